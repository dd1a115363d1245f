"""`straggler`: a job that makes steps has become slower, and one rank (or those of one node) keeps the others waiting.

Nothing of the training is changed: agents see how much each rank waits, by the sleep of its main thread or by its GPU.
A rank that does not spend on waiting the time by which a step has become longer, while all others do, is the
straggler. The evidence is statistical, with its confidence; it says where the time goes and not why: hardware, the
rank's data, or its part of the program. See docs/how-it-judges.md.

Fires: the job is slower than it was (as for `slow_job`), and of the added time one rank, or the ranks of one node,
wait for nearly nothing while nearly all others wait for nearly all of it; not by chance in 10,000 cases.
Names: the ranks, with how much of the added time they and the others wait; and where dumps found them most often.
Note: no rank is identified if all ranks are slower, if another one is late in each step, where rank 0 alone is late (it
logs and saves), below four ranks, or where waiting cannot be seen (Open MPI without a GPU that is seen).
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.analysis.straggler import Lateness, dumped, lateness
from slurm_watchdog.detect.slow_job import Slowdown, SlowJob, slowdown_finding, slowdown_of
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity, StackRequest, Truth

DUMPS = 12
"""Dumps that are asked for while a straggler is suspected. At 17 to 28 ms of a process's node each
(controller/evidence/early_budget.py, whose budget of an hour bounds them, too)."""
APART_S = 20.0  # Between two of them: other steps, and mostly another moment of a step.
SUREST = 0.9999  # More is not claimed: the model is not that exact.


def detect(view: ClusterView, settings: SlowJob) -> list[Finding]:
    """One finding for each running job; `settings` are those of slow_job."""
    return [_judge(job, view.now, settings) for job in view.jobs]


def _judge(job: JobView, now: float, settings: SlowJob) -> Finding:
    job_id, shift = job.job.job_id, settings.percent / 100
    finding = SPEC.about_job(job_id, f"the speed of job {job_id} is not known")
    slow = slowdown_of(job, shift, settings.lasts) if job.job.state == "RUNNING" else None
    if slow is None:
        steady = slowdown_finding(job, now, shift, settings.lasts).truth is Truth.OK
        return finding.ok(f"job {job_id} is not slower than it was") if steady else finding
    if job.silent_nodes or not job.every_rank_known or job.phase is not None:
        return finding.unknown(f"not all ranks of job {job_id} are seen training")
    found = lateness(job.waits, slow.first.at, slow.after_s / slow.before_s - 1, len(job.ranks))
    if found.truth is not Truth.BAD:
        about = f"who keeps job {job_id} waiting: {found.why}"
        return finding.ok(about) if found.truth is Truth.OK else finding.unknown(about)
    return _with_dumps(finding, job, now, slow, found)


def _with_dumps(finding: Finding, job: JobView, now: float, slow: Slowdown, found: Lateness) -> Finding:
    """What stacks of the same time have to say of it. Where sleep alone is seen, they have to confirm that it is a wait
    for other ranks; an idle GPU needs no word for it, but may be contradicted."""
    stacks = dumped(job.wait_dumps, slow.first.at, found.late)
    taken = sum(dump.at >= slow.first.at for dump in job.wait_dumps)
    if taken < DUMPS or (stacks.others_wait is Truth.UNKNOWN and not found.by_gpu):
        finding = replace(finding, wanted=(StackRequest(job_id=job.job.job_id, apart_s=APART_S, usual=True),))
    job_id, who = job.job.job_id, _who(found)
    if stacks.late_waits:
        return finding.unknown(f"{who} of job {job_id} does not wait as the others do, but stacks show it waiting")
    if not found.by_gpu and stacks.others_wait is not Truth.OK:
        return finding.unknown(f"whether the others of job {job_id} wait for {who} is not known from stacks yet")
    added = slow.after_s - slow.before_s
    percent = 100 * added / slow.before_s
    confidence = min(SUREST, found.confidence)
    facts = [_shares(found, added)]
    if stacks.place:
        facts.append(f"stacks found it most often in {stacks.place}")
    seats = {(rank.node, rank.process.pid): rank for rank in job.ranks}
    culprits = tuple(
        seats[key].culprit(f"does not wait while the others do ({_percent(each.waits)} of the added time)")
        for each in found.late
        if (key := (each.key.node, each.key.pid)) in seats
    )
    return finding.bad(
        f"Job {job_id} is {percent:.1f} % slower since step {slow.first.step}, and {who} keeps the "
        f"others waiting (confidence {confidence:.4f}).",
        culprits=culprits,
        facts=tuple(facts),
        duration_s=max(0.0, now - slow.first.at),
    )


def _who(found: Lateness) -> str:
    node, ranks = found.late[0].key.node, [str(each.key.rank) for each in found.late]
    return f"rank {ranks[0]} on {node}" if len(ranks) == 1 else f"{node} (ranks {', '.join(ranks[:8])})"


def _shares(found: Lateness, added_s: float) -> str:
    mine = sum(each.waits for each in found.late) / len(found.late)
    if found.by_gpu:
        return (
            f"of the {added_s:.3g} s by which a step has become longer its GPU idles {_percent(1 - mine)}, those of "
            f"the other {found.peers} ranks {_percent(1 - found.peers_wait)}"
        )
    return (
        f"of the {added_s:.3g} s by which a step has become longer it waits {_percent(mine)}, the other "
        f"{found.peers} ranks {_percent(found.peers_wait)}"
    )


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
