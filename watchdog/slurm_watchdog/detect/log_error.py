"""`log_error`: a rank logged an error that ended its run, or after which it makes no step. Names the first cause.

An error after which a step is made did not matter. While all ranks live, an error counts only when the next step is
overdue. Time limit, preemption, and what a person ends are normal ends.

Fires: a rank logged an error, and its run ended or has made no step since.
Names: the first cause, not the cascade: rank, node, line, and the work that was lost. Where no line says why, the
rank that a launcher or Slurm reports as the first that failed, with its signal or exit code; or the only one of which
they report nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import dead_for_s
from slurm_watchdog.analysis.memory_kills import OOM_KILL
from slurm_watchdog.analysis.progress_limit import makes_steps, progress_limit
from slurm_watchdog.base.text import shortened
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.spec import BROKEN, HANGS, DetectorSpec, Subject
from slurm_watchdog.diagnose.logs.root_cause import LEFT_FIRST, Cause, culprit_of, find_cause, running, work_lost
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity
from slurm_watchdog.model.past_runs import EndedJob, PastRun
from slurm_watchdog.model.slurm_states import FAILED, is_lost
from slurm_watchdog.model.supervisor import SupervisorState

SLURMS_WORD = FAILED - {"FAILED"}  # States of a run that say what happened: an exit code can mean anything.
ALL_GONE_S = 60.0  # Where no rank is left Slurm ends the job, or its script tries again: it gets so long.


LAST_WORDS_S = 6.0  # A run's last lines, and Slurm's word of who ended first, come with the next report.


RECENT_S = 600.0  # A run that has ended is reported for so long, or until the next run of the job makes steps.
LEAST_REPORTED_S = 60.0  # Also where the next run makes steps at once: someone has to see why it ended.
RISES = 2  # Steps of the next run that have to be seen: one line may be the step of the checkpoint that it has loaded.

GONE_FOR_S = 3.0  # Since the rank that logged it is gone; while all ranks live the limits of `collective_hang` hold.


def detect(view: ClusterView, limits: PhaseLimits) -> list[Finding]:
    """One finding for each running job, and for each run that is over and has errors or a failed state."""
    findings = [_running_finding(job, view, limits) for job in view.jobs]
    for job in view.waiting:
        if not job.past or job.job.state == "COMPLETING":  # it is not over yet
            findings.append(_finding(job.job.job_id, job.job.restarts))
    for job in (*view.jobs, *view.waiting):
        again = makes_steps(job, limits) and job.progress is not None and job.progress.rises >= RISES
        findings += [
            _past_finding(job.job.job_id, run, view, again)
            for run in (*map(_told, job.past[:-1]), *job.past[-1:])
            if _counts(run)
        ]
    for ended in view.ended:
        again = ended.run is not None and ended.run.steps_seen >= RISES
        findings += [
            _past_finding(ended.job.job_id, run, view, again) for run in map(_told, ended.past) if _counts(run)
        ]
        if ended.run is not None and (ended.run.errors or ended.job.state in SLURMS_WORD or ended.job.ended_with):
            findings.append(_ended_finding(ended, ended.run, view))
    return findings


def _counts(run: PastRun) -> bool:
    return bool(run.errors or run.started_again)


def _told(run: PastRun) -> PastRun:
    """A run that was started again, and that run has ended, too: the end of that one is reported."""
    return replace(run, started_again="", errors=()) if run.started_again else run


def _finding(job_id: str, restarts: int) -> Finding:
    return SPEC.about(f"run:{job_id}.{restarts}", job_id)


# ---------------------------------------------------------------------------------------- a run that continues


def _running_finding(job: JobView, view: ClusterView, limits: PhaseLimits) -> Finding:
    job_id, now = job.job.job_id, view.now
    finding = _finding(job_id, job.job.restarts)
    if job.job.state != "RUNNING":
        return finding
    if again := _restarting(job):
        return _again_finding(view, finding, running(job, now), again, 0.0)
    run = running(job, now) if job.errors else None
    cause = None if run is None else find_cause(run)
    if run is None or cause is None:
        if job.supervisor is not None and job.supervisor.failed:
            return finding.ok(f"job {job_id} makes steps again")
        fine = finding.ok(f"job {job_id} has logged no error since its last step")
        return fine if makes_steps(job, limits) else finding
    over = run.total_steps is not None and run.last_step is not None and run.last_step >= run.total_steps
    if job.silent_nodes or over or _only_follows(cause):
        return finding
    age_s = now - cause.error.at
    waited = _waited(job, cause, age_s, limits)
    if waited is None:
        return finding
    facts = (waited, *_kernel_words(view, job.job.nodes, cause.error.at))
    what = f"Job {job_id} has made no step since an error {_after(run)}"
    return _bad_finding(view, finding, cause, run, what, age_s, facts)


def _restarting(job: JobView) -> str:
    """That its supervisor starts the command again by itself, a clause, until that is seen to make steps."""
    status = job.supervisor
    if status is None or not status.failed or status.state in (SupervisorState.OVER, SupervisorState.WAITING):
        return ""
    runs = status.state is SupervisorState.RUNNING and job.step_id == status.step_id
    return "" if runs and job.progress is not None and job.progress.rises >= RISES else status.failed


def _again_finding(view: ClusterView, finding: Finding, run: PastRun, clause: str, age_s: float) -> Finding:
    """The command of `run` has ended and is started again, whatever the log says of it: people are told, and no one is
    needed."""
    cause = find_cause(run)
    what = f"Job {', '.join(finding.job_ids)}: {clause}, {_after(run)}"
    if cause is None:
        found = finding.bad(f"{what}; no line says why", facts=work_lost(run), duration_s=age_s)
    else:
        found = _bad_finding(view, finding, cause, run, what, age_s, ())
    return replace(found, severity=Severity.WARNING)


def _only_follows(cause: Cause) -> bool:
    """Whether all that was logged follows from an error that no line tells of."""
    return cause.only_consequence and cause.pattern != "nccl_watchdog"


def _after(run: PastRun) -> str:
    return "before its first step" if run.last_step is None else f"after step {run.last_step}"


def _waited(job: JobView, cause: Cause, age_s: float, limits: PhaseLimits) -> str | None:
    """Why the error counts, a sentence; None while it may still come to nothing."""
    if cause.pattern in log_table().headers and age_s < LAST_WORDS_S:
        return None
    ranks = job.ranks
    dead = [rank for rank in ranks if not rank.alive]
    if dead and len(dead) == len(ranks):
        gone_s = min(dead_for_s(rank) for rank in dead)
        return f"no rank is left since {gone_s:.0f} s" if min(gone_s, age_s) >= ALL_GONE_S else None
    its = [rank for rank in dead if cause.rank is None or rank.process.rank == cause.rank]
    if its:
        first = max(its, key=dead_for_s)
        if min(dead_for_s(first), age_s) >= GONE_FOR_S:
            left = f"{len(ranks) - len(dead)} ranks are left"
            return f"rank {first.process.rank} ended {dead_for_s(first):.0f} s ago, {left}"
    limit = progress_limit(job, limits)
    still_s = job.run_age_s if job.progress is None else min(job.run_age_s, job.progress.age_s)
    if min(age_s, still_s) >= limit.seconds:
        return f"no step for {still_s:.0f} s; {limit.seconds:.0f} s would be normal ({limit.reason})"
    return None


# ---------------------------------------------------------------------------------------- a run that is over


def _past_finding(job_id: str, run: PastRun, view: ClusterView, trains_again: bool) -> Finding:
    """A run that was followed by another one of the same job. Who requeued it is not known: only a clear
    cause counts. `trains_again`: the newest run made steps, so that the end of this one is over, too."""
    finding = _finding(job_id, run.restarts)
    over, age_s = finding.ok(f"run {run.restarts} of job {job_id} has ended"), view.now - run.ended_at
    if run.touched_at is not None:
        return finding.ok(f"run {run.restarts} of job {job_id} was ended by slurm-watchdog")
    if age_s > RECENT_S:
        return over
    if trains_again and (run.started_again or age_s > LEAST_REPORTED_S):
        return finding.ok(f"job {job_id} was started again, and makes steps")
    if run.started_again:
        return _again_finding(view, finding, run, run.started_again, age_s)
    cause = find_cause(run)
    if age_s < LAST_WORDS_S and not _is_named(cause):
        return finding
    if cause is None or cause.from_outside or _only_follows(cause):
        return over
    what = f"Run {run.restarts} of job {job_id} ended {_after(run)}"
    found = _bad_finding(view, finding, cause, run, what, age_s, ("it was requeued",))
    return replace(found, severity=Severity.WARNING)  # the job continues; what it cost is in the facts


def _is_named(cause: Cause | None) -> bool:
    """Whether more lines would hardly name another rank. A traceback whose last line has not come is an
    unfinished sentence."""
    if cause is None or cause.only_consequence or cause.pattern in log_table().headers:
        return False
    return cause.rank is not None


def _ended_finding(ended: EndedJob, run: PastRun, view: ClusterView) -> Finding:
    job = ended.job
    finding = _finding(job.job_id, job.restarts)
    over, age_s = finding.ok(f"job {job.job_id} is {job.state}"), view.now - ended.ended_at
    if job.state not in FAILED or age_s > RECENT_S:
        return over
    if run.touched_at is not None:
        return finding.ok(f"job {job.job_id} was ended by slurm-watchdog")
    cause = find_cause(run)
    if age_s < LAST_WORDS_S and not _is_named(cause):
        return finding
    if job.starts_again:
        return _again_finding(view, finding, run, job.starts_again, age_s)
    after = "before its first step was seen" if run.last_step is None else f"after step {run.last_step}"
    ended_so = f"Job {job.job_id} ended {f'with {job.ended_with}' if job.ended_with else job.state} {after}"
    down = tuple(n.name for n in view.slurm_nodes if n.name in job.nodes and is_lost(n.state))
    if cause is None and job.state not in SLURMS_WORD and not job.ended_with:
        return over
    if cause is None or (cause.only_consequence and job.state in SLURMS_WORD):
        facts = (*_kernel_words(view, job.nodes, ended.ended_at), *work_lost(run))
        facts += tuple([f"last words: {cause.error.line}"] if cause is not None else [])
        return finding.bad(
            f"{ended_so}{'' if job.ended_with else ', as Slurm says'}: its log does not say why.",
            culprits=tuple(Culprit(node=n, reason="Slurm has lost it") for n in down),
            facts=facts,
            duration_s=age_s,
        )
    said = () if job.ended_with else (f"Slurm says {job.state}",)
    facts = (*said, *_kernel_words(view, job.nodes, ended.ended_at))
    return _bad_finding(view, finding, cause, run, ended_so, age_s, facts)


# ---------------------------------------------------------------------------------------- the sentence

KERNEL_WORDS = frozenset(
    {"oom_kill", "segfault", "xid", "gpu_off_the_bus", "memory_failure", "filesystem_read_only", "no_space"}
)
"""What a kernel says of the death of a process, or of what it died of."""
KILLED, KERNEL_LOG = "SIGKILL", "kernel_log"
KERNEL_BEFORE_S, KERNEL_AFTER_S = 120.0, 30.0


def _kernel_words(view: ClusterView, nodes: tuple[str, ...], at: float) -> tuple[str, ...]:
    """What the kernels of the job's nodes said about that time. It may be about another job there, so it
    names no one."""
    here = frozenset(nodes)
    return tuple(
        f"the kernel of {node.name}: {shortened(seen.event.line, 200)}"
        for node in view.nodes
        if node.events and node.name in here
        for seen in node.events
        if seen.event.name in KERNEL_WORDS and at - KERNEL_BEFORE_S <= seen.at <= at + KERNEL_AFTER_S
    )[:4]


def _likely(view: ClusterView, cause: Cause, run: PastRun) -> str:
    """What SIGKILL most often means, where the kernel's log of the nodes does not say otherwise."""
    if KILLED not in cause.how:
        return ""
    nodes = [node for node in view.nodes if node.name in ((cause.node,) if cause.node else run.nodes)]
    kernels = [seen for node in nodes for seen in node.events if seen.event.source == KERNEL_LOG]
    if kernels and not any(seen.event.name == OOM_KILL for seen in kernels):
        return " (the kernel's log has no kill for memory)"
    return ", as the kernel does for memory (see dmesg and sacct)"


