"""A cluster of four nodes whose controller takes nodes out of service and tests them, and may be killed at each step of
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from slurm_watchdog.config.policy import Policy
from slurm_watchdog.controller.node_history.node_tests import NodeTests
from slurm_watchdog.controller.node_history.quarantine import QuarantineTools, sweep
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import TESTED_MARK, NodeEvent, NodeEventKind
from slurm_watchdog.model.slurm import Reservation, SlurmJob
from slurm_watchdog.nodetest.judge import NodeVerdict
from slurm_watchdog.slurm.client import SlurmUnavailable
from tests.behaviour.cluster import EPOCH, Scripted

POLICY = Policy(max_drained_nodes=1, drained_percent=50)
SUSPECT = (("n1", "i1"),)
OURS = "slurm-watchdog: suspect node, incident i1"


class Killed(BaseException):
    """The controller dies here."""


class Cluster:
    """Four nodes, of which n1 is suspect; the controller may be killed at its n-th step towards the world."""

    def __init__(self, directory: Path) -> None:
        self.policy = POLICY
        self.now, self.steps, self.dies_at = 10.0, 0, -1
        self.slurm = DyingSlurm(now=lambda: self.now)
        self.slurm.point = self.point
        self.slurm.cancelled = lambda job_id: self.tester.jobs.clear()
        self.slurm.add_nodes("n1", "n2", "n3", "n4")
        self.journal = Journal(f"sqlite:///{directory}/journal.sqlite")
        self.listing = tuple(self.slurm.nodes.values())
        """What the controller knows of the nodes, as they were at first: listings are older than requests."""
        self.held_back: str | None = None
        self.permitted = self.floors = False
        self.tester = ScriptedTester(self)
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
        tests = NodeTests(tools, self.tester.test, lambda: self.held_back, floors=self.floors)
        listed = tuple(self.slurm.nodes.values()), self.test_jobs, tuple(self.slurm.reservations.values())
        await tests.turn(*listed, {"n4": "slurm-watchdog: Xid 79"}, permitted=self.permitted)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    @property
    def test_jobs(self) -> dict[str, SlurmJob]:
        """What Slurm lists of jobs of tests."""
        return {each.job_id: each for each in self.tester.jobs}

    def _tools(self) -> QuarantineTools:
        return QuarantineTools(self.slurm, self.policy, self.events, self.record, lambda: EPOCH + self.now)

    def record(self, event: NodeEvent) -> None:
        self.point()
        self.journal.node_events.save(event)
        self.point()

    def events(self) -> list[NodeEvent]:
        return self.journal.node_events.since(0.0)

    def history(self, node: str = "n1") -> list[tuple[str, str]]:
        """Kind and words of what the history of a node says of its drains."""
        ours = (NodeEventKind.DRAINED, NodeEventKind.BY_OPERATOR)
        return [(each.kind, each.what) for each in self.journal.node_events.of(node=[node]) if each.kind in ours]

    def told(self) -> list[str]:
        """What the history of n1 says of its quarantine."""
        ours = (NodeEventKind.QUARANTINED, NodeEventKind.MENDED)
        return [each.what for each in self.journal.node_events.of(node=["n1"]) if each.kind in ours]

    @property
    def state(self) -> str:
        """How the quarantine of n1 stands: the first word of its newest event, if it has any."""
        found = [each.what for each in self.events() if (each.node, each.kind) == ("n1", NodeEventKind.QUARANTINED)]
        return found[-1].partition(" ")[0] if found else ""

    @property
    def done(self) -> list[str]:
        return self.slurm.done


class ScriptedTester:
    """Stands in for test-nodes: lifts the drain in a reservation, has a job there, and puts all back; a controller that
    dies meanwhile leaves what there is at that moment."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.asked: list[tuple[str, ...]] = []
        self.jobs: list[SlurmJob] = []
        self.says: Callable[[str], NodeVerdict | None] = lambda node: NodeVerdict(node=node, truth=Truth.OK, peers=4)

    async def test(self, name: str, nodes: Sequence[str]) -> Sequence[NodeVerdict]:
        cluster, slurm = self._cluster, self._cluster.slurm
        self.asked.append(tuple(nodes))
        cluster.point()
        lifted = {node: slurm.nodes[node] for node in nodes if "DRAIN" in slurm.nodes[node].state}
        assert not any(each.name.startswith(TESTED_MARK) for each in slurm.reservations.values()), "two at once"
        slurm.reservations[name] = Reservation(
            name=name, start_at=EPOCH + cluster.now, end_at=9e9, nodes=tuple(nodes), flags=("MAINT",)
        )
        for each, node in lifted.items():
            slurm.nodes[each] = replace(node, state="IDLE+MAINT", reason="", reason_at=None)
        cluster.point()
        self.jobs.append(SlurmJob(job_id="77", state="RUNNING", nodes=tuple(nodes), reservation=name))
        cluster.point()
        self.jobs.clear()
        slurm.nodes.update({each: replace(node, reason_at=cluster.now) for each, node in lifted.items()})
        cluster.point()
        slurm.reservations.pop(name, None)
        cluster.point()
        found = [said for node in nodes if (said := self.says(node)) is not None]
        if not found:
            raise SlurmUnavailable("salloc does not answer")
        return found


class DyingSlurm(Scripted):
    point: Callable[[], None]

    async def drain_node(self, node: str, reason: str) -> None:
        self.point()
        await super().drain_node(node, reason)
        self.point()

    async def undrain_node(self, node: str, reason: str, reason_at: float | None) -> None:
        self.point()
        await super().undrain_node(node, reason, reason_at)
        self.point()

    async def cancel(self, job_id: str) -> None:
        self.point()
        self.done.append(f"cancel {job_id}")
        self.cancelled(job_id)

    cancelled: Callable[[str], None]

    async def delete_reservation(self, name: str) -> None:
        self.point()
        self.reservations.pop(name)
        self.point()
