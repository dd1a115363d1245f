"""The agent: a tick gives one report; between ticks it listens to its children and to the controller's replies."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING

import slurm_watchdog
from slurm_watchdog.agent.children.child import FIRST_TRIM, TRIM_EVERY, give_back_memory
from slurm_watchdog.agent.collectors.collector import Collectors, CollectorSpec
from slurm_watchdog.agent.collectors.registry import COLLECTORS
from slurm_watchdog.agent.commands import Commands
from slurm_watchdog.agent.context import make_context
from slurm_watchdog.agent.memory import Memory, MemoryFile
from slurm_watchdog.agent.proc.files import BOOT_ID, read_words
from slurm_watchdog.agent.settings import Settings
from slurm_watchdog.base import clock, loop
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.protocol import Command, Reply
from slurm_watchdog.model.report import Report, with_sections

if TYPE_CHECKING:
    from slurm_watchdog.agent.delivery.spool import Waiting


def node_name(config: Settings) -> str:
    """Slurm's name of this node: as configured, else SLURMD_NODENAME, else the short host name."""
    if config.agent.node_name != "auto":
        return config.agent.node_name
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


class Agent:
    """What one agent knows and does. Its children are forked from this process."""

    def __init__(
        self, config: Settings, once: bool = False, collectors: Iterable[CollectorSpec] = COLLECTORS
    ):  # fmt: skip
        """With `once` everything is looked at in the first tick already, and nothing is remembered."""
        self.config, self.node, self.boot_id = config, node_name(config), read_words(BOOT_ID) or ""
        self.agent_id, self.sequence = uuid.uuid4().hex, 0
        self.interval_s = config.agent.interval
        self.memory = MemoryFile("" if once else config.agent.state_directory, self.boot_id, self.node)
        self.before = before = self.memory.take(clock.monotonic())
        self.sums = before.sums
        self.context = context = make_context(config, self.node, self.boot_id, once, before, self._keep_position)
        self.children, self.jobs, self.gpus = context.children, context.jobs, context.gpus
        self.collectors = Collectors(collectors, context)
        self.commands = Commands(context, config.kill_switch_prefixes)
        self.seen = loop.Isolated()  # What became of the collectors in the last tick.
        self._closed, self._position = False, before.kernel_log
        context.processes.remember(before.processes)
        context.logs.remember(before.logs)
        context.orphan_gpu_processes.remember(before.orphans)
        self.commands.remember(before.commands)

    def tick(self, now: float) -> Report:
        """One look at everything. A collector that fails leaves its section empty and a sentence in `problems`. Before
        it leaves this process it is to be masked."""
        seen = self.seen = loop.Isolated()
        self.children.poll(now)
        self.collectors.begin(now, seen)
        sections = tuple(self.collectors.collect(now, seen))
        aside = loop.Isolated()
        loop.isolate("commands", lambda: self._advance_commands(now), None, aside)
        seen.problems.extend(aside.problems)
        self.collectors.note_problems(now, seen)
        seen.problems.extend(self.children.problems())
        self.sequence += 1
        if self.sequence % TRIM_EVERY == FIRST_TRIM:
            give_back_memory()
        report = picked(
            Report,
            self,
            "node",
            "boot_id",
            "agent_id",
            "sequence",
            "interval_s",
            made_s=clock.since_boot(),
            agent_version=slurm_watchdog.__version__,
            hung_probes=self.children.hung(now),
            results=self.commands.take_results(),
            problems=tuple(seen.problems),
        )
        return with_sections(report, sections)

    def _advance_commands(self, now: float) -> None:
        self.commands.watch_jobs(tuple(self.jobs.watch.values()), now, self.jobs.running(now))
        self.commands.advance(now)

    def hear(self, reply: Reply, now: float) -> None:
        """Takes what the controller says about the jobs here, and its commands."""
        self.jobs.hear(reply.watch, reply.running, now)
        self.commands.watch_jobs(reply.watch, now, self.jobs.running(now))
        self.obey(reply.commands, now)

    def obey(self, commands: tuple[Command, ...], now: float) -> None:
        """Takes what the controller asks, with a reply or between two."""
        self.commands.accept(commands, now)

    @property
    def could_see(self) -> bool:
        """Whether the last tick knows which processes there are: else its report would say that all are gone."""
        return "process" not in self.seen.failed

    def close(self) -> None:
        """Lets the children and the supervisors of jobs go."""
        if not self._closed:
            self._closed = True
            self.collectors.close(clock.monotonic())
            self.context.supervisors.close()
            self.context.processes.table.close()
            self.children.close()

    def remember(self, reports: tuple[Waiting, ...], controller_id: str) -> None:
        """Keeps what the next agent has to know; `reports` are those that the controller has not taken. To be called
        at the end, when all that was seen is in a report."""
        now = clock.monotonic()
        memory = Memory(
            kernel_log=self._position,
            hung=self.children.unanswered(now),
            reports=reports,
            processes=self.context.processes.memory(),
            logs=self.context.logs.memory(),
            orphans=self.context.orphan_gpu_processes.memory(),
            jobs=self.jobs,
            commands=self.commands.memory(),
            sums=self.sums,
            controller_id=controller_id,
        )
        self.memory.write(memory, now)

    def _keep_position(self, position: int, now: float) -> None:
        """How far the kernel's log was read: kept as soon as it changes, for an agent that is killed."""
        self._position = position
        self.memory.write(Memory(kernel_log=position), now)
