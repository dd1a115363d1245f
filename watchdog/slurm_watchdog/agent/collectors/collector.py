"""What a collector is, and what it is given. CONTRIBUTING.md has the steps of adding one.

A collector is asked once in every tick and returns its section of the report. It never blocks: what may hang
is requested from a worker
(`context.workers`), and the answer is taken in this tick or a later one. One that raises leaves its section
empty; the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec

from slurm_watchdog.agent.collectors.presentation import Counters, Family
from slurm_watchdog.agent.gpu.orphan_processes import OrphanGpuProcesses
from slurm_watchdog.agent.gpu.reader import GpuReader
from slurm_watchdog.agent.kernel.kmsg import Device
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.mounts.probing import MountProber
from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.agent.processes.reader import ProcessReader
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.agent import Agent
from slurm_watchdog.model.report import Report

S = TypeVar("S", bound=Struct)


@dataclass
class Sections:
    """The newest section of each collector: of this tick once it was collected, until then of the tick before."""

    _newest: dict[type, Struct] = field(default_factory=dict)

    def of(self, kind: type[S]) -> S:
        """The newest section of this type; an empty one before the first, and where its collector failed."""
        found = self._newest.get(kind)
        return found if isinstance(found, kind) else kind()

    def put(self, section: Struct) -> None:
        """Takes the place of the older one of its type."""
        self._newest[type(section)] = section


@dataclass(frozen=True)
class CollectorContext:
    """What collectors are made from: how this agent runs, and what several of them share."""

    workers: WorkerPool
    settings: Agent  # The section `agent` of the configuration.
    node: str  # Slurm's name of this node.
    boot_id: str
    once: bool  # `agent --once`: everything is looked at in the first tick, and nothing is remembered on disk.
    sections: Sections  # What the collectors before this one saw in this tick.
    jobs: JobsHere
    processes: ProcessReader
    logs: JobLogs
    mounts: MountProber
    gpus: GpuReader
    orphan_gpu_processes: OrphanGpuProcesses
    open_kernel_log: Callable[[str], Device]


class Problem(NamedTuple):
    """Why a collector that worked did not see everything."""

    text: str
    failed: bool = True  # It counts as failed in this tick; not if what it does see is right.


class Collector:
    """One thing that is looked at in every tick."""

    keeper: Any = None
    """Where what it knows is kept. What it has of these methods is called: `retell()` where a new controller has not
    seen the recent past, `memory()` and `remember(memory)` for the agent that this process becomes at SIGHUP (its type
    is CollectorSpec.memory), `close(now)` at the end of the agent, while workers can still be asked."""

    def __init__(self, context: CollectorContext):
        self.context, self.sections = context, context.sections
        self.deadline_s = context.settings.probe_deadline

    def begin(self, now: float) -> None:
        """Called at the beginning of each tick: its worker may be at work while the others collect."""

    def collect(self, now: float) -> Struct:
        """Its section of the report, of the type that its CollectorSpec names. May raise anything."""
        raise NotImplementedError

    def problems(self, now: float) -> Iterable[Problem]:
        """A sentence each; called at the end of each tick."""
        return ()


def _nothing(report: Report) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class CollectorSpec:
    """Everything about one collector, beside its code."""

    name: str  # The name of its module: in `problems` of the report and as label `collector` of metrics.
    section: type[Struct]  # What `collect` returns; all fields have defaults.
    make: Callable[[CollectorContext], Collector]
    metrics: Callable[[Report], Iterable[Family]] = _nothing
    """What is exported of the last report; every family in every call, if without series."""
    counters: Callable[[], Counters] | None = None  # Metrics that need more than the last report.
    memory: type[msgspec.Struct] | None = None  # What goes over a reload, of one whose keeper has a memory.
