"""Replaying: gaps, silence and what was not answered; what the recorded controller did; what only a replay allows."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from typing import Any

import pytest

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.actions import ActionEnd, Decision
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.protocol import CommandResult, DumpStacks
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.recording.entries import Asked, Begin, Ended, Entry, State, pack, settings_of
from slurm_watchdog.replay.player import Outcome, Player, replay
from tests.builders.entries import begin, entry, frame, listing, no_answer, tick, ticks
from tests.builders.views import LOADER, RECV, process, slurm_job, stack

NODES = tuple(SlurmNode(name=name, address="", state="IDLE") for name in ("n1", "n2"))
ACT = """
mode: act
policy: {cooldown: 0s, budget_percent: 100, kinds: {gpu_fault: {ladder: [requeue]}}}
"""


def play(flow: Iterable[Entry], config: Config | None = None) -> Outcome:
    return replay(BytesIO(b"".join(map(pack, flow))).readline, config or Config())


def replayed(flow: Iterable[Entry], config: Config | None = None) -> Outcome:
    outcome = play(sorted(flow, key=lambda each: each.at), config)
    assert outcome.tally.skipped == {}
    return outcome


def fired(outcome: Outcome) -> list[str]:
    return [str(each.kind) for each in outcome.incidents if each.fired_at is not None]


def report(node: str, at: float, **what: Any) -> Entry:
    return frame(Report(node=node, boot_id="b", agent_id="a", sequence=int(10 * at) + 1, **what), at)


def idle(reports: Iterable[float], answers: Iterable[float], ticking: Iterable[float]) -> list[Entry]:
    """Two nodes without a job."""
    flow = [listing(t, nodes=NODES) for t in answers]
    flow += [report(node.name, t + 0.1) for t in reports for node in NODES]
    return flow + [tick(t + 0.2) for t in ticking]


def test_a_time_in_which_the_controller_stood_still_accuses_nobody() -> None:
    times = [*range(0, 300, 5), *range(900, 1200, 5)]
    assert replayed(idle(times, times, times)).incidents == ()


def test_nodes_that_fell_silent_while_slurm_answered_are_found_again() -> None:
    found = replayed(idle(range(0, 300, 5), range(0, 600, 10), range(600)))
    assert fired(found) == ["partition_or_outage"]
    assert found.incidents[0].fired_at == pytest.approx(295 + 40, abs=3)


def test_a_slurm_that_did_not_answer_is_found_again() -> None:
    flow = idle(range(0, 600, 5), range(0, 300, 10), range(600))
    flow += [no_answer(t) for t in range(300, 600, 10)]
    assert fired(replayed(flow)) == ["slurm_unreachable"]


def test_times_are_dates_whatever_the_monotonic_clock_says() -> None:
    flow = idle(range(0, 300, 5), range(0, 600, 10), range(600))
    found = next(
        each for each in replayed([each._replace(wall=1.7e9 + each.at) for each in flow]).incidents if each.fired_at
    )
    assert found.fired_at == pytest.approx(1.7e9 + 335, abs=3)


def test_entries_that_go_back_in_time_are_skipped_and_a_new_life_has_its_own_clock() -> None:
    flow = [listing(50.0, nodes=NODES), listing(40.0), Entry(7.0, 60.0, Begin()),
            listing(8.0, nodes=NODES)]  # fmt: skip
    tally = play(flow).tally
    assert (tally.used, tally.skipped) == (3, {"the time goes back": 1})


def test_what_a_newer_release_wrote_is_skipped_and_named() -> None:
    flow: list[Any] = [entry(1.0, Begin(version=9, release="7.0")), Entry(2.0, 2.0, ActionEnd(ok=True, ended_at=1.0, detail="")),  # type: ignore[arg-type]
            entry(3.0, b"zwhat"), entry(3.0, b"r\xc1"), tick(4.0)]  # fmt: skip
    skipped = play(flow).tally.skipped
    assert sum(skipped.values()) == 4
    assert any("version 9 of release 7.0" in why for why in skipped)


def test_other_settings_than_the_recorded_ones_are_named() -> None:
    recorded = Begin(settings=settings_of(parse_config(ACT)))
    found = play([entry(1.0, recorded)])
    assert {"restart", "policy"} <= set(found.differs)


# ------------------------------------------------------------------------------------ what was asked


def asked(node: str, at: float, command_id: str) -> Entry:
    command = DumpStacks(id=command_id, job_id="7", restarts=0, expires_s=25.0)
    return entry(at, Asked(node=node, command=command))


def test_stacks_that_were_asked_then_are_one_look_at_the_whole_job_now() -> None:
    """The replay would not have asked: it takes the answers all the same."""
    with Player(Config()) as player:
        player.take(listing(0.0, (slurm_job(),)))
        for at in (5.0, 25.0, 45.0):
            for node in ("n1", "n2"):
                player.take(asked(node, at, f"{node}/{at}"))
            for delay_s, node, ranks in ((0.5, "n1", (0, 1)), (1.5, "n2", (2, 3))):
                stacks = tuple(stack(r, LOADER if r == 3 else RECV) for r in ranks)
                result = CommandResult(command_id=f"{node}/{at}", ok=True, stacks=stacks)
                processes = tuple(process(r) for r in ranks)
                player.take(report(node, at + delay_s, processes=processes, results=(result,)))
        view = player.controller.state.job_view("7", 46.5)
    assert view is not None
    assert [(s.age_s, len(s.stacks), s.silent_nodes) for s in view.snapshots] == [(40, 4, ()), (20, 4, ()), (0, 4, ())]


# ------------------------------------------------------------------------------------ what was done


def lost(at: float, *gpus: int) -> Entry:
    """The node of job 7 reports, and these of its GPUs have fallen off the bus."""
    rows = tuple(
        Gpu(uuid=f"G{n}", index=n, pids=(100 + n,), error="NVML_ERROR_GPU_IS_LOST: GPU is lost" if n in gpus else None)
        for n in (0, 1)
    )
    return report("n1", at, processes=(process(0), process(1)), gpus=rows)


def decided(*more: Entry, second_from: int = 1000) -> tuple[list[tuple[str, str]], Outcome]:
    """(verdict, by) of the decisions about a GPU that is lost from 110 s on, and a second one later."""
    job = slurm_job(nodes=("n1",), job_id="7")
    spare = [SlurmNode(name=name, address="", state="IDLE") for name in ("n1", "n8", "n9")]
    flow = [listing(t, (job,), spare) for t in range(0, 250, 10)]
    flow += [report(name, t, processes=()) for t in range(0, 250, 10) for name in ("n8", "n9")]
    flow += [lost(t, *((0,) if t >= 110 else ()), *((1,) if t >= second_from else ())) for t in range(0, 250, 10)]
    found = replayed([*flow, *ticks(0.5, 250.0, 1.0), *more], parse_config(ACT))
    about = {each.id for each in found.incidents if each.kind == "gpu_fault"}
    return [_shentry(each) for each in found.decided if each.incident_id in about], found


def _shentry(decision: Decision) -> tuple[str, str]:
    return str(decision.verdict), decision.by


def test_a_second_fault_of_a_job_that_would_be_under_restart_finds_it_busy() -> None:
    assert decided(second_from=180)[0] == [("allowed", "gpu_fault"), ("suppressed", "busy")]


@pytest.mark.parametrize(("ok", "then"), [(True, []), (False, [("suppressed", "budget")])])
def test_a_recorded_action_that_failed_is_decided_again_and_one_that_helped_ends_its_incident(
    ok: bool, then: list[tuple[str, str]]
) -> None:
    end = Ended(subject="7.0", end=ActionEnd(ok=ok, ended_at=150.2, detail="over"))
    _, found = decided(entry(111.7, State(acting=("7.0",))), entry(150.2, end), entry(150.3, State()))
    first = found.incidents[0]
    assert [_shentry(each) for each in found.decisions(first)] == [("allowed", "gpu_fault"), *then]
    assert (first.resolution == "over") is ok


def test_a_recorded_pause_holds_in_the_replay_until_it_ends() -> None:
    pause = [entry(50.1, State(paused="maintenance")), entry(140.1, State())]
    assert decided(*pause)[0] == [("suppressed", "paused"), ("allowed", "gpu_fault")]


def test_while_the_recorded_controller_could_not_write_nothing_was_decided() -> None:
    full = [entry(50.1, State(journal_error="its disk is full")), entry(140.1, State())]
    assert decided(*full)[0] == [("allowed", "gpu_fault")]
    assert decided(full[0])[0] == []


def test_a_controller_that_was_started_again_knows_what_the_one_before_had_decided() -> None:
    found, outcome = decided(begin(150.1))
    assert [verdict for verdict, _ in found][:1] == ["allowed"] and found.count(("allowed", "gpu_fault")) == 1
    assert fired(outcome).count("gpu_fault") == 1
