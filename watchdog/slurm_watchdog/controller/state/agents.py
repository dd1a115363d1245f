"""Whose agent has reported, and when: what came twice, who is silent; the supervisors of jobs, as agents read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass
from sys import intern

from msgspec.structs import force_setattr

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.model.report import Report, State
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.supervisor import FRESH_S, JobSupervisor, Sighting, SupervisorStatus

MAX_STRANGERS = 256  # Nodes that report and that Slurm does not list: of `attach`, a test, or a late listing.
OFFSETS = 6  # Reports of a node by which its clock is compared with ours: in a stall one waits, others come.
MOST_WAITED_S = 300.0  # One that seems to have waited longer is of a node whose clock was stopped.


@dataclass(slots=True)
class _Agent:
    agent_id: str
    sequence: int
    boot_id: str
    offsets_s: deque[float]  # How far our clock is ahead of the kernel's, by its newest reports.
    taken_at: float | None = None  # When its newest report was made that said something about now.


class Agents:
    """One for each node that has ever reported. Not thread-safe: the state owns it."""

    def __init__(self, silent_after_s: float, left_out: LeftOut):
        self.silent_after_s = silent_after_s
        self._left_out = left_out
        self._agents: dict[str, _Agent] = {}
        self._heard_at: dict[str, float] = {}  # Node -> when its newest report was made.
        self._excused: set[str] = set()  # Given their time again, and not heard since.
        self._silent: frozenset[str] = frozenset()  # As it was when it was asked last.
        self._reporting: tuple[str, ...] | None = None  # The others by name, then; None: to be worked out.
        self._holds: tuple[float, float] | None = None  # From when until when that holds, if no silent one is heard.

    def has_room(self, node: str, listed: Collection[str]) -> bool:
        """Whether this node is known, or may become so: of those that Slurm does not list at most
        MAX_STRANGERS may, once it lists any."""
        if node in self._agents or node in listed or not listed:
            return True
        if sum(1 for name in self._agents if name not in listed) < MAX_STRANGERS:
            return True
        self._left_out.note("nodes", "nodes that Slurm does not list")
        return False

    def hear(self, name: str, agent_id: str, boot_id: str, report: Report | State, now: float) -> float | None:
        """A report has come: when it was made, on the caller's clock; None: it, or a later one, has come before. It may
        have waited longer than its age says: in a network, or for a controller that was stalled. The node's own clock
        tells how far apart its reports were made, and the one that waited least tells when."""
        made_at = now - max(0.0, report.age_s)
        agent = self._agents.get(name)
        if agent is None:
            agent = self._agents[name] = _Agent("", 0, boot_id, deque(maxlen=OFFSETS))
            self._reporting = None
        elif agent.agent_id == agent_id and report.sequence <= agent.sequence:
            return None
        if agent.boot_id != boot_id:
            agent.boot_id, agent.offsets_s = boot_id, deque(maxlen=OFFSETS)
        agent.agent_id, agent.sequence = agent_id, report.sequence
        if report.made_s > 0.0:
            agent.offsets_s.append(made_at - report.made_s)
            made_at = max(made_at - MOST_WAITED_S, report.made_s + min(agent.offsets_s))
        self._excused.discard(name)
        self._heard_at[name] = max(made_at, self._heard_at.get(name, made_at))
        if name in self._silent:
            self._holds = None
        return made_at

    def take(self, node: str, made_at: float) -> bool:
        """A report that was made at `made_at` says something about now. Returns whether the node was silent before."""
        agent = self._agents[node]
        before = made_at if agent.taken_at is None else agent.taken_at
        agent.taken_at = max(made_at, before)
        return made_at - before > self.silent_after_s

    def forget_silence(self, now: float) -> None:
        """No agent counts as silent: they all get their time again. That is no report: see `excused`."""
        self._heard_at, self._holds = dict.fromkeys(self._agents, now), None
        self._excused = set(self._agents)

    def excused(self) -> tuple[str, ...]:
        """Nodes that have not reported since they were given their time again, by name."""
        return tuple(sorted(self._excused))

    def forget_older_than(self, since: float, kept: Container[str]) -> list[str]:
        """Forgets the nodes that have not reported since then, but those in `kept`. Returns who they were."""
        gone = [name for name, at in self._heard_at.items() if at < since and name not in kept]
        for name in gone:
            del self._agents[name], self._heard_at[name]
            self._excused.discard(name)
            self._reporting = None
        return gone

    def reports(self, node: str, now: float) -> bool:
        """Whether this node has reported lately."""
        at = self._heard_at.get(node)
        return at is not None and now - at <= self.silent_after_s

    def reporting(self, now: float) -> tuple[str, ...]:
        """The nodes that have reported lately, by name; the same tuple while they are the same."""
        if self._reporting is not None and self._holds is not None and self._holds[0] <= now <= self._holds[1]:
            return self._reporting
        since = now - self.silent_after_s
        silent = frozenset([name for name, at in self._heard_at.items() if at < since])
        if self._reporting is None or silent != self._silent:
            self._silent, self._reporting = silent, tuple(sorted(self._heard_at.keys() - silent))
        oldest_at = min([at for at in self._heard_at.values() if at >= since], default=now)
        self._holds = now, oldest_at + self.silent_after_s
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
        return tuple(sorted(self._agents))


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


def share_texts(report: Report) -> None:
    """Makes most texts of its rows, which are kept, those of the report before: equal ones, so nothing changes."""
    for row in report.processes:
        force_setattr(row, "job_id", intern(row.job_id))
        force_setattr(row, "comm", intern(row.comm))
        force_setattr(row, "state", intern(row.state))
        if row.step_id:
            force_setattr(row, "step_id", intern(row.step_id))
    for gpu in report.gpus:
        force_setattr(gpu, "uuid", intern(gpu.uuid))
        force_setattr(gpu, "name", intern(gpu.name))
        if gpu.pci_bus_id:
            force_setattr(gpu, "pci_bus_id", intern(gpu.pci_bus_id))
