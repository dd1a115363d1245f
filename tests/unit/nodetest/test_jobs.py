"""Jobs of a test: at most so many at once, no two on a node, and none left when it is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from slurm_watchdog.nodetest.jobs import Ended, Heard, run_jobs
from slurm_watchdog.nodetest.pairs import ring
from slurm_watchdog.nodetest.plan import NodeJob, Placement, job_options


class Cluster:
    """Runs jobs that take one turn of the loop, and looks at which do at once."""

    def __init__(self, *, forever: bool = False) -> None:
        self.running: list[NodeJob] = []
        self.most, self.cancelled, self._forever = 0, 0, forever
        self.full = asyncio.Event()

    async def run(self, job: NodeJob, heard: Heard, wait_s: float | None) -> Ended:
        assert not {node for other in self.running for node in other.nodes} & set(job.nodes)
        self.running.append(job)
        self.most = max(self.most, len(self.running))
        if self.most == 3:
            self.full.set()
        try:
            await asyncio.sleep(3600 if self._forever else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running.remove(job)
        return Ended(nodes=job.nodes)


JOBS = [NodeJob(pair, {}, 1) for pair in ring([f"n{at}" for at in range(8)])]


async def run_all(cluster: Cluster, at_once: int) -> list[Ended]:
    return [each async for each in run_jobs(JOBS, cluster, at_once, lambda job, line: None, None)]


@pytest.mark.parametrize(("at_once", "most"), [(1, 1), (3, 3), (100, 4)])
def test_pairs_run_side_by_side_where_they_share_no_node(at_once: int, most: int) -> None:
    cluster = Cluster()
    ended = asyncio.run(run_all(cluster, at_once))
    assert sorted(each.nodes for each in ended) == sorted(job.nodes for job in JOBS)
    assert cluster.most == most


def test_cancelled_it_cancels_every_job_that_runs() -> None:
    cluster = Cluster(forever=True)

    async def cancelled() -> None:
        task = asyncio.ensure_future(run_all(cluster, 3))
        await asyncio.wait_for(cluster.full.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert (cluster.cancelled, cluster.running) == (3, [])


def test_a_job_is_exclusive_bounded_late_in_the_queue_and_says_whose_it_is() -> None:
    options = job_options(NodeJob(("n1", "n2"), {}, 7, "gpu"), Placement(comment="of ann", after="4711"))
    assert {
        "--exclusive", "--mem=0", "--time=7", "--nice=10000", "--nodelist=n1,n2", "--nodes=2", "--partition=gpu", "--comment=of ann",
        "--dependency=afterany:4711", "--job-name=slurm-watchdog-test",
    } <= set(options)  # fmt: skip
