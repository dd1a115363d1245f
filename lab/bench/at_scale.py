"""The controller as it is deployed, with thousands of agents that report to it: what it costs, how soon it
knows and decides."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench import fleet_slurm, fleet_tls
from lab.bench.controller_service import MAIN, FleetProcess, Prober, Service, fleet_options
from lab.bench.figures import Figures, quantile, say
from lab.bench.fleet_reports import Shape
from lab.bench.peers import free_port
from tests.munged import munged

MIB = 1024**2
MAX_CPU_PERCENT = 100.0
MAX_RSS_MB = 800.0
MAX_DECISION_S = 1.0
MAX_METRICS_MS = 100.0
MAX_SERIES = 20_000
MAX_STATUS_MS = 1000.0
MAX_STALL_MS = 1000.0
"""What the project promises of its controller with 10,000 agents and the configuration as shipped."""
SETTLE_S = 240.0
"""Time for all agents to have been taken the first time, or after a restart."""
QUIET_AFTER_RESTART_S = 50.0
"""An agent counts as silent after 40 s: so long nobody may have been accused."""


@dataclass(frozen=True)
class Options:
    """How large, how long."""

    nodes: int = 10_000
    jobs: int = 200
    workers: int = 0
    interval_s: float = 5.0
    seconds: float = 120.0
    warm_up_s: float = 30.0
    faults: int = 60
    """Nodes of which a GPU falls off the bus, one after the other, over the time of the measurement."""
    tls: bool = False
    """Whether agents prove themselves by certificates, not by MUNGE; the figures are then called `controller_tls.…`."""
    restart: bool = True
    outage: bool = True
    quiet_s: float = QUIET_AFTER_RESTART_S
    nice: int = -15
    """Of controller and fleet, where we may: what else this machine does shall not be measured."""


def _raise_limit() -> None:
    """Of descriptors, for us and all that we start, as the unit's LimitNOFILE does for the controller."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass
class Scene:
    """A controller, its fleet, and where its things are."""

    options: Options
    shape: Shape
    service: Service
    fleet: FleetProcess
    directory: Path

    def journal(self, query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.directory}/state/journal.sqlite?mode=ro", uri=True) as base:
            return base.execute(query).fetchall()

    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(row[0]) for row in self.journal("SELECT document FROM incidents")]


@contextmanager
def scene(options: Options) -> Iterator[Scene]:
    """Everything up and running, and taken down again."""
    shape = Shape(options.nodes, options.jobs, options.workers)
    with munged() as munge, tempfile.TemporaryDirectory(prefix="slurm-watchdog-scale.") as name:
        directory = Path(name)
        port = free_port()
        (directory / "state").mkdir()
        config, tls, security = directory / "config.yaml", None, f"security: {json.dumps(munge.security())}\n"
        if options.tls:
            tls = directory / "identity"
            fleet_tls.make(tls, [shape.name(index) for index in range(options.nodes)])
            security = f"security: {{mode: tls, tls_directory: {tls}/ca/controllers/localhost}}\n"
        config.write_text(
            f"mode: observe\ncontroller:\n  listen: 127.0.0.1:{port}\n  socket: {directory}/controller.sock\n"
            f"  state_directory: {directory}/state\n"
            f"slurm:\n  bin_directory: {fleet_slurm.install(directory, shape)}\n"
            f"agent:\n  interval: {round(options.interval_s * 1000)}ms\n{security}"
        )
        service = Service(config, port, directory, options.nice, fleet_tls.reader(tls) if tls else None)
        try:
            service.start()
            fleet = FleetProcess(fleet_options(options, port, munge, tls), options.nice)
            try:
                yield Scene(options, shape, service, fleet, directory)
            finally:
                fleet.close()
        finally:
            service.kill()


class Renamed(Figures):
    """The same measurement in another setting, under another name."""

    def __init__(self, figures: Figures, old: str, new: str):
        self.figures, self.old, self.new = figures, old, new

    def add(self, name: str, value: float, unit: str, **bounds: Any) -> None:
        self.figures.add(self.new + name.removeprefix(self.old), value, unit, **bounds)


