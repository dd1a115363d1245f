"""Whose agent has reported, and when: what came twice, what builds on an earlier report, who is silent; whose machine
does not answer; the supervisors of jobs, as agents read them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from sys import intern
from typing import Any, Final

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.model.node_view import UnreachedNode
from slurm_watchdog.model.observations import Gpu, Process
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.supervisor import FRESH_S, JobSupervisor, Sighting, SupervisorStatus

MAX_STRANGERS = 256  # Nodes that report and that Slurm does not list: of `attach`, a test, or a late listing.
MAX_KEPT_ROWS = 8192  # Processes of a report that are kept: twice what is taken over of one.
OFFSETS = 6  # Reports of a node by which its clock is compared with ours: in a stall one waits, others come.
MOST_WAITED_S = 300.0  # One that seems to have waited longer is of a node whose clock was stopped.


@dataclass(slots=True)
class _Agent:
    boot_id: str
    agent_id: str
    sequence: int
    reported_at: float
    processes: tuple[Process, ...] = ()  # Of the newest report; none where they are too many to be kept.
    excused: bool = False  # `reported_at` is when it was given its time again; its newest report is older.


class Agents:
    """One for each node that has ever reported. Not thread-safe: the state owns it."""

    def __init__(self, silent_after_s: float, left_out: LeftOut):
        self.silent_after_s = silent_after_s
        self._left_out = left_out
        self._agents: dict[str, _Agent] = {}
        self._offsets_s: dict[str, tuple[str, deque[float]]] = {}  # Node -> boot, and how far our clock is ahead.
        self._registered = 0  # Reports so far.
        self._reporting: tuple[tuple[float, int], tuple[str, ...]] | None = None
        """Who reports, and at which moment: (now, reports taken until then)."""
        self._names: tuple[str, ...] = ()  # Of all nodes that have reported, sorted; empty: to be sorted again.

    def has_room(self, node: str, listed: Collection[str]) -> bool:
        """Whether this node is known, or may become so: of those that Slurm does not list at most
        MAX_STRANGERS may, once it lists any."""
        if node in self._agents or node in listed or not listed:
            return True
        if sum(1 for name in self._agents if name not in listed) < MAX_STRANGERS:
            return True
        self._left_out.note("nodes", "nodes that Slurm does not list")
        return False

    def processes(self, node: str) -> tuple[Process, ...]:
        """The processes of the node's newest report; none where it is not kept."""
        agent = self._agents.get(node)
        return () if agent is None else agent.processes

    def made_at(self, report: Report, now: float) -> float:
        """When a report that is taken at `now` was made, on the caller's clock. It may have waited longer than its age
        says: in a network, or for a controller that was stalled. The node's own clock tells how far apart its reports
        were made, and the one that waited least tells when."""
        at = now - max(0.0, report.age_s)
        if report.made_s <= 0.0:
            return at
        boot_id, offsets_s = self._offsets_s.get(report.node, ("", None))
        if offsets_s is None or boot_id != report.boot_id:
            offsets_s = deque(maxlen=OFFSETS)
            self._offsets_s[report.node] = report.boot_id, offsets_s
        offsets_s.append(at - report.made_s)
        return max(at - MOST_WAITED_S, report.made_s + min(offsets_s))

    def register(self, report: Report, made_at: float) -> bool:
        """Remembers this report of a node, made at `made_at`. False: it, or a later one, has come before."""
        before = self._agents.get(report.node)
        if before is not None and before.agent_id == report.agent_id and report.sequence <= before.sequence:
            return False
        self._registered += 1
        if before is None:
            self._names = ()
        kept = len(report.processes) <= MAX_KEPT_ROWS
        if not kept:
            self._left_out.note("report_base", report.node, len(report.processes))
        self._agents[report.node] = _Agent(
            boot_id=report.boot_id,
            agent_id=report.agent_id,
            sequence=report.sequence,
            reported_at=max(made_at, before.reported_at) if before is not None else made_at,
            processes=report.processes if kept else (),
        )
        return True

    def forget_silence(self, now: float) -> None:
        """No agent counts as silent: they all get their time again. That is no report: see `excused`."""
        self._registered += 1
        for agent in self._agents.values():
            agent.reported_at, agent.excused = now, True

    def excused(self) -> tuple[str, ...]:
        """Nodes that have not reported since they were given their time again, by name."""
        return tuple(name for name in self.known() if self._agents[name].excused)

    def forget_older_than(self, since: float, kept: Container[str]) -> list[str]:
        """Forgets the nodes that have not reported since then, but those in `kept`. Returns who they were."""
        gone = [name for name, agent in self._agents.items() if agent.reported_at < since and name not in kept]
        for name in gone:
            del self._agents[name]
            self._offsets_s.pop(name, None)
            self._names, self._reporting = (), None
        return gone

    def boot_id(self, node: str) -> str | None:
        """Of the kernel under the agent that reported last; None for a node that never did."""
        agent = self._agents.get(node)
        return None if agent is None else agent.boot_id

    def reports(self, node: str, now: float) -> bool:
        """Whether this node has reported lately."""
        agent = self._agents.get(node)
        return agent is not None and now - agent.reported_at <= self.silent_after_s

    def reporting(self, now: float) -> tuple[str, ...]:
        """The nodes that have reported lately, by name. Asked for hundreds of incidents at one moment, it is worked
        out once."""
        moment = (now, self._registered)
        if self._reporting is None or self._reporting[0] != moment:
            agents, since = self._agents, now - self.silent_after_s
            found = tuple(name for name in self.known() if agents[name].reported_at >= since)
            self._reporting = (moment, found)
        return self._reporting[1]

    def known(self) -> tuple[str, ...]:
        """All nodes that have ever reported, by name."""
        if not self._names:
            self._names = tuple(sorted(self._agents))
        return self._names


