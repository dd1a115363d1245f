"""What is asked about processes of one user, of the child that is this user: `look:UID`; of processes of root's and the
system's, of a child without rights.

A child that does not return hangs on the process that it was about to look at. It is left under that one's name,
nothing is asked about that process until the child returns or the process has ended, and a fresh child is asked about
the others. One that a user has made so costs him children of his own, of which he has few, and no one else anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_watchdog.agent.children.become_user import refusal_to_become
from slurm_watchdog.agent.children.children import MAX_HUNG_OF_USER, Answer, Children, Value
from slurm_watchdog.agent.children.requests import Request
from slurm_watchdog.agent.proc.table import ProcessTable

log = logging.getLogger(__name__)
APART_IDLE_S = 5.0
APART = ":apart"
"""A child of its own for processes in D, and for what takes the lock of a process's memory: the others, and what is
read in every tick, need not wait for its deadline."""


@dataclass
class UserLooks:
    """Asks the users' children. `stuck` are the processes on which one hangs, and its key."""

    children: Children
    table: ProcessTable
    stuck: dict[int, str] = field(default_factory=dict)
    _refusals: dict[int, str | None] = field(default_factory=dict)

    def refusal(self, uid: int) -> str | None:
        """Why no child looks into processes of this user; None if one does."""
        if uid not in self._refusals:
            self._refusals = dict(list(self._refusals.items())[-1000:]) | {uid: refusal_to_become(uid)}
        return self._refusals[uid]

    def may_ask(self, pid: int) -> bool:
        """Whether no child hangs on this process."""
        return pid not in self.stuck

    def uid_of(self, pid: int) -> int:
        """Whose process it is; -1 if it has ended."""
        entry = self.table.entries.get(pid)
        return entry.known.uid if entry is not None else -1

    def ask(
        self, uid: int, request: Request[Value], pids: Sequence[int], deadline_s: float, now: float,
        then: Callable[[Answer[Value]], None], suffix: str = "",
    ) -> int | None:  # fmt: skip
        """Asks about `pids`, which are in the order of the request; -1: of the child without rights. Returns the number
        of the request, None if that child is busy or hangs."""

        def done(answer: Answer[Value]) -> None:
            if answer.timed_out:
                self._blame(answer, uid, pids)
            then(answer)

        key = f"look:{uid if uid >= 0 else 'own'}{suffix}"
        idle_s = APART_IDLE_S if suffix else None
        return self.children.ask(key, request, deadline_s, now, done, uid, idle_s=idle_s)

    def release(self) -> None:
        """A process whose child has returned, or that ended, may be asked about again."""
        for pid, key in list(self.stuck.items()):
            if self.children.is_free(key) or pid not in self.table.entries:
                del self.stuck[pid]

    def retire(self, kept: Container[int]) -> None:
        """Ends the children of all users but these."""
        for key in self.children.names():
            kind, _, rest = key.partition(":")
            uid = rest.partition(":")[0]
            if kind == "look" and uid.isdecimal() and int(uid) not in kept:
                self.children.retire(key)

    def _blame(self, answer: Answer[Any], uid: int, pids: Sequence[int]) -> None:
        if not 0 <= answer.place < len(pids):
            return
        pid = pids[answer.place]
        new_key = f"{answer.key.removesuffix(APART)}:{pid}"
        if not self.children.is_free(new_key):  # another one of them hangs on it, too
            new_key = f"{answer.key}:{pid}"
        of_own = sum(key.startswith("look:own") for key in self.stuck.values())
        aside = (uid >= 0 or of_own < MAX_HUNG_OF_USER) and self.children.set_aside(answer.key, new_key)
        self.stuck[pid] = new_key if aside else answer.key
        log.warning("nothing can be learnt about process %d: its memory's lock is held, or it is in execve", pid)
