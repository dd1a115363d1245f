"""The agent beside its peers: all run at the same time beside the same job, so that what disturbs one disturbs all."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests import helper_process
from tests.bench import controller, load, peers, scheduling
from tests.bench.figures import Figures, quantile, say
from tests.bench.process_tree import Target, Usage, count_distinct_pages, read_tree, started

MIB = 1024**2
MAX_CPU_PERCENT = 0.10
MAX_PSS_MIB = 40.0
MAX_TICK_CPU_MS = 15.0
MAX_NVML_MS = 5.0
"""What the project promises of its agent at an interval of 5 s."""
DRIVER_METRIC = "slurm_watchdog_nvml_driver_seconds"
SCRAPES = 40
TICK_GAP_S = 0.5
"""What the main thread does within this time of its last work belongs to the same tick: replies, answers of children."""
START_S = 60.0


@dataclass(frozen=True)
class Options:
    """How long, how often, with whom."""

    seconds: float = 120.0
    interval_s: float = 5.0
    warm_up_s: float = 30.0
    """Before anything counts: starting costs every agent more than going on, and happens once."""
    with_peers: bool = True
    driver_s: float = 65.0
    """How long the time in NVIDIA's driver is looked at: what is dear there comes once a minute."""
    with_helper: bool = False
    """The agent as a user without rights, and its helper: the figures are those of both together."""


@dataclass(frozen=True)
class Scene:
    """A job, a controller and an agent that reports to it."""

    load: load.Load
    controller: controller.Controller
    agent: Target
    metrics_port: int


@contextmanager
def scene(interval_s: float, cpus: set[int] | None = None, with_helper: bool = False) -> Iterator[Scene]:
    """The agent as it is deployed, a process of its own, beside the load; with its helper as a child, which counts as its own."""
    with ExitStack() as stack:
        job = stack.enter_context(load.running())
        taker = stack.enter_context(controller.listening((job.watch,)))
        port = peers.free_port()
        config = job.directory / "config.yaml"
        config.write_text(
            f"agent:\n  node_name: node1\n  interval: {round(interval_s * 1000)}ms\n"
            f"  controller_url: http://127.0.0.1:{taker.port}\n  metrics_listen: 127.0.0.1:{port}\n"
            f"  state_directory: {job.directory}/state\n"
            f"security: {json.dumps(taker.munged.security())}\n"
        )
        (job.directory / "state").mkdir()
        start = "import sys; from watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"
        command = [sys.executable, "-c", start, "agent", "--config", str(config)]
        log = job.directory / "agent.log"
        # Not the benchmark's own environment: a service has a small one.
        kept = {
            name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ
        }
        environment = {**kept, **job.environment}
        if with_helper:
            command, more = stack.enter_context(_powerless(job, config))
            environment |= more
        agent = stack.enter_context(started("agent", command, log, environment, job.space, cpus))
        try:
            _await_good_report(taker)
        except TimeoutError as error:
            raise RuntimeError(f"{error}; its log:\n{log.read_text(errors='replace')[-4000:]}") from error
        yield Scene(job, taker, agent, port)
        complaints = [
            line
            for line in log.read_text(errors="replace").splitlines()
            if "Traceback" in line or "ERROR" in line
        ]
        if complaints:
            say(f"the agent complained {len(complaints)} times; the last time: {complaints[-1]}")


