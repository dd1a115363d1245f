"""A heterogeneous job is one training, whatever number each component's processes have: its nodes are heard, asked by
the number that they know, and learn whose it is."""

from __future__ import annotations

import asyncio

from slurm_watchdog.config.controller import Jobs
from slurm_watchdog.controller.actions.owned_paths import OwnedPaths
from slurm_watchdog.controller.evidence.requests import EvidenceRequests
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.incidents import Finding, IncidentKind, StackRequest, Truth
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.views import RECV, node_of, process, slurm_job, stack

JOB = slurm_job(component_ids=("8",), batch_host="n1", stdout="/logs/7.out")


def cluster() -> ClusterState:
    """Ranks 0 and 1 of the first component are on n1, 2 and 3 of the second on n2, and have its number."""
    state = ClusterState(silent_after_s=600, report_lifetime_s=60)
    state.require_node_ownership = True
    nodes = tuple(SlurmNode(name=node, address=node, state="IDLE") for node in ("n1", "n2"))
    state.apply_slurm(SlurmView(jobs=(JOB,), nodes=nodes), 1000.0)
    for node, number in (("n1", "7"), ("n2", "8")):
        mine = tuple(process(rank, job_id=number) for rank in range(4) if node_of(rank) == node)
        report = Report(node=node, boot_id="b", agent_id="a", sequence=1, processes=mine)
        assert state.apply_report(report, 1000.0) == "accepted"
    return state


def test_ranks_of_every_component_are_ranks_of_the_job() -> None:
    view = cluster().job_view("7", 1001.0)
    assert view is not None
    assert [(each.node, each.process.rank, each.process.job_id) for each in view.ranks] == [
        (node_of(rank), rank, "7") for rank in range(4)
    ]
    assert view.every_rank_known


def test_each_node_is_asked_about_the_number_that_it_knows_and_the_dump_is_one() -> None:
    async def story() -> None:
        state, commands = cluster(), CommandQueue()
        requests = EvidenceRequests(state, commands, probe_deadline_s=10.0)
        wanted = Finding(
            kind=IncidentKind.COLLECTIVE_HANG, subject="job:7", truth=Truth.UNKNOWN, summary="", job_ids=("7",),
            wanted=(StackRequest(job_id="7"),),
        )  # fmt: skip
        requests.serve([wanted], 1001.0)
        await asyncio.sleep(0.01)
        asked = {node: commands.pop(node) for node in ("n1", "n2")}
        assert {node: [each.job_id for each in found] for node, found in asked.items()} == {"n1": ["7"], "n2": ["8"]}  # type: ignore[union-attr]
        for node, (command,) in asked.items():
            stacks = tuple(stack(rank, RECV) for rank in range(4) if node_of(rank) == node)
            commands.resolve(CommandResult(command_id=command.id, ok=True, stacks=stacks))
        await asyncio.sleep(0.01)
        view = state.job_view("7", 1002.0)
        assert view is not None
        assert [(each.silent_nodes, len(each.stacks)) for each in view.snapshots] == [((), 4)]
        await requests.close()

    asyncio.run(story())


def test_a_node_of_a_later_component_knows_whose_its_number_is() -> None:
    state = cluster()
    paths = OwnedPaths(Jobs(), state)
    known = {
        node: [(each.job_id, each.uid, each.log_paths) for each in paths.watches(JOB, {}, node)]
        for node in ("n1", "n2")
    }
    assert known == {"n1": [("7", 1000, ("/logs/7.out",))], "n2": [("7", 1000, ()), ("8", 1000, ())]}
    alone = slurm_job()
    state.apply_slurm(SlurmView(jobs=(alone,), nodes=()), 1003.0)
    assert [each.job_id for each in paths.watches(alone, {}, "n2")] == ["7"]
