"""The real controller, life after life, on simulated time: its real journal in a file, its real loop of coroutines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import sqlalchemy as sa

from slurm_watchdog.controller.app import live
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.journal.database import Database, JournalError, open_engine
from slurm_watchdog.journal.evidence import SqlEvidence
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import ActionEnd, Decision, Operation, OperationOutcome
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.notify.programs import Programs
from slurm_watchdog.wire.codec import decode_report, encode_reply
from tests.simulation.slurm import SimSlurm
from tests.simulation.timeline import Killed, SimLoop

if TYPE_CHECKING:
    from tests.simulation.sim import Simulation


class NoPeople:
    """Messages arrive nowhere."""

    async def post(self, notices: object) -> None:
        return None


class SimDatabase(Database):
    """The real database; a controller that is dead does not write into it, and its disk may be full."""

    def __init__(self, url: str, life: Life):
        self._life = life
        super().__init__(url, check=life.check)

    @property
    def is_open(self) -> bool:
        """Whether a transaction of several writes is under way."""
        return self._open is not None

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        if self._life.dead:
            raise Killed
        why = self._life.why_no_journal()
        if why:
            raise JournalError(why)
        with super().transaction() as sql:
            yield sql


class SimEvidence(SqlEvidence):
    """The real evidence; the controller may die before or after each write."""

    def __init__(self, database: Database, write: Callable[[str, Callable[[], None], str], None]):
        super().__init__(database)
        self._write = write

    def add(self, incident_id: str, at: float, kind: str, packed: str, collection: str | None = None) -> None:
        def work() -> None:
            super(SimEvidence, self).add(incident_id, at, kind, packed, collection)

        self._write("evidence", work, incident_id)


class SimJournal(Journal):
    """The real journal; the controller may die before or after each write."""

    _database: SimDatabase

    def __init__(self, url: str, life: Life):
        self._life = life
        super().__init__(url, lambda url: SimDatabase(url, life))
        self.evidence = SimEvidence(self._database, self._write)

    def _write(self, stage: str, work: Callable[[], None], detail: str) -> None:
        self._life.may_die(f"before {stage}")
        work()
        self._life.wrote(stage)
        self._life.sim.cluster.deed("us", f"journal {stage}", detail=detail)
        self._life.may_die(f"after {stage}")

    def add_decision(self, decision: Decision) -> None:
        def work() -> None:
            self._life.sim.note_circumstances(decision)
            super(SimJournal, self).add_decision(decision)
            self._life.sim.note_open(decision)

        self._write("decision", work, decision.id)

    def operation_intent(
        self, decision_id: str, operation: Operation, attempt: int, at: float, detail: str = ""
    ) -> None:
        self._write(
            f"intent {operation}",
            lambda: super(SimJournal, self).operation_intent(decision_id, operation, attempt, at, detail),
            f"{decision_id} {attempt}",
        )

    def operation_outcome(
        self,
        decision_id: str,
        operation: Operation,
        attempt: int,
        outcome: OperationOutcome,
        at: float,
        detail: str,
    ) -> None:
        self._write(
            f"outcome {operation} {outcome}",
            lambda: super(SimJournal, self).operation_outcome(decision_id, operation, attempt, outcome, at, detail),
            f"{decision_id} {attempt}",
        )

    def end_action(self, decision_id: str, end: ActionEnd) -> None:
        def work() -> None:
            super(SimJournal, self).end_action(decision_id, end)
            self._life.sim.open_actions.discard(decision_id)

        self._write("end", work, decision_id)

    @property
    def is_open(self) -> bool:
        """Whether a transaction of several writes is under way."""
        return self._database.is_open

    # ------------------------------------------------------------------------------------ across a fork

    def let_go(self) -> None:
        """Closes the file, silently: the next write opens it again."""
        self._database.engine.dispose()

    def go_on_at(self, url: str) -> None:
        """The next write goes to another file."""
        self._database.engine = open_engine(sa.make_url(url))


class Life:
    """One process of the controller, from its start to its end."""

    check: Callable[[sa.Connection], None] | None = None
    """First in every transaction of the journal."""

    def __init__(self, sim: Simulation):
        self.sim = sim
        self.dead = False
        self.started = self.seeing_from = sim.timeline.now
        self.rng = random.Random(f"life {sim.recipe.seed} {sim.lives}")
        self.loop = SimLoop(sim.timeline)
        self.slurm = SimSlurm(sim.cluster, self.rng, sim.recipe.weather, self.may_ask)
        self.stop = asyncio.Event()
        self.controller: Controller | None = None
        self.journal: SimJournal | None = None
        self.heard: dict[str, float] = {}
        """Node -> when its last report was taken over."""

    def reseed(self, name: str) -> None:
        self.rng.seed(name)

    def may_die(self, stage: str) -> None:
        if self.dead or self.sim.dies_at(stage):
            self.sim.cluster.deed("fault", f"controller dies {stage}")
            raise Killed

    def is_active(self) -> bool:
        return True

    def may_ask(self, request: str) -> bool:
        """Whether it may change anything in Slurm now."""
        return True

    def why_no_journal(self) -> str:
        """Why the database takes nothing; empty if it does."""
        return "The journal has no room: its disk is full." if self.sim.journal_full else ""

    def wrote(self, stage: str) -> None:
        """Something is in the journal."""

    def run(self) -> None:
        """Until it is killed, or cannot start."""
        try:
            self.loop.run_until_complete(self._main())
        except Killed:
            pass
        finally:
            self.bury()

    def bury(self) -> None:
        self.dead = True
        self.loop.bury()
        if self.journal is not None:
            self.journal.close()

    async def _main(self) -> None:
        try:
            self.journal = SimJournal(self.sim.url, self)
        except JournalError:
            return  # exit code 2; systemd starts it again
        people = Programs("people", NoPeople().post)
        notifier = Notifier(self.journal.outbox, (people, *self.sim.listeners), poll_s=30.0)
        try:
            self.controller = Controller(
                self.sim.config, journal=self.journal, slurm=self.slurm, notifier=notifier, metrics=ControllerMetrics(),
            )  # fmt: skip
        except JournalError:
            return
        await live(self.controller, notifier, self.stop)

    def receive(self, node: str, body: bytes, answer: Callable[[bytes | None], None]) -> None:
        """A report has arrived; it is read when the controller comes to it."""

        def handle() -> None:
            if not self.is_active():
                answer(None)
            elif self.controller is not None:
                report = decode_report(body)
                reply = self.controller.accept(report)
                self.heard[node] = self.sim.timeline.now
                answer(encode_reply(reply))

        if not self.dead:
            self.loop.call_soon(handle)

    def freeze(self, seconds: float) -> None:
        self.loop.freeze(seconds)
        if seconds > max(5.0, 5.0 * self.sim.recipe.tick_s):
            self.seeing_from = self.sim.timeline.now + seconds
