"""One job at one moment: does it hang, who keeps the others waiting, what is different about them. Pure.

What was seen last decides, in the order of how sure it is: a job that makes steps is well, whatever its
stacks look like; a rank that is gone, stopped, or blocked on a filesystem is named before the vote of the
stacks is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.analysis.held_processes import with_what_holds
from slurm_watchdog.analysis.job_state import PROGRESS_SLACK_S, has_ended
from slurm_watchdog.diagnose.culprit_words import describe_all, what_they_do
from slurm_watchdog.diagnose.diagnosis import Diagnosis, FilesystemVerdict, JobEvidence
from slurm_watchdog.diagnose.filesystem import (
    FLUSH_CALLS,
    FLUSH_PATIENCE_S,
    Assessment,
    Scope,
    assess,
    blocked_call,
    call_words,
)
from slurm_watchdog.diagnose.filesystem import culprits as blocked_culprits
from slurm_watchdog.diagnose.outliers import compare
from slurm_watchdog.diagnose.stacks.vote import Vote, VoteGroup, vote
from slurm_watchdog.diagnose.stacks.wording import class_word
from slurm_watchdog.knowledge.remediation_hints import MAX_HINTS, hints_for
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import ClusterView, FilesystemView, JobView, ProcessView
from slurm_watchdog.model.evidence import LockWait
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Role

BLOCKED_S: Final = 10.0
"""In one call on one file: shorter waits belong to ordinary writing."""
BLOCKED_FOR_S: Final = 60.0
"""As `filesystem_stall.blocked_for` is shipped."""
STEP_FACTOR: Final = 2.0
"""A step may take so much longer than the slowest of the recent ones before its job counts as standing still here."""
STEP_FLOOR_S: Final = 15.0
LONG_WORK_PATIENCE_S: Final = 1800.0
"""For an evaluation or a compilation that stacks show, as `collective_hang.evaluation_floor` is shipped."""
MAX_NAMED: Final = 32


def diagnose(
    view: ClusterView,
    job: JobView,
    gathered: JobEvidence,
    *,
    blocked_for_s: float = BLOCKED_FOR_S,
    limit_s: float | None = None,
) -> Diagnosis:
    """The diagnosis of `job` from what was just gathered of it and from what `view` says of filesystems.

    Who is blocked on a filesystem for less than `blocked_for_s` is shown and not accused. `limit_s` is the
    age of the last step at which detectors would call it a hang; None: not known.
    """
    ranks = job.ranks
    living = [rank for rank in ranks if rank.alive]
    voted = vote(gathered.snapshots, ranks) if gathered.snapshots else Vote()
    filesystems = _filesystems(view, job, gathered.locks)
    base = Diagnosis(
        job_id=job.job.job_id,
        is_hang=None,
        kind="unknown",
        summary="",
        ranks=len(ranks),
        groups=voted.groups,
        undumped=(*voted.undumped, *_missing(living, voted, gathered.silent)),
        missing=voted.missing,
        filesystems=filesystems,
    )
    named = _verdict(job, base, voted, living, blocked_for_s, limit_s)
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


def _verdict(
    job: JobView,
    base: Diagnosis,
    voted: Vote,
    living: Sequence[ProcessView],
    blocked_for_s: float,
    limit_s: float | None,
) -> Diagnosis:
    job_id, place = job.job.job_id, _after(job)
    if not job.ranks:
        return replace(base, summary=f"No ranks of job {job_id} are known: who belongs to it cannot be said.")
    dead = [rank for rank in job.ranks if not rank.alive]
    if dead and living and _is_over(job, voted, living):
        return _left_over(job_id, place, base, voted, living)
    gone_s = min((rank.gone_s or rank.seen_age_s for rank in dead), default=0.0)
    if dead and living and not _steps_since(job, gone_s - PROGRESS_SLACK_S):
        return replace(
            base, is_hang=True, kind="lingering_job", culprits=_named(dead, "is gone"),
            summary=f"Job {job_id} lost {describe_all(_named(dead, 'is gone'))}{place}; "
                f"{_count(len(living), 'rank lives', 'ranks live')} on.",
        )  # fmt: skip
    stuck = [each for each in base.filesystems if _explains_hang(each, job, blocked_for_s)]
    if stuck and not _steps_since(job, blocked_for_s):
        return _by_filesystem(job_id, place, base, stuck[0])
    steady = _makes_steps(job, limit_s)
    if steady is not None:
        return replace(base, is_hang=False, kind="progressing", summary=f"Job {job_id} makes progress: {steady}.")
    stopped = [rank for rank in living if rank.process.state in ("T", "t")]
    if stopped:
        why = "is stopped (by a signal or a debugger)"
        return replace(
            base, is_hang=True, kind="rank_stopped", culprits=_named(stopped, why),
            summary=f"Job {job_id} makes no progress{place}: {describe_all(_named(stopped, why))} {why}.",
        )  # fmt: skip
    return _by_vote(job, place, base, voted)


def _is_over(job: JobView, voted: Vote, living: Sequence[ProcessView]) -> bool:
    """Whether the training has made its last step, as its log says, or as all do that are left: those that
    are gone are no loss."""
    torn_down = sum(len(group.ranks) for group in voted.groups if group.place is Place.TEARDOWN)
    return has_ended(job) or torn_down == len(living)


def _left_over(job_id: str, place: str, base: Diagnosis, voted: Vote, living: Sequence[ProcessView]) -> Diagnosis:
    """The training is over, and some of its ranks stay: they are the ones to look at, unless they still save."""
    if voted.moving or voted.checkpointing:
        return replace(
            base, is_hang=False, kind="busy",
            summary=f"Job {job_id} is over{place}: what is left of it still saves or moves.",
        )  # fmt: skip
    standing: dict[int | None, VoteGroup] = {rank: group for group in voted.groups for rank in group.ranks}
    named = tuple(
        r.culprit(_still(standing.get(r.process.rank)))
        for r in living[:MAX_NAMED]
    )  # fmt: skip
    return replace(
        base, is_hang=None if voted.moving is None else True, kind="wedged_teardown",
        culprits=() if voted.moving is None else named,
        summary=f"Job {job_id} is over and does not end{place}: {describe_all(named)} {named[0].reason}.",
    )  # fmt: skip


def _still(group: VoteGroup | None) -> str:
    where = f"{group.place}, in {group.frames[0]}" if group is not None and group.frames else "could not be dumped"
    return f"is still there: {where}"


def _steps_since(job: JobView, seconds: float) -> bool:
    """Whether a step was made in the last `seconds`: then the loop does not depend on what went wrong before."""
    return job.progress is not None and job.progress.age_s < seconds


def _by_filesystem(job_id: str, place: str, base: Diagnosis, first: FilesystemVerdict) -> Diagnosis:
    kind = "filesystem_outage" if first.scope == Scope.OUTAGE else "filesystem_stall"
    summary = f"Job {job_id} makes no progress{place}: {first.summary}."
    return replace(base, is_hang=True, kind=kind, culprits=first.blocked, summary=summary)


def _by_vote(job: JobView, place: str, base: Diagnosis, voted: Vote) -> Diagnosis:
    job_id = job.job.job_id
    if not voted.groups:
        return replace(base, summary=f"Job {job_id}{place}: no stack of any rank could be had, so nothing can be said.")
    if voted.missing:
        few = ", ".join(map(str, voted.missing[:6]))
        return replace(
            base,
            summary=f"Job {job_id}{place}: the stacks of rank {few} are missing, so no rank is "
            "identified as the cause.",
        )
    if voted.moving is None:
        return replace(
            base,
            summary=f"Job {job_id}{place}: the dumps do not show whether its ranks move, so no rank is "
            "identified as the cause.",
        )
    waiting = _count(voted.waiting, "rank waits", "ranks wait")
    if voted.moving and len(voted.outside) == 1 and voted.waiting and not voted.checkpointing:
        one = voted.outside[0]
        return replace(
            base, is_hang=False, kind="busy",
            summary=f"Job {job_id}{place}: {what_they_do((one,))} and still moves or computes; {waiting} for it.",
        )  # fmt: skip
    if voted.moving:
        return replace(
            base, is_hang=False, kind="busy", summary=f"Job {job_id}{place}: its ranks still move or compute."
        )
    if voted.checkpointing:
        return replace(
            base, is_hang=False, kind="busy", culprits=(),
            summary=f"Job {job_id}{place}: a checkpoint or a transfer is under way, which may take its "
                f"time; {waiting}.",
        )  # fmt: skip
    if voted.patient and (job.progress is None or job.progress.age_s < LONG_WORK_PATIENCE_S):
        return replace(
            base, is_hang=False, kind="busy",
            summary=f"Job {job_id}{place}: an evaluation or a compilation is under way, which may take "
                f"its time; {waiting}.",
        )  # fmt: skip
    culprits = with_what_holds(job, (*voted.outside, *voted.undumped))
    if culprits and voted.waiting:
        return replace(
            base, is_hang=True, kind="collective_hang", culprits=culprits[:MAX_NAMED],
            summary=f"Job {job_id} hangs{place}: {what_they_do(culprits)}; {waiting} for "
                f"{'them' if len(culprits) > 1 else 'it'}.",
        )  # fmt: skip
    if voted.waiting:
        rest = f" and {voted.elsewhere} not" if voted.elsewhere else " and none is outside it"
        return replace(
            base, is_hang=True, kind="collective_hang",
            summary=f"Job {job_id} hangs{place}: {waiting} in a collective{rest}, so nobody is named.",
        )  # fmt: skip
    return replace(
        base,
        kind="stalled_progress",
        summary=f"Job {job_id}{place}: nothing moves, and no rank waits in a collective.",
    )


def _after(job: JobView) -> str:
    if job.progress is None:
        return " before its first step"
    return f" after {job.progress.place}, {job.progress.age_s:.0f} s ago"


def _makes_steps(job: JobView, limit_s: float | None) -> str | None:
    """Why the job counts as making steps, or as busy with what its log says; None if it does not, or never made one.

    `limit_s` is what the detectors allow it: where the log says that it evaluates or saves, that counts.
    """
    progress = job.progress
    if progress is None or progress.steps_seen < 2:
        return None
    if progress.phase is not None and limit_s is not None and progress.age_s < limit_s:
        return (
            f"its log says {progress.phase}, {progress.place} was {progress.age_s:.0f} s ago, and it "
            f"may take {limit_s:.0f} s"
        )
    usual_s = max([progress.step_s or 0.0, *progress.intervals_s], default=0.0)
    patience_s = max(STEP_FLOOR_S, STEP_FACTOR * usual_s)
    if progress.age_s > (patience_s if limit_s is None else min(patience_s, limit_s)):
        return None
    age = f"{progress.age_s:.0f} s" if progress.age_s >= 1 else "under a second"
    return f"{progress.place} was {age} ago" + (f" (about {progress.step_s:.2g} s a step)" if progress.step_s else "")


def _named(ranks: Sequence[ProcessView], reason: str) -> tuple[Culprit, ...]:
    return tuple(r.culprit(reason) for r in ranks[:MAX_NAMED])


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _missing(living: Sequence[ProcessView], voted: Vote, silent: Mapping[str, str]) -> list[Culprit]:
    """The ranks of which nothing came, with the reason that their node gave."""
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
    named = blocked_culprits(filesystem, BLOCKED_S)
    if not named:
        return None
    state = assess(filesystem, BLOCKED_S)
    first = named[0]
    call = next(blocked_call(p) for p in filesystem.blocked if (p.node, p.process.pid) == (first.node, first.pid))
    where = first.path or filesystem.mount
    return FilesystemVerdict(
        mount=filesystem.mount,
        scope=state.scope,
        summary=f"{describe_all(named)} in {call_words(call)} on {where} for {call.seconds:.0f} s; "
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
        case Scope.ONE_NODE:
            return f"{mount} answers elsewhere{f' ({answering})' if answering else ''}: it is this node"
        case Scope.ONE_FILE:
            return f"{mount} answers on that very node: it is this one file, a lock or its part of the storage"
        case _:
            return f"no other node has said yet whether it reaches {mount}"


def _explains_hang(filesystem: FilesystemVerdict, job: JobView, blocked_for_s: float) -> bool:
    """Whether a rank has been blocked for too long. Who flushes a file that answers gets the time that a
    large one takes; who waits for a lock is waiting for somebody else, whom the vote of the stacks finds."""
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
    return any(call.syscall not in FLUSH_CALLS or call.seconds >= FLUSH_PATIENCE_S for call in calls)


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