def _rank_words(cause: Cause) -> str:
    rank = f"rank {cause.rank}" if cause.rank is not None else "a rank"
    return f"{rank} on {cause.node}" if cause.node is not None else rank


def _bad_finding(
    view: ClusterView,
    finding: Finding,
    cause: Cause,
    run: PastRun,
    what: str,
    duration_s: float,
    facts: tuple[str, ...],
) -> Finding:
    culprit = culprit_of(cause)
    likely = _likely(view, cause, run)
    named: tuple[Culprit, ...] = (culprit,) if culprit is not None else ()
    if cause.how == LEFT_FIRST:
        explanation = f"{_rank_words(cause)} left first: it {LEFT_FIRST}, which then lost their connection to it"
    elif cause.how:
        explanation = f"{_rank_words(cause)} {cause.how}{likely} and logged no error"
        if cause.rank is None and cause.alike > 1:
            how = cause.how.replace("was ", "were ", 1)
            explanation = f"{cause.alike} ranks {how}{likely} alike, and nothing shows which of them was first"
    elif cause.only_consequence:
        explanation = f"no line says why, and the first error is a consequence: {cause.words}"
        if cause.rank is not None:
            explanation = f"no line says why; {_rank_words(cause)} ended first: {cause.words}"
        if cause.suspects:
            ranks = ", ".join(str(culprit.rank) for culprit in cause.suspects[:8])
            explanation = (
                f"no line says why, and rank{'s' if len(cause.suspects) > 1 else ''} {ranks} {cause.suspects[0].reason}"
            )
            named = cause.suspects
    else:
        alike = f" (and {cause.alike - 1} more rank{'s' if cause.alike > 2 else ''} alike)" if cause.alike > 1 else ""
        explanation = f"{_rank_words(cause)} failed first{alike}: {cause.words}"
        if cause.rank is None and cause.alike > 1:
            explanation = (
                f"{cause.alike} ranks{f', all on {cause.node},' if cause.node else ''} failed alike: {cause.words}"
            )
    more = f"{cause.followed} more lines of errors followed" if cause.followed else ""
    return finding.bad(
        f"{what}; {explanation}: {shortened(cause.error.line, 200)}",
        culprits=named,
        facts=tuple(fact for fact in (*facts, *work_lost(run), cause.error.line, more) if fact),
        duration_s=max(0.0, duration_s),
    )


SPEC = DetectorSpec(
    detect=detect,
    also=(CollectiveHang,),
    subject=Subject.RUN,
    severity=Severity.CRITICAL,
    sentence="A log has an error",
    steps_continue=True,
    explained_by=(*BROKEN, *HANGS, IncidentKind.CRASH_LOOP),
    wants_evidence=True,
    why_no_action="the error is reported; a job that hangs, or stays without the rank, is decided about as that",
    alerts=("SlurmWatchdogJobHangs",),
)
