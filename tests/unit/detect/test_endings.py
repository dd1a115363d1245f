"""A training that is over and does not end."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.detect import wedged_teardown
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.model.cluster_view import ErrorLine, JobView
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.observations import Checkpoint as OnDisk
from slurm_watchdog.model.observations import Event, EventKind
from tests.builders.endings import done
from tests.builders.rank_activity import four, rank
from tests.builders.views import BARRIER, SAVE, cluster, progress, slurm_job, snapshot, stack, still

TEARDOWN = ("destroy_process_group (torch/distributed/distributed_c10d.py)", "main (t.py)")


def wedged(view: JobView) -> Finding:
    (found,) = wedged_teardown.detect(cluster(view), CollectiveHang())
    return found


def error(age_s: float, **changes: Any) -> ErrorLine:
    given: dict[str, Any] = {
        "kind": EventKind.ERROR, "job_id": "7", "age_s": 0, "source": "l", "pattern": "traceback",
        "line": "Traceback (most recent call last):",
    }  # fmt: skip
    return ErrorLine(node="n1", age_s=age_s, event=Event(**{**given, **changes}))


@pytest.mark.parametrize(("doing", "cpu"), [("idles", 0.0), ("spins", 1.0)])
def test_a_job_whose_ranks_stay_after_the_last_step_is_told_after_ten_minutes(doing: str, cpu: float) -> None:
    found = wedged(done(doing=doing, cpu=cpu))
    assert (found.truth, found.actionable) == (Truth.BAD, True)
    assert [c.rank for c in found.culprits] == [0, 1, 2, 3]
    assert "made its last step 610 s ago and does not end" in found.summary
    assert wedged(done(590.0, doing, cpu)).truth is Truth.UNKNOWN


def test_the_ranks_that_are_still_there_are_named() -> None:
    gone = {f"r{n}": rank(n, gone_s=500.0) for n in (0, 1, 3)}
    found = wedged(done(**gone))
    assert [(c.node, c.rank, c.pid) for c in found.culprits] == [("n2", 2, 102)]
    assert "3 of 4 ranks have left" in found.summary


def test_the_stacks_of_the_teardown_are_in_the_facts() -> None:
    found = wedged(done(snapshots=still(TEARDOWN, TEARDOWN, TEARDOWN, TEARDOWN)))
    assert "tear their process group down" in found.summary
    assert "destroy_process_group" in found.facts[0]
    assert wedged(done(310.0)).wanted


def test_a_log_that_says_that_the_training_is_over_counts_from_that_line_on() -> None:
    late = four("idles", 0.0, progress=progress(5000.0, phase="finishing", phase_age_s=610.0))
    assert wedged(late).truth is Truth.BAD
    soon = four("idles", 0.0, progress=progress(5000.0, phase="finishing", phase_age_s=300.0))
    assert wedged(soon).truth is Truth.UNKNOWN


def test_the_last_steps_may_be_fewer_than_stand_between_two_lines() -> None:
    view = four("idles", 0.0, progress=progress(610.0, step=1000, stride=100, total_steps=1050))
    assert wedged(view).truth is Truth.BAD


ENDING = {
    "a last checkpoint by rank 0": done(1700.0, r0=rank(0, 0.9)),
    "an upload that is read from the disk": done(1700.0, r0=rank(0, 0.05, 5e7)),
    "a checkpoint that grows on the disk": done(
        1700.0, checkpoints_on_disk=(OnDisk(job_id="7", directory="/c", writing=True),)
    ),
    "a last evaluation": done(1700.0, "trains", 1.0),
    "a last checkpoint, as the stacks show it": done(
        1700.0, "spins", 1.0, snapshots=still(SAVE, BARRIER, BARRIER, BARRIER)
    ),
    "stacks that move": done(
        1700.0,
        snapshots=(
            snapshot(30, [stack(r, BARRIER) for r in range(4)]),
            snapshot(10, [stack(r, SAVE[1:]) for r in range(4)]),
        ),
    ),
    "nobody knows what the ranks do": done(1700.0, cpu=None),
    "all ranks have gone": done(processes=tuple(rank(n, gone_s=600.0) for n in range(4))),
    "the job is completing": done(job=slurm_job(state="COMPLETING")),
    "a node is silent": done(silent_nodes=("n2",)),
    "the end of an epoch": done(progress=progress(610.0, step=1000, total_steps=1000, begun_anew=1)),
    "no total is known": done(progress=progress(610.0, step=1000)),
    "no processes are known": done(processes=()),
    "it trains": four("trains", 1.0, progress=progress(5.0)),
}


@pytest.mark.parametrize("name", ENDING)
def test_nothing_is_said_of(name: str) -> None:
    assert wedged(ENDING[name]).truth is not Truth.BAD


def test_an_ending_that_seems_to_work_is_told_after_half_an_hour() -> None:
    for view in (done(1811.0, r0=rank(0, 0.9)), done(1811.0, cpu=None)):
        assert wedged(view).truth is Truth.BAD


def test_ranks_that_do_nothing_after_a_traceback_are_told_at_the_limit_and_the_one_that_failed_is_named() -> None:
    view = four("idles", 0.0, age_s=75.0, errors=(error(70.0, rank=2),))
    found = wedged(view)
    assert found.truth is Truth.BAD
    assert [c.rank for c in found.culprits] == [2]
    assert "Traceback" in found.facts[0]


@pytest.mark.parametrize(
    "view",
    [
        four("idles", 0.0, age_s=75.0, errors=(error(40.0),)),
        four("idles", 0.0, age_s=75.0, errors=(error(200.0),)),
        four("idles", 0.0, age_s=75.0, errors=(error(70.0, pattern="task_exit"),)),
        four("idles", 0.5, age_s=75.0, errors=(error(70.0),)),
        four("idles", None, age_s=75.0, errors=(error(70.0),)),
        four("idles", 0.0, age_s=75.0, errors=(error(70.0),), r1=rank(1, gone_s=70.0)),
        four("idles", 0.0, age_s=75.0, errors=(error(70.0),), snapshots=still(*[BARRIER] * 4)),
    ],
    ids=[
        "just now",
        "before the last step",
        "no end of a training",
        "they work",
        "not known",
        "a rank died",
        "stacks",
    ],
)
def test_an_error_alone_is_no_wedged_teardown(view: JobView) -> None:
    assert wedged(view).truth is not Truth.BAD


# ------------------------------------------------------------------------------------------------ in the teardown


def ends(age_s: float = 125.0, doing: str = "idles", cpu: float | None = 0.0, **changes: Any) -> JobView:
    """Four ranks in their teardown; the log tells neither total nor end."""
    given: dict[str, Any] = {"progress": progress(age_s, step=500), "snapshots": still(*[TEARDOWN] * 4)}
    return four(doing, cpu, **{**given, **changes})


def test_ranks_that_all_sit_in_their_teardown_are_told_after_two_minutes_whatever_the_log_says() -> None:
    found = wedged(ends())
    assert found.truth is Truth.BAD
    assert "as its stacks say" in found.summary
    assert wedged(done(125.0, snapshots=still(*[TEARDOWN] * 4))).truth is Truth.BAD


def test_the_one_that_stays_in_its_teardown_when_the_others_have_left_is_named_whatever_the_log_says() -> None:
    gone = {f"r{number}": rank(number, gone_s=120.0) for number in (0, 2, 3)}
    found = wedged(ends(**gone))
    assert (found.truth, [culprit.rank for culprit in found.culprits]) == (Truth.BAD, [1])
    assert "3 of 4 ranks have left" in found.summary
    assert wedged(ends(**gone, snapshots=still(TEARDOWN, SAVE, TEARDOWN, TEARDOWN))).truth is not Truth.BAD


@pytest.mark.parametrize(
    "view",
    [
        ends(110.0),
        ends(snapshots=still(TEARDOWN, TEARDOWN, TEARDOWN, BARRIER)),
        ends(snapshots=still(SAVE, TEARDOWN, TEARDOWN, TEARDOWN)),
        ends(snapshots=still(TEARDOWN, TEARDOWN, TEARDOWN)),
        ends(snapshots=still(*[TEARDOWN] * 4)[-1:]),
        ends(snapshots=()),
        ends(r0=rank(0, 0.9)),
        ends(r0=rank(0, 0.05, 5e7)),
        ends(cpu=None),
        ends(checkpoints_on_disk=(OnDisk(job_id="7", directory="/c", writing=True),)),
        ends(r1=rank(1, gone_s=100.0)),
        done(125.0, snapshots=still(SAVE, TEARDOWN, TEARDOWN, TEARDOWN)),
        done(125.0, snapshots=still(BARRIER, TEARDOWN, TEARDOWN, TEARDOWN)),
    ],
    ids=[
        "not for long", "one waits elsewhere", "rank 0 saves", "one could not be seen", "seen once", "no stacks", "rank 0 computes",
        "rank 0 uploads", "not known", "a checkpoint grows", "a rank died", "a last save", "a last barrier",
    ],
)  # fmt: skip
def test_a_teardown_in_which_anybody_may_still_work_gets_its_time(view: JobView) -> None:
    assert wedged(view).truth is not Truth.BAD
