"""How far one job is, how its ranks ended, and which of its processes are held (stopped, or in one system call for
long) or move data. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.knowledge.syscalls import PAGE_FAULT
from slurm_watchdog.model.cluster_view import ErrorLine, JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Role

FATAL = frozenset({"traceback", "python_exception", "cuda_oom", "cuda_error"})
"""Signatures of a line with which a training ends, if no step follows."""


def has_ended(job: JobView) -> bool:
    """Whether the training has made its last step, as far as its log says. A count that began again counts to
    the end of an epoch, and the last steps of all may be fewer than stand between two lines."""
    progress = job.progress
    if progress is None:
        return False
    if progress.phase == "finishing":
        return True
    if progress.total_steps is None or progress.begun_anew or progress.step <= 0:
        return False
    return progress.step + progress.stride > progress.total_steps


def had_steps_to_make(job: JobView) -> bool:
    """Whether it is known that the training is not over. A count that began again counts to the end of an epoch."""
    progress = job.progress
    if progress is None or progress.total_steps is None or progress.begun_anew:
        return False
    return progress.step + progress.stride <= progress.total_steps


def has_stepped_since(job: JobView, age_s: float) -> bool:
    """Whether it has made a step since then, however late its lines are read."""
    rose_s = None if job.progress is None else job.progress.last_increase_age_s
    return rose_s is not None and rose_s + job.read_later_s < age_s


def is_unseen(job: JobView) -> bool:
    """Whether nothing can be said of its ranks."""
    return job.job.state != "RUNNING" or not job.ranks or bool(job.silent_nodes)


def made_last_step(job: JobView) -> bool:
    """Whether its count has reached the number of steps that its log tells of."""
    progress = job.progress
    return progress is not None and progress.total_steps is not None and progress.step >= progress.total_steps


def last_error(job: JobView) -> ErrorLine | None:
    """The newest line since the last step with which a training ends."""
    if job.progress is None or job.progress.last_increase_age_s is None:
        return None
    since = [
        each
        for each in job.errors
        if each.event.pattern in FATAL and each.age_s <= min(job.progress.last_increase_age_s, job.progress.age_s)
    ]
    return min(since, key=lambda each: each.age_s, default=None)


def dead_for_s(rank: ProcessView) -> float:
    """Seconds since the rank was last known alive, 0 while it is."""
    if rank.alive:
        return 0.0
    return rank.seen_age_s if rank.gone_s is None else rank.gone_s


def last_words(job: JobView, first: ProcessView) -> list[str]:
    """Facts: error lines that name the dead rank, otherwise the last ones of its node."""
    named = [e for e in job.errors if e.event.rank is not None and e.event.rank == first.process.rank]
    nearby = [e for e in job.errors if e.event.rank is None]
    return [f"last words: {error.event.line}" for error in (named or nearby)[-3:]]


def has_trained(job: JobView) -> bool:
    """Whether an earlier run of the job was seen to make steps: that this one makes none is then no way of logging."""
    return any(run.start_s is not None for run in job.past)


# -------------------------------------------------------------------------------- held, or moving data

QUIET_IO_BYTES_S = 1e6
STORAGE_S = 60.0  # Who waited for storage for a moment within this time moves data, also where bytes are not counted.
STUCK_S = 30.0  # A call that has not returned for so long moves nothing.


def moves_data(process: ProcessView, within_s: float = STORAGE_S) -> bool:
    """Whether it is seen to read or write, or waited for storage for a moment within so long."""
    if process.process.io_bytes_s is not None and process.process.io_bytes_s >= QUIET_IO_BYTES_S:
        return True
    return process.storage_age_s is not None and process.storage_age_s < within_s and not is_held(process)


def rank_on_storage(job: JobView) -> ProcessView | None:
    """A living rank that has been in one call on a filesystem for long: then the filesystem is the matter."""
    return next((rank for rank in job.living_ranks if is_on_storage(rank)), None)


def process_on_storage(job: JobView) -> ProcessView | None:
    """As `rank_on_storage`, of whatever runs in the job: also a data loader's worker, or who writes its log."""
    return next((each for each in job.processes if each.alive and is_on_storage(each)), None)


def is_on_storage(process: ProcessView) -> bool:
    """Whether it has been in one call on a filesystem for long."""
    blocked = process.process.blocked
    if blocked is None or blocked.seconds < STUCK_S:
        return False
    return blocked.mount is not None or blocked.syscall == PAGE_FAULT


def is_held(rank: ProcessView) -> bool:
    """Whether it was stopped, or has been in one system call for long."""
    process = rank.process
    if process.blocked is not None:
        return process.blocked.seconds >= STUCK_S
    return process.state in ("T", "t") or (process.state == "D" and (process.state_age_s or 0.0) >= STUCK_S)


def with_what_holds(job: JobView, named: Iterable[Culprit]) -> tuple[Culprit, ...]:
    """`named`, where a rank that was stopped, or is in one call for long, is said to be that and not to run
    somewhere, and one whose worker is blocked on a filesystem with what that worker waits for."""
    return tuple(_with_what_holds(job, each) for each in named)


def _with_what_holds(job: JobView, culprit: Culprit) -> Culprit:
    living = [each for each in job.processes if each.alive and each.node == culprit.node]
    rank = next((each for each in living if each.process.pid == culprit.pid), None)
    if rank is not None and is_held(rank):
        held = held_by(rank)
        if culprit.reason.startswith(Place.OTHER):
            return replace(culprit, reason=held + culprit.reason.removeprefix(Place.OTHER))
        return replace(culprit, reason=f"{culprit.reason}; it {held}")
    worker = next(
        (
            each
            for each in living
            if each.process.role is Role.WORKER
            and culprit.rank is not None
            and each.process.rank == culprit.rank
            and is_on_storage(each)
        ),
        None,
    )
    if worker is None:
        return culprit
    return replace(culprit, reason=f"{culprit.reason}; its worker (pid {worker.process.pid}) {held_by(worker)}")


def not_ended(rank: ProcessView) -> str:
    """Of a process whose main thread has ended: what another thread of it is in, so that it does not end; else
    empty. A clause that follows its name."""
    if rank.unending is None:
        return ""
    wchan = f", at {rank.unending.wchan}" if rank.unending.wchan else ""
    return f"its main thread has ended, and another thread of it {held_by(rank)} (state {rank.unending.state}{wchan})"


def held_by(rank: ProcessView) -> str:
    """What holds it, of one that was stopped or has been in one call for long: the rest of a sentence about it."""
    process = rank.process
    if process.state in ("T", "t"):
        return "is stopped"
    blocked = process.blocked
    if blocked is None:
        return f"has been in state {process.state} for {process.state_age_s or 0.0:.0f} s"
    where = " or ".join(blocked.candidates)
    fault = f"a page fault on a mapped file{f' of {where}' if where else ''}"
    if blocked.syscall == PAGE_FAULT:
        call = fault if blocked.mount is None else f"a page fault on {blocked.path or blocked.mount}"
    else:
        on = blocked.path or blocked.mount
        call = f"{blocked.syscall or 'a system call'}{f' on {on}' if on else ''}"
    return f"has been in {call} for {blocked.seconds:.0f} s"
