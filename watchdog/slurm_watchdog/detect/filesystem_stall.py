"""`filesystem_stall`: a process of a job waits in one system call on one file, while other nodes reach the filesystem;
and `filesystem_outage`: a filesystem does not answer on two nodes or more.

Fires: a thread of a job has been in the same system call on the same file for 60 s and consumed nothing; from half of
that time on, the node and a few others are asked to write and read back there. After 20 s where the job has a
supervisor, its step is late, nothing is saved, and the node itself fails to answer while two others do. A rank that
writes while its job saves has 5 min, `fsync` and `close` 30 min, while the node itself reaches the filesystem.
Names: the rank, its pid, the path, and the node if other nodes answer and this one does not.
Acts: requeues the job without that node, unless the job makes steps all the same. Where the node answers and only this
file does not, or where no other node could be asked (15 s past the limit), it alerts only.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.analysis.lateness import is_overdue
from slurm_watchdog.analysis.progress_limit import SAVED_LATELY_S, saves_now
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.diagnose.culprit_words import describe
from slurm_watchdog.diagnose.filesystem import (
    ANSWER_COUNTS_FOR_S,
    FLUSH_CALLS,
    FLUSH_PATIENCE_S,
    Assessment,
    Scope,
    assess,
    blocked_call,
    call_words,
    culprits,
    long_blocked,
    probes_wanted,
)
from slurm_watchdog.knowledge.checkpoint_layouts import names_checkpoint
from slurm_watchdog.knowledge.limits import span
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView, FilesystemView, JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity, StackRequest
from slurm_watchdog.model.observations import Role

SCOPES: dict[str, tuple[Scope, ...]] = {
    IncidentKind.FILESYSTEM_OUTAGE: (Scope.OUTAGE,),
    IncidentKind.FILESYSTEM_STALL: (Scope.ONE_NODE, Scope.ONE_FILE, Scope.UNKNOWN),
}
"""Which of the two kinds a scope belongs to: each case is exactly one of them."""

PROBES_FROM_SHARE = 0.5  # From this share of the limit on, other nodes are asked: they have answered by the limit.

PROBE_PATIENCE_S = 15.0  # Beyond the limit, for other nodes' answers: a probe's deadline of 10 s and a report.


EAGER_FROM_S = 5.0  # From here on nodes are asked about a job with a supervisor: in time for SUPERVISED_BLOCKED_S.
STACKS_FROM_SHARE, STACKS_APART_S = 0.5, 3.0
"""From this share of SUPERVISED_BLOCKED_S on, while only the time is missing, stacks are dumped: the evidence is
there when the job is to be started again, and each dump brings a report, so that its end is not seen late."""
WITNESSES = 2  # Other nodes that reach the filesystem, or have another one there.

MAX_CONSEQUENCES = 8

UNPROVEN = (Scope.ONE_FILE, Scope.UNKNOWN)  # No node is known not to reach the filesystem.
SAVE_PATIENCE_S = 300.0  # A shard of some 100 GB, written in one call at 0.4 GB/s, takes so long.
WRITE_CALLS = frozenset({"write", "pwrite64", "writev", "pwritev", "pwritev2", "io_uring_enter"})


SUPERVISED_BLOCKED_S = 20.0  # In place of `blocked_for` for a late step under `run`; this node fails, two answer.


@dataclass(frozen=True, kw_only=True)
class FilesystemStall:
    """A process of a job waits in one system call on one file; other nodes reach the filesystem."""

    blocked_for: float = span(60.0, "Time in the same call on the same file.")


def detect(view: ClusterView, settings: FilesystemStall) -> list[Finding]:
    """One finding for each filesystem in trouble: BAD if it is the trouble of one node or one file."""
    return [_finding(view, filesystem, settings) for filesystem in view.filesystems]


def _finding(view: ClusterView, filesystem: FilesystemView, settings: FilesystemStall) -> Finding:
    limit_s = settings.blocked_for
    urgent = [job for job in view.jobs if _is_urgent(filesystem, job)]
    soon_s, nearly = STACKS_FROM_SHARE * SUPERVISED_BLOCKED_S, []
    if any(_is_proven(filesystem, job, SUPERVISED_BLOCKED_S) for job in urgent):
        limit_s = min(limit_s, SUPERVISED_BLOCKED_S)
    else:
        nearly = [job.job.job_id for job in urgent if _is_proven(filesystem, job, soon_s)]
    finding = filesystem_finding(view, filesystem, IncidentKind.FILESYSTEM_STALL, limit_s)
    if not urgent:
        return finding
    stacks = (StackRequest(job_id=each, apart_s=STACKS_APART_S, later_s=STACKS_APART_S) for each in nearly)
    return replace(finding, wanted=(*probes_wanted(view, filesystem), *stacks))


def blocked_limit_s(view: ClusterView, job: JobView, settings: FilesystemStall) -> float:
    """So long a process of this job may be blocked on a filesystem before someone is accused."""
    limit_s = SUPERVISED_BLOCKED_S
    proven = any(_is_urgent(each, job) and _is_proven(each, job, limit_s) for each in view.filesystems)
    return min(settings.blocked_for, limit_s) if proven else settings.blocked_for


def _is_urgent(filesystem: FilesystemView, job: JobView) -> bool:
    """Whether a rank of the job is blocked, not in a flush, which is late by its own measure, saves nothing, and would
    be started again in its allocation."""
    return (
        job.supervised
        and bool(_blocked_ranks(filesystem, job, EAGER_FROM_S))
        and is_overdue(job)
        and not saves_now(job)
    )


def _is_proven(filesystem: FilesystemView, job: JobView, limit_s: float) -> bool:
    """Whether a rank of it has been blocked for so long on a node that fails when it is asked, while others answer."""
    state = assess(filesystem, limit_s)
    failing = set(state.unanswering).issuperset(p.node for p in long_blocked(filesystem, limit_s))
    alone = state.scope is Scope.ONE_NODE and len(state.answering) + len(state.strangers) >= WITNESSES
    return alone and failing and bool(_blocked_ranks(filesystem, job, limit_s))


def _blocked_ranks(filesystem: FilesystemView, job: JobView, blocked_s: float) -> list[ProcessView]:
    mine = [p for p in long_blocked(filesystem, blocked_s) if p.process.job_id == job.job.job_id]
    return [p for p in mine if p.process.role is Role.RANK and blocked_call(p).syscall not in FLUSH_CALLS]


def filesystem_finding(view: ClusterView, filesystem: FilesystemView, kind: str, blocked_for_s: float) -> Finding:
    """What is to be said about one filesystem under the name of `kind`."""
    state, mount = assess(filesystem, blocked_for_s), filesystem.mount
    blocked_s, reporting = state.blocked_s, set(view.reporting_nodes)
    finding = Finding(
        kind=kind,
        subject=f"mount:{filesystem.key}",
        job_ids=_jobs_concerned(view, filesystem),
        duration_s=blocked_s,
        mounts=(mount,),
    )
    if not reporting.issuperset(p.node for p in filesystem.blocked):
        return finding
    if blocked_s < blocked_for_s and (state.unanswering or not reporting.issuperset(filesystem.known_nodes)):
        return finding
    if blocked_s < PROBES_FROM_SHARE * blocked_for_s:
        return finding.ok(f"{mount} answers")
    finding = replace(finding, wanted=probes_wanted(view, filesystem))
    if blocked_s < blocked_for_s or (state.scope is Scope.UNKNOWN and blocked_s < blocked_for_s + PROBE_PATIENCE_S):
        return finding
    calls = [blocked_call(p).syscall for p in long_blocked(filesystem, blocked_for_s)]
    if state.scope is Scope.ONE_FILE and blocked_s < FLUSH_PATIENCE_S and FLUSH_CALLS.issuperset(calls):
        return finding
    if state.scope in UNPROVEN and blocked_s < SAVE_PATIENCE_S and _only_saves(view, filesystem, blocked_for_s):
        return finding
    if state.scope not in SCOPES[kind]:
        return finding.ok(f"{mount}: {state.scope}")
    named = culprits(filesystem, blocked_for_s)
    one_node = state.scope is Scope.ONE_NODE
    return finding.bad(
        _sentence(filesystem, state, named),
        culprits=named,
        facts=(*_facts(filesystem, state, named), *_consequences(view, filesystem, finding.job_ids)),
        actionable=one_node and not _makes_steps(view, filesystem, finding.job_ids[0]),
        exclude_nodes=tuple(sorted({c.node for c in named if c.node})) if one_node else (),
    )


def _only_saves(view: ClusterView, filesystem: FilesystemView, blocked_for_s: float) -> bool:
    """Whether all who are blocked write for jobs that save, or into a checkpoint by its name, which no line may have
    announced, and no node fails when it is asked."""
    saving = {
        job.job.job_id
        for job in view.jobs
        if saves_now(job)
        or (job.progress is not None and job.progress.phase == "checkpointing")
        or (job.saved_age_s is not None and job.saved_age_s < SAVED_LATELY_S)  # that it is done is seen a moment later
    }
    return all(answer.responding for _, answer in filesystem.answers) and all(
        blocked_call(p).syscall in WRITE_CALLS
        and (p.process.job_id in saving or names_checkpoint(blocked_call(p).path or ""))
        for p in long_blocked(filesystem, blocked_for_s)
    )


def _jobs_concerned(view: ClusterView, filesystem: FilesystemView) -> tuple[str, ...]:
    """The jobs with a blocked process that make no steps, the longest blocked first; if none does, all of them."""
    blocked_s: dict[str, float] = {}
    for process in filesystem.blocked:
        job_id = process.process.job_id
        blocked_s[job_id] = max(blocked_s.get(job_id, 0.0), blocked_call(process).seconds)
    still = [job_id for job_id in blocked_s if not _makes_steps(view, filesystem, job_id)]
    return tuple(sorted(still or blocked_s, key=lambda job_id: (-blocked_s[job_id], job_id)))


STEP_SLACK_S = 10.0  # A step may be read this much later than it was made, and a call be seen this much late.


def _makes_steps(view: ClusterView, filesystem: FilesystemView, job_id: str) -> bool:
    """Whether the job has made a step since its process is blocked: then the loop does not depend on that process.

    Of a job whose steps cannot be read, only a blocked rank shows that it makes none.
    """
    mine = [p for p in filesystem.blocked if p.process.job_id == job_id]
    job = next((job for job in view.jobs if job.job.job_id == job_id), None)
    if job is None or job.progress is None or job.progress.last_increase_age_s is None:
        return not any(p.process.role is Role.RANK for p in mine)
    longest_s = max(blocked_call(p).seconds for p in mine)
    return job.progress.last_increase_age_s + STEP_SLACK_S < longest_s


def _sentence(filesystem: FilesystemView, state: Assessment, named: tuple[Culprit, ...]) -> str:
    first = named[0]
    process = next(p for p in filesystem.blocked if (p.node, p.process.pid) == (first.node, first.pid))
    call = blocked_call(process)
    who = f"{describe(first)} of job {process.process.job_id}"
    what = f"has been in {call_words(call)} on {first.path or filesystem.mount} for {call.seconds:.0f} s"
    more = f" ({len(named)} processes in all)" if len(named) > 1 else ""
    return f"{who} {what}{more}; {_consequence(filesystem.mount, state, named)}"


def _consequence(mount: str, state: Assessment, named: tuple[Culprit, ...]) -> str:
    node = named[0].node
    if state.scope is Scope.OUTAGE:
        nodes = ", ".join(sorted({c.node or "?" for c in named} | set(state.unanswering)))
        outage = f"filesystem {mount} does not answer on {nodes}: an outage of the filesystem, not of a node."
        return f"{outage} Nothing is restarted and no node is excluded while it lasts."
    if state.scope is Scope.ONE_FILE:
        return f"{mount} answers on that node: it is this file (a lock, or its part of the storage)."
    if state.scope is Scope.ONE_NODE and state.answering:
        return f"other nodes ({', '.join(state.answering)}) get an answer from {mount}: it is {node} that lost it."
    if state.scope is Scope.ONE_NODE:
        return f"no other node shares this {mount}: it is {node}'s own."
    reach, fail = (set(each) - {node} for each in (state.answering, state.unanswering))
    if not reach | fail:
        return f"no other node has reported within {ANSWER_COUNTS_FOR_S / 60:.0f} min whether it reaches {mount}."
    return f"{mount} answers on {len(reach)} of {len(reach | fail)} other nodes: its fault or that of {node}."


def _facts(filesystem: FilesystemView, state: Assessment, named: tuple[Culprit, ...]) -> tuple[str, ...]:
    facts = [f"{describe(c)}: {c.reason}, file {c.path or 'unknown'}" for c in named[:8]]
    if state.answering:
        facts.append(f"a probe of {filesystem.mount} answered on {', '.join(state.answering)}")
    if state.unanswering:
        facts.append(f"a probe of {filesystem.mount} got no answer on {', '.join(state.unanswering)}")
    return tuple(facts)


def _consequences(view: ClusterView, filesystem: FilesystemView, job_ids: tuple[str, ...]) -> list[str]:
    """The jobs that it stalls, for the reader of a hang's message."""
    return [
        f"job {job.job.job_id}: no step since {job.progress.place}, {job.progress.age_s:.0f} s ago: this is why"
        for job in view.jobs
        if job.job.job_id in job_ids and job.progress is not None and not _makes_steps(view, filesystem, job.job.job_id)
    ][:MAX_CONSEQUENCES]


