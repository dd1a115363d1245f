"""Thousands of incidents in one tick of the real controller: how long it holds the loop, when an action asked
for meanwhile begins, and what stands in a Slack that behaves as Slack does. In real time, with the messages'
own pace: two to three minutes."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lab.bench.figures import Figures, say
from lab.bench.fleet_reports import Shape, fault_of, report_of
from slurm_watchdog.base import clock
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.app import COLLECT_AFTER, live
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Operation
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.notify.dispatcher import make_notifier
from tests.builders import views
from tests.builders.slack_server import CHANNEL, FakeSlack

INCIDENTS = 5000
SPARE = 10
"""Nodes on which nothing is wrong: somebody asks for a restart of a job there."""
MESSAGES_PER_MINUTE = 5
MAX_TICK_S = 3.0
MAX_DELAY_S = 5.0
"""For an action that somebody asks for at the very moment of the storm: that tick, and its own writes."""
MAX_S = 400.0
CONFIG = """
mode: act
cluster_name: storm
controller: {{warm_up: 0s, agent_silent_after: 2h}}
detectors: {{gpu_fault: {{recent: 2h}}}}
notify:
  slack: {{token_file: {token}, channel: {channel}, api_url: "{url}/api/", messages_per_minute: {pace}}}
"""


class SlowTicks:
    """Takes the place of a tick's pieces: how long each tick took by itself, in seconds and in CPU seconds of
    this process."""

    def __init__(self, controller: Controller) -> None:
        self._pieces = controller.pieces
        self.took: list[tuple[float, float]] = []
        self.longest: list[float] = []
        """Of each tick, the CPU seconds of its longest piece."""
        self.then: Callable[[], object] | None = None
        """What somebody asks for while the next tick holds the loop."""
        self.asked_at = 0.0

    def __call__(self) -> Iterator[None]:
        if self.then is not None:
            asyncio.get_running_loop().call_soon(self.then)
            self.then, self.asked_at = None, time.monotonic()
        pieces, took, more = self._pieces(), [], True
        while more:
            began, cpu = time.monotonic(), time.process_time()
            more = next(pieces, self) is not self
            took.append((time.monotonic() - began, time.process_time() - cpu))
            if more:
                yield
        self.took.append((sum(wall for wall, _ in took), sum(cpu for _, cpu in took)))
        self.longest.append(max(cpu for _, cpu in took))


class Watched(Journal):
    """The real journal, and when the first operation of an action was written."""

    first_operation_at: float | None = None

    def operation_intent(
        self, decision_id: str, operation: Operation, attempt: int, at: float, detail: str = ""
    ) -> None:
        super().operation_intent(decision_id, operation, attempt, at, detail)
        self.first_operation_at = self.first_operation_at or time.monotonic()


@dataclass
class QuietSlurm:
    """Always the same answer."""

    view: SlurmView

    def notes(self) -> tuple[str, ...]:
        return ()

    async def read_view(self) -> SlurmView:
        return self.view

    async def read_job(self, job_id: str) -> SlurmJob | None:
        return next((job for job in self.view.jobs if job.job_id == job_id), None)

    async def close(self) -> None:
        return None


@dataclass
class Channel(FakeSlack):
    """Slack, with the time of each message that reached the channel or a thread."""

    times: list[float] = field(default_factory=list)

    def __init__(self) -> None:
        super().__init__()
        self.times = []

    def _keep(self, message: dict[str, Any]) -> str:
        self.times.append(time.monotonic())
        return super()._keep(message)


def run(figures: Figures) -> None:
    """Prints the figures; raises RuntimeError if the storm is not the one that was asked for."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)  # as the service does
    logging.getLogger("slurm_watchdog").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(asyncio.wait_for(_storm(figures, Path(directory)), MAX_S))


async def _storm(figures: Figures, directory: Path) -> None:
    shape = Shape(nodes=INCIDENTS + SPARE, jobs=INCIDENTS + SPARE)
    async with Channel().listening() as slack:
        assert isinstance(slack, Channel)
        text = CONFIG.format(
            token=slack.token_file(directory), channel=CHANNEL, url=slack.url, pace=MESSAGES_PER_MINUTE
        )
        config = parse_config(text)
        journal = Watched(f"sqlite:///{directory}/journal.sqlite")
        notifier = make_notifier(config, journal.outbox)
        controller = Controller(
            config,
            journal=journal,
            slurm=QuietSlurm(_view(shape)),
            notifier=notifier,
            metrics=ControllerMetrics(),  # type: ignore[arg-type]
        )
        ticks = controller.pieces = SlowTicks(controller)  # type: ignore[method-assign]
        stop = asyncio.Event()
        life = asyncio.create_task(live(controller, notifier, stop))
        try:
            await _measure(figures, shape, controller, ticks, slack)
        finally:
            stop.set()
            await life
            journal.close()


