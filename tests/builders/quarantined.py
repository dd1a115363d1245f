"""A cluster of four nodes whose controller takes nodes out of service and tests them, and may be killed at each step of
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.config.policy import Policy
from slurm_watchdog.controller.actions.node_tests import NodeTests
from slurm_watchdog.controller.actions.quarantine import QuarantineTools, sweep
from slurm_watchdog.controller.ports.node_tests import NotTested
from slurm_watchdog.journal.database import Database
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.node_tests import SqlNodeTests
from slurm_watchdog.journal.quarantines import SqlQuarantines
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from slurm_watchdog.model.node_test import NodeTest, NodeVerdict
from slurm_watchdog.model.quarantine import TESTED_MARK, Quarantine, QuarantineState
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode
from tests.behaviour.cluster import EPOCH, Scripted

POLICY = Policy(max_drained_nodes=1, drained_percent=50)
SUSPECT = (("n1", "i1"),)
OURS = "slurm-watchdog: suspect node, incident i1"


class Killed(BaseException):
    """The controller dies here."""


class Cluster:
    """Four nodes, of which n1 is suspect; the controller may be killed at its n-th step towards the world."""

    def __init__(self, directory: Path, by: Literal["drain", "reservation"] = "drain") -> None:
        self.policy = POLICY.model_copy(update={"quarantine_by": by})
        self.now, self.steps, self.dies_at = 10.0, 0, -1
        self.slurm = DyingSlurm(now=lambda: self.now)
        self.slurm.point = self.point
        self.slurm.cancelled = lambda job_id: self.tester.jobs.clear()
        self.slurm.add_nodes("n1", "n2", "n3", "n4")
        url = f"sqlite:///{directory}/journal.sqlite"
        self.journal = Journal(url)
        self.journal.quarantines = DyingQuarantines(Database(url), self.point)
        self.listing = tuple(self.slurm.nodes.values())
        """What the controller knows of the nodes, as they were at first: listings are older than requests."""
        self.held_back: str | None = None
        self.permitted = self.floors = False
        self.tester = ScriptedTester(self)
        self.journal.node_tests = DyingNodeTests(self.journal.node_tests._database, self.point)
        self.says("gpu_fault", "f1")

    def point(self) -> None:
        self.steps += 1
        if self.steps == self.dies_at:
            raise Killed

    def says(self, kind: str, name: str = "t1", place: str = "") -> None:
        self.says_of("n1", kind, name, place)

    def says_of(self, node: str, kind: str, name: str, place: str = "") -> None:
        self.now += 1.0
        key = f"{kind}:root:{name}:{node}:{place}"
        event = NodeEvent(key=key, node=node, kind=kind, at=EPOCH + self.now, what=f"{kind} {name}")
        self.journal.node_events.save(event)

    def sweep(self, suspects: tuple[tuple[str, str], ...] = SUSPECT, *, drains: bool = True) -> None:
        """A round; a controller that dies in it is started again."""
        self.now += 60.0
        try:
            asyncio.run(self._round(suspects, drains))
        except Killed:
            self.dies_at = -1

    async def _round(self, suspects: tuple[tuple[str, str], ...], drains: bool) -> None:
        """By a controller that has just been started: a test that it begins comes to its end."""
        tools, known = self._tools(), tuple(self.slurm.nodes.values())
        await sweep(tools, suspects, known, drains=drains)
        writer = JournalWriter(self.journal, LeftOut())
        tests = NodeTests(tools, self.tester, writer, lambda: self.held_back, floors=self.floors)
        await tests.turn(tuple(self.slurm.nodes.values()), self.test_jobs, permitted=self.permitted)
        await tests.ended()

    @property
    def test_jobs(self) -> dict[str, SlurmJob]:
        """What Slurm lists of jobs of tests."""
        return {each.job_id: each for each in self.tester.jobs}

    def _tools(self) -> QuarantineTools:
        return QuarantineTools(self.journal, self.slurm, self.policy, self.record, lambda: EPOCH + self.now)

    def record(self, event: NodeEvent) -> None:
        self.point()
        self.journal.node_events.save(event)
        self.point()

    def history(self, node: str = "n1") -> list[tuple[str, str]]:
        """Kind and words of what the history of a node says of its drains."""
        ours = (NodeEventKind.DRAINED, NodeEventKind.BY_OPERATOR)
        return [(each.kind, each.what) for each in self.journal.node_events.of_node((node,)) if each.kind in ours]

    def told(self) -> list[str]:
        """What the history of n1 says of its quarantine."""
        ours = (NodeEventKind.QUARANTINED, NodeEventKind.MENDED)
        return [each.what for each in self.journal.node_events.of_node(("n1",)) if each.kind in ours]

    def all(self) -> list[Quarantine]:
        return self.journal.quarantines.of_node("n1")

    @property
    def done(self) -> list[str]:
        return self.slurm.done


class ScriptedTester:
    """Stands in for test-nodes: lifts the drain in a reservation, has a job there, and puts all back; a controller that
    dies meanwhile leaves what there is at that moment."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.asked: list[NodeTest] = []
        self.jobs: list[SlurmJob] = []
        self.says: Callable[[str], NodeVerdict | None] = lambda node: NodeVerdict(node=node, truth=Truth.OK, peers=4)

    async def test(self, asked: NodeTest) -> Sequence[NodeVerdict]:
        cluster, slurm = self._cluster, self._cluster.slurm
        self.asked.append(asked)
        cluster.point()
        lifted = {node: slurm.nodes[node] for node in asked.nodes if "DRAIN" in slurm.nodes[node].state}
        assert not any(each.name.startswith(TESTED_MARK) for each in slurm.reservations.values()), "two at once"
        slurm.reservations[asked.name] = Reservation(
            name=asked.name, start_at=0.0, end_at=9e9, nodes=(*asked.nodes, *asked.peers), flags=("MAINT",)
        )
        for name, node in lifted.items():
            slurm.nodes[name] = replace(node, state="IDLE+MAINT", reason="", reason_at=None)
        cluster.point()
        self.jobs.append(SlurmJob(job_id="77", state="RUNNING", nodes=asked.nodes, comment=f"test-nodes {asked.name}"))
        cluster.point()
        self.jobs.clear()
        slurm.nodes.update({name: replace(node, reason_at=cluster.now) for name, node in lifted.items()})
        cluster.point()
        slurm.reservations.pop(asked.name, None)
        cluster.point()
        found = [said for node in (*asked.nodes, *asked.peers) if (said := self.says(node)) is not None]
        if not found:
            raise NotTested("sbatch does not answer")
        return found


