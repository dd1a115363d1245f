"""Rows about ranks that stand out: one that was stopped, one whose GPU idles. Pure."""

from __future__ import annotations

from slurm_watchdog.analysis.job_state import is_on_storage, is_unseen, made_last_step
from slurm_watchdog.analysis.progress_limit import loop_clock, progress_limit, with_a_step
from slurm_watchdog.analysis.rank_activity import RankState, activities
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.rule import Answer, Rule, Seen, Sign, lasting
from slurm_watchdog.detect.spec import HANGS, STORAGE
from slurm_watchdog.diagnose.stacks.vote import vote
from slurm_watchdog.knowledge.limits import PhaseLimits, most_odd
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView, JobView, RankGpu
from slurm_watchdog.model.incidents import IncidentKind, Severity

# ------------------------------------------------------------------------------------------------ stopped

WORDS = {"T": "stopped by a signal", "t": "held by a debugger or tracer"}
WHAT_TO_DO = {
    "T": "resume it on {0}: kill -CONT {1}",
    "t": "who holds it, on {0}: grep TracerPid /proc/{1}/status; it continues when that program detaches or ends",
}


def _stopped(view: ClusterView, job: JobView, limits: PhaseLimits) -> Answer:
    if job.job.state != "RUNNING" or not job.ranks:
        return None
    stopped = [rank for rank in job.living_ranks if rank.process.state in WORDS]
    if not stopped:  # A node that does not report may hold one: nothing is said, so that an incident stays open.
        known = job.every_rank_known and not job.silent_nodes
        return f"no rank of job {job.job.job_id} is stopped" if known else None
    # After a grace that its job was granted the end of that counts.
    since = [(rank, min(rank.process.state_age_s or 0.0, job.run_age_s)) for rank in stopped]
    signs = lasting(
        Sign(
            rank.culprit(f"{WORDS[rank.process.state]} for {seconds:.0f} s"),
            WHAT_TO_DO[rank.process.state].format(rank.node, rank.process.pid),
            seconds,
        )
        for rank, seconds in since
    )
    clock = loop_clock(job, view.now, limits)  # Its loop has not turned for longer than is normal, and has steps left.
    known = (job.progress is not None or clock.unread) and not made_last_step(job)
    acts = known and clock.age_s >= clock.limit.seconds and all(rank.process.state == "T" for rank in stopped)
    return Seen(signs, fields={"actionable": acts})


STOPPED = Rule(
    kind=IncidentKind.RANK_STOPPED,
    signal=_stopped,
    also=(CollectiveHang,),
    for_s=15.0,  # A debugger that only looks (py-spy, gdb -batch) is done within seconds.
    says="Rank {first.rank} of job {job} on {first.node} (pid {first.pid}){more} is {first.reason}: "
    "the job waits for it.",
    severity=Severity.CRITICAL,
    sentence="A rank is stopped",
    job_state="a rank is stopped",
    wants_evidence=True,
    ladder=(Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE),
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogRankLost"),
    doc="""
Fires: a rank is in state T or t for 15 s.
Names: the rank, and the command that continues it, or that says who holds it.
Acts: requeues the job where you allow it, if the rank was stopped by a signal and the job is beyond its
limit; never under a debugger.
""",
)

# ------------------------------------------------------------------------------------------------ idle GPU

LEAST_STEPS = 3  # Made without a GPU before it counts as idle while the job makes steps: a checkpoint idles, too.
BUSY_RATIO = 0.5  # A GPU below this may be one that idles, where it is not known since when it is as it is.
TRANSFERS = (Place.CHECKPOINT, Place.NETWORK)
IDLE_FOR_S = 60.0  # While the job makes no step beyond its limit.
IDLE_WHILE_STEPS_S = 900.0  # While the job makes steps.


def _idle(view: ClusterView, job: JobView, hang: PhaseLimits) -> Answer:
    """A checkpoint that rank 0 writes while the others wait in a barrier looks the same: nothing is reported while the
    log, the disk or the stacks show one, an evaluation or a transfer, nor while the process computes or moves data.
    Beside a rank that exited nobody is named: the others may wait for it."""
    progress, now = job.progress, view.now
    if is_unseen(job) or progress is None or progress.phase is not None or job.is_writing or job.gone_ranks:
        return None
    stands = progress.age_s >= max(IDLE_FOR_S, progress_limit(job, hang).seconds)
    idle_for_s = IDLE_FOR_S if stands else IDLE_WHILE_STEPS_S
    idle = _idle_among_busy(job, now, idle_for_s)
    if not stands:
        steps = [each.at for each in job.step_times]
        idle = [each for each in idle if sum(at > (each.view.idle_since or now) for at in steps) >= LEAST_STEPS]
        others_are_used = _shows_use(job)
        idle = [each for each in idle if not (others_are_used and _was_never_used(each))]
    if idle and progress.age_s < with_a_step(job, hang.checkpoint_floor):
        voted = vote(job.snapshots, job.ranks)  # who saves, loads, or talks to a server may use no time
        if voted.checkpointing or any(group.place in TRANSFERS for group in voted.groups):
            return None
    # Where a filesystem is the reason, that is reported under its own name.
    seen = activities(job, job.living_ranks, now, idle_for_s) if idle else ()
    waiting = {a.rank.process.rank for a in seen if a.doing is RankState.IDLE and not is_on_storage(a.rank)}
    quiet = [each for each in idle if each.rank in waiting]
    if not quiet:
        return f"no GPU of job {job.job.job_id} is idle among busy ones" if _all_are_used(job) else None
    since = [each.view.idle_since or now for each in quiet]
    signs = tuple(
        Sign(each.culprit(f"has been idle for {now - at:.0f} s"), gpu_values(each), now - at)
        for each, at in zip(quiet, since, strict=True)
    )
    words = {
        "has": f"{'have' if len(quiet) > 1 else 'has'} been idle for {now - since[0]:.0f} s",
        "does": f"has made no step for {progress.age_s:.0f} s" if stands else "makes steps",
    }
    acts = stands and progress.age_s >= IDLE_WHILE_STEPS_S
    return Seen(signs, words, {"actionable": acts})


def _idle_among_busy(job: JobView, now: float, idle_for_s: float) -> list[RankGpu]:
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
    if len(ranks) < 3 or len(idle_ones | perhaps) > most_odd(len(ranks)):
        return []
    if len(busy - idle_ones) < len(ranks) / 2 or len(busy) < 2:
        return []
    # A rank with several GPUs is idle if all of them are.
    return [each for each in idle if all(g in idle for g in job.gpus if g.rank == each.rank)]


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


GPU_IDLE = Rule(
    kind=IncidentKind.GPU_IDLE_RANK,
    signal=_idle,
    applies=lambda _, job: bool(job.gpus),
    also=(CollectiveHang,),
    says="The GPU of rank {first.rank} of job {job} on {first.node} ({first.gpu_uuid}){more} {has}, while those of "
    "its peers are busy; the job {does}.",
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
    doc="""
Fires: the GPU of a rank is idle while most others are busy: for 60 s if the job makes no step, for 15 min if it does.
Names: rank, node, GPU.
Acts: only where the job makes no step for 15 min, too.
""",
)
