"""The agent beside its peers: all run at the same time beside the same job, so that what disturbs one disturbs all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab.bench import controller, load, peers, scheduling
from lab.bench.figures import Figures, quantile, say
from lab.bench.metrics_text import read_metrics
from lab.bench.process_tree import Target, Usage, count_distinct_pages, read_tree, started
from slurm_watchdog.agent.metrics import FILE
from tests import agent_place
from tests.rig.rights import AGENT_UID, agent_command

MIB = 1024**2
MAX_CPU_PERCENT = 0.10
MAX_PSS_MIB = 40.0
MAX_PSS_OF_BOTH_MIB = 56.0
MAX_TICK_CPU_MS = 15.0
MAX_NVML_MS = 5.0
"""What the project promises at an interval of 5 s: CPU and memory of the agent with all its children."""
DRIVER_METRIC = "slurm_watchdog_nvml_driver_seconds"
TICK_GAP_S = 0.5
"""What the main thread does within this time of its last work belongs to the same tick: replies, answers of
children."""
START_S = 60.0


@dataclass(frozen=True)
class Options:
    """How long, how often, with whom."""

    seconds: float = 120.0
    interval_s: float = 5.0
    warm_up_s: float = 30.0
    """Before anything counts: starting costs every agent more than going on, and happens once."""
    with_peers: bool = True
    driver_s: float = 20.0
    """How long the time in NVIDIA's driver is looked at: what is dear there comes once a minute."""


@dataclass(frozen=True)
class Scene:
    """A job, a controller and an agent that reports to it."""

    load: load.Load
    controller: controller.Controller
    agent: Target
    metrics_file: Path

    @property
    def ours(self) -> tuple[Target, ...]:
        """All of the watchdog's processes on this node."""
        return (self.agent,)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(target.name for target in self.ours)

    def cpu_s(self) -> float:
        """CPU time of all of them so far."""
        return sum(target.cpu_s() for target in self.ours)

    def pids(self) -> list[int]:
        """All of them, their children included."""
        return [pid for target in self.ours for pid in read_tree(target.pid)]


@contextmanager
def scene(interval_s: float, cpus: set[int] | None = None) -> Iterator[Scene]:
    """The agent as it is deployed, beside the load: as root, with the rights that its unit gives it; as an ordinary
    user, who has jobs of his own to watch, without any. Raises RuntimeError if it does not see the load."""
    with ExitStack() as stack:
        job = stack.enter_context(load.running())
        taker = stack.enter_context(controller.listening((job.watch,)))
        config, log = job.directory / "config.yaml", job.directory / "agent.log"
        settings = (
            f"  node_name: node1\n  interval: {round(interval_s * 1000)}ms\n"
            f"  controller_url: http://127.0.0.1:{taker.port}\n  metrics_directory: {job.directory}/metrics\n"
            f"  state_directory: {job.directory}/state\n"
        )
        security = f"security: {json.dumps(taker.munged.security())}\n"
        for name in ("state", "metrics"):
            (job.directory / name).mkdir()
        # Not the benchmark's own environment: a service has a small one.
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ}
        if os.geteuid() == 0:
            place = stack.enter_context(agent_place.place(partial(_run_in, job)))
            environment = {**kept, **job.environment, **place.environment}
            # The stand-in of the driver's library, and where the interpreter's own library is bound.
            libraries = [
                each["LD_LIBRARY_PATH"] for each in (job.environment, place.environment) if each.get("LD_LIBRARY_PATH")
            ]
            environment["LD_LIBRARY_PATH"] = ":".join(libraries)
            for name in ("state", "metrics"):
                os.chown(job.directory / name, AGENT_UID, -1)
            command = agent_command(place, "--config", str(config))
        else:
            environment = {**kept, **job.environment}
            start = "import sys; from slurm_watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"
            command = [sys.executable, "-c", start, "agent", "--config", str(config)]
        config.write_text(f"agent:\n{settings}{security}")
        config.chmod(0o644)
        agent = stack.enter_context(started("agent", command, log, environment, job.space, cpus))
        try:
            _await_good_report(taker)
        except TimeoutError as error:
            raise RuntimeError(f"{error}; its log:\n{log.read_text(errors='replace')[-4000:]}") from error
        yield Scene(job, taker, agent, job.directory / "metrics" / FILE)
        _say_complaints(job.directory)


def _run_in(job: load.Load, *words: object) -> None:
    subprocess.run(job.space.words([str(word) for word in words]), check=True)


