"""What a replay does in the place of acting: it writes down what is allowed, and takes it as under way until
the trace says otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.actions import Action, ActionRun, Decision, Fence, Verdict
from slurm_watchdog.model.slurm import SlurmView
from slurm_watchdog.replay.decisions import ReplayExecutor
from tests.builders.replayed import play
from tests.builders.views import slurm_job
from tests.replay.write_traces import JOB, NODES, everybody, training

Line = dict[str, Any]
CONFIG = """
mode: act
policy: {cooldown: 0s, budget_percent: 100, kinds: {gpu_fault: {ladder: [requeue]}}}
"""


def lost(t: float, *ranks: int) -> Iterable[Line]:
    """All ranks report, and the GPUs of these have fallen off the bus."""
    return everybody(t, {rank: {"gpu": {"more": {"error": "NVML_ERROR_GPU_IS_LOST: GPU is lost"}}} for rank in ranks})


DECISION = Decision(
    id="d", incident_id="i", action=Action.REQUEUE, verdict=Verdict.ALLOWED, by="gpu_fault", reason="", decided_at=0.0,
    fence=Fence(job_id="7", restarts=0, start_at=None),
)  # fmt: skip


def decided(lines: Iterable[Line]) -> list[tuple[str, str]]:
    """(verdict, by) of each decision about the GPUs, in order."""
    found = play(sorted(lines, key=lambda line: line["t"]), CONFIG)
    about = {each.id for each in found.incidents if each.kind == "gpu_fault"}
    return [_shown(each) for each in found.decided if each.incident_id in about]


def _shown(decision: Decision) -> tuple[str, str]:
    return str(decision.verdict), decision.by


def faults() -> list[Line]:
    """One GPU is lost, and a minute later another one of the same job."""
    lines = list(training(100))
    for t in range(110, 171, 10):
        lines += lost(t, 0)
    for t in range(180, 241, 10):
        lines += lost(t, 0, 1)
    return lines


def test_a_second_fault_of_a_job_that_would_be_under_restart_finds_it_busy() -> None:
    assert decided(faults()) == [("allowed", "gpu_fault"), ("suppressed", "busy")]


@pytest.mark.parametrize("change", [{"restarts": 1}, {"state": "COMPLETED"}, {"state": "PENDING"}])
def test_an_action_that_nobody_did_is_over_with_the_run_that_it_was_to_end(change: dict[str, Any]) -> None:
    state = ClusterState(silent_after_s=60, report_lifetime_s=60)
    state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=()), 0.0)
    executor = ReplayExecutor(state)
    executor.drive(ActionRun(decision=DECISION))
    executor.sweep(10.0)
    assert executor.is_busy("7") and not executor.is_busy("8")
    assert executor.acting() == frozenset(), "nobody really acts: its incident ends as the trace says"
    state.apply_slurm(SlurmView(jobs=(slurm_job(**change),), nodes=()), 20.0)
    executor.sweep(20.0)
    assert not executor.is_busy("7")


def test_an_action_that_was_really_done_is_under_way_until_the_recording_says_that_it_has_ended() -> None:
    state = ClusterState(silent_after_s=60, report_lifetime_s=60)
    executor = ReplayExecutor(state)
    executor.drive(ActionRun(decision=DECISION))
    executor.follow(["7.0"])
    executor.sweep(10.0)  # Slurm does not even list it
    assert executor.is_busy("7") and executor.acting() == {"i"}
    assert executor.ended("8.0") is None
    assert executor.ended("7.0") == DECISION
    assert not executor.is_busy("7") and executor.acting() == frozenset()


@pytest.mark.parametrize(("ok", "then"), [(True, []), (False, [("suppressed", "budget")])])
def test_a_recorded_action_that_failed_is_decided_again_and_one_that_helped_ends_its_incident(
    ok: bool, then: list[tuple[str, str]]
) -> None:
    lines = list(training(100))
    for t in range(110, 171, 10):
        lines += lost(t, 0)
    lines += [
        {"t": 110.3, "kind": "controller", "acting": [f"{JOB}.0"]},
        {"t": 150.2, "kind": "ended", "subject": f"{JOB}.0", "ok": ok, "detail": "over"},
        {"t": 150.3, "kind": "controller"},
        *({"t": t, "kind": "report", "node": node} for t in (180, 190) for node in NODES),
    ]
    found = play(sorted(lines, key=lambda line: line["t"]), CONFIG)
    first = found.incidents[0]
    assert [_shown(each) for each in found.decisions[first.id]] == [("allowed", "gpu_fault"), *then]
    assert (first.resolution == "over") is ok


def test_a_recorded_pause_holds_in_the_replay_until_it_ends() -> None:
    lines = list(training(100))
    for t in range(110, 171, 10):
        lines += lost(t, 0)
    pause = [{"t": 50.1, "kind": "controller", "paused": "maintenance"}, {"t": 140.1, "kind": "controller"}]
    assert decided([*lines, *pause]) == [("suppressed", "paused"), ("allowed", "gpu_fault")]


def test_while_the_recorded_controller_could_not_write_nothing_was_decided() -> None:
    lines = list(training(100))
    for t in range(110, 171, 10):
        lines += lost(t, 0)
    full = [
        {"t": 50.1, "kind": "controller", "journal_error": "its disk is full"},
        {"t": 140.1, "kind": "controller"},
    ]
    assert decided([*lines, *full]) == [("allowed", "gpu_fault")]
    assert decided([*lines, full[0]]) == []


def test_a_storm_holds_back_what_comes_right_after_it() -> None:
    """The cooldown of a storm: no other guard of these jobs objects."""
    jobs = {str(number): f"m{number}" for number in range(5)}
    lines: list[Line] = []
    for number, node in jobs.items():
        lines.append(
            {
                "t": 0,
                "kind": "job",
                "job_id": number,
                "state": "RUNNING",
                "nodes": [node],
                "restarts": 0,
                "user": "u",
            }
        )
    for t in range(5, 200, 5):
        for number, node in jobs.items():
            broken = (50 <= t < 100 and number in "012") or (t >= 140 and number == "4")
            more = {"more": {"error": "NVML_ERROR_GPU_IS_LOST: GPU is lost"}} if broken else {}
            lines += [
                {"t": t, "kind": "report", "node": node},
                {"t": t, "kind": "proc", "node": node, "job_id": number, "rank": 0, "pid": 7, "state": "R"},
                {
                    "t": t,
                    "kind": "gpu",
                    "node": node,
                    "job_id": number,
                    "gpu": 0,
                    "uuid": f"G-{node}",
                    "util": 90,
                    "pids": [7],
                    **more,
                },
            ]
    found = play(lines, CONFIG.replace("cooldown: 0s", "cooldown: 0s, storm_cooldown: 2min"))
    last = [each for each in found.decided if each.fence is not None and each.fence.job_id == "4"]
    assert [each.by for each in last] == ["storm"]
    assert "a storm was over only" in last[0].reason
