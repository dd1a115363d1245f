"""What a replayed controller has in the place of an event loop that waits, Slurm, nodes, a database and levers: they
answer from the recording, and change nothing.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from itertools import count
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.controller.actions.decision_inputs import subject_of
from slurm_watchdog.controller.actions.driver import Driver
from slurm_watchdog.controller.actions.manager import Actions
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.journal.database import Database
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import Journal, NodeEntry
from slurm_watchdog.model.actions import ActionRun, Decision
from slurm_watchdog.model.protocol import Command, CommandResult
from slurm_watchdog.model.slurm import SlurmView
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.recording.entries import Answer, Ended, State
from slurm_watchdog.slurm.client import SlurmUnavailable

A_DRAIN = NodeEntry(node="", what="drained", job_id="", decision_id="", at=0.0, reason="")
"""Of which node is not recorded: drains are counted."""


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers come when whoever drives it has come to their time, `now`; nothing else comes."""

    def __init__(self, now: float) -> None:
        self.now = self._target = now
        selector = selectors.SelectSelector()
        selector.select = self._skip  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_to(self, target: float) -> None:
        """All that is due until then, each thing at its time."""
        self._target = max(self.now, target)
        self.run_forever()

    def _skip(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        until = self.now + (float("inf") if timeout is None else timeout)
        self.now = min(until, self._target)
        if until > self._target:
            self.stop()
        return []

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """No threads: what they would do is done at once."""
        future = self.create_future()
        future.set_result(func(*args))
        return future


class RecordedSlurm:
    """Answers as it did, and has no other request: a replay makes none."""

    answer = Answer(why_not="no listing yet", answered=False)

    async def read_view(self) -> SlurmView:
        if self.answer.view is None:
            raise SlurmUnavailable(self.answer.why_not, answered=self.answer.answered)
        return self.answer.view

    def notes(self) -> tuple[str, ...]:
        return ()


class RecordedCommands(CommandQueue):
    """Commands of the replay are answered by what was answered to the same ones in the recording."""

    def __init__(self) -> None:
        super().__init__()
        self._here: dict[tuple[str, Command], str] = {}  # Node and the rest of a command -> its id here.
        self._recorded: dict[str, tuple[str, Command]] = {}  # Id in the recording -> the same.
        self.on_ask = lambda node, command: self._here.update({_key(node, command): command.id})

    def note(self, node: str, command: Command) -> bool:
        """The recorded controller asked this. Returns whether the replay asks it, too."""
        self._recorded[command.id] = key = _key(node, command)
        return self._here.get(key) in self._futures

    def resolve(self, result: CommandResult) -> None:
        key = self._recorded.pop(result.command_id, None)
        if key in self._here:
            super().resolve(replace(result, command_id=self._here[key]))


def _key(node: str, command: Command) -> tuple[str, Command]:
    return node, replace(command, id="", expires_s=0.0)


class ReplayJournal(Journal):
    """The real journal, in memory, with what the recorded controller knew of its own; it fails when that one's did."""

    state = State()

    def __init__(self) -> None:
        self.decided: list[Decision] = []  # In the order in which they were made.
        super().__init__("sqlite://", lambda url: Database(url, check=self._check))

    def _check(self, _: object = None) -> None:
        if self.state.journal_error is not None:
            raise JournalError(self.state.journal_error)

    def paused(self) -> tuple[str, str, float] | None:
        self._check()
        return None if self.state.paused is None else (self.state.paused, "", clock.wall())

    def add_decision(self, decision: Decision) -> None:
        super().add_decision(decision)
        self.decided.append(decision)

    def node_entries(self, what: str, job_id: str | None = None) -> list[NodeEntry]:
        return [*super().node_entries(what, job_id), *((A_DRAIN,) * (self.state.drained if what == "drained" else 0))]


class ReplayActions(Actions):
    """Carries nothing out. What the recorded controller did is under way until the recording has its end; what only the
    replay allows, until the run that it is about is over."""

    state = State()  # Of the recorded controller.

    def drive(self, run: ActionRun) -> None:
        self._drivers[run.decision.id] = Driver(run, self._tools)

    def acting(self) -> frozenset[str]:
        decisions = [driver.run.decision for driver in self._drivers.values()]
        return frozenset(each.incident_id for each in decisions if subject_of(each) in self.state.acting)

    def sweep(self, now: float) -> None:
        for decision in [driver.run.decision for driver in self._drivers.values()]:
            if (fence := decision.fence) is not None and subject_of(decision) not in self.state.acting:
                job = self._state.jobs.get(fence.job_id)
                if job is None or job.restarts != fence.restarts or job.state not in RUNNING:
                    del self._drivers[decision.id]

    def end(self, ended: Ended) -> None:
        """An action of the recorded controller has ended."""
        runs = (each.run for each in self._drivers.values() if subject_of(each.run.decision) == ended.subject)
        if (run := next(runs, None)) is not None:
            del self._drivers[run.decision.id]
            self._writer.write(lambda: self._journal.end_action(run.decision.id, ended.end))
            self._ended(replace(run, end=ended.end))


def numbered_ids() -> Callable[[], str]:
    """Ids that are the same in every replay: r1, r2, …"""
    return map("r{}".format, count(1)).__next__
