"""A controller that takes every report and tells what the real one tells; its own cost is not the agent's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slurm_watchdog.model.protocol import JobWatch, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_report
from tests.munged import Munged, munged
from tests.proven_server import serving
from tests.rig.rights import AGENT_UID


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

    def accept(self, report: Report) -> Reply:
        """Notes one report, and answers as the controller does while nothing is wrong."""
        self.last = report
        self.arrived.append(time.monotonic())
        self.sizes.append(len(encode_report(report)))
        self.news.set()
        jobs = tuple(watch.job_id for watch in self.watch)
        return Reply(watch=self.watch, running=jobs, controller_id="bench")

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
        serving(controller.munged, controller.accept, frozenset({AGENT_UID})) as port,
    ):
        controller.port = port.number
        yield controller
