"""One job at one moment: does it hang, who keeps the others waiting, what is different about them. Pure.

What was seen last decides, in the order of how sure it is: a job that makes steps is well, whatever its
stacks look like; a rank that is gone, stopped, or blocked on a filesystem is named before the vote of the
stacks is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import has_ended, not_ended, with_what_holds
from slurm_watchdog.analysis.progress_limit import KNOWN_PHASES, Limit, limit_by_stacks, nobody_answers
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose import filesystem as storage
from slurm_watchdog.diagnose.culprit_words import describe_all, what_they_do
from slurm_watchdog.diagnose.filesystem import Assessment, Scope
from slurm_watchdog.diagnose.logs.root_cause import failed_first
from slurm_watchdog.diagnose.outliers import Difference, RankFacts, compare
from slurm_watchdog.diagnose.recorded_collectives import weigh
from slurm_watchdog.diagnose.stacks.sentences import class_word
from slurm_watchdog.diagnose.stacks.vote import Vote, VoteGroup, vote
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.knowledge.remediation_hints import MAX_HINTS, Hint, hints_for
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import ClusterView, FilesystemView, JobView, ProcessView, Progress, StackSnapshot
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import LockWait
from slurm_watchdog.model.incidents import Culprit, IncidentKind
from slurm_watchdog.model.observations import Role


class FilesystemVerdict(Struct):
    """One filesystem on which processes of the job wait."""

    mount: str
    scope: str  # `outage`, `one_node`, `one_file`, `lock` or `unknown`.
    summary: str
    blocked: tuple[Culprit, ...] = ()
    answering: tuple[str, ...] = ()
    unanswering: tuple[str, ...] = ()


class Diagnosis(Struct):
    """What is to be said about one job."""

    job_id: str
    is_hang: bool | None  # None: nothing can be said.
    kind: str  # Name of what is wrong, as detectors have it; `progressing`, `busy` or `unknown` otherwise.
    summary: str
    lacks: str = ""  # Why no rank is identified, in a few words.
    culprits: tuple[Culprit, ...] = ()
    ranks: int = 0
    groups: tuple[VoteGroup, ...] = ()
    undumped: tuple[Culprit, ...] = ()  # Ranks without a stack, each with the reason.
    missing: tuple[int, ...] = ()  # Ranks of which nothing came at all.
    differences: tuple[Difference, ...] = ()
    filesystems: tuple[FilesystemVerdict, ...] = ()
    stack_class: str = ""
    """What those who keep the others waiting do, in the words of `group-stacks`: dataloader, lock, filesystem."""
    hints: tuple[Hint, ...] = ()  # What it usually is, and what to try: never the verdict.


class JobEvidence(Struct):
    """What was collected of one job."""

    snapshots: tuple[StackSnapshot, ...] = ()  # Oldest first.
    facts: tuple[RankFacts, ...] = ()  # Of each rank, for comparing them.
    settings: Mapping[str, Mapping[str, str]] = {}  # Node -> name -> value.
    locks: Mapping[tuple[str, int], LockWait] = {}  # (node, pid) -> the file lock that the process waits for.
    collectives: tuple[RecordSet, ...] = ()  # What ranks recorded of their collectives, since the last step.
    silent: Mapping[str, str] = {}  # Nodes that gave no evidence, with the reason.


BLOCKED_S = 10.0  # In one call on one file: shorter waits belong to ordinary writing.
STEP_FACTOR = 2.0
"""A step may take so much longer than the slowest of the recent ones before its job counts as standing still here."""
STEP_FLOOR_S = 15.0
MAX_NAMED = 32


class _Bounds(Struct):
    """See `diagnose`."""

    blocked_for_s: float
    limits: PhaseLimits
    limit_s: float | None


def diagnose(
    view: ClusterView,
    job: JobView,
    gathered: JobEvidence,
    *,
    blocked_for_s: float,
    limits: PhaseLimits,
    limit_s: float | None = None,
) -> Diagnosis:
    """The diagnosis of `job` from what was just gathered of it and from what `view` says of filesystems.

    Who is blocked on a filesystem for less than `blocked_for_s` is shown and not accused. `limits` are
    those of `collective_hang`; `limit_s` is the age of the last step at which it would call the job one that hangs;
    None: not known.
    """
    ranks = job.ranks
    bounds = _Bounds(blocked_for_s=blocked_for_s, limits=limits, limit_s=limit_s)
    living = [rank for rank in ranks if rank.alive]
    voted = vote(gathered.snapshots, ranks) if gathered.snapshots else Vote()
    filesystems = _filesystems(view, job, gathered.locks)
    base = Diagnosis(
        job_id=job.job.job_id,
        is_hang=None,
        kind="unknown",
        summary="",
        ranks=len(ranks),
        groups=_without_stopped(voted.groups, living),
        undumped=(*voted.undumped, *_missing(living, voted, gathered.silent)),
        missing=voted.missing,
        filesystems=filesystems,
    )
    named = _weighed(_verdict(replace(job, snapshots=gathered.snapshots), base, voted, living, bounds), job, gathered)
    numbers = [culprit.rank for culprit in named.culprits if culprit.rank is not None]
    theirs = [group for group in voted.groups if frozenset(numbers) & frozenset(group.ranks)]
    stack_class = class_word(group.place for group in theirs) if theirs else ""
    text = " ".join((named.summary, *(frame for group in theirs for frame in group.frames)))
    hints = (*hints_for(stack_class, text), *hints_for(named.kind, text)) if named.is_hang else ()
    return replace(
        named,
        differences=compare(gathered.facts, gathered.settings, numbers),
        stack_class=stack_class,
        hints=tuple(dict.fromkeys(hints))[:MAX_HINTS],
    )


def _without_stopped(groups: Sequence[VoteGroup], living: Sequence[ProcessView]) -> tuple[VoteGroup, ...]:
    """The groups of equal stacks, with the ranks that a signal or a debugger has stopped in groups of their own."""
    stopped = {each.process.rank: each.node for each in living if each.process.state in ("T", "t")}
    apart: list[VoteGroup] = []
    for group in groups:
        inside = tuple(rank for rank in group.ranks if rank in stopped)
        others = tuple(rank for rank in group.ranks if rank not in stopped)
        if others:
            apart.append(replace(group, ranks=others))
        if inside:
            nodes = tuple(dict.fromkeys(stopped[rank] for rank in inside))
            apart.append(replace(group, place=Place.STOPPED, ranks=inside, nodes=nodes))
    return tuple(apart)


def _weighed(named: Diagnosis, job: JobView, gathered: JobEvidence) -> Diagnosis:
    if not named.is_hang or named.kind != IncidentKind.COLLECTIVE_HANG:
        return named
    weighed = weigh(named.culprits, job.ranks, gathered.collectives, gathered.snapshots)
    summary = "; ".join((named.summary.removesuffix("."), *weighed.words)) + "."
    return replace(named, culprits=weighed.culprits, summary=summary)


def _verdict(job: JobView, base: Diagnosis, voted: Vote, living: Sequence[ProcessView], bounds: _Bounds) -> Diagnosis:
    name, place = f"Job {job.job.job_id}", _after(job)
    if not job.ranks:
        return replace(base, summary=f"No ranks of job {job.job.job_id} are known.")
    if not living:
        lacks = "none of its ranks is alive any more"
        return replace(base, lacks=lacks, summary=f"{name}{place}: {lacks}.")
    dead = job.gone_ranks
    if dead and _is_over(job, voted, living):
        return _left_over(f"{name} is over", place, base, voted, living)
    gone_s = min((rank.gone_s or rank.seen_age_s for rank in dead), default=0.0)
    if dead and not _steps_since(job, gone_s - job.read_later_s):
        first, live_on = failed_first(job, dead, 0.0), _count(len(living), "rank lives", "ranks live")
        named = _named(dead if first is None else [first], "has exited")
        followed = f", {len(dead) - 1} followed" if first is not None and len(dead) > 1 else ""
        lost = f"{name} lost {describe_all(named)}{place}{followed}; {live_on} on."
        return _hangs(base, "lingering_job", lost, named)
    stuck = [each for each in base.filesystems if _explains_hang(each, job, bounds.blocked_for_s)]
    if stuck and not _steps_since(job, bounds.blocked_for_s):
        kind = "filesystem_outage" if stuck[0].scope == Scope.OUTAGE else "filesystem_stall"
        return _hangs(base, kind, f"{name} makes no progress{place}: {stuck[0].summary}.", stuck[0].blocked)
    steady = _makes_steps(job, bounds.limit_s)
    if steady is not None:
        return replace(base, is_hang=False, kind="progressing", summary=f"{name} makes progress: {steady}.")
    why = "is stopped (by a signal or a debugger)"
    stopped = _named([rank for rank in living if rank.process.state in ("T", "t")], why)
    if stopped:
        text = f"{name} makes no progress{place}: {describe_all(stopped)} {why}."
        return _hangs(base, "rank_stopped", text, stopped)
    return _by_vote(job, name, place, base, voted, bounds)


def _hangs(base: Diagnosis, kind: str, summary: str, culprits: tuple[Culprit, ...]) -> Diagnosis:
    return replace(base, is_hang=True, kind=kind, culprits=culprits, summary=summary)


def _is_over(job: JobView, voted: Vote, living: Sequence[ProcessView]) -> bool:
    """Whether the training has made its last step, by its log or by all that are left: who is gone is no loss."""
    torn_down = sum(len(group.ranks) for group in voted.groups if group.place is Place.TEARDOWN)
    return has_ended(job) or torn_down == len(living)


def _left_over(over: str, place: str, base: Diagnosis, voted: Vote, living: Sequence[ProcessView]) -> Diagnosis:
    """The training is over, and some of its ranks stay: they are the ones to look at, unless they still save."""
    if voted.moving or voted.checkpointing:
        saves = f"{over}{place}: what is left of it still saves or moves."
        return replace(base, is_hang=False, kind="busy", summary=saves)
    standing: dict[int | None, VoteGroup] = {rank: group for group in voted.groups for rank in group.ranks}
    named = tuple(r.culprit(_still(standing.get(r.process.rank))) for r in living[:MAX_NAMED])
    text = f"{over} and does not end{place}: {describe_all(named)} {named[0].reason}."
    if voted.moving is None:
        return replace(base, kind="wedged_teardown", summary=text)
    return _hangs(base, "wedged_teardown", text, named)


def _still(group: VoteGroup | None) -> str:
    where = f"{group.place}, in {group.frames[0]}" if group is not None and group.frames else "could not be dumped"
    return f"is still there: {where}"


def _steps_since(job: JobView, seconds: float) -> bool:
    """Whether a step was made in the last `seconds`: then the loop does not depend on what went wrong before."""
    return job.progress is not None and _last_step_s(job.progress) < seconds


def _last_step_s(progress: Progress) -> float:
    """How long ago the last step was, or the end of a save after it. A grace that the job was granted is neither."""
    return progress.age_s if progress.ungranted_age_s is None else progress.ungranted_age_s


def _by_vote(job: JobView, name: str, place: str, base: Diagnosis, voted: Vote, bounds: _Bounds) -> Diagnosis:
    if not voted.groups:
        lacks = "no stack of any rank could be read"
        return replace(base, lacks=lacks, summary=f"{name}{place}: {lacks}, so the cause is unknown.")
    if voted.missing or voted.moving is None:
        few = ", ".join(map(str, voted.missing[:6]))
        why = f"the stacks of rank {few} are missing" if few else "the dumps do not show whether its ranks move"
        return replace(base, lacks=why, summary=f"{name}{place}: {why}, so no rank is identified as the cause.")
    waiting = _count(voted.waiting, "rank waits", "ranks wait")
    age_s = job.progress.age_s if job.progress is not None else job.run_age_s
    since_s = _last_step_s(job.progress) if job.progress is not None else age_s
    early = bounds.limit_s is not None and since_s < bounds.limit_s
    until = f" (no incident before {bounds.limit_s:.0f} s without a step)" if early else ""
    busy = _busy(job, voted, waiting, bounds)
    if busy:
        return replace(base, is_hang=False, kind="busy", summary=f"{name}{place}: {busy}.")
    culprits = with_what_holds(job, (*voted.outside, *voted.undumped))
    if culprits and voted.waiting:
        text = f"{what_they_do(culprits)}; {waiting} for {'them' if len(culprits) > 1 else 'it'}"
        return _hangs(base, "collective_hang", f"{name} hangs{place}: {text}{until}.", culprits[:MAX_NAMED])
    if voted.waiting:
        rest = f" and {voted.elsewhere} not" if voted.elsewhere else " and none is outside it"
        lacks = f"{waiting} in a collective{rest}"
        text = f"{name} hangs{place}: {lacks}, so no rank is identified as the cause{until}."
        return _hangs(replace(base, lacks=lacks), "collective_hang", text, ())
    nothing = f"{name}{place}: nothing moves, and no rank waits in a collective."
    return replace(base, kind="stalled_progress", summary=nothing)


def _busy(job: JobView, voted: Vote, waiting: str, bounds: _Bounds) -> str:
    if voted.moving and len(voted.outside) == 1 and voted.waiting and not voted.checkpointing:
        return f"{what_they_do(voted.outside)} and still moves or computes; {waiting} for it"
    if voted.moving:
        return "its ranks still move or compute"
    age_s = job.progress.age_s if job.progress is not None else job.run_age_s
    limit = Limit(seconds=bounds.limit_s or 0.0, reason="")
    limit = limit_by_stacks(job, voted, limit, bounds.limits, unanswered=nobody_answers(job, voted))
    if age_s >= limit.seconds:
        return ""
    if voted.checkpointing:
        who = f"{what_they_do(voted.outside)}: " if voted.outside else ""
        return f"{who}a checkpoint or a transfer is under way, which may take {limit.seconds:.0f} s; {waiting}"
    if voted.patient:
        return f"an evaluation or a compilation is under way, which may take {limit.seconds:.0f} s; {waiting}"
    return ""


def _after(job: JobView) -> str:
    if job.progress is None:
        return " before its first step"
    return f" after {job.progress.place}, {_last_step_s(job.progress):.0f} s ago"


def _makes_steps(job: JobView, limit_s: float | None) -> str | None:
    """Why the job counts as making steps, or as busy with what its log says; None if it does not, or never made one.

    `limit_s` is what the detectors allow it: where the log says that it evaluates or saves, that counts, until it takes
    longer than the run has shown it to.
    """
    progress = job.progress
    if progress is None or progress.steps_seen < 2:
        return None
    since_s, own_s = _last_step_s(progress), progress.phase_intervals_s
    longer = len(own_s) >= KNOWN_PHASES and progress.age_s > max(STEP_FLOOR_S, STEP_FACTOR * max(own_s))
    if progress.phase is not None and limit_s is not None and progress.age_s < limit_s and not longer:
        return (
            f"its log says {progress.phase}, {progress.place} was {since_s:.0f} s ago, and it may take {limit_s:.0f} s"
        )
    usual_s = max([progress.step_s or 0.0, *progress.intervals_s], default=0.0)
    patience_s = max(STEP_FLOOR_S, STEP_FACTOR * usual_s)
    if since_s > (patience_s if limit_s is None else min(patience_s, limit_s)):
        return None
    age = f"{since_s:.0f} s" if since_s >= 1 else "under a second"
    return f"{progress.place} was {age} ago" + (f" (about {progress.step_s:.2g} s a step)" if progress.step_s else "")


def _named(ranks: Sequence[ProcessView], reason: str) -> tuple[Culprit, ...]:
    return tuple(r.culprit("; ".join(filter(None, (reason, not_ended(r))))) for r in ranks[:MAX_NAMED])


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _missing(living: Sequence[ProcessView], voted: Vote, silent: Mapping[str, str]) -> list[Culprit]:
    return [
        rank.culprit(silent.get(rank.node, "its dump did not come in time"))
        for rank in living
        if rank.process.rank in voted.missing or rank.node in silent
    ]


# ---------------------------------------------------------------------------------------- filesystems


def _filesystems(
    view: ClusterView, job: JobView, locks: Mapping[tuple[str, int], LockWait]
) -> tuple[FilesystemVerdict, ...]:
    mine = [fs for fs in view.filesystems if any(p.process.job_id == job.job.job_id for p in fs.blocked)]
    found = [each for fs in mine if (each := _one(fs)) is not None]
    return (*found, *_locks(job, locks))


def _one(filesystem: FilesystemView) -> FilesystemVerdict | None:
    named = storage.culprits(filesystem, BLOCKED_S)
    if not named:
        return None
    state = storage.assess(filesystem, BLOCKED_S)
    first = named[0]
    call = next(
        storage.blocked_call(p) for p in filesystem.blocked if (p.node, p.process.pid) == (first.node, first.pid)
    )
    where = first.path or filesystem.mount
    return FilesystemVerdict(
        mount=filesystem.mount,
        scope=state.scope,
        summary=f"{describe_all(named)} in {storage.call_words(call)} on {where} for {call.seconds:.0f} s; "
        f"{scope_sentence(filesystem.mount, state)}",
        blocked=named[:MAX_NAMED],
        answering=state.answering,
        unanswering=state.unanswering,
    )


def scope_sentence(mount: str, state: Assessment) -> str:
    """Whose fault it is, in words."""
    answering, unanswering = ", ".join(state.answering[:4]), ", ".join(state.unanswering[:4])
    match state.scope:
        case Scope.OUTAGE:
            return (
                f"{mount} fails on several nodes{f' ({unanswering})' if unanswering else ''}: its "
                "server or the network, no node's fault"
            )
        case Scope.ONE_NODE if not state.answering:
            return (
                f"{mount} is a filesystem of this node alone ({', '.join(state.strangers[:4])} have another one there)"
            )
        case Scope.ONE_NODE:
            return f"{mount} answers elsewhere{f' ({answering})' if answering else ''}: it is this node"
        case Scope.ONE_FILE:
            return f"{mount} answers on that very node: it is this one file, a lock or its part of the storage"
        case _:
            return f"no other node has reported yet whether it reaches {mount}"


def _explains_hang(filesystem: FilesystemVerdict, job: JobView, blocked_for_s: float) -> bool:
    """Whether a rank has been blocked for too long. Who flushes a file that answers gets the time that a
    large one takes; who waits for a lock is waiting for someone else, and the vote of the stacks finds him."""
    pids = {(culprit.node, culprit.pid) for culprit in filesystem.blocked}
    calls = [
        p.process.blocked
        for p in job.ranks
        if (p.node, p.process.pid) in pids
        and p.process.blocked is not None
        and p.process.blocked.seconds >= blocked_for_s
    ]
    if filesystem.scope in (Scope.OUTAGE, Scope.ONE_NODE):
        return bool(calls)
    return any(call.syscall not in storage.FLUSH_CALLS or call.seconds >= storage.FLUSH_PATIENCE_S for call in calls)


def _locks(job: JobView, locks: Mapping[tuple[str, int], LockWait]) -> list[FilesystemVerdict]:
    found = []
    for process in job.processes:
        lock = locks.get((process.node, process.process.pid))
        if lock is None or process.process.role is Role.HELPER:
            continue
        holder = (
            f"held by {lock.holder or 'a process'} (pid {lock.holder_pid})"
            if lock.holder_pid
            else "held on another node"
        )
        culprit = process.culprit(f"waits for a file lock ({lock.kind} on {lock.file}), {holder}")
        found.append(
            FilesystemVerdict(mount=lock.file, scope="lock", summary=what_they_do((culprit,)), blocked=(culprit,))
        )
    return found
