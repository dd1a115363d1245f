"""`crash_loop`: a job restarts again and again and dies each time before its first new step.

A run counts as died if it was short, was not ended from outside (preemption, a requeue, a person), and it got no
further than the runs before it. What could not be read is not evidence, unless the run was over before anybody could
look, and another run's log shows the cause.

Fires: three runs one after the other died before their first new step, each within 30 min.
Names: the cause that they have in common, if there is one.
Acts: `[hold]` is the ladder for it. Preemption, runs that a person requeued, and runs before a hold do not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.memory_kills import Kills, kills_in_run, memory_kills, why_not
from slurm_watchdog.base.text import shortened
from slurm_watchdog.detect.spec import STORAGE, DetectorSpec, Subject
from slurm_watchdog.diagnose.culprit_words import describe
from slurm_watchdog.diagnose.logs.root_cause import Cause, culprit_of, find_cause, work_lost
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity
from slurm_watchdog.model.past_runs import EndedJob, PastRun
from slurm_watchdog.model.slurm_states import WAITING

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
RUNS = 3  # So many runs one after the other have to die: two may be chance, …
WITHIN_S = 1800.0  # … each of them within this time.
QUICK_S = 30.0  # A log is found with a listing that shows the job and the report after it: within 15 s, or twice that.


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each running job that has restarted, and one for each that ended in such a loop."""
    findings = [_job_finding(job, job.past, view.now) for job in (*view.jobs, *view.waiting) if job.past]
    for ended in view.ended:
        if ended.run is not None and ended.past and ended.job.state == "FAILED":
            over = JobView(job=ended.job, run_age_s=0.0)
            findings.append(_job_finding(over, (*ended.past, ended.run), view.now))
    return findings


def _job_finding(job: JobView, past: Sequence[PastRun], now: float) -> Finding:
    job_id = job.job.job_id
    finding = SPEC.about(f"loop:{job_id}", job_id)
    if job.progress is not None and job.job.state == "RUNNING":
        highest = _highest(past)
        # After a restart the steps since the checkpoint are made again: only one that was never made is new.
        is_new = highest is None or not job.progress.step_known or job.progress.step > highest
        if job.progress.steps_seen > 1 and is_new:
            return finding.ok(f"job {job_id} makes new steps")
    if job.job.held and job.job.state in WAITING:
        return finding.ok(f"job {job_id} is held: it does not start before `scontrol release {job_id}`")
    past = _by_themselves(past)
    if len(past) < RUNS:
        return finding
    recent = past[-RUNS:]
    # With all of its errors, those before its last step, too: it made no new one.
    causes = [find_cause(replace(run, rose_at=None)) for run in recent]
    for place, (run, cause) in enumerate(zip(recent, causes, strict=True)):
        before = past[: len(past) - len(recent) + place]
        objection = _objection(run, cause, before)
        if objection is not None:
            return finding.ok(objection) if _was_read(run) else finding
    if not any(causes) and not all(_was_read(run) for run in recent):
        return finding
    return _bad_finding(finding, job, recent, causes, now)


def _by_themselves(past: Sequence[PastRun]) -> Sequence[PastRun]:
    """The runs since the last one that made steps until we ended it, or after which the job was held, without others
    that we ended: a requeue is no way out of a loop."""
    lived = [
        place for place, run in enumerate(past) if run.held_after or (run.touched_at is not None and run.steps_seen > 0)
    ]
    return [run for run in past[lived[-1] + 1 if lived else 0 :] if run.touched_at is None]


def _was_read(run: PastRun) -> bool:
    """Whether an agent could read its logs. Last words that came after the listing with the next run are
    proof of that, too."""
    return run.log_read or bool(run.errors)


def _highest(runs: Sequence[PastRun]) -> int | None:
    return max((run.last_step for run in runs if run.last_step is not None), default=None)


def _objection(run: PastRun, cause: Cause | None, before: Sequence[PastRun]) -> str | None:
    """Why this run did not die in a loop, a sentence; None if it did."""
    name = f"run {run.restarts}"
    quick = run.unseen or run.ended_at - run.began_at < QUICK_S
    if not _was_read(run) and not quick:
        return f"the logs of {name} could not be read: how it ended is unknown"
    if cause is not None and cause.from_outside:
        return f"{name} was ended from outside: {cause.error.line}"
    if run.ended_at - run.began_at > WITHIN_S and not run.unseen:
        return f"{name} lasted {run.ended_at - run.began_at:.0f} s"
    highest = _highest(before)
    if highest is None or run.last_step is None:
        return f"{name} made steps" if run.steps_seen > 0 else None
    if run.last_step > highest:
        return f"{name} got to step {run.last_step}, further than those before"
    return None


