"""Whose agent has reported, and when: what came twice, what builds on an earlier report, who is silent; whose machine
does not answer; the supervisors of jobs, as agents read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from sys import intern

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.model.node_view import UnreachedNode
from slurm_watchdog.model.observations import Process
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
    whole: int = 0  # The newest whole report that was taken over; 0: none of this agent.
    state: bytes = b""  # The classes in it.
    processes: tuple[Process, ...] = ()  # Of it; none where they are too many to be kept.


class Agents:
    """One for each node that has ever reported. Not thread-safe: the state owns it."""

    def __init__(self, silent_after_s: float, left_out: LeftOut):
        self.silent_after_s = silent_after_s
        self._left_out = left_out
        self._agents: dict[str, _Agent] = {}
        self._heard_at: dict[str, float] = {}  # Node -> when its newest report was made.
        self._offsets_s: dict[str, tuple[str, deque[float]]] = {}  # Node -> boot, and how far our clock is ahead.
        self._next: list[tuple[float, str]] = []
        """(when it had been heard, node) of each that was not silent then: a heap, the one heard longest ago first."""
        self._silent: set[str] = set()
        self._excused: set[str] = set()  # Given their time again, and not heard since.
        self._names: tuple[str, ...] = ()  # Of all nodes that have reported, sorted; empty: to be sorted again.
        self._reporting: tuple[str, ...] | None = None  # Those that are not silent, by name; None: to be worked out.

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
        """The processes of the node's newest whole report; none where it is not kept."""
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
        """Remembers that this report of a node came, made at `made_at`. False: it, or a later one, has come before."""
        name = report.node
        agent = self._agents.get(name)
        if agent is None:
            self._agents[name] = _Agent(report.boot_id, report.agent_id, report.sequence, made_at)
            self._names = ()
            self._hear(name, made_at)
            return True
        if agent.agent_id != report.agent_id:
            agent.agent_id, agent.whole = report.agent_id, 0
        elif report.sequence <= agent.sequence:
            return False
        agent.boot_id, agent.sequence = report.boot_id, report.sequence
        self._excused.discard(name)
        self._hear(name, max(made_at, agent.reported_at))
        return True

    def _hear(self, name: str, at: float) -> None:
        if name in self._silent or name not in self._heard_at:
            self._silent.discard(name)
            self._reporting = None
            heappush(self._next, (at, name))
        self._agents[name].reported_at = self._heard_at[name] = at

    def take_whole(self, report: Report) -> bool:
        """This whole report says how its node is. Returns whether its classes are as they were; no class is none."""
        agent = self._agents[report.node]
        same = bool(report.state) and agent.whole > 0 and agent.state == report.state
        kept = len(report.processes) <= MAX_KEPT_ROWS
        if not kept:
            self._left_out.note("report_base", report.node, len(report.processes))
        agent.whole, agent.state = report.sequence, report.state
        agent.processes = report.processes if kept else ()
        return same

    def is_as(self, report: Report) -> bool:
        """Whether a small report names the whole one that was taken over last, with the same classes: its node is as
        that one said. Else nothing is known of what it does."""
        agent = self._agents[report.node]
        return agent.whole == report.same_as and agent.state == report.state

    def forget_silence(self, now: float) -> None:
        """No agent counts as silent: they all get their time again. That is no report: see `excused`."""
        for name in self._agents:
            self._hear(name, now)
        self._excused = set(self._agents)

    def excused(self) -> tuple[str, ...]:
        """Nodes that have not reported since they were given their time again, by name."""
        return tuple(sorted(self._excused))

    def forget_older_than(self, since: float, kept: Container[str]) -> list[str]:
        """Forgets the nodes that have not reported since then, but those in `kept`. Returns who they were."""
        gone = [name for name, at in self._heard_at.items() if at < since and name not in kept]
        for name in gone:
            del self._agents[name], self._heard_at[name]
            self._offsets_s.pop(name, None)
            self._silent.discard(name)
            self._excused.discard(name)
            self._names, self._reporting = (), None
        return gone

    def boot_id(self, node: str) -> str | None:
        """Of the kernel under the agent that reported last; None for a node that never did."""
        agent = self._agents.get(node)
        return None if agent is None else agent.boot_id

    def reports(self, node: str, now: float) -> bool:
        """Whether this node has reported lately."""
        at = self._heard_at.get(node)
        return at is not None and now - at <= self.silent_after_s

    def reporting(self, now: float) -> tuple[str, ...]:
        """The nodes that have reported lately, by name: looked at are those alone that may have fallen silent."""
        due, since = self._next, now - self.silent_after_s
        for name in [each for each in self._silent if self._heard_at[each] >= since]:  # the moment is an earlier one
            self._silent.discard(name)
            self._reporting = None
            heappush(due, (self._heard_at[name], name))
        while due and due[0][0] < since:
            _, name = heappop(due)
            at = self._heard_at.get(name)
            if at is not None and at >= since:
                heappush(due, (at, name))
            elif at is not None and name not in self._silent:
                self._silent.add(name)
                self._reporting = None
        if self._reporting is None:
            self._reporting = tuple(name for name in self.known() if name not in self._silent)
        return self._reporting

    def silent(self, now: float) -> tuple[str, ...]:
        """The others that are known, by name."""
        self.reporting(now)
        return tuple(sorted(self._silent))

    def heard_at(self) -> dict[str, float]:
        """Node -> when its newest report was made, a small one, too."""
        return dict(self._heard_at)

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
    ) -> Iterator[tuple[JobSupervisor, bool]]:
        """Takes over what a job's batch host says of it, and yields it, and whether that is news; what other nodes say
        counts for nothing."""
        for each in report.supervisors:
            job = job_of(each.job_id)
            if job is not None and job.batch_host == report.node and job.restarts == each.restarts:
                seen = Sighting(status=each.status, written_at=made_at - each.age_s, read_at=made_at - each.read_age_s)
                before = self.last_word(job)
                self._known[each.job_id] = each.restarts, seen
                dead = before is None or made_at - before.written_at > FRESH_S
                yield each, before is None or dead or before.status != each.status

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


def with_shared_texts(report: Report) -> Report:
    """The same report: its rows are kept, and most of their texts are those of the report before."""
    return replace(
        report,
        processes=tuple(
            replace(each, job_id=intern(each.job_id), comm=intern(each.comm), state=intern(each.state),
                    step_id=each.step_id and intern(each.step_id))
            for each in report.processes
        ),
        gpus=tuple(
            replace(each, uuid=intern(each.uuid), name=intern(each.name),
                    pci_bus_id=each.pci_bus_id and intern(each.pci_bus_id))
            for each in report.gpus
        ),
    )  # fmt: skip
