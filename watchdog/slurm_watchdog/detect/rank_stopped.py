"""`rank_stopped`: a rank was stopped by a signal, or by a debugger, and its job waits for it.

Fires: a rank is in state T or t for 15 s.
Names: the rank, and the command that continues it, or that says who holds it.
Acts: requeues the job where you allow it, if the rank was stopped by a signal and the job is beyond its
limit; never under a debugger.
"""

from __future__ import annotations

from slurm_watchdog.analysis.job_state import made_last_step
from slurm_watchdog.analysis.progress_limit import loop_clock
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.diagnose.culprit_words import and_more
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, Severity

WORDS = {"T": "stopped by a signal", "t": "held by a debugger or tracer"}
WHAT_TO_DO = {
    "T": "resume it on {0}: kill -CONT {1}",
    "t": "who holds it, on {0}: grep TracerPid /proc/{1}/status; it continues when that program detaches or ends",
}

STOPPED_FOR_S = 15.0  # A debugger that only looks (py-spy, gdb -batch) is done within seconds.


@each_job
def detect(view: ClusterView, job: JobView, limits: PhaseLimits) -> Finding:
    """One finding for each running job; `limits` are those of `collective_hang`."""
    job_id = job.job.job_id
    finding = SPEC.about_job(job_id)
    if job.job.state != "RUNNING" or not job.ranks:
        return finding
    stopped = [rank for rank in job.living_ranks if rank.process.state in WORDS]
    # After a grace that its job was granted the end of that counts.
    since = ((rank, min(rank.process.state_age_s or 0.0, job.run_age_s)) for rank in stopped)
    long = sorted(((r, s) for r, s in since if s >= STOPPED_FOR_S), key=lambda each: -each[1])
    if not long:
        # A node that does not report may hold one: nothing is said, so that an incident about it stays open.
        unknown = stopped or job.silent_nodes or not job.every_rank_known
        return finding if unknown else finding.ok(f"no rank of job {job_id} is stopped")
    culprits = tuple(rank.culprit(f"{WORDS[rank.process.state]} for {seconds:.0f} s") for rank, seconds in long)
    first, more = culprits[0], and_more(len(culprits))
    return finding.bad(
        f"Rank {first.rank} of job {job_id} on {first.node} (pid {first.pid}){more} is "
        f"{first.reason}: the job waits for it.",
        culprits=culprits,
        facts=tuple(WHAT_TO_DO[rank.process.state].format(rank.node, rank.process.pid) for rank, _ in long[:8]),
        duration_s=long[0][1],
        actionable=_stands(job, view.now, limits) and all(rank.process.state == "T" for rank in stopped),
    )


def _stands(job: JobView, now: float, limits: PhaseLimits) -> bool:
    """Whether the loop has not turned for longer than is normal for it, and has some left to make."""
    progress, clock = job.progress, loop_clock(job, now, limits)
    known = progress is not None or clock.unread
    return known and not made_last_step(job) and clock.age_s >= clock.limit.seconds


SPEC = DetectorSpec(
    detect=detect,
    also=(CollectiveHang,),
    severity=Severity.CRITICAL,
    sentence="A rank is stopped",
    job_state="a rank is stopped",
    wants_evidence=True,
    ladder=(Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE),
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogRankLost"),
)
