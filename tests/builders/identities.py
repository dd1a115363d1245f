"""Processes to be identified, none of which is real, and children that answer when the test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_watchdog.agent.children.answers import IdentifiedProcess
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import IdentifyProcesses, Request
from slurm_watchdog.agent.proc.entry import Entry, ProcessFacts, Stat
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.identity_cache import Identities
from slurm_watchdog.agent.processes.user_looks import UserLooks


@dataclass
class Asked:
    key: str
    request: Request[Any]
    then: Callable[[Answer[Any]], None]


@dataclass
class FakeProbes:
    """Children by name that are busy until the test lets them answer, hang or return."""

    busy: dict[str, Asked] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)

    def ask(
        self, key: str, request: Request[Any], deadline_s: float, now: float, then: Callable[[Answer[Any]], None],
        uid: int = -1, **_: Any,
    ) -> int | None:  # fmt: skip
        if key in self.busy:
            return None
        self.busy[key] = Asked(key, request, then)
        return len(self.busy)

    def set_aside(self, key: str, new_key: str) -> bool:
        if key not in self.hung or new_key in self.busy:
            return False
        self.hung.remove(key)
        self.hung.add(new_key)
        self.busy[new_key] = self.busy.pop(key)
        return True

    def is_free(self, key: str) -> bool:
        return key not in self.busy

    def hang(self, key: str, place: int = 0) -> None:
        """The deadline passes while the child looks at the process in this place of its request."""
        self.hung.add(key)
        self.busy[key].then(Answer(1, key, None, "no answer", timed_out=True, place=place))

    def finish(self, key: str, value: Any = None, error: str | None = None, place: int = 0) -> None:
        self.busy.pop(key).then(Answer(1, key, value, error, place=place))

    def come_back(self, key: str) -> None:
        """A hung child returns; its answer is dropped."""
        self.hung.discard(key)
        del self.busy[key]


class World:
    """A table of processes, none of which is real."""

    def __init__(self, *pids: int, state: str = "S") -> None:
        self.probes = FakeProbes()
        self.table = ProcessTable()
        self.looks = UserLooks(self.probes, self.table)  # type: ignore[arg-type]
        self.looks.refusal = lambda uid: None  # type: ignore[method-assign]
        self.identities = Identities(self.looks)
        for pid in pids:
            self.add(pid, state)

    def add(self, pid: int, state: str = "S", uid: int = 1000) -> None:
        known = ProcessFacts(pid, 0, 1, "python", uid)
        self.table.entries[pid] = Entry(known, Stat("python", state, 1, 0, 0, 0))
        self.table.to_identify.add(pid)

    def give(self, pid: int, uid: int) -> None:
        """The process is this user's."""
        entry = self.table.entries[pid]
        entry.known = replace(entry.known, uid=uid)

    def ask(self) -> dict[str, list[int]]:
        """One tick: the pids that each child was asked about just now."""
        before = {key: id(asked.request) for key, asked in self.probes.busy.items()}
        self.identities.ask(0.0, 1.0)
        return {
            key: self.asked_about(key)
            for key, asked in self.probes.busy.items()
            if before.get(key) != id(asked.request)
        }

    def asked_about(self, key: str) -> list[int]:
        """The processes that a child is busy with."""
        request = self.probes.busy[key].request
        assert isinstance(request, IdentifyProcesses)
        return request.pids

    def answer(self, key: str, most: int = 1000) -> None:
        """The child has identified these, the first `most` of them."""
        pids = self.asked_about(key)[:most]
        found = [IdentifiedProcess(pid=pid, start_ticks=pid * 10, environ={"RANK": "1"}, exe="python") for pid in pids]
        self.probes.finish(key, found)
