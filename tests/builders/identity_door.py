"""A controller's port in a thread, for tests that come to it as an agent or as somebody else does.

Without `identity` it takes each client for the only user's agent: for tests of what comes after the proof.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from slurm_watchdog.agent.courier.streams import Controller, ProvenStream, Refused, TcpController
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.ingest.endpoint import OwnUser, ReportEndpoint
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report, State
from slurm_watchdog.wire import port as wire
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.frames import ORDERS, REPORT, TAKEN


class Port:
    """The port, what it took and what it refused."""

    def __init__(self, take: Callable[[Report], Reply] = lambda report: Reply(controller_id="c"), **options: Any):
        self.take = take
        self.metrics = ControllerMetrics()
        self.reports: list[Report] = []
        self.loop = options.pop("loop", None) or asyncio.new_event_loop()
        options = {"identity": OwnUser(0, ""), "address_of": None, **options}
        self.healthy = True, "well"
        self.door = ReportEndpoint(
            take=self._take, hold=self.hold, metrics=self.metrics, healthy=lambda: self.healthy, **options
        )
        self.server: wire.Port = self.door.server()
        self.server.only_uid = None  # these clients come by TCP; whose socket it is: test_unix.py
        self.number = 0

    def accept(self, report: Report) -> Reply:
        self.reports.append(report)
        return self.take(report)

    def _take(self, report: Report, before: object) -> tuple[object, Reply | None]:
        reply = self.accept(report)
        return reply, None if reply == before and not reply.commands else reply

    def hold(self, node: str, agent: tuple[str, str], said: State, before: object) -> tuple[object, Reply]:
        return None, self.accept(said.report(node, agent))

    def do(self, work: Callable[[], Any]) -> Any:
        """Calls `work` in the thread of the port."""

        async def call() -> Any:
            return work()

        return self.wait(call())

    def wait(self, coming: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coming, self.loop).result(30)

    def refused(self, reason: str) -> float:
        """How often connections were refused for this reason."""
        return (
            self.metrics.registry.get_sample_value("slurm_watchdog_refused_connections_total", {"reason": reason})
            or 0.0
        )

    def outcome(self, outcome: str) -> float:
        """How often a report, or a stream, came to this."""
        return self.metrics.registry.get_sample_value("slurm_watchdog_reports_total", {"outcome": outcome}) or 0.0

    def all_refused(self) -> dict[str, float]:
        """Everything that was refused, by reason."""
        return {
            sample.labels[label]: sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            for label in ("reason", "outcome")
            if sample.name in ("slurm_watchdog_refused_connections_total", "slurm_watchdog_reports_total")
            and label in sample.labels
            and sample.value
        }


@contextmanager
def listening(number: int = 0, **options: Any) -> Iterator[Port]:
    """The port on this number of 127.0.0.1, or a free one, while the block runs; `options` are those of the door."""
    port = Port(**options)
    thread = threading.Thread(target=port.loop.run_forever, daemon=True)
    thread.start()
    port.number = port.wait(port.server.start("127.0.0.1", number, 100))
    try:
        yield port
    finally:
        port.wait(port.server.cleanup())
        port.loop.call_soon_threadsafe(port.loop.stop)
        thread.join(10)
        port.loop.close()


def lost(port: Port, outcome: str) -> float:
    """How often a stream was lost in this way."""
    return port.metrics.registry.get_sample_value("slurm_watchdog_lost_streams_total", {"reason": outcome}) or 0.0


def url(port: Port, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{port.number}"


class Agent:
    """A real agent's streams to `controller`, and one report after the other; a new stream where the last one ended."""

    def __init__(self, controller: Controller):
        self.controller = controller
        self.restart: Callable[[], Controller] | None = None  # What a courier that starts makes of its files.
        self.link: ProvenStream | None = None
        self.why = ""  # The sentence of the last BYE.

    def report(self, node: str = "n1", sequence: int = 1) -> str:
        """`taken`, or the word of the BYE. Raises OSError for all else."""
        if self.link is None:
            self.controller.node = node
        return self.say(body_of(node, sequence))

    def say(self, body: bytes) -> str:
        """The same for any bytes."""
        if self.controller.is_renewed():
            assert self.restart is not None
            node, self.controller = self.controller.node, self.restart()
            self.controller.node = node
            self.close()
        try:
            self.link = self.link or self.controller.open(20.0)
            self.link.send(REPORT, body)
            while (frame := self.link.receive())[0] == ORDERS:
                pass
            assert frame[0] == TAKEN
        except Refused as error:
            self.close()
            self.why = str(error)
            return error.code
        except OSError:
            self.close()
            raise
        return "taken"

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None


def agent(port: Port, node: str = "n1") -> Agent:
    """One for a port without an identity."""
    return Agent(TcpController(url(port), node))


def body_of(node: str, sequence: int = 1) -> bytes:
    return encode_report(Report(node=node, boot_id="b", agent_id="a", sequence=sequence))


def until(seen: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits for a condition. Fails if it does not come."""
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
