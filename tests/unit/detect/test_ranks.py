"""Ranks that died, or whose GPU idles: named within seconds, and never at the end of a job or in a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect import rank_rules
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.lingering_job import dead_rank
from slurm_watchdog.model.cluster_view import ErrorLine, JobView, RankGpu, StepTime
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.node_view import GpuView
from slurm_watchdog.model.observations import Checkpoint, Event, EventKind, Gpu
from tests.builders.eight_ranks import eight
from tests.builders.views import BARRIER, LOADER, SAVE, cluster, job, progress, seen, slurm_job, still

NOW = 10_000.0


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


# ------------------------------------------------------------------------------------------------ dead


def died(view: JobView) -> Finding:
    return only(dead_rank(cluster(view)))


def test_a_rank_that_is_gone_is_told_within_seconds() -> None:
    found = died(eight((5, 4.0)))
    assert found.truth is Truth.BAD
    assert [(c.rank, c.node) for c in found.culprits] == [(5, "n2")]
    assert "7 of 8 are left" in found.summary


@pytest.mark.parametrize(
    "view",
    [
        eight((5, 1.0)),
        eight((0, 9.0), (1, 9.0), (2, 9.0)),
        eight((5, 9.0), progress=None),
        eight((5, 9.0), progress=progress(20.0, step=1000, total_steps=1000)),
        eight((5, 9.0), job=slurm_job(state="COMPLETING")),
        eight((5, 9.0), silent_nodes=("n2",)),
        job(processes=(seen(0), seen(1, gone_s=9.0))),
    ],
    ids=["just now", "many", "not begun", "after the last step", "ending", "silent node", "one of two"],
)
def test_dead_rank_is_not_reported_in_an_ending_or_with_missing_facts(view: JobView) -> None:
    assert died(view).truth is Truth.UNKNOWN


def test_where_the_survivors_gpus_rest_the_job_is_ending() -> None:
    everybody = dict.fromkeys(range(8), 10.0)
    assert died(eight((5, 9.0), gpus=gpus(everybody))).truth is Truth.UNKNOWN
    assert died(eight((5, 9.0), gpus=gpus({5: 10.0}))).truth is Truth.BAD


def test_where_the_training_may_be_over_its_ranks_have_a_minute_to_leave() -> None:
    """Nobody knows how many steps there were to make: nothing but an error, or GPUs that spin, tell an end
    from a death."""

    def unsure(gone_s: float, **changes: Any) -> JobView:
        return eight((5, gone_s), **{"progress": progress(70.0), **changes})

    said = Event(kind=EventKind.ERROR, job_id="7", age_s=0, source="l", pattern="traceback", line="Traceback", rank=5)
    assert died(unsure(30.0)).truth is Truth.UNKNOWN
    assert died(unsure(61.0)).truth is Truth.BAD
    assert died(unsure(4.0, gpus=gpus({5: 10.0}))).truth is Truth.BAD
    assert died(unsure(4.0, errors=(ErrorLine(node="n1", age_s=5.0, event=said),))).truth is Truth.BAD
    assert died(unsure(4.0, errors=(ErrorLine(node="n1", age_s=50.0, event=said),))).truth is Truth.UNKNOWN
    last = progress(70.0, step=900, total_steps=1000, begun_anew=1)  # of an epoch, and there may be no other
    assert died(unsure(30.0, progress=last)).truth is Truth.UNKNOWN


def test_a_rank_whose_node_has_not_reported_since_may_have_gone_as_well() -> None:
    """Slurm ends a job of one rank a node: the node of the first one to die reports first."""

    def view(*unseen: int) -> JobView:
        ranks = tuple(
            replace(seen(rank, node=f"n{rank}", gone_s=4.0 if rank == 5 else None), seen_age_s=8.0 if rank in unseen else 0.5)
            for rank in range(8)
        )  # fmt: skip
        return eight(processes=ranks)

    assert died(view(0, 1, 2, 3, 4, 6, 7)).truth is Truth.UNKNOWN
    assert died(view(0, 1)).truth is Truth.UNKNOWN
    assert died(view(0)).truth is Truth.BAD
    assert died(view()).truth is Truth.BAD


def test_ranks_that_were_seen_only_a_moment_after_the_death_may_be_leaving_too() -> None:
    """PyTorch's processes take seconds to leave, each its own."""
    ranks = tuple(replace(each, seen_age_s=0.5 if each.gone_s else 2.0) for each in eight((5, 4.0)).ranks)
    assert died(eight(processes=ranks)).truth is Truth.UNKNOWN


def test_a_job_that_makes_steps_without_the_rank_is_well() -> None:
    assert died(eight((5, 60.0), progress=progress(2.0))).truth is Truth.OK


# ------------------------------------------------------------------------------------------------ idle GPU


def gpus(idle: dict[int, float], ranks: int = 8, busy_s: float = 5000.0) -> tuple[RankGpu, ...]:
    """A GPU a rank, busy for long, but those of `idle` (rank -> seconds)."""
    return tuple(
        RankGpu(
            rank=rank, pid=100 + rank,
            view=GpuView(
                node="n1" if rank < 2 else "n2", gpu=Gpu(uuid=f"GPU-{rank}", index=rank, utilization_ratio=0.0 if rank in idle else 1.0),
                idle_since=NOW - idle[rank] if rank in idle else None,
                busy_since=None if rank in idle else NOW - busy_s,
            ),
        )
        for rank in range(ranks)
    )  # fmt: skip


def used_before(each: RankGpu) -> RankGpu:
    return replace(each, view=replace(each.view, gpu=replace(each.view.gpu, usual_sm_clock_hz=1.98e9)))


