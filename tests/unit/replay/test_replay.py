"""Replaying: the trace's clock, silence, what Slurm said, who is not named, what would have been done; and
that order and gaps accuse nobody."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.replay.player import Outcome, TracePlayer, numbered_ids
from slurm_watchdog.trace.read import read_moments
from slurm_watchdog.trace.records import ParseStats
from tests.builders.replayed import Line, play, verdict
from tests.replay import write_traces as traces
from tests.replay.write_traces import JOB, everybody, job, log, rank, step, stuck, training


def fired(outcome: Outcome) -> list[str]:
    return sorted(str(each.kind) for each in outcome.incidents if each.fired_at is not None)


def outage(pids: bool = True) -> list[Line]:
    lines = [dict(line) for line in traces.filesystem_outage()]
    for line in lines:
        if not pids and line["kind"] == "proc":
            del line["pid"], line["start"]
    return lines


# ---------------------------------------------------------------------------------------------- time


def test_times_are_those_of_the_trace() -> None:
    for begin in (0.0, 1.7e9):
        outcome = play([{**line, "t": line["t"] + begin} for line in outage()])
        (incident,) = outcome.incidents
        assert incident.opened_at == begin + 101
        assert incident.fired_at is not None
        assert 60 <= incident.fired_at - begin - 101 <= 70


def test_time_goes_on_between_two_moments_and_ends_with_the_trace() -> None:
    lines = [*training(100), rank(105, 3, state="Z"), *everybody(110, {3: {"state": "Z"}})]
    assert fired(play(lines)) in ([], ["dead_rank"])
    # Nothing is said for half an hour, but Slurm goes on answering: the silent agents are found at once, not
    # at the end.
    late = play([*lines, {"t": 2000, "kind": "job", "job_id": JOB}])
    (silent,) = [i for i in late.incidents if i.kind == "partition_or_outage"]
    assert silent.fired_at == pytest.approx(110 + 40, abs=2)


def test_a_stall_of_the_fault_s_own_job_is_measured_from_the_newest_fault_before_it() -> None:
    lines = [
        {"t": 50, "kind": "fault", "name": "an earlier one"},
        {"t": 103, "kind": "fault", "job_id": "other"},
        {"t": 104, "kind": "fault", "job_id": JOB, "node": "n7"},
        {"t": 189, "kind": "fault", "name": "a later one", "job_id": JOB},
        *outage(),
    ]
    (incident,) = play(sorted(lines, key=lambda each: each["t"])).incidents
    assert incident.fired_at is not None
    assert incident.detected_after_s == incident.fired_at - 101


def test_without_a_marked_fault_the_beginning_is_what_the_evidence_says() -> None:
    (incident,) = play([line for line in outage() if line["kind"] != "fault"]).incidents
    assert incident.fired_at is not None
    assert incident.detected_after_s == incident.fired_at - incident.opened_at


# ---------------------------------------------------------------------------------------------- who says what


def test_a_node_that_says_nothing_is_silent_and_accused_of_nothing_else() -> None:
    lines = list(training(100))
    for t in range(110, 301, 10):
        lines += [line for line in everybody(t) if line["node"] == "n0"]
        lines.append(step(t, t // 10))
    outcome = play(lines)
    assert fired(outcome) == ["agent_silent"]
    assert [c.node for c in outcome.incidents[0].culprits] == ["n1"]


def test_a_gap_in_which_nobody_said_anything_is_the_controllers_and_accuses_no_node() -> None:
    lines = [line for line in training(9000) if not 300 < line["t"] < 8000]
    assert play(lines).incidents == ()
    assert play([line for line in lines if line.get("node") != "n1"]).incidents == ()


def test_nodes_that_fell_silent_while_slurm_went_on_are_an_outage() -> None:
    outcome = play([*training(300), *(job(t) for t in range(310, 601, 10))])
    assert "partition_or_outage" in fired(outcome)


def test_reports_that_come_once_a_minute_are_no_silence() -> None:
    lines = [job(0)]
    for t in range(60, 3601, 60):
        lines += [*everybody(t), step(t, t // 60)]
    outcome = play(lines)
    assert outcome.incidents == ()
    assert outcome.silent_after_s == 180


def test_a_job_without_a_list_of_nodes_has_those_where_its_processes_are() -> None:
    lines = [line for line in outage() if line["kind"] != "job"]
    outcome = play([{"t": 0, "kind": "job", "job_id": JOB, "state": "running"}, *lines])
    assert fired(outcome) == ["filesystem_outage"]


def test_in_a_trace_without_any_job_line_a_job_runs_while_its_ranks_are_listed() -> None:
    assert fired(play(line for line in outage() if line["kind"] != "job")) == ["filesystem_outage"]


def test_ranks_that_no_line_lists_any_more_leave_nothing_behind_where_no_job_line_was_written() -> None:
    ranks = [
        {"t": t, "kind": "proc", "node": "n0", "job_id": 7, "rank": rank, "pid": 70 + rank, "state": "R"}
        for t in range(0, 600, 10)
        for rank in range(4)
    ]
    steps = [{"t": t, "kind": "log", "node": "n0", "job_id": 7, "line": f"step={t} loss=2"} for t in range(600)]
    silence = [{"t": t, "kind": "report", "node": "n0"} for t in range(600, 4000, 10)]
    assert play([*sorted([*ranks, *steps], key=lambda line: line["t"]), *silence]).incidents == ()


def test_processes_of_a_job_that_nobody_named_are_counted_and_not_judged_where_other_jobs_are_named() -> None:
    other = {"t": 0, "kind": "job", "job_id": "other", "state": "RUNNING", "nodes": ["n9"]}
    outcome = play([other, *(line for line in outage() if line["kind"] != "job")])
    assert not any("filesystem" in kind for kind in fired(outcome))
    assert outcome.tally.ignored["a proc line about a job that no job line has named yet"][0] > 10


def test_a_fault_of_a_node_without_a_job_is_reported() -> None:
    fell_off = "NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus."
    reports = [{"t": t, "kind": "report", "node": "n0"} for t in range(0, 200, 10)]
    lines = [*reports, {"t": 195, "kind": "kmsg", "node": "n0", "line": fell_off}]
    assert fired(play(lines)) == ["gpu_fault"]


def test_a_trace_that_ends_with_its_job_has_its_cause_though_no_rank_is_known() -> None:
    lines = [
        {"t": 0, "kind": "job", "job_id": "7", "state": "RUNNING", "nodes": ["n0"]},
        {"t": 5, "kind": "log", "node": "n0", "job_id": "7", "line": "RuntimeError: CUDA error: unknown error"},
        {"t": 9, "kind": "job", "job_id": "7", "state": "FAILED"},
    ]
    assert fired(play(lines)) == ["log_error"]


def test_nodes_that_were_silent_until_slurm_started_their_job_again_are_not_reported() -> None:
    def run(begin: int, restarts: int) -> list[dict[str, Any]]:
        job = {
            "t": begin,
            "kind": "job",
            "job_id": "7",
            "state": "RUNNING",
            "nodes": ["n0", "n1"],
            "restarts": restarts,
        }
        reports = [
            {"t": t, "kind": "report", "node": n} for t in range(begin + 2, begin + 200, 10) for n in ("n0", "n1")
        ]
        return [job, *reports]

    assert play([*run(0, 0), *run(300, 1)]).incidents == ()


def test_a_job_stays_as_it_was_said_last_until_it_ends() -> None:
    lines = outage()
    end = [
        {"t": 192, "kind": "job", "job_id": JOB, "state": "CANCELLED"},
        *({"t": 195, "kind": "report", "node": node} for node in traces.NODES),
    ]
    (incident,) = play([*lines, *end]).incidents
    assert incident.state == "resolved" or not incident.actionable
    assert play(lines).incidents[0].state == "firing"


def test_a_pid_that_the_trace_does_not_tell_is_never_shown() -> None:
    (incident,) = play(outage(pids=False)).incidents
    assert [(c.node, c.rank, c.pid) for c in incident.culprits] == [("n0", 0, None), ("n1", 2, None)]
    text = " ".join([incident.summary, *incident.facts])
    assert "pid" not in text
    assert "rank 0 (on n0)" in text


def test_a_step_that_a_bar_draws_again_is_no_progress() -> None:
    lines: list[Line] = [job(0)]
    for t in range(10, 301, 10):
        lines += [
            *everybody(t),
            log(t, f"\r {min(t // 10, 20)}%|##  | {min(t // 10, 20)}/100 [00:10<00:50, 1.00s/it]"),
        ]
    for t in range(310, 2401, 30):
        lines += [*everybody(t), log(t, " 20%|##  | 20/100 [00:10<00:50, 1.00s/it]")]
    assert set(fired(play(lines))) <= {"collective_hang", "stalled_progress"}
    assert fired(play(lines))


def in_own_words(words: Callable[[int], str]) -> list[Line]:
    """A job that makes a step every 10 s and stands still from 500 s on, with every rank doing nothing."""
    lines: list[Line] = [job(0)]
    for t in range(10, 3001, 10):
        lines += everybody(t) if t < 500 else everybody(t, {r: {"state": "S"} for r in range(4)})
        if t < 500:
            lines.append(log(t, words(t // 10)))
    return lines


def steps_seen(lines: list[Line], config: str = "") -> int:
    player = TracePlayer(parse_config(config) if config else Config(), ParseStats(), numbered_ids(), 10.0)
    data = b"\n".join(json.dumps(line).encode() for line in lines)
    for moment in read_moments(io.BytesIO(data).read, ParseStats()):
        player.play(moment)
    view = player.state.job_view(JOB, 3000.0)
    return view.progress.steps_seen if view is not None and view.progress is not None else 0


def test_the_site_s_own_patterns_are_read_as_in_the_service() -> None:
    lines = in_own_words(lambda n: f"Fortschritt {n} erreicht")
    assert steps_seen(lines) == 0
    assert steps_seen(lines, "jobs:\n  progress_patterns: ['Fortschritt (?P<step>\\d+) erreicht']\n") == 49


def test_a_count_of_an_unknown_format_is_learnt_as_in_the_service() -> None:
    lines = in_own_words(lambda n: f"n={7 * n} nll {2 + (n % 5) / 10:.3f} grad_norm 1.{n % 7}")
    assert 20 < steps_seen(lines) < 49
    assert steps_seen(in_own_words(lambda n: f"PULSE {n} nll {2 + (n % 5) / 10:.3f}")) == 0


def test_a_kernel_line_a_probe_and_a_checkpoint_reach_the_views() -> None:
    lines = [
        *training(100),
        {"t": 110, "kind": "kmsg", "node": "n1", "line": "NVRM: Xid (PCI:0000:c1:00): 79, pid=280061, "
            "GPU has fallen off the bus."},
        {"t": 110, "kind": "checkpoint", "node": "n0", "job_id": JOB, "step": 9, "complete": True},
        *everybody(110),
    ]  # fmt: skip
    outcome = play(lines)
    assert [(c.node) for i in outcome.incidents for c in i.culprits] == ["n1"]
    assert fired(outcome) == ["gpu_fault"]


# ---------------------------------------------------------------------------------------------- what would
# have been done


def test_replay_observes_unless_configured_to_act_and_never_acts() -> None:
    lines = list(traces.filesystem_stall())
    for config, wanted in (("", "observed"), ("mode: act", "allowed")):
        outcome = play(lines, config)
        incident = next(i for i in outcome.incidents if i.kind == "filesystem_stall")
        (decision,) = outcome.decisions[incident.id]
        assert (decision.action, decision.verdict, decision.exclude) == ("requeue", wanted, ("n0",))


def test_a_detector_that_is_off_finds_nothing() -> None:
    assert play(outage(), "detectors: {filesystem_outage: {mode: off}}").incidents == ()


# ---------------------------------------------------------------------------------------------- whatever comes

KEEP_TOGETHER = "log"
"""The lines of one file are a sequence: their order says which came first."""


def shuffled(lines: list[Line], seed: int) -> list[Line]:
    """The same records, those of one moment in another order."""
    chance, by_t = random.Random(seed), {}
    for line in lines:
        by_t.setdefault(line["t"], []).append(line)
    out: list[Line] = []
    for t in sorted(by_t):
        group = by_t[t]
        mixed = chance.sample(group, len(group))
        logs = iter([line for line in group if line["kind"] == KEEP_TOGETHER])
        out += [next(logs) if line["kind"] == KEEP_TOGETHER else line for line in mixed]
    return out


@pytest.mark.parametrize("trace", traces.TRACES, ids=lambda trace: trace.__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_within_a_moment_does_not_change_the_verdict(trace: Any, seed: int) -> None:
    lines = [dict(line) for line in trace()]
    if trace is traces.healthy:
        lines = lines[:400]
    assert verdict(play(shuffled(lines, seed))) == verdict(play(lines))


DROPPED = {
    "proc": ("job_id", "pid", "start", "state", "state_age_s", "syscall", "path", "mount", "wchan", "cpu_s", "rank"),
    "gpu": ("gpu", "uuid", "util", "sm_clock_mhz", "power_w", "temp_c", "mem_used_mib", "throttle", "pids", "job_id"),
    "job": ("nodes", "name", "user", "batch_host"),
    "checkpoint": ("step", "complete"),
}  # fmt: skip
"""Fields that may be missing. What logs, probes and Slurm say of the job's state is left: without a step
nobody can tell that a job goes on, and the nodes of a job that has not ended should report."""


@pytest.mark.parametrize("trace", [traces.healthy, traces.irregular, traces.filesystem_stall], ids=lambda t: t.__name__)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.02, 0.2, 0.9]))
@settings(max_examples=12)
def test_dropping_fields_adds_no_incident(trace: Any, seed: int, share: float) -> None:
    chance = random.Random(seed)
    lines = [dict(line) for line in trace()]
    known = play(lines).incidents if trace is traces.filesystem_stall else ()
    whole = {str(incident.kind) for incident in known if incident.fired_at is not None}
    stuck = {culprit.rank for incident in known for culprit in incident.culprits}
    for line in lines:
        for name in DROPPED.get(line["kind"], ()):
            if chance.random() < share:
                line.pop(name, None)
    outcome = play(lines)
    # A filesystem of which less is known may look like an outage's, or like a job that stands for whatever
    # reason: it does stand, and it is the same rank that everybody waits for.
    vaguer = {"filesystem_outage", "stalled_progress", "collective_hang"} if whole else set()
    assert set(fired(outcome)) <= whole | vaguer, [i.summary for i in outcome.incidents]
    named = {c.rank for i in outcome.incidents if i.fired_at is not None for c in i.culprits}
    assert named <= stuck | {None}, [i.summary for i in outcome.incidents]


@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.01, 0.1, 0.4]), jitter_s=st.sampled_from([0.0, 3.0]))
@settings(max_examples=15)
def test_lost_lines_and_uneven_times_accuse_nobody_of_a_healthy_job(seed: int, share: float, jitter_s: float) -> None:
    chance = random.Random(seed)
    lines = []
    for line in traces.healthy():
        agents = line["kind"] in ("proc", "gpu", "report")
        if not agents or line["kind"] == "report" or chance.random() >= share:
            lines.append({**line, "t": line["t"] + (chance.uniform(0, jitter_s) if agents else 0.0)})
    assert play(sorted(lines, key=lambda each: each["t"])).incidents == ()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 400),
            st.one_of(
                st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")),
                st.dictionaries(
                    st.sampled_from(["t", "kind", "node", "job_id", "rank", "pid", "state", "line", "more", "util", "step"]),
                    st.sampled_from(
                        [None, -1, 0, 5, 50, 1e9, "x", "n0", "n1", JOB, "D", "Z", "proc", "job", "gpu", "log", "kmsg", "mount",
                         "checkpoint", "report", "stack", "node", [], {}, {"blocked": 5}, True, "COMPLETED"]
                    ),
                ),
            ),
        ),
        max_size=25,
    )
)  # fmt: skip
@settings(max_examples=60)
def test_no_garbage_ends_a_replay(garbage: list[tuple[int, Any]]) -> None:
    lines: list[Any] = outage()[:150]
    for place, line in garbage:
        lines.insert(place % len(lines), line)
    outcome = play(lines)
    assert outcome.tally.used > 100


def test_a_blocked_rank_in_a_single_sighting_of_a_healthy_moment_is_no_incident() -> None:
    lines = [*training(100), *everybody(110, {0: stuck(110, 107)}), *everybody(120), step(120, 12)]
    assert play(lines).incidents == ()