def run(figures: Figures, options: Options) -> None:
    """All figures, one after the other."""
    _raise_limit()
    if options.tls:
        figures = Renamed(figures, "controller.", "controller_tls.")
    how = " over mutual TLS" if options.tls else " by MUNGE"
    say(f"{options.nodes} agents{how}, {options.jobs} jobs, an interval of {options.interval_s:g} s")
    with scene(options) as here:
        settled_s = here.fleet.wait_for_all(options.nodes, SETTLE_S)
        say(f"all agents were taken within {settled_s:.1f} s of their start")
        time.sleep(options.warm_up_s)
        faulty = _measure_load(figures, here)
        _measure_questions(figures, here)
        allowed = {here.shape.name(index) for index in faulty}
        if options.restart:
            _measure_restart(figures, here)
        false = [i for i in here.incidents() if not _expected(i, allowed)]
        figures.add("controller.false_incidents", len(false), "1", at_most=0)
        for incident in false[:10]:
            say(f"false: {incident['kind']} {incident['subject']}: {incident.get('summary')}")
        if options.outage:
            _measure_outage(figures, here)


def _expected(incident: dict[str, Any], nodes: set[str]) -> bool:
    """Whether it is the consequence of a fault that was injected."""
    named = {culprit.get("node") for culprit in incident.get("culprits", ())}
    return incident["kind"] == "gpu_fault" and bool(named) and named <= nodes


def _measure_load(figures: Figures, here: Scene) -> list[int]:
    """The daily load, with a GPU that falls off the bus every now and then. Returns the nodes where one did."""
    options, service, fleet = here.options, here.service, here.fleet
    step = max(1, options.nodes // max(1, options.faults))
    faulty = [(7 + n * step) % options.nodes for n in range(options.faults)]
    injected: dict[str, float] = {}
    prober = Prober(service.port, service.tls)
    fleet.ask("tally")
    cpu_s, taken, began = service.cpu_s(), service.taken(), time.monotonic()
    rss = [service.rss_bytes()]
    with prober.running():
        for number, index in enumerate(faulty):
            time.sleep(max(0.0, began + number * options.seconds / (options.faults + 1) - time.monotonic()))
            fleet.ask("fault", nodes=[index])
            injected[here.shape.name(index)] = time.time()
            rss.append(service.rss_bytes())
        time.sleep(max(0.0, began + options.seconds - time.monotonic()))
    seconds = time.monotonic() - began
    cpu_s, taken = service.cpu_s() - cpu_s, service.taken() - taken
    rss.append(service.rss_bytes())
    tally, interval_s = fleet.ask("tally"), options.interval_s
    say(f"fleet: { ({k: v for k, v in tally.items() if k != 'trips_s'}) }; load average {os.getloadavg()[0]:.1f}")
    figures.add("controller.agents", tally["connected"], "1", at_least=options.nodes)
    figures.add(
        "controller.reports_per_s",
        taken / seconds,
        "1/s",
        at_least=0.98 * options.nodes / interval_s,
    )
    figures.add("controller.report_bytes", tally["bytes_out"] / max(1, tally["sent"]), "B")
    figures.add("controller.cpu_percent_of_core", 100 * cpu_s / seconds, "%", at_most=MAX_CPU_PERCENT)
    figures.add("controller.cpu_us_per_report", 1e6 * cpu_s / max(1, taken), "us")
    figures.add("controller.rss_mb", max(rss) / 1e6, "MB", at_most=MAX_RSS_MB)
    figures.add("controller.rss_growth_mb", (rss[-1] - rss[0]) / 1e6, "MB")
    trips_ms = [1000 * each for each in tally["trips_s"]]
    figures.add("controller.receive_to_state_p50_ms", quantile(trips_ms, 0.5), "ms")
    figures.add("controller.receive_to_state_p99_ms", quantile(trips_ms, 0.99), "ms")
    stalls_ms = [1000 * each for each in prober.waits_s]
    figures.add("controller.event_loop_stall_p99_ms", quantile(stalls_ms, 0.99), "ms")
    figures.add("controller.event_loop_stall_max_ms", max(stalls_ms), "ms", at_most=MAX_STALL_MS)
    time.sleep(interval_s + 2.0)  # the last fault goes with its node's next report
    _add_decisions(figures, here, injected)
    return faulty


def _add_decisions(figures: Figures, here: Scene, injected: dict[str, float]) -> None:
    """From the moment when the fleet sent the report to the decision in the journal. The fleet sends a fault
    with the node's next report, so the report's own moment is what the kernel's line is dated by:
    `opened_at`, to which the controller gave its arrival."""
    decided = {
        row[0]: row[1]
        for row in here.journal("SELECT incident_id, MIN(decided_at) FROM decisions GROUP BY incident_id")
    }
    waits_s, found = [], set()
    for incident in here.incidents():
        nodes = {culprit.get("node") for culprit in incident.get("culprits", ())}
        hit = nodes & injected.keys()
        if incident["kind"] == "gpu_fault" and hit and incident["id"] in decided:
            found |= hit
            waits_s.append(max(0.0, decided[incident["id"]] - incident["opened_at"]))
    if not injected:
        return
    figures.add("controller.faults_decided_ratio", len(found) / len(injected), "1", at_least=1.0)
    if waits_s:
        figures.add("controller.receive_to_decision_p50_s", quantile(waits_s, 0.5), "s")
        figures.add("controller.receive_to_decision_p99_s", quantile(waits_s, 0.99), "s", at_most=MAX_DECISION_S)


def _measure_questions(figures: Figures, here: Scene) -> None:
    """What Prometheus and people ask, while the load continues."""
    times_ms, body = [], b""
    for _ in range(20):
        began = time.monotonic()
        body = here.service.get("/metrics", 30.0)
        times_ms.append(1000 * (time.monotonic() - began))
        time.sleep(0.1)
    series = [line for line in body.decode().splitlines() if line and not line.startswith("#")]
    figures.add("controller.metrics_ms", quantile(times_ms, 0.5), "ms", at_most=MAX_METRICS_MS)
    figures.add("controller.metrics_max_ms", max(times_ms), "ms")
    figures.add("controller.metrics_series", len(series), "1", at_most=MAX_SERIES)
    status_ms = []
    for _ in range(3):
        began = time.monotonic()
        command = [
            sys.executable,
            "-c",
            MAIN,
            "status",
            "--socket",
            str(here.directory / "controller.sock"),
            "--json",
        ]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60, check=False)
        status_ms.append(1000 * (time.monotonic() - began))
    figures.add("controller.status_ms", quantile(status_ms, 0.5), "ms", at_most=MAX_STATUS_MS)


