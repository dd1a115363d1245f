"""Processes that are held: stopped, or in one system call for long; and those that move data. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.knowledge.syscalls import PAGE_FAULT
from slurm_watchdog.model.cluster_view import JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Role

QUIET_IO_BYTES_S = 1e6
STORAGE_S = 60.0
"""One that was seen waiting for storage for a moment within this time moves data, also where its bytes cannot
be counted."""
STUCK_S = 30.0  # A call that has not returned for so long moves nothing.


def moves_data(process: ProcessView, within_s: float = STORAGE_S) -> bool:
    """Whether it is seen to read or write, or waited for storage for a moment within so long."""
    if process.io_bytes_s is not None and process.io_bytes_s >= QUIET_IO_BYTES_S:
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
