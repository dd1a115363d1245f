"""`python -m lab.bench.judging NODES JOBS INCIDENTS`: what a report (small, whole; from its bytes to those of the answer)
and a tick take of the processor in the real controller, in process and with a clock of its own: reports that come as in
life (one in six is whole, and each of a node that is asked for it), ticks without any, after news of 5 % of the nodes,
and after news of all. Mean milliseconds, as one JSON line."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from lab.bench.fleet_reports import WHOLE_EVERY, Shape, events_of, fault_of, logs_of, report_of, small_of
from lab.bench.storm import QuietSlurm
from slurm_watchdog.base import clock
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.app import COLLECT_AFTER
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report, State, is_state
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.notify.dispatcher import make_notifier
from slurm_watchdog.wire.codec import (
    decode_reply,
    decode_report,
    decode_state,
    encode_reply,
    encode_report,
    encode_state,
)
from tests.builders import views

CONFIG = (
    "controller: {warm_up: 0s, agent_silent_after: 2h}\n"
    "detectors: {gpu_fault: {recent: 2h}}\n"
    "mode: observe\n"
)  # fmt: skip
WARM_UP, MEASURED = 20, 4  # Rounds of 5 s in which every node reports once.


@dataclass
class Bench:
    shape: Shape
    controller: Controller
    faults: int
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    second: float = 0.0
    sequence: int = 0
    whole: dict[int, int] = field(default_factory=dict)
    """Node -> number of its newest whole report."""
    closely: dict[int, bool | None] = field(default_factory=dict)
    bases: dict[str, object] = field(default_factory=dict)
    """What the newest answer of each node depended on."""

    def reports(self, nodes: Iterable[int], number: int, into: str) -> None:
        for index in nodes:
            self.sequence += 1
            report = self._report(index, number, is_news=not into)
            is_short = is_state(report)
            body = encode_state(report) if is_short else encode_report(report)
            began = time.thread_time()
            reply = self._take(report, decode_state(body) if is_short else decode_report(body))
            answer = b"" if reply is None else encode_reply(reply)
            took_s = time.thread_time() - began
            if answer:
                self.closely[index] = decode_reply(answer).closely
            if into:
                self.took_s[into].append(took_s)
                self.took_s["small" if report.same_as else "whole"].append(took_s)

    def _report(self, index: int, number: int, *, is_news: bool) -> Report:
        """As the agent of this node makes it."""
        before = self.whole.get(index)
        fault = (fault_of(self.shape, index),) if number == 1 and index < self.faults else ()
        if before is None or self.closely.get(index) or is_news or fault or (number + index) % WHOLE_EVERY == 0:
            self.whole[index] = self.sequence
            report = replace(report_of(self.shape, index, number, index % 8), node_events=fault)
        else:
            report = small_of(self.shape, index, before)
        report = replace(
            report, agent_id=f"{index + 1:032x}", sequence=self.sequence, agent_version="0", made_s=1000.0 + self.second,
            state=bytes((number,)) if is_news and number >= WARM_UP else report.state,
        )  # fmt: skip
        if not self.shape.is_batch_host(index):
            return report
        events = events_of(self.shape, index, max(0, number - 1), number)
        return replace(report, logs=logs_of(self.shape, index, number), events=events)

    def _take(self, report: Report, said: Report | State) -> Reply | None:
        if isinstance(said, Report):
            self.bases[report.node], reply = self.controller.take(said, self.bases.get(report.node))
            return reply
        agent = report.boot_id, report.agent_id
        self.bases[report.node], reply = self.controller.hold(report.node, agent, said, self.bases.get(report.node))
        return reply

    def tick(self, into: str) -> None:
        self.second += 1.0
        began = time.thread_time()
        self.controller.tick()
        gc.collect(0)
        self.took_s[into].append(time.thread_time() - began)


async def measure(nodes: int, jobs: int, faults: int) -> dict[str, float]:
    shape, config = Shape(nodes=nodes, jobs=jobs), parse_config(CONFIG)
    names: dict[str | None, list[str]] = defaultdict(list)
    for index in range(nodes):
        names[shape.job_of(index)].append(shape.name(index))
    view = SlurmView(
        jobs=tuple(
            views.slurm_job(job_id=job, nodes=tuple(of), start_at=clock.wall() - 7200)
            for job, of in names.items()
            if job
        ),
        nodes=tuple(SlurmNode(name=name, address="", state="ALLOCATED") for of in names.values() for name in of),
    )
    journal = Journal(f"sqlite:///{tempfile.mkdtemp()}/journal.sqlite")
    notifier, slurm = make_notifier(config, journal.outbox), QuietSlurm(view)
    bench = Bench(
        shape,
        Controller(config, journal=journal, slurm=slurm, notifier=notifier, metrics=ControllerMetrics()),  # type: ignore[arg-type]
        faults,
    )
    began, date = clock.monotonic(), clock.wall()
    clock.monotonic, clock.wall = lambda: began + bench.second, lambda: date + bench.second
    await bench.controller.read_slurm()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    for number in range(WARM_UP + MEASURED):
        for part in range(5):
            bench.reports(range(part, nodes, 5), number, "report" if number >= WARM_UP else "")
            bench.tick("usual" if number >= WARM_UP else "")
        await bench.controller.read_slurm()
    for number in range(WARM_UP + MEASURED, WARM_UP + 2 * MEASURED):
        bench.tick("")
        bench.tick("nothing")
        bench.reports(range(max(1, nodes // 20)), number, "")
        bench.tick("five_percent")
        bench.reports(range(nodes), number, "")
        bench.tick("all")
    found = {name: round(1000 * sum(took) / len(took), 3) for name, took in bench.took_s.items() if name}
    return {"nodes": nodes, "jobs": jobs, "incidents": len(bench.controller.judge.incidents), **found}


if __name__ == "__main__":
    logging.getLogger("slurm_watchdog").setLevel(logging.ERROR)
    print(json.dumps(asyncio.run(measure(*map(int, sys.argv[1:4])))))
