"""What is looked up in one pass on a large cluster is what a search of everything would find: the short way
against the plain one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.analysis.slurm_nodes import may_be_starting, share_silent
from slurm_watchdog.detect import node_rules
from slurm_watchdog.detect.gpu_fault import JobsOfNodes
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView, RankGpu
from slurm_watchdog.model.node_view import GpuView, NodeView, SlurmNodeView
from slurm_watchdog.model.observations import Gpu, Role
from slurm_watchdog.model.slurm_states import is_away, is_lost
from tests.builders import views as builders

NAMES = tuple(f"n{number}" for number in range(6))
STATES = ("ALLOCATED", "IDLE*+DRAIN", "DOWN*", "MAINT", "DOWN+DRAIN", "IDLE")
NOW = 1000.0


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    nodes = draw(st.lists(st.sampled_from(NAMES), unique=True))
    listed = draw(st.lists(st.sampled_from(NAMES), unique=True))
    silent = draw(st.lists(st.sampled_from(nodes), unique=True)) if nodes else []
    subjects = [f"{what}:{name}" for what in ("node", "full") for name in NAMES]
    return ClusterView(
        now=NOW,
        silent_after_s=40.0,
        nodes=tuple(NodeView(name=name, reported_at=NOW - draw(st.floats(0, 700))) for name in sorted(nodes)),
        silent_nodes=tuple(sorted(silent)),
        slurm_nodes=tuple(
            SlurmNodeView(name=name, state=draw(st.sampled_from(STATES)), back_at=draw(st.none() | st.floats(0, NOW)))
            for name in listed
        ),
        jobs=tuple(draw(st.lists(jobs(), max_size=3, unique_by=lambda job: job.job.job_id))),
        asked=draw(st.none() | st.frozensets(st.sampled_from(subjects))),
    )  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> JobView:
    ranks = [
        ProcessView(
            node=draw(st.sampled_from(NAMES)),
            process=builders.process(rank=rank, pid=draw(st.integers(1, 4)), role=draw(st.sampled_from((Role.RANK, Role.WORKER)))),
            seen_age_s=1.0,
        )
        for rank in range(draw(st.integers(0, 5)))
    ]  # fmt: skip
    gpus = [
        RankGpu(
            rank=0,
            pid=draw(st.integers(1, 4)),
            view=GpuView(node=draw(st.sampled_from(NAMES)), gpu=Gpu(uuid=draw(st.sampled_from("AB")), index=0)),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]  # fmt: skip
    job_id = str(draw(st.integers(1, 4)))
    nodes = tuple(draw(st.lists(st.sampled_from(NAMES), unique=True)))
    job = builders.slurm_job(job_id=job_id, nodes=nodes)
    return JobView(job=job, run_age_s=9.0, processes=tuple(ranks), gpus=tuple(gpus))


@settings(deadline=None)
@given(views(), st.sampled_from(NAMES), st.sampled_from(("A", "B", "")), st.sets(st.integers(1, 4)))
def test_the_ranks_on_a_gpu_are_those_that_a_search_of_all_ranks_finds(
    view: ClusterView, node: str, uuid: str, pids: set[int]
) -> None:
    plain = [
        (job, rank)
        for job in view.jobs
        if node in job.job.nodes
        for rank in job.ranks
        if rank.node == node
        and (
            rank.process.pid in pids
            or any((each.view.node, each.view.gpu.uuid, each.pid) == (node, uuid, rank.process.pid) for each in job.gpus)
        )
    ]  # fmt: skip
    jobs = JobsOfNodes(view, (node, NAMES[0]))
    assert jobs.ranks_on(node, uuid, pids) == plain
    assert jobs.ranks_on(node, uuid, pids) == plain
    assert list(jobs.on(node)) == [job for job in view.jobs if node in job.job.nodes]


@settings(deadline=None)
@given(views())
def test_the_share_of_silent_nodes_is_that_of_a_plain_count(view: ClusterView) -> None:
    slurm = {node.name: node for node in view.slurm_nodes}
    here = [
        node
        for node in view.nodes
        if not (node.name in slurm and is_away(slurm[node.name].state))
        and not (
            node.name in view.silent_nodes and node.name in slurm and may_be_starting(view, node, slurm[node.name])
        )
    ]  # fmt: skip
    assert share_silent(view) == (sum(node.name in view.silent_nodes for node in here), len(here))


@settings(deadline=None)
@given(views())
def test_every_node_that_is_asked_about_silent_or_down_has_its_finding_and_no_other_has(
    view: ClusterView,
) -> None:
    asked = {node.name for node in view.nodes if view.asked is None or f"node:{node.name}" in view.asked}
    state = {node.name: node.state for node in view.slurm_nodes}
    names = [node.name for node in view.nodes]
    down = [name for name in names if name in state and (name in asked or is_lost(state[name]))]
    assert [finding.subject for finding in node_rules.DOWN.detect(view)] == [f"node:{name}" for name in down]
    meant = [name for name in names if name in asked or name in view.silent_nodes]
    assert [finding.subject for finding in node_rules.SILENT.detect(view)] == [f"node:{name}" for name in meant]
