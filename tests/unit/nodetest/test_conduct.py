"""A test of nodes as a whole over scripted jobs: which nodes a second look measures, and what remains of the first one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.nodetest.conduct import Report, Terms, conduct
from slurm_watchdog.nodetest.jobs import Ended, Heard
from slurm_watchdog.nodetest.plan import NodeJob, Wanted
from slurm_watchdog.nodetest.results import Line

SHARED = "/s"
PHASES = frozenset({"cpu", "mount"})


class Shown:
    """A progress that nobody looks at."""

    def part(self, what: str, jobs: int) -> None:
        pass

    def ended(self, job: Ended) -> None:
        pass


class Jobs:
    """Answers each job with the figures that `rate(node, look)` and `cpu(node)` give; None: its node is not free."""

    def __init__(self, rate: Callable[[str, int], float | None], cpu: Callable[[str], float]) -> None:
        self._rate, self._cpu = rate, cpu
        self.asked: list[NodeJob] = []

    async def run(self, job: NodeJob, heard: Heard, wait_s: float | None) -> Ended:
        (node,) = job.nodes
        look = 1 + sum(each.nodes == job.nodes for each in self.asked)
        self.asked.append(job)
        rate = self._rate(node, look)
        if rate is None:
            return Ended(nodes=job.nodes, why=f"its nodes were not free within {wait_s} s")
        lines = [Line(node=node, phase="state", state="ok", at=0.0, facts={"model": "X x32"})]
        phases = [each["phase"] for each in job.question["phases"]]
        if "cpu" in phases:
            lines.append(Line(node=node, phase="cpu", state="ok", at=0.0, figures={"cpu_all": (self._cpu(node), 0.0, 5, False)}))  # fmt: skip
        if "mount" in phases:
            figures = {"mount_read": (rate, 0.0, 5, False)}
            lines.append(Line(node=node, phase="mount", state="ok", at=0.0, subject=SHARED, figures=figures))
        return Ended(nodes=job.nodes, lines=tuple(lines))

    @property
    def second(self) -> list[NodeJob]:
        """Jobs of the second look, in their order."""
        return self.asked[NODES:]


NODES = 6


def conducted(jobs: Jobs) -> Report:
    wanted = Wanted(phases=PHASES, shared_directories=(SHARED,), tools=False)
    nodes = [
        SlurmNode(name=f"n{at}", address=f"n{at}", state="IDLE", partitions=("main",)) for at in range(1, NODES + 1)
    ]
    return asyncio.run(
        conduct(nodes, wanted, Terms(at_once=1), jobs, Shown(), lambda job, line: None, {}, lambda _: {})
    )


def bad(report: Report) -> list[str]:
    return [each.node for each in report.verdicts if each.truth is Truth.BAD]


@pytest.mark.parametrize(("peers_then", "named"), [(900.0, []), (4000.0, ["n3"]), (None, ["n3"])])
def test_a_shared_directory_that_is_as_slow_on_peers_in_the_second_look_convicts_nobody(
    peers_then: float | None, named: list[str]
) -> None:
    jobs = Jobs(lambda node, look: 800.0 if node == "n3" else 4000.0 if look == 1 else peers_then, lambda node: 6e4)
    assert bad(conducted(jobs)) == named
    assert [job.nodes[0] for job in jobs.second] == ["n1", "n2", "n3", "n4", "n5"]
    assert [job.wait_s for job in jobs.second] == [60.0, 60.0, None, 60.0, 60.0]
    of_a_peer = {each["phase"] for each in jobs.second[0].question["phases"]}
    assert of_a_peer == {"state", "mount"}


def test_a_node_whose_own_parts_are_slow_is_measured_again_without_its_peers() -> None:
    jobs = Jobs(lambda node, look: 4000.0, lambda node: 3e4 if node == "n3" else 6e4)
    assert bad(conducted(jobs)) == ["n3"]
    assert [job.nodes for job in jobs.second] == [("n3",)]
