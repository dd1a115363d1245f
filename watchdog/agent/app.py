"""The agent: a tick gives one report; between ticks it listens to its children and to the controller's replies."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import watchdog
from watchdog import clock, runner
from watchdog.agent import file_actions, identify, nvml, tail
from watchdog.agent.collectors.gpu import GpuCollector
from watchdog.agent.collectors.job_log import JobLogs
from watchdog.agent.collectors.process import ProcessCollector
from watchdog.agent.commands import Commands
from watchdog.agent.evidence import stacks
from watchdog.agent.mounts import Mount, read_mounts
from watchdog.agent.probe import Function, Probes, ProbesLost
from watchdog.agent.settings import Settings, split_listen
from watchdog.model import DumpStacks, Event, Gpu, LogFile, MountProbe, Process, Report
from watchdog.wire import WireError

if TYPE_CHECKING:
    from watchdog.agent.metrics import AgentMetrics
    from watchdog.agent.sender import Sender

log = logging.getLogger(__name__)

FUNCTIONS: dict[str, Function] = {
    "identify": identify.identify,
    "resolve": identify.resolve,
    "list_mounts": identify.list_mounts,
    "list_open_logs": identify.list_open_logs,
    "follow": tail.follow,
    "dump_stacks": stacks.dump_stacks,
    "read_gpus": nvml.read_gpus,
    "probe_mount": file_actions.probe_mount,
    "write_kill_switch": file_actions.write_kill_switch,
    "remove_kill_switch": file_actions.remove_kill_switch,
    "prepare_directory": file_actions.prepare_directory,
    "remove_directory": file_actions.remove_directory,
}
"""Everything that the agent's children can do."""

ONCE_PAUSE_S = 1.0
"""Between the two ticks of `--once`: whether a process is blocked shows only in two looks."""
ONCE_GPU_S = 5.0
"""`--once` waits so long for NVML: without a client that stays, the driver takes seconds to begin."""


def node_name(config: Settings) -> str:
    """Slurm's name of this node: as configured, else SLURMD_NODENAME, else the short host name."""
    if config.agent.node_name != "auto":
        return config.agent.node_name
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def read_boot_id() -> str:
    """The kernel's random name of this boot; empty where it can't be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Agent:
    """What one agent knows and does. Made from the main thread, before any other thread: it forks its children's parent."""

    def __init__(self, config: Settings):
        self.config = config
        self.node = node_name(config)
        self.boot_id = read_boot_id()
        self.agent_id = uuid.uuid4().hex
        self.sequence = 0
        self.probes = Probes(FUNCTIONS)
        mounts: tuple[Mount, ...] = read_mounts()
        self.processes = ProcessCollector(self.probes, mounts)
        self.logs = JobLogs(
            self.probes, mounts, self.node, tuple(config.agent.log_patterns), become_owner=os.geteuid() == 0
        )
        self.gpus = GpuCollector(self.probes)
        self.commands = Commands(
            self.probes, self.logs, self.node, config.agent.probe_deadline, self.processes.environ_of
        )
        self.seen = runner.Isolated()

    def tick(self, now: float) -> Report:
        """One look at everything. A part that fails leaves its share empty and a sentence in `problems`."""
        seen = self.seen = runner.Isolated()
        deadline_s = self.config.agent.probe_deadline
        self.probes.check()
        self.probes.poll(now)
        self.gpus.ask(now, deadline_s)
        no_processes: tuple[Process, ...] = ()
        processes = runner.isolate(
            "process", lambda: self.processes.collect(now, deadline_s), no_processes, seen
        )
        self.processes.mounts = self.logs.mounts
        no_logs: tuple[tuple[LogFile, ...], tuple[Event, ...], int] = ((), (), 0)
        logs, events, dropped = runner.isolate(
            "job_log", partial(self._collect_logs, processes, now, deadline_s), no_logs, seen
        )
        self.commands.processes = processes
        no_mounts: tuple[MountProbe, ...] = ()
        mounts = runner.isolate("mount", partial(self._collect_mounts, now), no_mounts, seen)
        no_gpus: tuple[Gpu, ...] = ()
        gpus = runner.isolate("gpu", partial(self.gpus.collect, now), no_gpus, seen)
        if self.gpus.problem:
            seen.problems.append(f"gpu: {self.gpus.problem}")
            seen.failed.add("gpu")
        self.sequence += 1
        return Report(
            node=self.node,
            boot_id=self.boot_id,
            agent_id=self.agent_id,
            sequence=self.sequence,
            interval_s=self.config.agent.interval,
            agent_version=watchdog.__version__,
            processes=processes,
            logs=logs,
            events=events,
            events_dropped=dropped,
            mounts=mounts,
            hung_probes=self.probes.hung(now),
            gpus=gpus,
            results=self.commands.take_results(),
            problems=tuple(seen.problems),
        )

    @property
    def could_see(self) -> bool:
        """Whether the last tick knows which processes there are: without that, its report would say that all are gone."""
        return "process" not in self.seen.failed

    def close(self) -> None:
        """Lets the children go."""
        self.probes.close()

    def _collect_logs(
        self, processes: tuple[Process, ...], now: float, deadline_s: float
    ) -> tuple[tuple[LogFile, ...], tuple[Event, ...], int]:
        jobs = {process.job_id for process in processes} | set(self.logs.jobs)
        environs = {job_id: self.processes.environ_of(job_id) for job_id in jobs}
        return self.logs.collect(now, processes, environs, deadline_s)

    def _collect_mounts(self, now: float) -> tuple[MountProbe, ...]:
        self.commands.watch_jobs(tuple(self.logs.watch.values()), now)
        self.commands.advance(now)
        return self.commands.mounts(now)


