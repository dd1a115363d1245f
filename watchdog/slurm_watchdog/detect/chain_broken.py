"""`chain_broken`: a training that continues from job to job, or from run to run, ended early, and nothing is queued.

Only what was seen to be a chain is one: an earlier job that this one waited for and continued, or an earlier run of it.

Fires: a job that continued an earlier job or run ended early, and nothing is queued behind it for 2 min.
Names: no rank or node: the job, its state, its last step.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.analysis.memory_kills import Kills, kills_in_run, memory_kills, why_not
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.diagnose.culprit_words import describe
from slurm_watchdog.diagnose.logs.root_cause import work_lost
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding
from slurm_watchdog.model.past_runs import EndedJob

BROKE = {
    "FAILED": "it failed",
    "TIMEOUT": "its time was over",
    "NODE_FAIL": "Slurm lost a node",
    "OUT_OF_MEMORY": "it ran out of memory",
    "BOOT_FAIL": "a node did not boot",
    "PREEMPTED": "it was preempted",
    "DEADLINE": "its deadline had passed",
}
"""Final states in which a training is not done, in words (squeue(1), job state codes). CANCELLED: a person
wanted it so."""

GRACE_S = 120.0  # For the next job to be submitted: a script does it in seconds, cron in a minute.


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each job that ended within the last hour and was a link of a chain."""
    kills = memory_kills(view) if view.ended else {}
    return [_chain_finding(ended, view.now, kills) for ended in view.ended if ended.preceded_by or _went_on(ended)]


def _went_on(ended: EndedJob) -> bool:
    """Whether this job's last run went on from an earlier one of its own."""
    before = [run.first_step for run in ended.past if run.first_step is not None]
    first = None if ended.run is None else ended.run.first_step
    return first is not None and bool(before) and first > min(before)


def _chain_finding(ended: EndedJob, now: float, kills: Kills) -> Finding:
    job, age_s = ended.job, max(0.0, now - ended.ended_at)
    finding = replace(SPEC.about(f"chain:{job.job_id}", job.job_id), duration_s=age_s)
    if ended.succeeded_by:
        return finding.ok(f"job {ended.succeeded_by[0]} continues job {job.job_id}")
    if job.state not in BROKE:
        return finding.ok(f"job {job.job_id} is {job.state}")
    step, total = ended.last_step, ended.total_steps
    if step is not None and total is not None and step >= total:
        return finding.ok(f"job {job.job_id} has made its last step")
    if age_s < GRACE_S:
        return finding
    at = f" at step {step}" + (f" of {total}" if total is not None else "") if step is not None else ""
    evidence = (
        f"it went on from job {', '.join(ended.preceded_by[-3:])}"
        if ended.preceded_by
        else f"it had continued from {len(ended.past)} earlier runs"
    )
    run = ended.run
    killed = [] if run is None else [each for each in kills_in_run(kills, job, run) if not why_not(each, run, now)]
    why = f"{describe(killed[0].culprit)} was {killed[0].words}" if killed else BROKE[job.state]
    name = f" ({job.name} of {job.user})" if job.name else ""
    return finding.bad(
        f"The chain of job {job.job_id}{name} is broken: it ended {job.state}{at} ({why}) "
        f"{age_s:.0f} s ago, and nothing is queued behind it.",
        facts=(evidence, *(work_lost(run) if run is not None else ()), "submit the next job of the chain"),
    )


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.RUN,
    needs_cluster=True,
    sentence="The chain of jobs has ended",
    alerts=("SlurmWatchdogCrashLoop",),
    hint=Hint(
        usually="Nothing is queued behind a run that should continue: the dependency failed, the array "
        "ended, or the resubmission at the end never ran.",
        try_next="squeue -u USER; --dependency=afterany instead of afterok; submit the next one at the "
        "start of the script.",
        documented="sbatch --dependency",
    ),
)
