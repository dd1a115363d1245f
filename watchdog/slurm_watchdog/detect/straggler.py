"""`straggler`: a job that makes steps has become slower, and one rank (or those of one node) keeps the others waiting.

Fires: the job is slower than it was (as for `slow_job`), and of the added time one rank, or the ranks of one node,
wait for nearly nothing while nearly all others wait for nearly all of it; not by chance in 10,000 cases.
Names: the ranks, with how much of the added time they and the others wait; and where dumps found them most often.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.analysis.straggler import Lateness, dumped, lateness
from slurm_watchdog.detect.slow_job import Slowdown, SlowJob, slowdown_finding, slowdown_of
from slurm_watchdog.detect.spec import DetectorSpec, Subject, each_job
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity, StackRequest, Truth

DUMPS = 12
"""Dumps that are asked for while a straggler is suspected. At 17 to 28 ms of a process's node each
(controller/evidence/early_budget.py, whose budget of an hour bounds them, too)."""
APART_S = 20.0  # Between two of them: other steps, and mostly another moment of a step.
SUREST = 0.9999  # More is not claimed: the model is not that exact.


@each_job
def detect(view: ClusterView, job: JobView, settings: SlowJob) -> Finding:
    """One finding for each running job; `settings` are those of slow_job."""
    job_id, shift = job.job.job_id, settings.percent / 100
    finding = SPEC.about_job(job_id)
    slow = slowdown_of(job, shift, settings.lasts) if job.job.state == "RUNNING" else None
    if slow is None:
        steady = slowdown_finding(job, view.now, shift, settings.lasts).truth is Truth.OK
        return finding.ok(f"job {job_id} is not slower than it was") if steady else finding
    if job.silent_nodes or not job.every_rank_known or job.phase is not None:
        return finding
    found = lateness(job.waits, slow.first.at, slow.after_s / slow.before_s - 1, len(job.ranks))
    if found.truth is not Truth.BAD:
        return finding.ok(f"no rank of job {job_id} keeps it waiting") if found.truth is Truth.OK else finding
    return _with_dumps(finding, job, view.now, slow, found)


def _with_dumps(finding: Finding, job: JobView, now: float, slow: Slowdown, found: Lateness) -> Finding:
    """What stacks of the same time have to say of it. Where sleep alone is seen, they have to confirm that it is a wait
    for other ranks; an idle GPU needs no word for it, but may be contradicted."""
    stacks = dumped(job.wait_dumps, slow.first.at, found.late)
    taken = sum(dump.at >= slow.first.at for dump in job.wait_dumps)
    if taken < DUMPS or (stacks.others_wait is Truth.UNKNOWN and not found.by_gpu):
        finding = replace(finding, wanted=(StackRequest(job_id=job.job.job_id, apart_s=APART_S, usual=True),))
    job_id, who = job.job.job_id, _who(found)
    if stacks.late_waits or (not found.by_gpu and stacks.others_wait is not Truth.OK):
        return finding
    added = slow.after_s - slow.before_s
    percent = 100 * added / slow.before_s
    seats = {(rank.node, rank.process.pid): rank for rank in job.ranks}
    culprits = tuple(
        seats[key].culprit(f"does not wait while the others do ({_percent(each.waits)} of the added time)")
        for each in found.late
        if (key := (each.key.node, each.key.pid)) in seats
    )
    return finding.bad(
        f"Job {job_id} is {percent:.1f} % slower since step {slow.first.step}, and {who} keeps the "
        f"others waiting (confidence {min(SUREST, found.confidence):.4f}).",
        culprits=culprits,
        facts=(
            _shares(found, added),
            *([f"stacks found it most often in {stacks.place}"] if stacks.place else []),
        ),
        duration_s=max(0.0, now - slow.first.at),
    )


def _who(found: Lateness) -> str:
    node, ranks = found.late[0].key.node, [str(each.key.rank) for each in found.late]
    return f"rank {ranks[0]} on {node}" if len(ranks) == 1 else f"{node} (ranks {', '.join(ranks[:8])})"


def _shares(found: Lateness, added_s: float) -> str:
    mine, theirs = sum(each.waits for each in found.late) / len(found.late), found.peers_wait
    does, others = "it waits", ", the other"
    if found.by_gpu:
        mine, theirs, does, others = 1 - mine, 1 - theirs, "its GPU idles", ", those of the other"
    longer = f"of the {added_s:.3g} s by which a step has become longer"
    return f"{longer} {does} {_percent(mine)}{others} {found.peers} ranks {_percent(theirs)}"


def _percent(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.0f} %"


SPEC = DetectorSpec(
    kind=IncidentKind.STRAGGLER,
    detect=detect,
    also=(SlowJob,),
    subject=Subject.JOB,
    severity=Severity.WARNING,
    blames_node=0.25,
    sentence="A rank keeps the others of its job waiting",
    steps_continue=True,
    explained_by=(IncidentKind.SLOW_NODE,),
    why_no_action="it says which rank is late, and not whether its node, its data or its program makes it so",
    alerts=("SlurmWatchdogSlow",),
    hint=Hint(
        usually="Another program on its node, a slow or throttled CPU, a slow data loader, more work than others.",
        try_next="Compare its node with others: slurm-watchdog test-nodes. Look at where its stacks are.",
    ),
)