class DyingNodeTests(SqlNodeTests):
    def __init__(self, database: Database, point: Callable[[], None]) -> None:
        super().__init__(database)
        self.point = point

    def intend(self, test: NodeTest) -> None:
        self.point()
        super().intend(test)
        self.point()

    def save(self, test: NodeTest) -> None:
        self.point()
        super().save(test)
        self.point()


class DyingSlurm(Scripted):
    point: Callable[[], None]

    async def drain_node(self, node: str, reason: str) -> None:
        self.point()
        await super().drain_node(node, reason)
        self.point()

    async def undrain_node(self, node: SlurmNode) -> None:
        self.point()
        await super().undrain_node(node)
        self.point()

    async def reserve_node(self, node: str, name: str) -> None:
        self.point()
        await super().reserve_node(node, name)
        self.point()

    async def cancel(self, job_id: str) -> None:
        self.point()
        self.done.append(f"cancel {job_id}")
        self.cancelled(job_id)

    cancelled: Callable[[str], None]

    async def delete_reservation(self, name: str) -> None:
        if name.startswith(TESTED_MARK):  # several nodes, which no scripted reservation has
            self.point()
            self.reservations.pop(name)
            self.point()
            return
        self.point()
        await super().delete_reservation(name)
        self.point()


class DyingQuarantines(SqlQuarantines):
    def __init__(self, database: Database, point: Callable[[], None]) -> None:
        super().__init__(database)
        self.point = point

    def _die_around(self, work: Callable[[], None]) -> None:
        self.point()
        work()
        self.point()

    def intend(self, node: str, incident_id: str, reason: str, at: float, reservation: str | None = None) -> None:
        self._die_around(lambda: super(DyingQuarantines, self).intend(node, incident_id, reason, at, reservation))

    def drained(self, quarantine_id: int, reason_at: float | None) -> None:
        self._die_around(lambda: super(DyingQuarantines, self).drained(quarantine_id, reason_at))

    def end(self, quarantine_id: int, state: QuarantineState, at: float, why: str) -> None:
        self._die_around(lambda: super(DyingQuarantines, self).end(quarantine_id, state, at, why))
