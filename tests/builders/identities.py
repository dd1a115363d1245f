"""Processes to be identified, none of which is real, and children that answer when the test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_watchdog.agent.proc.entry import Entry, ProcessFacts, Stat
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.identity_cache import Identities
from slurm_watchdog.agent.workers.answer_types import IdentifiedProcess
from slurm_watchdog.agent.workers.request_types import IdentifyProcesses, Request
from slurm_watchdog.agent.workers.worker import Answer


@dataclass
class Asked:
    key: str
    request: Request[None]
    then: Callable[[Answer[None]], None]
    on_part: Callable[[Any], None]


@dataclass
class FakeProbes:
    """Children by name that are busy until the test lets them answer, hang or return."""

    busy: dict[str, Asked] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)

    def ask(
        self, key: str, request: Request[None], deadline_s: float, now: float,
        then: Callable[[Answer[None]], None], *, on_part: Callable[[Any], None],
    ) -> int | None:  # fmt: skip
        if key in self.busy:
            return None
        self.busy[key] = Asked(key, request, then, on_part)
        return len(self.busy)

    def rename(self, key: str, new_key: str) -> bool:
        if key not in self.hung or new_key in self.busy:
            return False
        self.hung.remove(key)
        self.hung.add(new_key)
        self.busy[new_key] = self.busy.pop(key)
        return True

    def is_free(self, key: str) -> bool:
        return key not in self.busy

    def hang(self, key: str) -> None:
        """The deadline passes."""
        self.hung.add(key)
        request = self.busy[key]
        request.then(Answer(1, key, None, "no answer", timed_out=True))

    def finish(self, key: str, error: str | None = None) -> None:
        self.busy.pop(key).then(Answer(1, key, None, error))

    def come_back(self, key: str) -> None:
        """A hung child returns; its answer is dropped."""
        self.hung.discard(key)
        del self.busy[key]


class World:
    """A table of processes, none of which is real."""

    def __init__(self, *pids: int, state: str = "S") -> None:
        self.probes = FakeProbes()
        self.table = ProcessTable()
        self.identities = Identities(self.probes, self.table)  # type: ignore[arg-type]
        for pid in pids:
            self.add(pid, state)

    def add(self, pid: int, state: str = "S") -> None:
        known = ProcessFacts(pid, pid * 10, 1, "python", 1000)
        self.table.entries[pid] = Entry(known, Stat("python", state, 1, 0, 0, pid * 10))
        self.table.to_identify.add(pid)

    def give(self, pid: int, uid: int) -> None:
        """The process is this user's."""
        entry = self.table.entries[pid]
        entry.known = replace(entry.known, uid=uid)

    def ask(self) -> dict[str, list[int]]:
        """One tick: the pids that each child was asked about just now."""
        before = {key: id(request) for key, request in self.probes.busy.items()}
        self.identities.ask(0.0, 1.0)
        return {
            key: sorted(pid for pid, _ in self.asked_about(key))
            for key, asked in self.probes.busy.items()
            if before.get(key) != id(asked)
        }

    def asked_about(self, key: str) -> list[tuple[int, int | None]]:
        """(pid, start) of the processes that a child is busy with."""
        request = self.probes.busy[key].request
        assert isinstance(request, IdentifyProcesses)
        return request.processes

    def answer(self, key: str, *pids: int) -> None:
        """The child has identified these."""
        for index, (pid, start) in enumerate(self.asked_about(key)):
            if pid in pids:
                found = IdentifiedProcess(index=index, pid=pid, start_ticks=start, environ={"RANK": "1"}, exe="python")
                self.probes.busy[key].on_part(found)