def _say_complaints(directory: Path) -> None:
    """Errors in the log of the agent."""
    lines = (directory / "agent.log").read_text(errors="replace").splitlines()
    complaints = [line for line in lines if "Traceback" in line or "ERROR" in line]
    if complaints:
        say(f"the agent complained {len(complaints)} times; the last time: {complaints[-1]}")


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
        here = stack.enter_context(scene(options.interval_s))
        others: list[Target] = []
        if options.with_peers:
            peers.install()
            logs = sorted(here.load.directory.glob("logs/*.out"))
            others = stack.enter_context(
                peers.running(
                    peers.Place(here.load.directory, here.load.space, here.load.pids, logs, options.interval_s)
                )
            )
        say(f"warming up for {options.warm_up_s:.0f} s, then measuring for {options.seconds:.0f} s")
        time.sleep(options.warm_up_s)
        window = _measure(here, others, options)
        _report_agent(figures, window, here)
        _report_ticks(figures, window, options)
        _report_driver(figures, here, options)
        _report_peers(figures, window, here.names)


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

    def cpu_percent(self, *names: str, of_proc: bool = False) -> float:
        """CPU time of these trees together, in per cent of one core."""
        used = 0.0
        for name in names:
            before, after = self.before[name], self.after[name]
            used += after.cpu_proc_s - before.cpu_proc_s if of_proc else after.cpu_s - before.cpu_s
        return 100 * used / self.seconds

    def pss_mib(self, *names: str) -> float:
        """Memory of these trees together, in the end."""
        return sum(self.after[name].pss_bytes for name in names) / MIB


def _measure(here: Scene, others: list[Target], options: Options) -> Window:
    targets = [*here.ours, *others]
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
        used = here.cpu_s()
        while time.monotonic() - began < options.seconds:
            here.controller.wait_for_report(START_S)
            time.sleep(options.interval_s / 2)
            last, used = used, here.cpu_s()
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


def _report_agent(figures: Figures, window: Window, here: Scene) -> None:
    before, after = window.before["agent"], window.after["agent"]
    figures.add("both.cpu_percent_of_core", window.cpu_percent(*here.names), "%", at_most=MAX_CPU_PERCENT)
    figures.add("both.pss_mib", window.pss_mib(*here.names), "MiB", at_most=MAX_PSS_OF_BOTH_MIB)
    for target in here.ours:
        of = window.after[target.name]
        bound = MAX_PSS_MIB if target is here.agent else None
        figures.add(f"{target.name}.cpu_percent_of_core", window.cpu_percent(target.name), "%")
        figures.add(f"{target.name}.pss_mib", of.pss_bytes / MIB, "MiB", at_most=bound)
        figures.add(f"{target.name}.rss_mib", of.rss_bytes / MIB, "MiB")
        distinct = count_distinct_pages(target.pid)
        if distinct is not None:
            figures.add(f"{target.name}.distinct_memory_mib", distinct / MIB, "MiB")
        for name in ("processes", "threads", "descriptors"):
            figures.add(f"{target.name}.{name}", getattr(of, name), "1")
    figures.add("agent.cpu_percent_of_core_by_proc_stat", window.cpu_percent("agent", of_proc=True), "%")
    figures.add("agent.wakeups_per_second", (after.switches - before.switches) / window.seconds, "1/s")
    figures.add("agent.reads_per_tick", (after.reads - before.reads) / max(1, len(window.tick_cpu_s)), "1")
    figures.add("agent.report_bytes", window.report_bytes / max(1, window.reports), "B")
    figures.add("load_average", os.getloadavg()[0], "1")
    if window.reports != len(window.tick_cpu_s):
        say(f"{window.reports} reports in {len(window.tick_cpu_s)} intervals")


def _report_ticks(figures: Figures, window: Window, options: Options) -> None:
    ticks_ms = [1000 * seconds for seconds in window.tick_cpu_s]
    figures.add("both.tick_cpu_p50_ms", quantile(ticks_ms, 0.5), "ms")
    figures.add("both.tick_cpu_p99_ms", quantile(ticks_ms, 0.99), "ms", at_most=MAX_TICK_CPU_MS)
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
    """How much each process used, to find what can be made cheaper."""
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
    """Time that the longest of so many ticks spent in NVIDIA's driver, by the agent's own count."""
    time.sleep(options.driver_s)
    spent_s = read_metrics(here.metrics_file).get(DRIVER_METRIC)
    if spent_s is None:
        say(f"the agent's metrics have no {DRIVER_METRIC}: no figure of its time in NVML")
        return
    figures.add("agent.nvml_max_ms_per_tick", 1000 * spent_s, "ms", at_most=MAX_NVML_MS)


def _report_peers(figures: Figures, window: Window, ours: tuple[str, ...]) -> None:
    others = [name for name in window.after if name not in ours]
    for name in others:
        figures.add(f"peer.{name}.cpu_percent_of_core", window.cpu_percent(name), "%")
        figures.add(f"peer.{name}.pss_mib", window.after[name].pss_bytes / MIB, "MiB")
    for name in others:
        if window.cpu_percent(name) > 0:
            ratio = window.cpu_percent(*ours) / window.cpu_percent(name)
            figures.add(f"both.cpu_ratio_to_{name}", ratio, "1")


def read_process_names(root: int) -> dict[int, str]:
    """For each thread of the tree below `root`, pid and name of its process."""
    names = {}
    for pid in read_tree(root):
        label = f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}{' (main)' if pid == root else ''}"
        names |= {int(task): label for task in os.listdir(f"/proc/{pid}/task")}
    return names