def quiet(rank: int, cpu_ratio: float | None = 0.0, io_bytes_s: float | None = 0.0) -> Any:
    return seen(rank, cpu_ratio=cpu_ratio, io_bytes_s=io_bytes_s)


def idle(view: JobView) -> Finding:
    return only(rank_rules.GPU_IDLE.detect(cluster(view), CollectiveHang()))


def standing(idle_ones: dict[int, float], **changes: Any) -> JobView:
    given = {
        "processes": tuple(quiet(rank) for rank in range(8)),
        "gpus": gpus(idle_ones),
        "progress": progress(100.0),
    }
    return job(**{**given, **changes})


def test_where_a_rank_is_gone_nobody_else_is_accused_of_an_idle_gpu() -> None:
    ranks = tuple(replace(quiet(rank), gone_s=40.0 if rank == 0 else None) for rank in range(8))
    assert idle(standing({5: 90.0}, processes=ranks)).truth is Truth.UNKNOWN


def test_the_one_idle_gpu_among_busy_ones_is_named() -> None:
    found = idle(standing({5: 90.0}))
    assert found.truth is Truth.BAD
    assert [(c.rank, c.gpu_uuid, c.node) for c in found.culprits] == [(5, "GPU-5", "n2")]


@pytest.mark.parametrize(
    "view",
    [
        standing({5: 30.0}),
        standing({5: 90.0}, progress=progress(200.0, intervals_s=(105.0,) * 9)),
        standing(dict.fromkeys(range(4), 90.0)),
        standing({5: 90.0}, progress=progress(2.0)),
        standing({0: 90.0}, progress=progress(100.0, phase="checkpointing")),
        standing({0: 90.0}, progress=progress(100.0, phase="evaluating")),
        standing({0: 90.0}, checkpoints_on_disk=(Checkpoint(job_id="7", directory="/c", writing=True),)),
        standing({0: 90.0}, processes=tuple(quiet(rank, 1.0 if rank == 0 else 0.0) for rank in range(8))),
        standing({0: 90.0}, processes=tuple(quiet(rank, 0.0, 5e8 if rank == 0 else 0.0) for rank in range(8))),
        standing({0: 90.0}, processes=tuple(quiet(rank, None) for rank in range(8))),
        standing({1: 90.0}, gpus=gpus({1: 90.0}, ranks=2)),
        standing({5: 90.0}, silent_nodes=("n2",)),
        standing({5: 90.0}, gpus=gpus({5: 90.0}, busy_s=20.0)),
    ],
    ids=["short", "within its limit", "half of them", "makes steps", "checkpoint in the log", "evaluation", "checkpoint on disk", "computes",
         "moves data", "not known", "two ranks", "silent node", "peers only just busy"],
)  # fmt: skip
def test_gpu_idle_rank_is_not_reported_where_another_reason_explains_it(view: JobView) -> None:
    assert idle(view).truth is not Truth.BAD


def test_a_gpu_that_idles_for_very_long_is_told_even_if_the_job_makes_steps() -> None:
    steps = tuple(StepTime(step=n, seconds=10.0, at=NOW - 40 + 10 * n, logged=True) for n in range(4))
    view = standing({5: 1000.0}, progress=progress(2.0), step_times=steps)
    assert idle(view).truth is Truth.BAD
    assert idle(replace(view, step_times=steps[:2])).truth is not Truth.BAD


def test_a_gpu_that_was_never_used_is_not_needed_where_the_job_makes_steps() -> None:
    steps = tuple(StepTime(step=n, seconds=10.0, at=NOW - 40 + 10 * n, logged=True) for n in range(4))
    used = tuple(each if each.rank == 5 else used_before(each) for each in gpus({5: 1000.0}))
    assert idle(standing({5: 1000.0}, progress=progress(2.0), step_times=steps, gpus=used)).truth is not Truth.BAD
    assert idle(standing({5: 90.0}, gpus=used)).truth is Truth.BAD  # it makes no step: that may be why
    all_used = tuple(used_before(each) for each in used)
    assert idle(standing({5: 1000.0}, progress=progress(2.0), step_times=steps, gpus=all_used)).truth is Truth.BAD


@pytest.mark.parametrize("phase", ["starting", "finishing", "evaluating", "checkpointing", "a phase of tomorrow"])
def test_an_idle_gpu_says_nothing_in_a_phase_that_is_not_training(phase: str) -> None:
    """One rank gathers the results, builds an index, or writes the last model, while the others wait in a barrier."""
    steps = tuple(StepTime(step=n, seconds=10.0, at=NOW - 40 + 10 * n, logged=True) for n in range(4))
    for age_s in (2.0, 100.0, 5000.0):
        view = standing({0: 1000.0}, progress=progress(age_s, phase=phase), step_times=steps)
        assert idle(view).truth is Truth.UNKNOWN


UPLOAD = ("read (ssl.py)", "urlopen (urllib3/connectionpool.py)", "push (hub.py)", "train (t.py)")


@pytest.mark.parametrize("doing", [SAVE, UPLOAD])
def test_an_idle_gpu_whose_rank_saves_or_uploads_as_the_stacks_show_is_not_told_before_a_checkpoint_s_time(
    doing: Any,
) -> None:
    stacks = still(doing, *[BARRIER] * 7)
    assert idle(standing({0: 90.0}, snapshots=stacks)).truth is Truth.UNKNOWN
    late = standing({0: 5000.0}, snapshots=stacks, progress=progress(4000.0))
    assert idle(late).truth is Truth.BAD
    assert idle(standing({0: 90.0}, snapshots=still(LOADER, *[BARRIER] * 7))).truth is Truth.BAD