async def _measure(figures: Figures, shape: Shape, controller: Controller, ticks: SlowTicks, slack: Channel) -> None:
    await _until(lambda: controller.state.slurm_at is not None)
    for index in range(shape.nodes):
        controller.accept(_report(shape, index, 0))
    await _until(lambda: len(ticks.took) >= 4)
    before, stall = len(ticks.took), Stall()
    say(f"{INCIDENTS} jobs, a tick without news takes {ticks.took[-1][0]:.2f} s")
    for index in range(INCIDENTS):
        controller.accept(_report(shape, index, 1))
    waiting = asyncio.create_task(stall.watch())
    job = controller.state.jobs[shape.job_of(shape.nodes - 1) or ""]
    ticks.then = lambda: controller.decider.ask_restart(job, (), "a bench", "root")
    await _until(lambda: len(controller.judge.incidents) >= INCIDENTS)
    assert isinstance(controller.journal, Watched)
    journal = controller.journal
    await _until(lambda: journal.first_operation_at is not None and len(ticks.took) > before + 3)
    await _until(lambda: not journal.outbox.pending(1))
    waiting.cancel()

    wall_s, cpu_s = max(ticks.took[before:])
    # What others on this machine do while it runs is not the controller's: then the CPU time tells, and the
    # clock only roughly.
    restless = wall_s > 1.3 * cpu_s
    after = sorted(cpu for _, cpu in ticks.took[before + 2 :])
    strained = restless and cpu_s > MAX_TICK_S  # they share its caches, too
    figures.add("storm.tick_cpu_seconds", cpu_s, "s", at_most=MAX_TICK_S, doubtful=strained)
    figures.add(
        "storm.piece_cpu_seconds_max",
        max(ticks.longest[before:]),
        "s",
        at_most=MAX_TICK_S / 2,
        doubtful=strained,
    )
    figures.add("storm.tick_seconds", wall_s, "s", at_most=MAX_TICK_S, doubtful=restless)
    figures.add("storm.tick_cpu_seconds_before", ticks.took[before - 1][1], "s")
    figures.add("storm.tick_cpu_seconds_after", after[len(after) // 2], "s")
    delay_s = (journal.first_operation_at or 0.0) - ticks.asked_at
    figures.add("storm.action_delay_seconds", delay_s, "s", at_most=MAX_DELAY_S, doubtful=restless)
    figures.add("storm.event_loop_stall_max_s", stall.longest_s, "s", at_most=MAX_TICK_S, doubtful=restless)
    figures.add("storm.incidents_in_journal", _kept(journal), "1", at_least=INCIDENTS)
    figures.add("storm.slack_messages", len(slack.posts), "1")
    most = _most_in_a_minute(slack.times)
    figures.add("storm.slack_messages_a_minute_max", most, "1", at_most=MESSAGES_PER_MINUTE)
    figures.add("storm.incidents_in_digest", _told(slack), "1", at_least=INCIDENTS)


class Stall:
    """How long the event loop let somebody wait who wanted a turn every 10 ms."""

    longest_s = 0.0

    async def watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.longest_s = max(self.longest_s, time.monotonic() - before - 0.01)


def _view(shape: Shape) -> SlurmView:
    names = [shape.name(index) for index in range(shape.nodes)]
    jobs = tuple(
        views.slurm_job(job_id=shape.job_of(index), nodes=(name,), partition="gpu", start_at=clock.wall() - 7200)
        for index, name in enumerate(names)
    )
    return SlurmView(
        jobs=jobs,
        nodes=tuple(
            SlurmNode(name=name, address="127.0.0.1", state="ALLOCATED", partitions=("gpu",)) for name in names
        ),
    )


def _report(shape: Shape, index: int, number: int) -> Report:
    """All is well in round 0; a card has fallen off the bus in round 1."""
    report = report_of(shape, index, number, 0)
    events = (fault_of(shape, index),) if number else ()
    return replace(report, sequence=number + 1, agent_id=f"agent-{index}", node_events=events)


async def _until(done: Callable[[], object]) -> None:
    while not done():  # noqa: ASYNC110 - what is waited for are figures of the real controller, which sets no event
        await asyncio.sleep(0.05)


def _kept(journal: Journal) -> int:
    return sum(1 for incident in journal.load_open_incidents() if incident.kind.value == "gpu_fault")


def _most_in_a_minute(times: list[float]) -> int:
    return max(sum(1 for at in times if start <= at < start + 60.0) for start in times)


def _told(slack: FakeSlack) -> int:
    """How many job numbers the digests name, ranges unfolded."""
    found: set[int] = set()
    for post in slack.posts:
        for block in post["blocks"]:
            for line in re.findall(r"(?:×[^:\n]*:|• …) ([\d, -]+)", block.get("text", {}).get("text", "")):
                for part in re.findall(r"\d+(?:-\d+)?", line):
                    low, _, high = part.partition("-")
                    found.update(range(int(low), int(high or low) + 1))
    return len(found)