SPEC = DetectorSpec(
    detect=detect,
    settings=FilesystemStall,
    subject=Subject.FILESYSTEM,
    severity=Severity.CRITICAL,
    blames_node=0.9,
    sentence="Processes wait for a filesystem",
    job_state="waits for a filesystem",
    explained_by=(IncidentKind.FILESYSTEM_OUTAGE,),
    has_aftermath=False,
    wants_evidence=True,
    ladder=(Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE),
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogFilesystem"),
)


def _outages(view: ClusterView, settings: FilesystemStall) -> list[Finding]:
    """One finding for each filesystem in trouble: BAD if two nodes or more get no answer from it."""
    return [
        filesystem_finding(view, filesystem, IncidentKind.FILESYSTEM_OUTAGE, settings.blocked_for)
        for filesystem in view.filesystems
    ]


OUTAGE = DetectorSpec(
    kind=IncidentKind.FILESYSTEM_OUTAGE,
    detect=_outages,
    also=(FilesystemStall,),
    subject=Subject.FILESYSTEM,
    severity=Severity.CRITICAL,
    sentence="A filesystem does not answer",
    job_state="waits for a filesystem",
    wants_evidence=True,
    why_no_action="restarting would not help while the filesystem is unavailable",
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogFilesystem"),
    doc="""
Fires: as `filesystem_stall`, with two nodes or more that are blocked or get no answer.
Names: the ranks that are blocked, and the mount.
Acts: no job is restarted into the filesystem; when it answers again, the timeouts of its jobs are restarted.
""",
)