def _measure_restart(figures: Figures, here: Scene) -> None:
    """Killed and started again under load: how soon every agent is back, and nobody is accused."""
    here.service.kill()
    killed = time.monotonic()
    time.sleep(2.0)
    here.fleet.ask("forget")
    here.fleet.ask("tally")
    began = time.monotonic()
    prober = Prober(here.service.port, here.service.tls)
    here.service.start()
    answered_s = time.monotonic() - began
    with prober.running():
        here.fleet.wait_for_all(here.options.nodes, SETTLE_S)
        figures.add("controller.restart_recovery_s", time.monotonic() - began, "s")
        figures.add("controller.restart_answers_s", answered_s, "s")
        time.sleep(here.options.quiet_s)
    figures.add("controller.restart_stall_max_ms", 1000 * max(prober.waits_s), "ms", at_most=MAX_STALL_MS)
    text = here.service.get("/metrics", 30.0).decode()
    reporting = next(float(line.split()[-1]) for line in text.splitlines() if 'nodes{state="reporting"}' in line)
    figures.add("controller.restart_nodes_reporting", reporting, "1", at_least=here.options.nodes)
    say(f"down for {began - killed:.1f} s; fleet: {here.fleet.ask('count')}")


def _measure_outage(figures: Figures, here: Scene) -> None:
    """Half of all nodes at once fall silent: one incident says so, and the loop continues."""
    before = {incident["id"] for incident in here.incidents() if incident["state"] == "firing"}
    prober = Prober(here.service.port, here.service.tls)
    with prober.running():
        here.fleet.ask("silence", nodes=list(range(here.options.nodes // 2)))
        time.sleep(60.0)
    new = [i for i in here.incidents() if i["id"] not in before and i["state"] == "firing"]
    alone = [i for i in new if not i.get("inhibited_by")]
    say(f"outage: {[(i['kind'], i['subject']) for i in alone][:10]}, {len(new)} in the journal")
    figures.add("controller.outage_incidents", len(alone), "1", at_most=1)
    figures.add("controller.outage_stall_max_ms", 1000 * max(prober.waits_s), "ms", at_most=MAX_STALL_MS)
