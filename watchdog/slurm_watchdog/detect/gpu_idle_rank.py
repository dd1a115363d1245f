"""`gpu_idle_rank`: the GPU of one rank is idle while those of its peers are busy, for long.

A checkpoint that rank 0 writes while the others wait in a barrier looks the same: nothing is reported while the log,
the disk or the stacks show one, an evaluation or a transfer, nor while the process itself computes or moves data.

Fires: the GPU of a rank is idle while most others are busy: for 60 s if the job makes no step, for 15 min if it does.
Names: rank, node, GPU.
Acts: only where the job makes no step for 15 min, too.
"""

from __future__ import annotations

from slurm_watchdog.analysis.job_state import is_on_storage, is_unseen
from slurm_watchdog.analysis.progress_limit import progress_limit, with_a_step
from slurm_watchdog.analysis.rank_activity import MAX_ODD_SHARE, RankState, activities
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.spec import HANGS, STORAGE, DetectorSpec, each_job
from slurm_watchdog.diagnose.culprit_words import and_more
from slurm_watchdog.diagnose.stacks.vote import vote
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import ClusterView, JobView, RankGpu
from slurm_watchdog.model.incidents import Finding, IncidentKind

LEAST_STEPS = 3  # Made without a GPU before it counts as idle while the job makes steps: a checkpoint idles, too.
BUSY_RATIO = 0.5  # A GPU below this may be one that idles, where it is not known since when it is as it is.
TRANSFERS = (Place.CHECKPOINT, Place.NETWORK)

IDLE_FOR_S = 60.0  # While the job makes no step beyond its limit.
IDLE_WHILE_STEPS_S = 900.0  # While the job makes steps.


def idle_ranks(job: JobView, now: float, idle_for_s: float) -> list[RankGpu]:
    """The few GPUs of a job that have been idle so long while those of most other ranks were busy throughout;
    empty if unclear."""
    idle = [g for g in job.gpus if g.view.idle_since is not None and now - g.view.idle_since >= idle_for_s]
    if not idle:
        return []
    ranks = {each.rank for each in job.gpus}
    idle_ones = {each.rank for each in idle}
    busy = {g.rank for g in job.gpus if g.view.busy_since is not None and now - g.view.busy_since >= idle_for_s}
    unsure = (g for g in job.gpus if g.view.idle_since is None and g.view.busy_since is None)
    perhaps: set[int | None] = {g.rank for g in unsure if (g.view.gpu.utilization_ratio or 0.0) < BUSY_RATIO}
    perhaps |= {rank.process.rank for rank in job.ranks if rank.process.rank not in ranks}
    if len(ranks) < 3 or len(idle_ones | perhaps) > max(1, MAX_ODD_SHARE * len(ranks)):
        return []
    if len(busy - idle_ones) < len(ranks) - max(1, 2 * MAX_ODD_SHARE * len(ranks)) or len(busy) < 2:
        return []
    # A rank with several GPUs is idle if all of them are.
    return [each for each in idle if all(g in idle for g in job.gpus if g.rank == each.rank)]


