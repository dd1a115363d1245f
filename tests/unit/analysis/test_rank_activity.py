"""What ranks do, as their processes and GPUs show it; and the three verdicts that rest on it where there are
no stacks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.rank_activity import RankState, activities, loop_state
from slurm_watchdog.detect import collective_hang, stalled_progress
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.stalled_progress import StalledProgress
from slurm_watchdog.model.cluster_view import ErrorLine, JobView, LogView
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.past_runs import PastRun
from tests.builders.rank_activity import HEALTHY, IDLE_RANK, NOW, UNSEEN, card, four, rank
from tests.builders.views import (
    COMPUTE,
    LOADER,
    RECV,
    blocked,
    cluster,
    job,
    progress,
    snapshot,
    stack,
    still,
    talking,
)

HANG, STALLED = CollectiveHang(), StalledProgress()


def hang(view: JobView) -> Finding:
    (found,) = collective_hang.detect(cluster(view), HANG)
    return found


def stalled(view: JobView) -> Finding:
    (found,) = stalled_progress.detect(cluster(view), STALLED, HANG)
    return found


def test_rank_activity_is_read_from_its_gpu_and_then_its_process() -> None:
    rows = {
        RankState.WORKS: four("trains", 0.0),
        RankState.SPINS: four("spins", 0.0),
        RankState.BUSY: four("busy"),
        RankState.IDLE: four("idles", 0.0),
        RankState.UNKNOWN: four("idles", None),
    }
    for doing, view in rows.items():
        assert {a.doing for a in activities(view, view.ranks, NOW, 30.0)} == {doing}
    computing = four("idles", 0.9)
    assert {a.doing for a in activities(computing, computing.ranks, NOW, 30.0)} == {RankState.WORKS}


@pytest.mark.parametrize(
    ("doing", "tensor", "dram", "usual", "found"),
    [
        ("busy", 0.0, 0.001, 0.4, RankState.SPINS),  # no power is known
        ("busy", 0.0, 0.39, 0.4, RankState.WORKS),  # its memory is in use
        ("busy", None, None, 0.4, RankState.BUSY),
        ("busy", 0.0, 0.001, None, RankState.BUSY),  # nobody knows what it does at work
        ("busy", 0.0, 0.001, 0.01, RankState.BUSY),  # a program that never uses much of either
        ("spins", 0.0, 0.001, 0.4, RankState.SPINS),
        ("spins", 0.3, 0.2, 0.4, RankState.WORKS),  # its power fell, and it goes on computing
        ("trains", 0.0, 0.001, 0.4, RankState.WORKS),  # the two differ
    ],
)
def test_a_busy_gpu_spins_if_neither_its_power_nor_its_activity_is_what_it_was(
    doing: str, tensor: float | None, dram: float | None, usual: float | None, found: RankState
) -> None:
    each = card(0, doing, usual_work_ratio=usual)
    gpu = replace(each.view.gpu, tensor_active_ratio=tensor, dram_active_ratio=dram)
    view = four(doing, g0=replace(each, view=replace(each.view, gpu=gpu)))
    assert activities(view, view.ranks, NOW, 30.0)[0].doing is found


@pytest.mark.parametrize(
    ("doing", "phase", "age_s", "truth"),
    [
        ("trains", "evaluating", 3000.0, Truth.UNKNOWN),
        ("trains", "evaluating", 7300.0, Truth.BAD),
        ("busy", "evaluating", 3000.0, Truth.BAD),
        ("trains", None, 3000.0, Truth.BAD),
    ],
)
def test_an_evaluation_in_which_every_gpu_computes_as_in_training_has_two_hours(
    doing: str, phase: str | None, age_s: float, truth: Truth
) -> None:
    at_it = progress(age_s, phase=phase)
    assert stalled(four(doing, progress=at_it)).truth is truth
    assert stalled(four(doing, progress=at_it, g0=card(0, "busy"))).truth is Truth.BAD


def test_one_look_at_low_power_between_two_steps_is_no_spinning() -> None:
    gap = card(0, "spins", recent_power_w=320.0)
    assert loop_state(four("trains", g0=gap), NOW, 60.0).stands is False


def test_gpus_that_spin_are_a_hang_without_a_culprit_that_is_not_acted_on() -> None:
    found = hang(four())
    assert (found.truth, found.culprits, found.actionable) == (Truth.BAD, (), False)
    assert "4 of 4 ranks spin" in found.summary
    assert not hang(four(age_s=5000.0)).actionable
    assert stalled(four()).truth is Truth.UNKNOWN


@pytest.mark.parametrize("doing", ["spins", "busy"])
def test_the_idle_rank_among_busy_ones_is_named_with_its_gpu(doing: str) -> None:
    found = hang(four(doing, **IDLE_RANK))
    assert found.truth is Truth.BAD
    assert [(c.node, c.rank, c.pid, c.gpu_uuid) for c in found.culprits] == [("n2", 2, 102, "GPU-2")]
    assert not found.actionable
    assert hang(four(doing, age_s=1811.0, **IDLE_RANK)).actionable


def test_the_rank_whose_process_is_quiet_while_the_others_poll_is_named_although_its_gpu_is_as_busy() -> None:
    found = hang(four(r1=rank(1, 0.01)))
    assert [(c.rank, c.gpu_uuid) for c in found.culprits] == [(1, "GPU-1")]


def test_stacks_that_are_there_decide_whatever_the_gpus_show() -> None:
    moving = (
        snapshot(30, [stack(r, RECV) for r in range(4)]),
        snapshot(10, [stack(0, COMPUTE), *(stack(r, RECV) for r in (1, 2, 3))]),
    )
    assert hang(four(snapshots=moving, **IDLE_RANK)).truth is Truth.UNKNOWN
    assert stalled(four(snapshots=moving, **IDLE_RANK)).truth is Truth.UNKNOWN
    standing_still = still(RECV, LOADER, RECV, RECV)
    assert [c.rank for c in hang(four(snapshots=standing_still, **IDLE_RANK)).culprits] == [1]


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_wrong_with(name: str) -> None:
    assert hang(HEALTHY[name]).truth is not Truth.BAD
    assert stalled(HEALTHY[name]).truth is not Truth.BAD


@pytest.mark.parametrize("name", UNSEEN)
def test_rank_activity_hang_and_stall_are_not_reported_if(name: str) -> None:
    assert hang(UNSEEN[name]).truth is not Truth.BAD
    assert stalled(UNSEEN[name]).truth is not Truth.BAD


# ------------------------------------------------------------------------------------------------ stalled_progress


@pytest.mark.parametrize(
    "view", [four("idles", 0.0), job(processes=tuple(rank(n) for n in range(4)), progress=progress(75.0))]
)
def test_a_job_in_which_nobody_does_anything_stalls_at_its_limit(view: JobView) -> None:
    found = stalled(view)
    assert (found.truth, found.culprits, found.actionable) == (Truth.BAD, (), False)
    assert "since step 500" in found.summary


def test_a_site_without_stacks_may_act_on_ranks_that_are_all_known_to_do_nothing_for_long() -> None:
    wants = StalledProgress(act_without_stacks=2400.0)
    quiet, unknown, works = (four("idles", cpu, age_s=2500.0) for cpu in (0.0, None, 0.9))
    for view, settings, acts in (
        (quiet, wants, True),
        (quiet, STALLED, False),
        (four("idles", 0.0, age_s=2300.0), wants, False),
        (replace(quiet, snapshots=(snapshot(1.0, [stack(n, COMPUTE) for n in range(4)]),)), wants, False),
        (unknown, wants, False),
        (works, wants, False),
    ):
        (found,) = stalled_progress.detect(cluster(view), settings, HANG)
        assert found.actionable is acts


def test_stacks_that_are_on_their_way_are_waited_for() -> None:
    assert stalled(four("idles", 0.0, age_s=65.0)).truth is Truth.UNKNOWN


def test_a_rank_that_has_been_in_one_call_for_long_is_named() -> None:
    held = rank(1, 0.0, state="D", blocked=blocked(50.0, mount=None, path=None, syscall="ioctl"))
    assert [(c.rank, c.reason) for c in stalled(four("idles", 0.0, r1=held)).culprits] == [
        (1, "has been in ioctl for 50 s")
    ]


def test_a_rank_that_is_blocked_on_a_filesystem_is_the_filesystem_s_matter() -> None:
    held = rank(1, 0.0, state="D", blocked=blocked(50.0))
    view = four("busy", r1=held, g1=card(1, "idles"))
    assert hang(view).truth is Truth.UNKNOWN
    assert stalled(view).truth is Truth.UNKNOWN
    assert stalled(four("idles", 0.0, r1=held)).truth is Truth.UNKNOWN


def test_a_job_that_seems_to_work_and_makes_no_step_for_very_long_is_told() -> None:
    for view in (four("trains", age_s=1811.0), four("idles", None, age_s=1811.0), four("busy", age_s=1811.0)):
        found = stalled(view)
        assert (found.truth, found.culprits, found.actionable) == (Truth.BAD, (), False)
    assert stalled(four("trains", age_s=1805.0)).truth is Truth.UNKNOWN


def saves(age_s: float, **changes: Any) -> JobView:
    """Rank 0 writes a checkpoint, and its peers wait for it in a barrier."""
    return four("spins", age_s=age_s, **{"r0": rank(0, 0.7, 6e8), "g0": card(0, "idles"), **changes})


def test_while_the_files_of_a_checkpoint_grow_nobody_is_accused_however_long_it_takes() -> None:
    view = saves(7000.0, growing_age_s=5.0)
    assert stalled(view).truth is Truth.UNKNOWN
    assert stalled(replace(view, growing_age_s=None)).truth is Truth.BAD
    assert stalled(replace(view, growing_age_s=400.0)).truth is Truth.BAD


def test_the_step_after_a_checkpoint_of_half_an_hour_has_its_time_too() -> None:
    for lately in ({"growing_age_s": 40.0}, {"saving_age_s": 40.0}):
        assert stalled(four("trains", age_s=2100.0, **lately)).truth is Truth.UNKNOWN
    assert stalled(four("trains", age_s=2100.0, saving_age_s=400.0)).truth is Truth.BAD
    assert stalled(four("trains", age_s=5000.0, saving_age_s=40.0)).truth is Truth.BAD


def test_ranks_that_stand_still_in_a_checkpoint_hang_once_its_files_grow_no_more() -> None:
    frames = ("_save (torch/serialization.py)", "save_checkpoint (checkpointing.py)", "train (train.py)")
    dumps = still(frames, *3 * [RECV])
    view = four("spins", age_s=2000.0, r0=rank(0, 0.0), g0=card(0, "idles"), snapshots=dumps)
    assert hang(replace(view, growing_age_s=5.0)).truth is Truth.UNKNOWN
    assert [c.rank for c in hang(replace(view, growing_age_s=300.0)).culprits] == [0]


def test_gpus_that_idle_accuse_although_a_checkpoint_was_written_a_moment_ago() -> None:
    assert stalled(four("idles", 0.0, growing_age_s=20.0)).truth is Truth.BAD


def test_a_job_that_lost_a_rank_stalls_only_after_its_lingering_was_looked_into() -> None:
    gone = four("idles", 0.0, r3=replace(rank(3), gone_s=60.0))
    assert stalled(gone).truth is Truth.UNKNOWN
    assert stalled(replace(gone, progress=progress(1811.0))).truth is Truth.BAD


def test_after_the_last_step_and_after_an_error_it_is_no_hang_of_gpus() -> None:
    done = four(progress=progress(75.0, step=1000, total_steps=1000))
    assert (hang(done).truth, stalled(done).truth) == (Truth.UNKNOWN, Truth.UNKNOWN)
    line = ErrorLine(
        node="n1",
        age_s=70,
        event=Event(kind=EventKind.ERROR, job_id="7", age_s=0, source="l", pattern="traceback", line="Traceback"),
    )
    assert hang(four(errors=(line,))).truth is Truth.UNKNOWN
    assert hang(four(errors=(replace(line, age_s=500.0),))).truth is Truth.BAD


def test_ranks_of_which_none_could_be_dumped_are_judged_by_their_gpus() -> None:
    undumped = tuple(snapshot(age, [stack(r, (), error="py-spy is not there") for r in range(4)]) for age in (30, 10))
    assert [c.rank for c in hang(four(snapshots=undumped, **IDLE_RANK)).culprits] == [2]


# ------------------------------------------------------------------------------------------------ before the first step


def unborn(doing: str = "idles", cpu: float | None = 0.0, **changes: Any) -> JobView:
    """Four ranks that have run for 5500 s and never made a step; their log began to train, and is silent."""
    given = {
        "progress": None,
        "run_age_s": 5500.0,
        "phase": "starting",
        "log": LogView(grew_age_s=5000.0, whole=True),
    }
    return four(doing, cpu, **{**given, **changes})


def test_a_training_that_never_makes_its_first_step_is_told_and_never_acted_on() -> None:
    found = stalled(unborn())
    assert (found.truth, found.actionable, found.culprits) == (Truth.BAD, False, ())
    assert "has made no first step for 5500 s" in found.summary
    assert "phase starting" in found.summary


@pytest.mark.parametrize("doing", ["busy", "trains"])
def test_before_the_first_step_the_rank_that_idles_while_all_others_are_busy_is_named(doing: str) -> None:
    found = stalled(unborn(doing, 1.0, **IDLE_RANK))
    assert found.truth is Truth.BAD
    assert [(c.node, c.rank, c.gpu_uuid) for c in found.culprits] == [("n2", 2, "GPU-2")]


def test_a_run_after_one_that_made_steps_is_a_training_whatever_its_log_says() -> None:
    before = PastRun(restarts=0, began_at=0.0, ended_at=100.0, steps_seen=50)
    assert stalled(unborn(phase=None, past=(before,))).truth is Truth.BAD
    assert stalled(unborn(phase=None, past=(replace(before, steps_seen=0),))).truth is Truth.UNKNOWN


@pytest.mark.parametrize(
    "view",
    [
        unborn(run_age_s=5300.0),
        unborn(phase=None),
        unborn(log=None),
        unborn(log=LogView(grew_age_s=5000.0, whole=False)),
        unborn(phase="finishing"),
        unborn(silent_nodes=("n1",)),
        unborn("idles", 0.9),
        unborn("idles", None),
        unborn("idles", 0.0, r0=rank(0, 1.0)),
        unborn("idles", 0.0, r0=rank(0, 0.05, 5e7)),
        unborn("trains", 1.0),
        unborn("busy", 1.0),
        unborn("busy", 1.0, log=LogView(grew_age_s=60.0, whole=True), **IDLE_RANK),
        unborn("idles", 0.0, r3=rank(3, gone_s=400.0)),
        unborn("idles", 0.0, r3=rank(3, state="D", blocked=blocked(400.0))),
        unborn("idles", 0.0, g0=card(0, "idles", idle_since=NOW - 900)),
    ],
    ids=[
        "not so long", "no word of a training", "its log cannot be read", "a part of its log was passed over", "it ends",
        "a node is silent", "they compile", "nobody knows", "rank 0 builds an index", "rank 0 reads", "GPUs compute", "GPUs are busy",
        "an unknown log grows", "a rank has exited", "a filesystem", "a GPU was in use lately",
    ],
)  # fmt: skip
def test_a_start_that_may_be_well_is_not_told(view: JobView) -> None:
    assert stalled(view).truth is Truth.UNKNOWN


SLEEPS = ("sleep (time.py)", "wait_for_shard (data.py)", "train (t.py)")


@pytest.mark.parametrize(
    ("age_s", "changes", "told"),
    [
        (620.0, {}, True),
        (590.0, {}, False),  # a retry that may succeed
        (620.0, {"r1": rank(1, 0.9)}, False),
        (620.0, {"r1": rank(1, None)}, False),
        (620.0, {"g3": card(3, "trains")}, False),
        (620.0, {"snapshots": (snapshot(30, [stack(n, SLEEPS) for n in range(4)]),)}, False),
        (620.0, {"snapshots": talking(still(*[SLEEPS] * 4), 1, ("a 0", "a 9e5", "a 2e6"))}, False),
        (620.0, {"snapshots": talking(still(*[SLEEPS] * 4), 1, ("a 2e6",) * 3)}, True),
        (620.0, {"snapshots": still(SLEEPS, SLEEPS, SLEEPS)}, False),  # of one rank there is none
    ],
)
def test_ranks_that_all_stand_still_outside_of_any_collective_are_told_after_ten_minutes(
    age_s: float, changes: dict[str, Any], told: bool
) -> None:
    found = stalled(four("idles", 0.0, age_s=age_s, **{"snapshots": still(*[SLEEPS] * 4), **changes}))
    assert (found.truth is Truth.BAD) is told
    assert not found.culprits
    assert found.actionable is told, (
        "where a ladder is configured, as `run` has one, a program that stands still is started again"
    )
    if told:
        assert "none waits in a collective: 4 of 4 in sleep (time.py)" in found.summary


def test_ranks_that_stand_still_in_places_of_their_own_are_told_with_all_their_places() -> None:
    mine, other = ("forward (net.py)", "train (t.py)"), ("look (data.py)", "train (t.py)")
    found = stalled(four("idles", 0.0, age_s=620.0, snapshots=still(SLEEPS, SLEEPS, mine, other)))
    assert (found.truth, found.culprits, found.actionable) == (Truth.BAD, (), True)
    assert (
        "2 of 4 in sleep (time.py), 1 in forward (net.py), 1 in look (data.py), so no rank is identified"
        in found.summary
    )