class Service:
    """An agent that reports: what happens in and between the ticks of the daemon."""

    def __init__(
        self, agent: Agent, sender: Sender, metrics: AgentMetrics, signals: runner.Signals, echo: bool = False
    ):
        """With `echo` each report is also a line of JSON on standard output."""
        self.agent, self.sender, self.metrics, self.signals = agent, sender, metrics, signals
        self.echo = echo
        self.controller_id = ""

    def tick(self, now: float) -> bool:
        """Makes a report and hands it to the sender; False if this tick could not see."""
        if self.signals.reload:
            self.signals.reload = False
            self.sender.read_token()
        self._take_replies(now)
        report = self.agent.tick(now)
        self.metrics.update(report, self.agent.seen, self.sender.spool_bytes)
        if not self.agent.could_see:
            return False
        if self.echo:
            sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
            sys.stdout.flush()
        try:
            self.sender.put(report)
        except WireError as error:
            log.error("this report can't be sent: %s", error)
            return False
        return True

    def between(self, now: float) -> None:
        """Takes what children and controller said meanwhile; results of commands go out at once, with a fresh report."""
        self.agent.probes.check()
        self.agent.probes.poll(now)
        self._take_replies(now)
        self.agent.commands.advance(now)
        if self.agent.commands.has_results:
            self.tick(now)

    def wake_fds(self) -> list[int]:
        """Descriptors for which `between` is called when they can be read."""
        return [self.sender.fileno(), *self.agent.probes.filenos()]

    def _take_replies(self, now: float) -> None:
        for reply in self.sender.replies():
            self.agent.logs.watch = {watch.job_id: watch for watch in reply.watch}
            if reply.controller_id != self.controller_id:
                self.controller_id = reply.controller_id
                self.agent.logs.tell_again()
            if any(isinstance(command, DumpStacks) for command in reply.commands):
                self.agent.gpus.want_processes()  # a job is under suspicion: whose GPU is whose has to be known now
            self.agent.commands.watch_jobs(reply.watch, now)
            self.agent.commands.accept(reply.commands, now)


def run_agent(config: Settings, *, once: bool = False, as_json: bool = False) -> int:
    """The agent as a daemon until SIGTERM, or with `once` two ticks and their outcome on standard output. Returns the exit code."""
    agent = Agent(config)
    try:
        if once:
            return _show_once(agent, as_json)
        return _serve(agent, config, echo=as_json)
    except ProbesLost as error:
        log.critical("%s: ending, to be started anew", error)
        return 1
    finally:
        agent.close()


def _serve(agent: Agent, config: Settings, echo: bool) -> int:
    # Imported only now: the children, forked long ago, need neither, and their memory counts.
    from watchdog.agent.metrics import AgentMetrics
    from watchdog.agent.sender import Sender, Spool

    metrics = AgentMetrics(agent.probes.counts, lambda: agent.gpus.driver_s)
    spool = Spool(config.agent.spool_bytes, config.agent.spool_age)
    count: Callable[[str], None] = metrics.count_report
    sender = Sender(config.agent.controller_url, spool, config.security.token_file, count)
    signals = runner.Signals()
    signals.install()
    sender.start()
    if config.agent.metrics_listen:
        metrics.serve(*split_listen(config.agent.metrics_listen))
    service = Service(agent, sender, metrics, signals, echo)
    log.info("watching %s for %s every %g s", agent.node, config.agent.controller_url, config.agent.interval)
    runner.run_cadence(
        service.tick, config.agent.interval, signals, service.wake_fds, service.between, metrics.count_tick
    )
    sender.stop()
    return 0


def _show_once(agent: Agent, as_json: bool) -> int:
    first = agent.tick(clock.monotonic())
    runner.sleep(ONCE_PAUSE_S)
    agent.gpus.settle(ONCE_GPU_S)
    report = agent.tick(clock.monotonic())
    events = (*first.events, *report.events)
    dropped = first.events_dropped + report.events_dropped
    report = msgspec.structs.replace(report, events=events, events_dropped=dropped)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        from watchdog.agent.show import show_report  # rich is for terminals, not for the daemon

        show_report(report)
    return 0 if agent.could_see else 1
