"""Two controllers on one journal, in simulated time: the active one dies, is stopped, is cut off from the database, and
the other one takes its place; the one that was stopped moves again and does not know.

The lease is the real one, on a SQLite that has the five functions of PostgreSQL which it uses. A controller that is
stopped stays in the middle of its stack, while the next one's loop runs on top of it: the world has one thread.
A stop inside of a transaction is a death here: PostgreSQL ends the transaction of one that is idle for four
seconds, two before anybody takes the lease (tests/unit/journal/test_lease.py has it on a real one).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from slurm_watchdog.controller.standby import LOOK_EVERY_S
from slurm_watchdog.journal.database import open_engine
from slurm_watchdog.journal.lease import CHECK_EVERY_S, RENEW_EVERY_S, Lease
from tests.simulation.controller import Life
from tests.simulation.sim import Simulation
from tests.simulation.timeline import Killed


class SimLease(Lease):
    """The real one, on SQLite."""

    def __init__(self, url: str, name: str, now: Callable[[], float]):
        super().__init__(url, name)
        self._now = now
        self.go_on_at(url)

    def go_on_at(self, url: str) -> None:
        self._database.engine = open_engine(sa.make_url(url))
        sa.event.listen(self._database.engine, "connect", self._add_functions)

    def _add_functions(self, connection: sqlite3.Connection, record: object) -> None:
        """What PostgreSQL has: its clock in seconds, an interval likewise."""
        connection.create_function("clock_timestamp", 0, self._now)
        connection.create_function("make_interval", 7, lambda *parts: parts[6])
        connection.create_function("extract", 2, lambda part, seconds: seconds)
        connection.create_function("hashtext", 1, lambda text: 0)
        connection.create_function("pg_advisory_xact_lock", 1, lambda key: None)

    def let_go(self) -> None:
        self._database.close()


class Service:
    """One of the two machines, and the process on it: it waits, or has a life as the active one."""

    def __init__(self, number: int, zero: float):
        self.number, self.zero = number, zero
        """Of its monotonic clock."""
        self.lag_s = 0.0
        """What that clock missed, of a virtual machine that was paused."""
        self.up_at = 0.0
        """When its process was, or is, started."""
        self.lease: SimLease | None = None
        self.life: PairLife | None = None


class PairLife(Life):
    """One process while it is the active controller."""

    sim: Pair

    def __init__(self, sim: Pair, service: Service, lease: SimLease):
        super().__init__(sim)
        self.service, self.lease, self.check = service, lease, lease.check
        self.stopped = False
        self.cut_until = 0.0
        self.loop.while_frozen(lambda until: sim.stop_here(self, until))
        self._main_task: asyncio.Task[None] | None = None

    def is_active(self) -> bool:
        return self.lease.is_held()

    def may_ask(self, request: str) -> bool:
        self.may_die(f"before {request}")
        if self.sim.timeline.now < self.cut_until or not self.is_active() or not self.lease.confirm():
            return False
        if self.lease.epoch != self.sim.epoch:
            self.sim.complain(f"a controller that was replaced asked for {request}")
        return True

    def why_no_journal(self) -> str:
        if self.sim.timeline.now < self.cut_until:
            return "The journal failed: the server closed the connection. Nothing is done until it works again."
        return super().why_no_journal()

    def wrote(self, stage: str) -> None:
        if self.lease.epoch != self.sim.epoch:
            self.sim.complain(f"a controller that was replaced wrote {stage}")

    def run_until(self, t: float) -> None:
        """Until then, or until it is dead."""
        sim = self.sim
        with sim.as_one(self.service, self):
            try:
                if self._main_task is None:
                    self._main_task = self.loop.create_task(self._main())
                    self._main_task.add_done_callback(lambda _: self.loop.stop())
                self.loop.run_until(t)
                if self._main_task.done():
                    self.lease.close()
                    self.end()
            except Killed:
                self.end()

    def end(self) -> None:
        if not self.dead:
            self.bury()
            self.lease.let_go()
            self.service.lease, self.service.lag_s = None, 0.0
            self.service.up_at = self.sim.timeline.now + self.sim.rng.uniform(*self.sim.recipe.restart_after_s)


class Pair(Simulation):
    """A simulation with two controllers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.services = [Service(number, self.rng.uniform(0, 1e6)) for number in range(2)]
        self.holder: PairLife | None = None
        """Who has the lease, or had it last."""
        self.epoch = 0
        """Of the newest lease that was taken."""
        self.takeovers = 0
        self._clock = self.services[0]
        self._asks: dict[str, int] = dict.fromkeys(self.agents, 0)
        """Node -> the controller that its agent turns to."""
        self._waits_for: dict[str, int] = {}
        """Node -> the one that has not answered it yet."""

    # ------------------------------------------------------------------------------------ running

    def _live(self) -> None:
        preparing = SimLease(self.url, "", lambda: self.timeline.now)
        preparing.prepare()
        preparing.let_go()
        for service in self.services:
            self.timeline.after(LOOK_EVERY_S * (1 + service.number), lambda service=service: self._look(service))
        self._drive(float("inf"))
        for service in self.services:
            if service.life is not None:
                service.life.end()

    def _drive(self, until: float) -> None:
        """Whoever is the active one lives, until then."""
        while self.timeline.now < (end := min(until, self.recipe.until_s)):
            if self._lives():
                assert self.holder is not None
                self.holder.run_until(end)
            else:
                self.timeline.advance(end, self._lives)

    def _lives(self) -> bool:
        return self.holder is not None and not self.holder.dead and not self.holder.stopped

    @contextmanager
    def as_one(self, service: Service, life: Life | None) -> Iterator[None]:
        """In it clocks are those of `service`, and `life` is who does something."""
        before, self._clock, self.life = (self._clock, self.life), service, life
        try:
            yield
        finally:
            self._clock, self.life = before

    def monotonic(self) -> float:
        return self.timeline.now + self._clock.zero - self._clock.lag_s

    def complain(self, text: str) -> None:
        self.complaints.append(f"{self.timeline.now:.0f}: {text}")

    # ------------------------------------------------------------------------------------ the lease

    def _look(self, service: Service) -> None:
        """The standby's look, as slurm_watchdog.controller.standby does it; the database is not asked while the
        active one renews."""
        now, holder = self.timeline.now, self.holder
        self.timeline.after(LOOK_EVERY_S, lambda: self._look(service))
        renews = self._lives() and holder is not None and now >= holder.cut_until
        if renews or now < service.up_at or (service.life is not None and not service.life.dead) or self.journal_full:
            return
        if service.lease is None:
            service.lease = SimLease(self.url, f"mgmt{service.number}", lambda: self.timeline.now)
        with self.as_one(service, self.life):
            if not service.lease.take():
                return
        self.lives += 1
        self.takeovers += self.epoch > 0
        self.epoch = service.lease.epoch
        if self._lives():
            self.complain("two controllers were active")
        service.life = self.holder = PairLife(self, service, service.lease)
        self.cluster.deed("us", "controller starts", detail=f"{service.number} epoch {self.epoch}")
        self._renew_always(service.life)
        self._watch(service.life)

    def _renew(self, life: PairLife) -> None:
        if not life.dead and not life.stopped and self.timeline.now >= life.cut_until:
            with self.as_one(life.service, self.life):
                life.lease.renew()

    def _renew_always(self, life: PairLife) -> None:
        self._renew(life)
        if not life.dead:
            self.timeline.after(RENEW_EVERY_S, lambda: self._renew_always(life))

    def _watch(self, life: PairLife) -> None:
        """Ends it when the lease was not renewed in time, as `Lease.keep` does."""
        if life.dead or life.stopped:
            return
        with self.as_one(life.service, self.life):
            left_s = life.lease.until - self.monotonic()
        if left_s <= 0:
            self.cluster.deed("fault", f"controller {life.service.number} has lost its lease")
            life.loop.kill()
        else:
            self.timeline.after(left_s + self.rng.uniform(0, CHECK_EVERY_S), lambda: self._watch(life))

    # ------------------------------------------------------------------------------------ what goes wrong

    def befall(self, what: str, seconds: float) -> None:
        """The one that does something now: `stop` and `machine` (its clock stops, too) in the middle of what it
        does, `freeze` at its next await, `cut` off from the database, `end` as systemd ends a service."""
        life = self.life
        if not isinstance(life, PairLife):
            return
        number = life.service.number
        if what == "freeze":
            life.loop.freeze(seconds)
            return
        if what == "end":
            self.cluster.deed("fault", f"controller {number} is ended")
            life.loop.call_soon(life.stop.set)
        elif what == "cut":
            self.cluster.deed("fault", f"controller {number} is cut off for {seconds:.0f} s")
            life.cut_until = self.timeline.now + seconds
        elif life.journal is None or life.journal.is_open:
            self.cluster.deed("fault", f"controller {number} dies in a transaction")
            raise Killed
        else:
            self.stop_here(life, self.timeline.now + seconds, clock_stops=what == "machine")

    def stop_here(self, life: PairLife, until: float, *, clock_stops: bool = False) -> None:
        """`life`, which calls this, does nothing until then; the world and the other controller go on."""
        began = self.timeline.now
        self.cluster.deed("fault", f"controller {life.service.number} is stopped until {until:.0f}")
        life.stopped = True
        with self.as_one(life.service, None):
            self._drive(until)
        life.stopped = False
        if self.timeline.now >= self.recipe.until_s:
            raise Killed
        self.cluster.deed("fault", f"controller {life.service.number} moves again")
        stopped_s = self.timeline.now - began
        if stopped_s > max(5.0, 5.0 * self.recipe.tick_s):
            life.seeing_from = self.timeline.now
        if clock_stops:
            life.service.lag_s += stopped_s
            self.timeline.after(self.rng.uniform(0, RENEW_EVERY_S), lambda: self._wake(life))
        else:
            self._wake(life)

    def _wake(self, life: PairLife) -> None:
        """Which of its two threads is first is chance, and what the loop does before either."""
        if self.rng.random() < 0.5:
            self._renew(life)
        self.timeline.after(self.rng.uniform(0, CHECK_EVERY_S), lambda: self._watch(life))

    # ------------------------------------------------------------------------------------ agents

    def _post(self, node: str, body: bytes, answer: Callable[[bytes | None], None]) -> bool:
        """To the controller that the agent turns to; after a failure to the other one."""
        number = self._asks[node]
        if self._waits_for.pop(node, None) == number:  # it has given up waiting
            number = 1 - number
        self._asks[node] = number
        life = self.services[number].life
        if life is None or life.dead:  # the standby refuses, or nobody listens
            self._asks[node] = 1 - number
            return False

        def back(reply: bytes | None) -> None:
            self._waits_for.pop(node, None)
            if reply is None:
                self._asks[node] = 1 - number
            answer(reply)

        self._waits_for[node] = number
        life.receive(node, body, back)
        return True

    # ------------------------------------------------------------------------------------ across a fork

    def let_go(self) -> None:
        super().let_go()
        for service in self.services:
            if service.lease is not None:
                service.lease.let_go()

    def go_on_at(self, url: str) -> None:
        super().go_on_at(url)
        for service in self.services:
            if service.lease is not None:
                service.lease.go_on_at(url)
