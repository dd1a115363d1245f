"""What the controller of a replay is given in the place of time, Slurm, agents, a database and levers: they answer from
the recording, and change nothing.

What the recorded controller did is under way until the recording says how it ended; what the replay alone allows,
until the run that it is about is over.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.controller.actions.decision_inputs import subject_of
from slurm_watchdog.controller.actions.job_observer import Tools
from slurm_watchdog.controller.actions.manager import Actions
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.journal.database import Database
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import Journal, NodeEntry
from slurm_watchdog.model.actions import ActionRun, Decision
from slurm_watchdog.model.protocol import Command, CommandResult
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.recording.entries import Ended, Listing, NoAnswer, State
from slurm_watchdog.slurm.client import SlurmUnavailable

A_DRAIN = NodeEntry(node="", what="drained", job_id="", decision_id="", at=0.0, reason="")
"""Of which node is not recorded: drains are counted."""


class Unwaiting(selectors.SelectSelector):
    """Nothing comes from outside; `wait(seconds)` is called in the place of waiting."""

    wait: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.wait(timeout)
        return []


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers come when whoever drives it has come to their time: `now`."""

    def __init__(self, now: float) -> None:
        self.now = self._target = now
        selector = Unwaiting()
        selector.wait = self._skip
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_to(self, target: float) -> None:
        """All that is due until then, each thing at its time."""
        self._target = max(self.now, target)
        self.run_forever()

    def _skip(self, seconds: float | None) -> None:
        if seconds is None or self.now + seconds > self._target:
            self.now = self._target
            self.stop()
        else:
            self.now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """No threads: what they would do is done at once."""
        future = self.create_future()
        future.set_result(func(*args))
        return future


class RecordedSlurm:
    """Answers as it did, and has no other request: a replay makes none."""

    def __init__(self) -> None:
        self._jobs: dict[str, SlurmJob] = {}
        self._nodes: dict[str, SlurmNode] = {}
        self._answer: SlurmView | NoAnswer = NoAnswer(reason="no listing yet")

    def take(self, answer: Listing | NoAnswer) -> None:
        """The next answer."""
        if isinstance(answer, NoAnswer):
            self._answer = answer
            return
        for known, gone in ((self._jobs, answer.gone_jobs), (self._nodes, answer.gone_nodes)):
            for name in gone:
                known.pop(name, None)
        self._jobs.update((job.job_id, job) for job in answer.jobs)
        self._nodes.update((node.name, node) for node in answer.nodes)
        self._answer = SlurmView(
            jobs=tuple(self._jobs.values()), nodes=tuple(self._nodes.values()), dropped=answer.dropped,
            partial=answer.partial,
        )  # fmt: skip

    async def read_view(self) -> SlurmView:
        if isinstance(self._answer, NoAnswer):
            raise SlurmUnavailable(self._answer.reason, answered=self._answer.answered)
        return self._answer

    def notes(self) -> tuple[str, ...]:
        return ()


class RecordedCommands(CommandQueue):
    """Commands of the replay are answered by what was answered to the same ones in the recording."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = defaultdict[tuple[str, Command], deque[str]](deque)  # Ids here, by node and the rest of it.
        self._names: dict[str, str] = {}  # Id in the recording -> id here.
        self.on_ask = lambda node, command: self._asked[_key(node, command)].append(command.id)

    def note(self, node: str, command: Command) -> bool:
        """The recorded controller asked this. Returns whether the replay has asked it, too."""
        asked = self._asked[_key(node, command)]
        while asked and asked[0] not in self._futures:
            asked.popleft()  # no one waits for it any more
        if asked:
            self._names[command.id] = asked.popleft()
        return command.id in self._names

    def resolve(self, result: CommandResult) -> None:
        here = self._names.pop(result.command_id, None)
        if here is not None:
            super().resolve(replace(result, command_id=here))


def _key(node: str, command: Command) -> tuple[str, Command]:
    return node, replace(command, id="", expires_s=0.0)


class ReplayDatabase(Database):
    """In memory; it fails when the recorded one did."""

    why_not: str | None = None

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        if self.why_not is not None:
            raise JournalError(self.why_not)
        with super().transaction() as sql:
            yield sql


class ReplayJournal(Journal):
    """The real journal, in memory, with what the recorded controller knew of its own."""

    _database: ReplayDatabase

    def __init__(self) -> None:
        self._drained = 0
        self.decided: list[Decision] = []  # In the order in which they were made.
        super().__init__("sqlite://", ReplayDatabase)

    def follow(self, state: State) -> None:
        """Takes over whether nothing was to be done, and whether nothing could be written."""
        self._database.why_not = None
        before, self._drained = self.paused(), state.drained
        if state.journal_error is None and state.paused is None and before is not None:
            self.resume("", clock.wall())
        elif state.paused is not None and (before is None or before[0] != state.paused):
            self.pause(state.paused, "", clock.wall())
        self._database.why_not = state.journal_error

    def add_decision(self, decision: Decision) -> None:
        super().add_decision(decision)
        self.decided.append(decision)

    def node_entries(self, what: str, job_id: str | None = None) -> list[NodeEntry]:
        return [*super().node_entries(what, job_id), *((A_DRAIN,) * (self._drained if what == "drained" else 0))]


class ReplayActions(Actions):
    """Carries nothing out, and knows what is under way."""

    def __init__(self, tools: Tools):
        super().__init__(tools)
        self._runs: dict[str, ActionRun] = {}  # By decision.
        self._real: set[str] = set()  # Of them, under way in the recording, too: it says their ends.

    def drive(self, run: ActionRun) -> None:
        self._runs[run.decision.id] = run

    def is_busy(self, job_id: str) -> bool:
        fences = [run.decision.fence for run in self._runs.values()]
        return any(fence is not None and fence.job_id == job_id for fence in fences)

    def acting(self) -> frozenset[str]:
        return frozenset(self._runs[each].decision.incident_id for each in self._real)

    def sweep(self, now: float) -> None:
        """What nobody did is over with the run that it was to end."""
        for decision_id, run in list(self._runs.items()):
            fence = run.decision.fence
            if fence is None or decision_id in self._real:
                continue
            job = self._state.jobs.get(fence.job_id)
            if job is None or job.restarts != fence.restarts or job.state not in RUNNING:
                self._forget(decision_id)

    def follow(self, state: State) -> None:
        """What the recorded controller acted on. How one that is not among them any more ended is not known."""
        for decision_id, run in list(self._runs.items()):
            if subject_of(run.decision) in state.acting:
                self._real.add(decision_id)
            elif decision_id in self._real:
                self._forget(decision_id)

    def end(self, ended: Ended) -> None:
        """An action of the recorded controller has ended."""
        run = next((each for each in self._runs.values() if subject_of(each.decision) == ended.subject), None)
        if run is None:
            return
        self._forget(run.decision.id)
        self._writer.write(lambda: self._journal.end_action(run.decision.id, ended.end))
        self._ended(replace(run, end=ended.end))

    def _forget(self, decision_id: str) -> None:
        del self._runs[decision_id]
        self._real.discard(decision_id)


def numbered_ids() -> Callable[[], str]:
    """Ids that are the same in every replay: r1, r2, …"""
    numbers = iter(range(1, 1 << 62))
    return lambda: f"r{next(numbers)}"