def _bad_finding(
    finding: Finding, job: JobView, runs: Sequence[PastRun], causes: Sequence[Cause | None], now: float
) -> Finding:
    known = [cause for cause in causes if cause is not None]
    common, times = Counter(cause.pattern for cause in known).most_common(1)[0] if known else ("", 0)
    same = [cause for cause in known if cause.pattern == common]
    culprits = tuple(culprit for cause in same if (culprit := culprit_of(cause)) is not None)
    node, contrast = _by_contrast(runs, causes, job.past)
    if node is None:
        culprits = tuple(replace(culprit, node=None, pid=None) for culprit in culprits if culprit.rank is not None)
    if not known:
        why = "no line of its log says why"
    else:
        alike = {_NUMBERS.sub("#", cause.error.line) for cause in same}  # pids, times and addresses differ each time
        every = "each time" if times == len(runs) and len(alike) == 1 else f"in {times} of {len(runs)} runs"
        also = f" ({len(alike)} different lines)" if len(alike) > 1 else ""
        why = f"{every} {same[-1].how or same[-1].words}{also}: {shortened(same[-1].error.line, 200)}"
    where = f" Each run failed on {node}, and {contrast}: leave that node out." if node else ""
    at = _highest(runs)
    step = "before its first step" if at is None else f"at step {at} at the latest"
    lasted_s = max(0.0, now - runs[0].began_at)
    return finding.bad(
        f"Job {job.job.job_id} restarts and dies again and again: {len(runs)} runs in {lasted_s:.0f} s ended {step}; "
        f"{why}.{where} Hold it until a person has looked.",
        culprits=culprits[-1:],
        facts=(*map(_line, runs, causes), f"scontrol hold {job.job.job_id}"),
        duration_s=lasted_s,
        actionable=True,
    )


def _by_contrast(
    runs: Sequence[PastRun], causes: Sequence[Cause | None], past: Sequence[PastRun]
) -> tuple[str | None, str]:
    """(the node that is to blame, what shows it): each run of the loop failed there, of something that a node
    can cause, and the job made steps in a run without that node, or failed there on different ranks. The same
    allocation each time proves nothing about one node of it."""
    known = [cause for cause in causes if cause is not None and cause.pattern in log_table().node_can_cause]
    nodes = {cause.node for cause in known}
    if len(known) != len(runs) or len(nodes) != 1 or None in nodes:
        return None, ""
    node = nodes.pop()
    if any(run.nodes and node not in run.nodes and run.steps_seen > 0 for run in past):
        return node, f"one without {node} made steps"
    ranks = {cause.rank for cause in known if cause.rank is not None}
    several = any(len(run.nodes) > 1 for run in runs)
    return (node, "on different ranks") if several and len(ranks) > 1 else (None, "")


def _line(run: PastRun, cause: Cause | None) -> str:
    logged = "nothing" if cause is None else shortened(cause.error.line, 160)
    step = "no step" if run.last_step is None else f"step {run.last_step}"
    lasted = "over before it was seen" if run.unseen else f"{run.ended_at - run.began_at:.0f} s"
    return f"run {run.restarts}: {lasted}, {step}, said {logged}"


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.RUN,
    severity=Severity.CRITICAL,
    sentence="The job is crash-looping",
    explained_by=(*STORAGE, IncidentKind.DISK_FULL),
    site_may_act=True,
    why_no_action="another restart would fail the same way: a person has to look at it",
    alerts=("SlurmWatchdogCrashLoop",),
    hint=Hint(
        usually="The cause is in what every start does: a checkpoint, a configuration, a node that is always taken.",
        try_next="The first error of each try: the same line means the program, the same node means the node.",
    ),
)


# ---------------------------------------------------------------------------------------- a chain of jobs

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


def chain_broken(view: ClusterView) -> list[Finding]:
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
    finding = replace(CHAIN_BROKEN.about(f"chain:{job.job_id}", job.job_id), duration_s=age_s)
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


CHAIN_BROKEN = DetectorSpec(
    kind=IncidentKind.CHAIN_BROKEN,
    detect=chain_broken,
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
    doc="""
Fires: a job that continued an earlier job or run ended early, and nothing is queued behind it for 2 min.
Names: no rank or node: the job, its state, its last step.
""",
)
