"""What a collector is, and what it is given. CONTRIBUTING.md has the steps of adding one.

A collector is asked once in every tick and returns its section of the report. It never blocks: what may hang
is requested from a worker
(`context.workers`), and the answer is taken in this tick or a later one. One that raises leaves its section
empty; the others continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

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


class Collector(Protocol):
    """One thing that is looked at in every tick. It may also have any of the methods of the Protocols below."""

    def collect(self, now: float) -> Struct:
        """Its section of the report, of the type that its CollectorSpec names. May raise anything."""


@runtime_checkable
class Begins(Protocol):
    """A collector whose worker should be at work while the others collect."""

    def begin(self, now: float) -> None:
        """Called at the beginning of each tick."""


class Problem(NamedTuple):
    """Why a collector that worked did not see everything."""

    text: str
    failed: bool = True  # It counts as failed in this tick; not if what it does see is right.


@runtime_checkable
class HasProblems(Protocol):
    """A collector that knows when it is blind."""

    def problems(self, now: float) -> Iterable[Problem]:
        """A sentence each; called at the end of each tick."""


@runtime_checkable
class Retells(Protocol):
    """A collector that reports changes, which a new controller has not seen."""

    def retell(self) -> None:
        """The next section begins with the recent past; some of it may be known."""


@runtime_checkable
class Remembers(Protocol):
    """A collector whose knowledge goes over to the agent that this process becomes at SIGHUP."""

    def memory(self) -> Any:
        """A value of the type that its CollectorSpec names as `memory`."""

    def remember(self, memory: Any) -> None:
        """Called before the first tick."""


@runtime_checkable
class Closes(Protocol):
    """A collector with something to put away at the end of the agent."""

    def close(self, now: float) -> None:
        """Called once, while workers can still be asked."""


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
    memory: type[msgspec.Struct] | None = None  # What goes over a reload, of one that Remembers.
