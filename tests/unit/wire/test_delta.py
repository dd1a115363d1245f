"""What has changed is told exactly, what has gone is named, and whoever lacks the report before asks for a full one."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.observations import (
    Checkpoint,
    Event,
    EventKind,
    Gpu,
    GpuHolder,
    LogFile,
    MountProbe,
    Process,
)
from slurm_watchdog.model.report import ProcessNumbers, Report
from slurm_watchdog.wire.codec import decode_report, encode_report
from slurm_watchdog.wire.delta import changes_between, delta_base, make_whole
from tests.builders.views import process


def report(sequence: int = 1, **changes: Any) -> Report:
    given = {"node": "n1", "boot_id": "b", "agent_id": "a", "sequence": sequence}
    return Report(**{**given, **changes})


def told(before: Report, after: Report) -> Report:
    """What the controller makes of the bytes."""
    small = changes_between(before, after)
    assert small is not None
    whole = make_whole(delta_base(before), decode_report(encode_report(small)))
    assert whole is not None
    return whole


def gpu(uuid: str, **changes: Any) -> Gpu:
    return Gpu(uuid=uuid, index=0, **changes)


pids = st.integers(1, 6)
processes = st.lists(
    st.builds(
        lambda pid, ticks, state, cpu_s, rank, threads, step, ran: process(
            rank, pid=pid, start_ticks=ticks, state=state, cpu_s=cpu_s, threads=threads, step_id=step, runnable_s=ran
        ),
        pids, st.integers(1, 2), st.sampled_from("RSDZ"), st.floats(0, 1e6), st.sampled_from([0, 1, None]),
        st.sampled_from([None, 1, 2]), st.sampled_from(["0", "1"]), st.sampled_from([None, 1.5, 61.25]),
    ),
    max_size=6,
    unique_by=lambda each: (each.pid, each.start_ticks),
).map(tuple)  # fmt: skip
gpus = st.lists(
    st.builds(
        lambda uuid, util, error, pids: gpu(uuid, utilization_ratio=util, error=error, pids=pids),
        st.sampled_from(["", "GPU-a", "GPU-b", "GPU-c"]), st.sampled_from([None, 0.0, 1.0]),
        st.sampled_from([None, "lost"]), st.sampled_from([None, (), (7,)]),
    ),
    max_size=3,
).map(tuple)  # fmt: skip
logs = st.lists(st.builds(lambda at: LogFile(job_id="7", path="/l", offset=at), st.integers(0, 3)), max_size=1).map(
    tuple
)
checkpoints = st.lists(
    st.builds(lambda step: Checkpoint(job_id="7", directory="/c", step=step), st.integers(0, 3)), max_size=1
).map(tuple)
reports = st.builds(
    lambda processes, gpus, logs, checkpoints, problems: report(
        processes=processes, gpus=gpus, logs=logs, checkpoints=checkpoints, problems=problems
    ),
    processes, gpus, logs, checkpoints, st.sampled_from([(), ("gpu: no answer",)]),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(reports, reports)
def test_changes_on_top_of_the_report_before_are_the_report_itself(before: Report, after: Report) -> None:
    after = replace(after, sequence=2)
    small = changes_between(before, after)
    if small is not None:
        whole = make_whole(delta_base(before), decode_report(encode_report(small)))
        assert whole == after


@settings(max_examples=200, deadline=None)
@given(reports, reports, reports)
def test_a_chain_of_changes_ends_at_the_last_report(first: Report, second: Report, third: Report) -> None:
    known = first
    for sequence, now in ((2, second), (3, third)):
        now = replace(now, sequence=sequence)
        small = changes_between(known, now)
        whole = make_whole(known, small) if small is not None else now
        assert whole == now
        known = delta_base(whole)


def test_numbers_that_move_are_a_short_list_and_the_rest_is_not_told_again() -> None:
    before = report(1, processes=(process(0), process(1)), gpus=(gpu("GPU-a", power_w=500.0),))
    after = report(2, processes=(process(0, cpu_s=9.0), process(1)), gpus=(gpu("GPU-a", power_w=510.0),))
    small = changes_between(before, after)
    assert small is not None and small.changes is not None
    assert (small.processes, small.gpus) == ((), ())
    assert [row.at for row in small.changes.process_rows] == [0]
    assert [row.power_w for row in small.changes.gpu_rows] == [510.0]
    assert len(encode_report(small)) < len(encode_report(after)) / 2
    assert told(before, after) == after


def test_a_process_is_gone_because_it_is_named_never_because_it_is_missing() -> None:
    before = report(1, processes=(process(0), process(1)))
    after = report(2, processes=(process(1),))
    small = changes_between(before, after)
    assert small is not None and small.changes is not None
    assert small.changes.gone == ((100, 5),)
    assert told(before, after) == after


def test_delta_base_has_no_events_probes_or_results() -> None:
    event = Event(kind=EventKind.ERROR, job_id="7", age_s=1.0, source="/l", line="x")
    before = report(1, events=(event,), mounts=(MountProbe(mount="/m", responding=True, seconds=0.1),))
    after = report(2)
    assert told(before, after) == after
    holders = (GpuHolder(pid=1, start_ticks=1, uid=0, user="u", comm="c", state="S"),)
    assert told(report(1, gpu_holders=holders), report(2)).gpu_holders == ()


def test_changes_fit_only_the_report_that_they_were_made_for() -> None:
    small = changes_between(report(1, processes=(process(0),)), report(2, processes=(process(0, cpu_s=1.0),)))
    assert small is not None
    assert make_whole(report(3, processes=(process(0),)), small) is None
    assert make_whole(report(1, agent_id="other", processes=(process(0),)), small) is None
    assert make_whole(report(1), small) is None, "a place that there is not"


def test_places_and_keys_that_there_are_not_are_refused() -> None:
    before = report(1, processes=(process(0),), gpus=(gpu("GPU-a"),))
    small = changes_between(before, report(2, processes=(process(0, cpu_s=1.0),), gpus=(gpu("GPU-a"),)))
    assert small is not None and small.changes is not None
    row = ProcessNumbers(-1, "R", 0.0, None, None, None)
    for changes in (replace(small.changes, process_rows=(row,)), replace(small.changes, gone=((1, 1),))):
        assert make_whole(before, replace(small, changes=changes)) is None
    assert make_whole(before, replace(small, gpus=(gpu("GPU-z"),))) is None


# ---------------------------------------------------------------------------------------- the controller's end


def new_state() -> ClusterState:
    return ClusterState(silent_after_s=45.0, report_lifetime_s=30.0)


def small_of(before: Report, after: Report) -> Report:
    small = changes_between(before, after)
    assert small is not None
    return small


def test_a_controller_that_lacks_the_report_before_takes_nothing_and_a_full_one_helps() -> None:
    state, first = new_state(), report(1, processes=(process(0),))
    second = report(2, processes=(process(0, cpu_s=1.0),))
    third = report(3, processes=(process(0, cpu_s=2.0),))
    assert state.agents.complete(small_of(first, second)) is None, "it was started just now"
    state.apply_report(first, 10.0)
    assert state.agents.complete(small_of(second, third)) is None, "the second was lost"
    assert state.agents.known() == ("n1",)
    assert state.apply_report(third, 20.0) == "accepted"
    whole = state.agents.complete(small_of(third, report(4)))
    assert whole == report(4)


def test_a_report_of_changes_that_comes_twice_is_a_duplicate_and_nobody_is_asked_for_more() -> None:
    state, first = new_state(), report(1, processes=(process(0),))
    small = small_of(first, report(2, processes=(process(0, cpu_s=1.0),)))
    state.apply_report(first, 10.0)
    whole = state.agents.complete(small)
    assert whole is not None and state.apply_report(whole, 15.0) == "accepted"
    again = state.agents.complete(small)
    assert again is not None and state.apply_report(again, 16.0) == "duplicate"


def test_another_agent_on_the_same_node_begins_in_full() -> None:
    state = new_state()
    state.apply_report(report(1), 10.0)
    assert state.agents.complete(small_of(report(1, agent_id="b"), report(2, agent_id="b"))) is None


def test_report_of_an_agent_without_deltas_is_decoded() -> None:
    state = new_state()
    for sequence in (1, 2, 3):
        full = report(sequence, processes=(process(0, cpu_s=float(sequence)),))
        assert state.agents.complete(full) == full
        assert state.apply_report(full, 10.0 * sequence) == "accepted"


def test_processes_are_told_by_number_and_start() -> None:
    reused: tuple[Process, ...] = (process(0, start_ticks=99),)
    assert told(report(1, processes=(process(0),)), report(2, processes=reused)).processes[0].start_ticks == 99
