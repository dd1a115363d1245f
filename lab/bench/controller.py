"""A controller that takes every report and tells what the real one tells; its own cost is not the agent's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer

from slurm_watchdog.model.protocol import JobWatch, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import decode_report, encode_reply
from tests.helper_process import AGENT_UID
from tests.munged import Munged, munged
from tests.proven_server import Proof, handler


@dataclass
class Controller:
    """What arrived so far."""

    watch: tuple[JobWatch, ...]
    port: int = 0
    munged: Munged = field(default_factory=lambda: Munged("", 0))
    """By which the agent and this controller prove themselves: it costs the agent what it costs on a cluster."""
    arrived: list[float] = field(default_factory=list)
    """Monotonic clock at each report."""
    sizes: list[int] = field(default_factory=list)
    last: Report | None = None
    news: threading.Event = field(default_factory=threading.Event)

    def accept(self, body: bytes) -> bytes:
        """Notes one report, and answers as the controller does while nothing is wrong."""
        self.last = decode_report(body)
        self.arrived.append(time.monotonic())
        self.sizes.append(len(body))
        self.news.set()
        jobs = tuple(watch.job_id for watch in self.watch)
        return encode_reply(Reply(watch=self.watch, running=jobs, controller_id="bench"))

    def wait_for_report(self, seconds: float) -> Report:
        """The next report. Raises TimeoutError if none comes."""
        self.news.clear()
        if not self.news.wait(seconds) or self.last is None:
            raise TimeoutError(f"the agent has sent no report for {seconds:.0f} s")
        return self.last


@contextmanager
def listening(watch: tuple[JobWatch, ...]) -> Iterator[Controller]:
    """The controller while the block runs."""
    controller = Controller(watch)

    with (
        munged() as controller.munged,
        ThreadingHTTPServer(
            ("127.0.0.1", 0), handler(Proof(controller.munged, frozenset({AGENT_UID})), controller.accept)
        ) as server,
    ):
        server.daemon_threads = True
        controller.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield controller
        finally:
            server.shutdown()
            thread.join(10)
