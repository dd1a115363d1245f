"""A whole controller in this process, over a cluster that is made up, for bodies to go through; and what must
hold whatever they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.ingest.endpoint import OwnUser, ReportEndpoint
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.report import Report
from slurm_watchdog.notify.dispatcher import Notifier
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.connection import Connection
from slurm_watchdog.wire.frames import REPORT, FrameError
from slurm_watchdog.wire.stream_server import Stream
from tests.behaviour.cluster import EPOCH, Job, Scripted
from tests.fuzz.bodies import Bodies

STEP_S = 0.1
"""Simulated time between two bodies: what three nodes may send."""
TICK_EVERY = 100
GOOD_EVERY = 500
SHOWN = 600
"""Bytes of a body that did harm; the seed brings it back whole."""
OUTCOMES = frozenset({"taken", "garbage", "wrong_node", "too_large", "too_often"})


class Unharmed(AssertionError):
    """It was not."""


class Named(msgspec.Struct):
    node: str = "n1"


class Nowhere(asyncio.Transport):
    """What is written here is gone."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        return

    def close(self) -> None:
        return


class Place:
    """The controller, the door before it, and a clock of their own."""

    def __init__(self, journal: str):
        self.now = 1000.0
        self.cluster = Scripted(lambda: EPOCH + self.now)
        self.cluster.add_nodes("n1", "n2", "n3")
        for job_id in ("7", "8"):
            self.cluster.jobs[job_id] = Job(job_id, wants=1)
        self.journal = Journal(f"sqlite:///{journal}")
        self.metrics = ControllerMetrics()
        self.outcomes: Counter[str] = Counter()
        self._sequence = 0
        self.bodies = 0

    @contextlib.contextmanager
    def time(self) -> Iterator[None]:
        """Everybody lives by the clock of this place."""
        with clock.simulated(lambda: self.now, lambda: EPOCH + self.now):
            yield

    async def open(self) -> None:
        """Makes the controller; call it within `time` and within the loop that it will live in."""
        config = Config()
        notifier = Notifier(self.journal.outbox)
        self.controller = Controller(
            config, journal=self.journal, slurm=self.cluster, notifier=notifier, metrics=self.metrics
        )
        for _ in range(5):
            self.cluster.live()
        await self.controller.read_slurm()
        self.door = ReportEndpoint(
            identity=OwnUser(0, ""),
            address_of=None,
            take=self.controller.take,
            hold=self.controller.hold,
            metrics=self.metrics,
            healthy=self.controller.healthy,
        )

    async def close(self) -> None:
        await self.controller.evidence.close()
        await self.controller.collector.close()
        await self.controller.actions.close()
        self.journal.close()

    async def give(self, kind: str, body: bytes) -> str:
        """One body through the door and all that is behind it. Returns what came of it. Raises Unharmed."""
        self.now += STEP_S
        self.bodies += 1
        outcome = self._take(body)
        if outcome not in OUTCOMES:
            raise Unharmed(f"{kind}: {outcome} came of {body[:2000]!r}")
        self.outcomes[f"{kind} {outcome}"] += 1
        if self.bodies % TICK_EVERY == 0:
            await self.judge()
        if self.bodies % GOOD_EVERY == 0:
            self.good()
        return outcome

    def _take(self, body: bytes) -> str:
        """As on a stream that the node has opened that the body names."""
        client = Connection(self.door.server())
        client.transport, client.remote = Nowhere(), "127.0.0.1"
        stream = Stream(client, self.door)
        stream.is_open = True
        try:
            stream.node = msgspec.msgpack.decode(body, type=Named).node
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            stream.node = "n1"
        try:
            assert self.door.take_frame(stream, REPORT, body) is None
        except FrameError as error:
            stream.refuse(*error.args)
            return str(error.args[0])
        return "taken"

    async def judge(self) -> None:
        """Slurm is looked at, and a tick comes to its end. Raises Unharmed."""
        self.cluster.live()
        await self.controller.read_slurm()
        self.controller.tick()
        await asyncio.sleep(0)
        failed = {
            sample.labels["kind"]: sample.value
            for family in self.metrics.detector_failures.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and sample.value
        }
        if failed:
            raise Unharmed(f"detectors failed: {failed}")
        if self.controller.last_tick != self.now or not self.controller.healthy()[0]:
            raise Unharmed(f"it is not well: {self.controller.healthy()}")
        if self.bodies % (10 * TICK_EVERY) == 0:
            self.metrics.text()

    def good(self) -> None:
        """A report as agents send it is taken in between. Raises Unharmed."""
        self._sequence += 1
        self.now += 1.0
        report = Report(node="n3", boot_id="good", agent_id=f"good{self._sequence}", sequence=1)
        if (outcome := self._take(encode_report(report))) != "taken":
            raise Unharmed(f"a good report was not taken: {outcome}")

    def counted(self) -> dict[str, float]:
        """Reports by outcome, as the metrics have them."""
        return {
            sample.labels["outcome"]: sample.value
            for family in self.metrics.reports.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and sample.value
        }


class Loud(logging.Handler):
    """Keeps what was logged as an error: nobody's report is one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < 10:
            self.records.append(logging.Formatter().format(record))


async def fuzz(place: Place, number: int, seed: int, said: Any = lambda count: None) -> None:
    """`number` bodies. Raises Unharmed, with the seed and what it was."""
    bodies, loud = Bodies(seed), Loud()
    logging.getLogger("slurm_watchdog").addHandler(loud)
    await place.open()
    try:
        for count in range(number):
            kind, body = bodies.next()
            try:
                await place.give(kind, body)
            except Exception as error:
                raise Unharmed(
                    f"seed {seed}, body {count} ({kind}): {traceback.format_exc()[-2500:]}; body {body[:SHOWN]!r}"
                ) from error
            if loud.records:
                raise Unharmed(
                    f"seed {seed}, body {count} ({kind}): logged {loud.records[0][-3000:]}; body {body[:SHOWN]!r}"
                )
            if count % 10_000 == 9_999:
                said(count + 1)
    finally:
        logging.getLogger("slurm_watchdog").removeHandler(loud)
        await place.close()