class Supervisors:
    """The newest word of each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Sighting]] = {}  # SLURM_JOB_ID -> restarts, and its supervisor.

    def apply(
        self, report: Report, made_at: float, job_of: Callable[[str], SlurmJob | None]
    ) -> Iterator[JobSupervisor]:
        """Takes over what a job's batch host says of it, and yields it; what other nodes say counts for nothing."""
        for each in report.supervisors:
            job = job_of(each.job_id)
            if job is not None and job.batch_host == report.node and job.restarts == each.restarts:
                seen = Sighting(status=each.status, written_at=made_at - each.age_s, read_at=made_at - each.read_age_s)
                self._known[each.job_id] = each.restarts, seen
                yield each

    def keep(self, job_ids: Container[str]) -> None:
        """Forgets all of other jobs."""
        self._known = {job_id: each for job_id, each in self._known.items() if job_id in job_ids}

    def of(self, job: SlurmJob, now: float) -> SupervisorStatus | None:
        """What the living supervisor of this run of the job says; None: it has none, or it does not live."""
        known = self.last_word(job)
        return None if known is None or now - known.written_at > FRESH_S else known.status

    def last_word(self, job: SlurmJob) -> Sighting | None:
        """What the supervisor of this run of the job said last, living or not; None: it has none."""
        restarts, known = self._known.get(job.process_id, (None, None))
        return known if restarts == job.restarts else None


class UnreachedNodes:
    """The state owns it."""

    def __init__(self) -> None:
        self._tries: dict[str, tuple[float, int]] = {}  # Node -> since when it was asked in vain, and how often.

    def note(self, node: str, now: float) -> None:
        """It did not answer once more."""
        at, tries = self._tries.get(node, (now, 0))
        self._tries[node] = at, tries + 1

    def forget(self, node: str) -> None:
        """It answers, or reports, or no one can tell."""
        self._tries.pop(node, None)

    def views(self, now: float) -> tuple[UnreachedNode, ...]:
        """All of them."""
        return tuple(UnreachedNode(name, tries, now - at) for name, (at, tries) in self._tries.items())


