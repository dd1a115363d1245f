"""The end of a rank, told by the kernel when it comes: a report goes out at once, not with the next tick.

A process descriptor (pidfd_open(2), Linux 5.3) can be read when its process has ended. Where the kernel has
none, or refuses, nothing is lost but these seconds.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable

from slurm_watchdog.model.observations import Process, Role

MAX_WATCHED = 64  # Ranks of one node that are watched; a node has as many as it has GPUs, mostly 8.

PACE_S = 10.0  # Between two reports out of turn for one user's ranks: those of a job that dies end together.

ProcessId = tuple[int, int]  # (pid, start ticks).


class Exits:
    """Descriptors of the ranks that live. One loop owns it."""

    def __init__(self, is_there: Callable[[int, int], bool]) -> None:
        """`is_there` says, of a pid and its start, whether that process has this number at this moment."""
        self._is_there = is_there
        self._fds: dict[ProcessId, int] = {}
        self._poll = select.poll()
        self._refused: set[ProcessId] = set()
        self._uids: dict[ProcessId, int] = {}
        self._said: dict[int, float] = {}  # User -> when the end of a rank of his was news.

    def follow(self, processes: Iterable[Process]) -> None:
        """Watches these ranks, as of the newest look at all processes, and no others any more."""
        self._uids = {
            (p.pid, p.start_ticks): p.uid for p in processes if p.role is Role.RANK and p.state not in ("Z", "X")
        }
        ranks = self._uids.keys()
        for gone in self._fds.keys() - ranks:
            self._close(gone)
        self._refused &= ranks
        for new in sorted(ranks - self._fds.keys() - self._refused)[: MAX_WATCHED - len(self._fds)]:
            fd = self._open(new)
            if fd is None:
                self._refused.add(new)
            else:
                self._fds[new] = fd
                self._poll.register(fd, select.POLLIN)

    def filenos(self) -> list[int]:
        """Can be read when someone has ended."""
        return list(self._fds.values())

    def any_ended(self, now: float) -> bool:
        """Whether a rank has ended since the last call; of each user that is said once in PACE_S.
        Each is reported once: ranks that live for a moment are seen with the next tick, and cost nothing more."""
        if not self._fds:
            return False
        ready = [fd for fd, _ in self._poll.poll(0)]
        news = False
        for who in [each for each, fd in self._fds.items() if fd in ready]:
            uid = self._uids.get(who, -1)
            self._close(who)
            self._refused.add(who)
            if now - self._said.get(uid, float("-inf")) >= PACE_S:
                self._said[uid] = now
                news = True
        self._said = {uid: at for uid, at in self._said.items() if now - at < PACE_S}
        return news

    def _open(self, who: ProcessId) -> int | None:
        try:
            fd = os.pidfd_open(who[0])
        except OSError:  # it has ended, or the kernel has no such thing for us
            return None
        if self._is_there(*who):
            return fd
        os.close(fd)  # it has just ended: the next look tells
        return None

    def _close(self, who: ProcessId) -> None:
        fd = self._fds.pop(who)
        self._poll.unregister(fd)
        os.close(fd)