@contextmanager
def _powerless(job: load.Load, config: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command of an agent without rights, its helper before it in the background, and what their environment needs."""

    def run(*words: object) -> None:
        subprocess.run(job.space.words([str(word) for word in words]), check=True)

    with helper_process.place(run) as place:
        directory = place.directory / "helper"
        directory.mkdir()
        os.chown(directory, helper_process.HELPER_UID, helper_process.HELPER_UID)
        text = config.read_text().replace("agent:\n", f"agent:\n  helper_socket: {directory}/socket\n", 1)
        config.write_text(text)
        for path, mode in ((job.directory, 0o755), (config, 0o644)):
            path.chmod(mode)
        os.chown(job.directory / "state", helper_process.AGENT_UID, -1)
        helper = helper_process.helper_command(place, directory / "socket")
        agent = helper_process.agent_command(place, "--config", str(config))
        script = f"{shlex.join(helper)} & while ! [ -S {directory}/socket ]; do sleep 0.1; done; exec {shlex.join(agent)}"
        yield ["sh", "-c", script], dict(place.environment)


def _await_good_report(taker: controller.Controller) -> None:
    """Until it sees what there is to see: a figure of an agent that sees nothing would be worth nothing."""
    end = time.monotonic() + START_S
    seen = ""
    while time.monotonic() < end:
        report = taker.wait_for_report(START_S)
        ranks = {process.rank for process in report.processes if process.role == "rank"}
        read = [row for row in report.logs if row.growth_age_s is not None]
        gpus = [gpu for gpu in report.gpus if gpu.utilization_ratio is not None]
        seen = f"{len(ranks)} ranks, {len(read)} logs, {len(gpus)} GPUs; {[row for row in report.logs if row.growth_age_s is None]}; problems: {report.problems}"
        if len(ranks) == load.RANKS and len(read) >= load.RANKS + 2 and len(gpus) == load.GPUS:
            return
    raise TimeoutError(f"the agent does not see the load, after {START_S:.0f} s only {seen}")


def run(figures: Figures, options: Options) -> None:
    """All figures of the agent and of its peers."""
    with ExitStack() as stack:
        here = stack.enter_context(scene(options.interval_s, with_helper=options.with_helper))
        others: list[Target] = []
        if options.with_peers:
            peers.install()
            logs = sorted(here.load.directory.glob("logs/*.out"))
            others = stack.enter_context(
                peers.running(
                    peers.Place(
                        here.load.directory, here.load.space, here.load.pids, logs, options.interval_s
                    )
                )
            )
        say(f"warming up for {options.warm_up_s:.0f} s, then measuring for {options.seconds:.0f} s")
        time.sleep(options.warm_up_s)
        window = _measure(here, others, options)
        _report_agent(figures, window, here, options)
        _report_ticks(figures, window, options)
        _report_driver(figures, here, options)
        _report_peers(figures, window)
        _report_scrapes(figures, here, window)


@dataclass(frozen=True)
class Window:
    """What was read at the beginning and the end of the measurement, and what was noted in between."""

    seconds: float
    before: dict[str, Usage]
    after: dict[str, Usage]
    tick_cpu_s: list[float]
    schedule: scheduling.Schedule | None
    names: dict[int, str]
    agent_pid: int
    reports: int
    report_bytes: int

    def cpu_percent(self, name: str, of_proc: bool = False) -> float:
        """CPU time of a tree, in per cent of one core."""
        before, after = self.before[name], self.after[name]
        used = after.cpu_proc_s - before.cpu_proc_s if of_proc else after.cpu_s - before.cpu_s
        return 100 * used / self.seconds


def _measure(here: Scene, others: list[Target], options: Options) -> Window:
    targets = [here.agent, *others]
    here.controller.wait_for_report(START_S)
    time.sleep(options.interval_s / 2)  # begin and end in the silence between two ticks
    recording = None
    with ExitStack() as stack:
        try:
            recording = stack.enter_context(scheduling.recording(here.agent.pid, "agent"))
        except OSError as error:
            say(f"the kernel's scheduler can't be traced ({error}): no wall time and no stretches")
        before = {target.name: target.usage() for target in targets}
        first, began = len(here.controller.arrived), time.monotonic()
        tick_cpu_s = []
        used = here.agent.cpu_s()
        while time.monotonic() - began < options.seconds:
            here.controller.wait_for_report(START_S)
            time.sleep(options.interval_s / 2)
            last, used = used, here.agent.cpu_s()
            tick_cpu_s.append(used - last)
        after = {target.name: target.usage() for target in targets}
        seconds = time.monotonic() - began
    schedule = None
    if recording is not None:
        schedule = scheduling.arrange(scheduling.parse_switches(recording.lines), recording.threads)
    reports = len(here.controller.arrived) - first
    return Window(
        seconds=seconds,
        before=before,
        after=after,
        tick_cpu_s=tick_cpu_s,
        schedule=schedule,
        names=read_process_names(here.agent.pid),
        agent_pid=here.agent.pid,
        reports=reports,
        report_bytes=sum(here.controller.sizes[-reports:]) if reports else 0,
    )


def _report_agent(figures: Figures, window: Window, here: Scene, options: Options) -> None:
    before, after = window.before["agent"], window.after["agent"]
    figures.add("agent.cpu_percent_of_core", window.cpu_percent("agent"), "%", at_most=MAX_CPU_PERCENT)
    figures.add("agent.cpu_percent_of_core_by_proc_stat", window.cpu_percent("agent", of_proc=True), "%")
    figures.add("agent.pss_mib", after.pss_bytes / MIB, "MiB", at_most=MAX_PSS_MIB)
    figures.add("agent.rss_mib", after.rss_bytes / MIB, "MiB")
    distinct = count_distinct_pages(here.agent.pid)
    if distinct is not None:
        figures.add("agent.distinct_memory_mib", distinct / MIB, "MiB")
    figures.add("agent.wakeups_per_second", (after.switches - before.switches) / window.seconds, "1/s")
    ticks = max(1, len(window.tick_cpu_s))
    figures.add("agent.reads_per_tick", (after.reads - before.reads) / ticks, "1")
    figures.add("agent.processes", after.processes, "1")
    figures.add("agent.threads", after.threads, "1")
    figures.add("agent.descriptors", after.descriptors, "1")
    figures.add("agent.report_bytes", window.report_bytes / max(1, window.reports), "B")
    if window.reports != len(window.tick_cpu_s):
        say(f"{window.reports} reports in {len(window.tick_cpu_s)} intervals")


def _report_ticks(figures: Figures, window: Window, options: Options) -> None:
    ticks_ms = [1000 * seconds for seconds in window.tick_cpu_s]
    figures.add("agent.tick_cpu_p50_ms", quantile(ticks_ms, 0.5), "ms")
    figures.add("agent.tick_cpu_p99_ms", quantile(ticks_ms, 0.99), "ms", at_most=MAX_TICK_CPU_MS)
    if window.schedule is None or not window.schedule.stretches_s:
        return
    main = [run for run in window.schedule.runs if run.thread == window.agent_pid]
    walls_ms = [1000 * (end - begin) for begin, end in scheduling.bursts(main, TICK_GAP_S)]
    figures.add("agent.tick_wall_p50_ms", quantile(walls_ms, 0.5), "ms")
    figures.add("agent.tick_wall_p99_ms", quantile(walls_ms, 0.99), "ms")
    figures.add("agent.longest_stretch_ms", 1000 * max(window.schedule.stretches_s), "ms")
    figures.add("agent.wakeups_per_tick", window.schedule.sleeps.total() / len(window.tick_cpu_s), "1")
    _say_shares(window, window.schedule)


def _say_shares(window: Window, schedule: scheduling.Schedule) -> None:
    """Which process used how much, for whoever wants to make it less."""
    ticks = len(window.tick_cpu_s)
    used: Counter[str] = Counter()
    woken: Counter[str] = Counter()
    for run in schedule.runs:
        used[window.names.get(run.thread, "those that ended")] += run.end_s - run.begin_s
    for thread, count in schedule.sleeps.items():
        woken[window.names.get(thread, "those that ended")] += count
    for name, seconds in used.most_common():
        say(f"{1000 * seconds / ticks:6.2f} ms and {woken[name] / ticks:4.1f} wake-ups a tick: {name}")


def _report_driver(figures: Figures, here: Scene, options: Options) -> None:
    """Time that each of so many ticks spent in NVIDIA's driver, by the agent's own count; after the window, for asking costs it."""
    spent_ms = []
    for _ in range(max(1, round(options.driver_s / options.interval_s))):
        here.controller.wait_for_report(START_S)
        time.sleep(min(0.5, options.interval_s / 4))
        value = read_metrics(here.metrics_port).get(DRIVER_METRIC)
        if value is None:
            say(f"the agent's metrics have no {DRIVER_METRIC}: no figure of its time in NVML")
            return
        spent_ms.append(1000 * value)
    figures.add("agent.nvml_p50_ms_per_tick", quantile(spent_ms, 0.5), "ms")
    figures.add("agent.nvml_max_ms_per_tick", max(spent_ms), "ms", at_most=MAX_NVML_MS)


def _report_peers(figures: Figures, window: Window) -> None:
    for name in window.after:
        if name != "agent":
            figures.add(f"peer.{name}.cpu_percent_of_core", window.cpu_percent(name), "%")
            figures.add(f"peer.{name}.pss_mib", window.after[name].pss_bytes / MIB, "MiB")
    for name in window.after:
        if name != "agent" and window.cpu_percent(name) > 0:
            ratio = window.cpu_percent("agent") / window.cpu_percent(name)
            figures.add(f"agent.cpu_ratio_to_{name}", ratio, "1")


def _report_scrapes(figures: Figures, here: Scene, window: Window) -> None:
    """What one scrape of the agent's own /metrics costs it, and what it costs with one every 15 s."""
    connection = HTTPConnection("127.0.0.1", here.metrics_port, timeout=10)
    here.controller.wait_for_report(START_S)
    ticked, used = len(here.controller.arrived), here.agent.cpu_s()
    try:
        for _ in range(SCRAPES):
            peers.scrape(connection)
    except (OSError, HTTPException) as error:
        say(f"the agent's metrics can't be scraped: {error}")
        return
    spent = here.agent.cpu_s() - used
    if len(here.controller.arrived) != ticked:
        spent -= quantile(window.tick_cpu_s, 0.5)
    each_s = max(0.0, spent) / SCRAPES
    figures.add("agent.scrape_cpu_ms", 1000 * each_s, "ms")
    figures.add(
        "agent.cpu_percent_of_core_scraped_every_15_s", window.cpu_percent("agent") + 100 * each_s / 15, "%"
    )


def read_metrics(port: int) -> dict[str, float]:
    """The agent's own metrics by name and labels, as text; empty if there are none."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        data = peers.scrape(connection)
    except (OSError, HTTPException):
        return {}
    finally:
        connection.close()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    return parse_metrics(text)


def parse_metrics(text: str) -> dict[str, float]:
    """`name{labels} value` lines of the Prometheus text format, by all that stands before the value."""
    found = {}
    for line in text.splitlines():
        name, space, value = line.rpartition(" ")
        if space and not line.startswith("#"):
            found[name] = float(value)
    return found


def read_process_names(root: int) -> dict[int, str]:
    """For each thread of the tree below `root`, pid and name of its process."""
    names = {}
    for pid in read_tree(root):
        label = f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}{' (main)' if pid == root else ''}"
        names |= {int(task): label for task in os.listdir(f"/proc/{pid}/task")}
    return names