MAX_REPORTS_PER_S = 1000.0
"""Over mutual TLS, of nodes with 8 GPUs each, 1,000 a second took 68 to 88 % of a core of the measuring machines, and
2,000 more than a whole one (docs/evaluation.md)."""
LONGEST_S = 10.0
"""What detectors allow for reports to be late (a node that reports was heard within 12 s: `node_down`) is made for one
every 5 to 10 s, and an agent waits 15 s for an answer that is held back until its next report is due."""
TOO_BUSY, AT_EASE = 0.85, 0.5
"""Of a core: above the first agents are asked to report less often, below the second more often again. STEP changes the
load by less than what lies between them."""
STEP = 1.25
SETTLED_S = 120.0  # Between two such changes: all agents have to hear of one.


@dataclass
class ReportInterval:
    """Times in seconds. One event loop owns it."""

    usual_s: float = 5.0  # `agent.interval`.
    max_reports_per_s: float = MAX_REPORTS_PER_S  # Of all agents together.
    longest_s: float = LONGEST_S  # No agent is asked to report less often.
    _by_load_s: float = 0.0  # What a full core has asked for; 0: nothing.
    _changed_at: float | None = None

    def follow(self, now: float, agents: int, busy_share: float | None) -> None:
        """Takes how much of a core the controller took lately; None: it is not known."""
        if self._changed_at is None:
            self._changed_at = now  # the start, too, has to be over: all agents come at once
        if busy_share is None or now - self._changed_at < SETTLED_S:
            return
        if busy_share > TOO_BUSY and self.of(agents) < self.longest_s:
            self._by_load_s = min(float(math.ceil(self.of(agents) * STEP)), self.longest_s)
        elif busy_share < AT_EASE and self._by_load_s:
            shorter_s = float(math.floor(self._by_load_s / STEP))
            self._by_load_s = shorter_s if shorter_s > max(self.usual_s, self._by_number_s(agents)) else 0.0
        else:
            return
        self._changed_at = now

    def least_s(self, agents: int) -> float:
        """The shortest interval that each of so many agents may have; 0 where any will do."""
        return max(self._by_number_s(agents), self._by_load_s)

    def of(self, agents: int) -> float:
        """The interval of each of so many agents."""
        return max(self.usual_s, self.least_s(agents))

    def _by_number_s(self, agents: int) -> float:
        """Whole seconds, so that it does not change with every agent that comes."""
        needed_s = agents / self.max_reports_per_s
        return min(float(math.ceil(needed_s)), self.longest_s) if needed_s > 1.0 else 0.0


shared_number: Final[Callable[[Any], Any]] = lru_cache(maxsize=8192, typed=True)(lambda number: number)
"""Given a number, or None, the first one equal to it: of users, sizes, clocks, temperatures."""


def with_shared_values(report: Report) -> Report:
    """The same report."""
    return replace(
        report,
        node=intern(report.node),
        boot_id=intern(report.boot_id),
        agent_id=intern(report.agent_id),
        processes=tuple(map(_process, report.processes)),
        gpus=tuple(map(_gpu, report.gpus)),
    )


def _process(process: Process) -> Process:
    return replace(
        process,
        job_id=intern(process.job_id),
        uid=shared_number(process.uid),
        world_size=shared_number(process.world_size),
        comm=intern(process.comm),
        state=intern(process.state),
        step_id=None if process.step_id is None else intern(process.step_id),
    )


def _gpu(gpu: Gpu) -> Gpu:
    return replace(
        gpu,
        uuid=intern(gpu.uuid),
        pci_bus_id=None if gpu.pci_bus_id is None else intern(gpu.pci_bus_id),
        name=intern(gpu.name),
        memory_total_bytes=shared_number(gpu.memory_total_bytes),
    )