@each_job
def detect(view: ClusterView, job: JobView, hang: PhaseLimits) -> Finding | None:
    """One finding for each job with GPUs. `hang` has what the limits of steps are learnt by."""
    job_id, progress, now = job.job.job_id, job.progress, view.now
    if not job.gpus:
        return None
    finding = SPEC.about_job(job_id)
    if is_unseen(job) or progress is None or progress.phase is not None or job.is_writing:
        return finding
    if job.gone_ranks:  # the others may wait for the one that exited, and its GPU is not among those that are compared
        return finding
    stands = progress.age_s >= max(IDLE_FOR_S, progress_limit(job, hang).seconds)
    idle_for_s = IDLE_FOR_S if stands else IDLE_WHILE_STEPS_S
    idle = idle_ranks(job, now, idle_for_s)
    if not stands:
        steps = [each.at for each in job.step_times]
        idle = [each for each in idle if sum(at > (each.view.idle_since or now) for at in steps) >= LEAST_STEPS]
        others_are_used = _shows_use(job)
        idle = [each for each in idle if not (others_are_used and _was_never_used(each))]
    if idle and progress.age_s < with_a_step(job, hang.checkpoint_floor):
        voted = vote(job.snapshots, job.ranks)  # who saves, loads, or talks to a server may use no time
        if voted.checkpointing or any(group.place in TRANSFERS for group in voted.groups):
            return finding
    # Where a filesystem is the reason, that is reported under its own name.
    seen = activities(job, job.living_ranks, now, idle_for_s) if idle else ()
    waiting = {a.rank.process.rank for a in seen if a.doing is RankState.IDLE and not is_on_storage(a.rank)}
    quiet = [each for each in idle if each.rank in waiting]
    if not quiet:
        return finding.ok(f"no GPU of job {job_id} is idle among busy ones") if _all_are_used(job) else finding
    culprits = tuple(r.culprit(f"has been idle for {now - (r.view.idle_since or now):.0f} s") for r in quiet)
    first, more = culprits[0], and_more(len(culprits))
    reason = first.reason.replace("has", "have", 1) if more else first.reason
    does = f"has made no step for {progress.age_s:.0f} s" if stands else "makes steps"
    return finding.bad(
        f"The GPU of rank {first.rank} of job {job_id} on {first.node} ({first.gpu_uuid}){more} {reason}, while those "
        f"of its peers are busy; the job {does}.",
        culprits=culprits,
        facts=tuple(gpu_values(each) for each in quiet[:8]),
        duration_s=now - min(each.view.idle_since or now for each in quiet),
        actionable=stands and progress.age_s >= IDLE_WHILE_STEPS_S,
    )


def _all_are_used(job: JobView) -> bool:
    """Whether every GPU of the job is known to be at work now, but those that the job never uses. One that
    idles, and has not idled for long enough to be reported, clears no one."""
    known = {each.rank for each in job.gpus}
    others_are_used = _shows_use(job)
    there = {rank.process.rank for rank in job.ranks}
    return there <= known and all(
        (others_are_used and _was_never_used(each))
        or (each.view.gpu.utilization_ratio is not None and each.view.idle_since is None)
        for each in job.gpus
    )


def _shows_use(job: JobView) -> bool:
    """Whether any GPU of the job was seen under load. Asked once for a job: it has thousands of GPUs."""
    return any(each.view.gpu.usual_sm_clock_hz is not None for each in job.gpus)


def _was_never_used(each: RankGpu) -> bool:
    """Whether this GPU was never seen under load. If others of the job were, it is that of a rank that hands
    out data, or coordinates, and has none to do: the job makes its steps, so it needs none."""
    return each.view.gpu.usual_sm_clock_hz is None and each.view.gpu.recent_sm_clock_hz is None


def gpu_values(each: RankGpu) -> str:
    """What a GPU says of itself: a fact beside a verdict."""
    gpu = each.view.gpu
    values = (
        ("{:.0%} busy", gpu.utilization_ratio),
        ("{:.0f} MHz", gpu.sm_clock_hz and gpu.sm_clock_hz / 1e6),
        ("{:.0f} W", gpu.power_w),
        ("{:.0f} C", gpu.temperature_c),
    )
    values_text = ", ".join(form.format(value) for form, value in values if value is not None)
    return f"GPU {gpu.index} of {each.view.node}, rank {each.rank}: {values_text}"


SPEC = DetectorSpec(
    detect=detect,
    also=(CollectiveHang,),
    blames_node=0.25,
    sentence="A GPU of the job is idle",
    job_state="a rank is idle",
    site_may_act=True,
    steps_continue=True,
    explained_by=(
        *STORAGE,
        *HANGS,
        IncidentKind.STALLED_PROGRESS,
        IncidentKind.RANK_STOPPED,
        IncidentKind.DEAD_RANK,
        IncidentKind.GPU_FAULT,
    ),
    wants_evidence=True,
    alerts=("SlurmWatchdogSlow",),
)
