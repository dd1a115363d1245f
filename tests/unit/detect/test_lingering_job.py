"""lingering_job: a rank is dead and the others wait for it; ranks that leave at the end are none."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.lingering_job import LingeringJob, detect
from slurm_watchdog.model.cluster_view import ErrorLine, ProcessView
from slurm_watchdog.model.incidents import Finding, StackRequest, Truth
from slurm_watchdog.model.observations import Event, EventKind, Process, Role
from tests.builders.logged_runs import errors
from tests.builders.rank_activity import card, rank
from tests.builders.views import COMPUTE, RECV, blocked, cluster, job, progress, seen, slurm_job, snapshot, stack


def left(*ranks: int, lines=RECV):
    return tuple(snapshot(age, [stack(r, lines) for r in ranks]) for age in (20, 10))


THREE_LEFT = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=40.0))
LINGERS = {"processes": THREE_LEFT, "progress": progress(45.0), "snapshots": left(0, 1, 2)}


def judge(**changes) -> Finding:
    (finding,) = detect(cluster(job(**changes)), LingeringJob(), CollectiveHang())
    return finding


def test_the_dead_rank_is_named_with_its_last_words_and_the_job_may_be_requeued() -> None:
    words = ErrorLine(
        node="n1",
        age_s=41,
        event=Event(kind=EventKind.ERROR, job_id="7", age_s=0, source="l", rank=3, line="boom"),
    )
    finding = judge(**LINGERS, errors=(words,))
    assert (finding.truth, finding.actionable) == (Truth.BAD, True)
    assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n2", 3, 103)]
    assert "last words: boom" in finding.facts
    assert "3 of them wait in a collective" in finding.summary


@pytest.mark.parametrize(("later_s", "truth"), [(5.0, Truth.OK), (10.0, Truth.BAD)])
def test_a_step_that_was_read_with_a_later_report_may_have_been_made_with_the_dead_rank(
    later_s: float, truth: Truth
) -> None:
    """Read 8 s after the rank ended."""
    assert judge(**{**LINGERS, "progress": progress(32.0)}, read_later_s=later_s).truth is truth


DIED_LATELY = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=9.0))
SUPERVISED: dict[str, Any] = {
    "processes": DIED_LATELY,
    "progress": progress(10.0, total_steps=1000),
    "snapshots": tuple(snapshot(age, [stack(r, RECV) for r in range(3)]) for age in (5, 1)),
    "supervised": True,
    "step_id": "0",
}
LAUNCHER = seen(0, pid=90, role=Role.HELPER, comm="torchrun")


def test_a_job_with_a_supervisor_is_not_left_the_time_in_which_others_would_end_it() -> None:
    finding = judge(**SUPERVISED)
    assert (finding.truth, finding.actionable, [c.rank for c in finding.culprits]) == (Truth.BAD, True, [3])


def test_survivors_that_were_still_told_of_the_end_a_moment_ago_are_looked_at_again() -> None:
    told = snapshot(7, [stack(r, COMPUTE) for r in range(3)])
    assert judge(**{**SUPERVISED, "snapshots": (told, *SUPERVISED["snapshots"])}).truth is Truth.BAD
    moved = judge(**{**SUPERVISED, "snapshots": (told, SUPERVISED["snapshots"][1])})
    assert moved.truth is Truth.UNKNOWN
    assert [each.later_s for each in moved.wanted if isinstance(each, StackRequest)] == [2.5]


@pytest.mark.parametrize(("gone_s", "later_s"), [(9.0, 2.5), (29.0, 2.5), (31.0, 8.0), (79.0, 8.0), (81.0, None)])
def test_survivors_are_looked_at_more_rarely_the_longer_a_rank_is_gone(gone_s: float, later_s: float | None) -> None:
    survivors = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=gone_s))
    finding = judge(**{**SUPERVISED, "processes": survivors, "progress": progress(gone_s + 1.0, total_steps=1000)})
    assert [each.later_s for each in finding.wanted if isinstance(each, StackRequest)] == [later_s]


@pytest.mark.parametrize(
    "changes",
    [
        {"supervised": False},
        {"progress": progress(10.0)},
        {"processes": (*DIED_LATELY, LAUNCHER)},
        {"processes": (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=7.0))},
        {"snapshots": tuple(snapshot(age, [stack(0, RECV), stack(1, RECV), stack(2, COMPUTE)]) for age in (5, 1))},
        {"snapshots": tuple(snapshot(age, [stack(r, RECV) for r in range(2)]) for age in (5, 1))},
        {"snapshots": ()},
        {"unlisted": 2},
    ],
)
def test_the_job_has_its_whole_grace_if_others_may_end_it_or_not_all_are_seen_to_wait(changes: dict[str, Any]) -> None:
    assert judge(**{**SUPERVISED, **changes}).truth is Truth.UNKNOWN


KILLED: dict[str, Any] = {
    **SUPERVISED,
    "processes": (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=4.0)),
    "progress": progress(5.0, total_steps=1000, paces_s=(1.0,) * 100, longest_pace_s=2.0, read_age_s=2.0),
    "snapshots": tuple(snapshot(age, [stack(r, RECV) for r in range(3)]) for age in (3, 0.5)),
    "errors": errors((3.5, "srun: error: n2: task 3: Killed")),
}


def test_a_rank_whose_task_slurm_says_was_killed_is_not_waited_for_once_the_step_is_late() -> None:
    finding = judge(**KILLED)
    assert (finding.truth, finding.actionable, [c.rank for c in finding.culprits]) == (Truth.BAD, True, [3])
    assert "was killed (SIGKILL) 4 s ago, 3 ranks are left, 3 of them wait in a collective" in finding.summary


@pytest.mark.parametrize(
    "changes",
    [
        {"errors": ()},  # it may have left by itself, or a wrapper starts it again: nobody says
        {"errors": errors((3.5, "srun: error: n2: task 3: Exited with exit code 1"))},
        {"errors": errors((3.5, "srun: error: n2: task 3: Terminated"))},
        {"errors": errors((3.5, "srun: error: n2: task 2: Killed"))},  # of another one
        {"progress": progress(5.0, total_steps=1000)},  # too little is known of its steps
        {"progress": replace(KILLED["progress"], age_s=1.5)},  # a monitor was killed, and the others train
        {"progress": replace(KILLED["progress"], paces_s=(30.0,) * 100, longest_pace_s=30.0)},
        {"processes": (*KILLED["processes"], LAUNCHER)},
        {"processes": (*KILLED["processes"], seen(3, pid=333))},  # it is there again
        {"processes": (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=2.0))},
        {"supervised": False},
        {"snapshots": tuple(snapshot(age, [stack(0, RECV), stack(1, RECV), stack(2, COMPUTE)]) for age in (3, 0.5))},
        {"snapshots": KILLED["snapshots"][1:]},
    ],
)
def test_a_killed_rank_is_waited_for_as_any_other_if(changes: dict[str, Any]) -> None:
    assert judge(**{**KILLED, **changes}).truth is not Truth.BAD


def test_ranks_that_ended_because_they_lost_it_are_not_named_with_it() -> None:
    ended = (seen(0), seen(1, gone_s=2.0), seen(2, gone_s=36.0), seen(3, gone_s=40.0))
    finding = judge(**{**LINGERS, "processes": ended, "snapshots": left(0)})
    assert (finding.truth, [c.rank for c in finding.culprits]) == (Truth.BAD, [3, 2]), "a report apart is together"
    assert "and rank 2 ended 40 s ago, 1 followed, 1 rank is left" in finding.summary


def test_a_zombie_is_dead_since_it_became_one() -> None:
    zombie = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=40.0, state="Z"))
    finding = judge(**{**LINGERS, "processes": zombie})
    assert (finding.truth, finding.culprits[0].reason) == (Truth.BAD, "has been a zombie for 40 s")


def test_a_zombie_with_a_thread_that_cannot_end_is_said_to_have_one() -> None:
    call = blocked(38.0, syscall="ioctl", path="/dev/nvidia1", mount=None, wchan="os_acquire_mutex")
    zombie = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=40.0, state="Z", threads=2, blocked=call))
    finding = judge(**{**LINGERS, "processes": zombie})
    assert finding.summary.endswith(
        " Of rank 3: its main thread has ended, and another thread of it has been in ioctl on /dev/nvidia1 for 38 s "
        "(state D, at os_acquire_mutex)."
    )
    assert finding.culprits[0].reason.startswith("has been a zombie for 40 s; its main thread has ended")


def test_after_a_grace_the_steps_before_the_death_are_still_before_it() -> None:
    assert (
        judge(**{**LINGERS, "progress": progress(31.0, last_increase_age_s=45.0), "run_age_s": 31.0}).truth is Truth.BAD
    )


HEALTHY = {
    "all ranks are there": {},
    "the job goes on without the rank": {**LINGERS, "progress": progress(3.0)},
    "an elastic launcher started the rank again": {
        **LINGERS,
        "processes": (seen(3, gone_s=40.0, pid=77), *(seen(r) for r in range(4))),
    },
    "the others still work": {
        **LINGERS,
        "snapshots": (*left(0, 1, 2)[:1], *left(0, 1, 2, lines=COMPUTE)[1:]),
    },
    "the last step was made": {**LINGERS, "progress": progress(45.0, total_steps=500)},
    "the grace is not over": {**LINGERS, "processes": (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=29.0))},
    "all ranks ended": {**LINGERS, "processes": tuple(seen(r, gone_s=90.0) for r in range(4))},
    "the last rank uploads what the others have left to it": {
        **LINGERS,
        "processes": (seen(0), *(seen(r, gone_s=3000.0) for r in (1, 2, 3))),
        "snapshots": left(0, lines=("send (requests/adapters.py)", "upload (t.py)")),
        "progress": progress(4000.0),
    },
    "the job is suspended": {**LINGERS, "job": slurm_job(state="SUSPENDED")},
    "no ranks are known": {**LINGERS, "processes": ()},
    "a node is silent": {**LINGERS, "silent_nodes": ("n2",)},
    "no dump came": {**LINGERS, "snapshots": ()},
    "the dump of a survivor is missing": {**LINGERS, "snapshots": left(0, 1)},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_incident_if(name: str) -> None:
    assert judge(**HEALTHY[name]).truth is not Truth.BAD


def test_without_any_stack_there_is_an_alert_in_the_end_and_nothing_is_done() -> None:
    late = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=301.0))
    finding = judge(processes=late, progress=progress(400.0))
    assert (finding.truth, finding.actionable) == (Truth.BAD, False)


# ------------------------------------------------------------------------------------------------ small jobs,
# without stacks


def two(dead_s: float = 70.0, survivor: str = "spins", cpu: float | None = 1.0, **changes: Any) -> Finding:
    """Two ranks; rank 1 is gone for so long, and so is the last step."""
    given = {
        "processes": (rank(0, cpu, world_size=2), rank(1, gone_s=dead_s, world_size=2)),
        "gpus": (card(0, survivor),),
        "progress": progress(dead_s + 5),
        "job": slurm_job(nodes=("n1",)),
    }
    return judge(**{**given, **changes})


def test_the_dead_one_of_two_ranks_is_found_by_the_gpu_of_the_other_that_spins() -> None:
    found = two()
    assert (found.truth, found.actionable) == (Truth.BAD, False)
    assert [(c.node, c.rank) for c in found.culprits] == [("n1", 1)]
    assert "1 rank is left" in found.summary
    assert "spin" in found.summary


def test_one_of_two_that_does_nothing_is_told_later_and_only_before_the_last_step() -> None:
    assert two(290.0, "idles", 0.0, progress=progress(295.0, total_steps=1000)).truth is Truth.UNKNOWN
    assert two(310.0, "idles", 0.0, progress=progress(315.0, total_steps=1000)).truth is Truth.BAD
    assert two(5000.0, "idles", 0.0).truth is Truth.UNKNOWN


@pytest.mark.parametrize(
    "changes",
    [
        {"survivor": "trains"},
        {"survivor": "idles", "cpu": 0.9},
        {"survivor": "idles", "cpu": None},
        {"dead_s": 40.0},
        {"progress": progress(2.0)},
        {"progress": None},
    ],
    ids=["trains", "computes", "unknown", "within the limit", "makes steps", "never made one"],
)
def test_one_of_two_ranks_may_have_ended_alone(changes: dict[str, Any]) -> None:
    assert two(**changes).truth is not Truth.BAD


def helper(comm: str = "torchrun", cpu: float | None = 0.0, **changes: Any) -> ProcessView:
    process = Process(
        pid=99, start_ticks=5, job_id="7", role=Role.HELPER, comm=comm, state="S", uid=1000, cpu_ratio=cpu, **changes
    )
    return ProcessView(node="n1", process=process, seen_age_s=1.0)


def nobody(gone_s: float = 610.0, *others: ProcessView, **changes: Any) -> Finding:
    """Four ranks that are gone in the middle of the training."""
    ranks = tuple(seen(r, gone_s=gone_s + r) for r in range(4))
    return judge(
        **{
            "processes": (*ranks, *others),
            "progress": progress(gone_s + 10, total_steps=1000),
            **changes,
        }
    )


@pytest.mark.parametrize("others", [(), (helper(),), (helper(), helper("bash"))], ids=len)
def test_a_job_of_which_no_rank_is_left_in_the_middle_of_its_training_is_told_after_ten_minutes(
    others: tuple[ProcessView, ...],
) -> None:
    found = nobody(610.0, *others)
    assert (found.truth, found.actionable) == (Truth.BAD, False)
    assert [c.rank for c in found.culprits] == [3, 2, 1, 0]
    assert "step 500 of 1000" in found.summary
    assert nobody(590.0, *others).truth is Truth.UNKNOWN


def test_where_nobody_knows_how_many_steps_there_were_to_make_it_is_told_after_half_an_hour() -> None:
    assert nobody(1700.0, progress=progress(1710.0)).truth is Truth.UNKNOWN
    assert nobody(1810.0, progress=progress(1820.0)).truth is Truth.BAD


@pytest.mark.parametrize(
    "found",
    [
        nobody(9000.0, helper("rsync", 0.9)),
        nobody(9000.0, helper("python", None)),
        nobody(9000.0, progress=None),
        nobody(9000.0, progress=progress(9010.0, step=1000, total_steps=1000)),
        nobody(9000.0, progress=progress(9010.0, phase="finishing")),
        nobody(9000.0, progress=progress(3.0, total_steps=1000)),
        nobody(9000.0, job=slurm_job(is_batch=False)),
        nobody(9000.0, job=slurm_job(state="COMPLETING")),
        nobody(9000.0, silent_nodes=("n2",)),
        nobody(9000.0, run_age_s=60.0),
    ],
    ids=[
        "its script copies", "nobody knows what its script does", "no step was ever read", "the last step was made",
        "the log says it is over", "somebody makes steps", "an interactive allocation", "ending", "a node is silent", "a grace",
    ],
)  # fmt: skip
def test_a_job_without_ranks_may_be_well(found: Finding) -> None:
    assert found.truth is not Truth.BAD
