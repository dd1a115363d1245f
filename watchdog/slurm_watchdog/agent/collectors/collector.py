"""What a collector is, and what it is given. CONTRIBUTING.md has the steps of adding one.

A collector is asked once in every tick and returns its section of the report. It never blocks: what may hang is
requested from a child (`context.children`), and the answer is taken in this tick or a later one. One that raises leaves
its section empty; the others continue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from slurm_watchdog.base.loop import Isolated, isolate
from slurm_watchdog.base.structs import Struct

if TYPE_CHECKING:
    from slurm_watchdog.agent.children.children import Children
    from slurm_watchdog.agent.delivery.courier_link import CourierLink
    from slurm_watchdog.agent.files.mount_probing import MountProber
    from slurm_watchdog.agent.gpu.orphan_processes import OrphanGpuProcesses
    from slurm_watchdog.agent.gpu.reader import GpuReader
    from slurm_watchdog.agent.logs.job_logs import JobLogs
    from slurm_watchdog.agent.processes.jobs_here import JobsHere
    from slurm_watchdog.agent.processes.reader import ProcessReader
    from slurm_watchdog.agent.processes.supervisor_link import SupervisorLink
    from slurm_watchdog.config.agent import Agent

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

    children: Children
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
    supervisors: SupervisorLink
    courier: CourierLink
    kernel_records: deque[bytes]  # The newest of the kernel's log, for evidence.
    kernel_log_position: int | None = None  # How far an agent before this one has read it.
    keep_position: Callable[[int, float], None] = lambda position, now: None  # Is given it, and now, when it changes.


class Problem(NamedTuple):
    """Why a collector that worked did not see everything."""

    text: str
    failed: bool = True  # It counts as failed in this tick; not if what it does see is right.


class Collector:
    """One thing that is looked at in every tick."""

    keeper: Any = None
    """Where what it knows is kept. What it has of these methods is called: `retell()` where a new controller has not
    seen the recent past, `close(now)` at the end of the agent, while children can still be asked."""

    def __init__(self, context: CollectorContext):
        self.context, self.sections = context, context.sections
        self.deadline_s = context.settings.probe_deadline

    def begin(self, now: float) -> None:
        """Called at the beginning of each tick: its child may be at work while the others collect."""

    def collect(self, now: float) -> Struct:
        """Its section of the report, of the type that its CollectorSpec names. May raise anything."""
        raise NotImplementedError

    def problems(self, now: float) -> Iterable[Problem]:
        """A sentence each; called at the end of each tick."""
        return ()


@dataclass(frozen=True)
class CollectorSpec:
    """Everything about one collector, beside its code."""

    name: str  # The name of its module: in `problems` of the report and as label `collector` of metrics.
    section: type[Struct]  # What `collect` returns; all fields have defaults.
    make: Callable[[CollectorContext], Collector]


class Collectors:
    """The collectors of `specs`, made from `context`, in their order."""

    def __init__(self, specs: Iterable[CollectorSpec], context: CollectorContext):
        self._sections = context.sections
        self._all: list[tuple[CollectorSpec, Collector]] = [(spec, spec.make(context)) for spec in specs]

    def begin(self, now: float, seen: Isolated) -> None:
        """A tick begins."""
        for spec, each in self._all:
            isolate(spec.name, partial(each.begin, now), None, seen)

    def collect(self, now: float, seen: Isolated) -> Iterator[Struct]:
        """One section after the other. A collector that raises has an empty one, and a sentence in `seen`."""
        for spec, each in self._all:
            section = isolate(spec.name, partial(each.collect, now), None, seen) or spec.section()
            self._sections.put(section)
            yield section

    def note_problems(self, now: float, seen: Isolated) -> None:
        """Adds to `seen` why collectors that worked did not see everything."""
        for spec, each in self._all:
            problems: list[Problem] = isolate(spec.name, partial(_problems, each, now), [], seen)
            seen.problems.extend(f"{spec.name}: {problem.text}" for problem in problems)
            if any(problem.failed for problem in problems):
                seen.failed.add(spec.name)

    def retell(self) -> None:
        """The controller is new, or reports did not reach it: the next sections begin with the recent past."""
        for _, each in self._all:
            if hasattr(each.keeper, "retell"):
                each.keeper.retell()

    def close(self, now: float) -> None:
        """The agent ends."""
        for _, each in self._all:
            if hasattr(each.keeper, "close"):
                each.keeper.close(now)


def _problems(collector: Collector, now: float) -> list[Problem]:
    return list(collector.problems(now))
