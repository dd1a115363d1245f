"""What jobs left on GPUs: one finding for each job, with all its processes; nothing is cleared by a node that
does not speak."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from slurm_watchdog.controller.state.nodes import Nodes
from slurm_watchdog.detect import orphan_gpu_process
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import GpuHolder
from slurm_watchdog.model.report import Report
from tests.builders.views import cluster, job, seen, slurm_job

NOW = 1000.0
HOLDER = GpuHolder(
    pid=4711, start_ticks=9, uid=1000, user="eve", comm="python", state="S", job_id="6", gpu_uuids=("GPU-a", "GPU-b"),
    memory_bytes=520 * 2**20, orphan_for_s=300.0,
)  # fmt: skip


def held(number: int, **changes: Any) -> GpuHolder:
    """A process with a GPU and a start of its own."""
    own = {
        "pid": 4711 + number,
        "gpu_uuids": (f"GPU-{number}",),
        "minors": (number,),
        "memory_bytes": 3 << 30,
    }
    return replace(HOLDER, **{**own, **changes})


def node(name: str, *holders: GpuHolder, released: tuple[GpuHolder, ...] = ()) -> NodeView:
    return NodeView(name=name, reported_at=NOW - 2.0, boot_id="b", holders=holders, released=released)


def look(*nodes: NodeView, **changes: Any) -> list[Finding]:
    return orphan_gpu_process.detect(cluster(job(), nodes=nodes, **changes))


def test_one_process_is_reported_with_its_user_its_job_its_gpus_and_its_name() -> None:
    (found,) = look(node("n1", HOLDER))
    assert (found.truth, found.subject, found.job_ids) == (Truth.BAD, "leftovers:6/1000", ())
    assert found.summary == (
        "1 process of eve's job 6, which is over, still holds GPU-a, GPU-b on n1: pid 4711 (python), 520.0 MiB, for 5 min."
    )
    assert [(c.node, c.pid, c.gpu_uuid) for c in found.culprits] == [
        ("n1", 4711, "GPU-a"),
        ("n1", 4711, "GPU-b"),
    ]


def test_leftovers_of_one_job_on_many_nodes_are_one_finding_with_a_line_for_each_process() -> None:
    nodes = [node(f"n{n}", *(held(8 * n + gpu, rank=8 * n + gpu) for gpu in range(8))) for n in range(10)]
    (found,) = look(*nodes)
    assert found.summary == (
        "80 processes of eve's job 6, which is over, still hold 80 GPUs on n0, n1, n2, n3, n4, n5, n6, n7, n8, n9: "
        "240.0 GiB in all, for 5 min."
    )
    assert found.facts[0] == "n0: pid 4711 (python), rank 0, GPU 0 (GPU-0), 3.0 GiB, state S"
    assert found.facts[64] == "and 16 more processes"
    assert found.facts[65] == "on n0: ps -o pid,user,lstart,stat,cmd -p " + ",".join(str(4711 + n) for n in range(8))
    assert len(found.culprits) == orphan_gpu_process.MAX_LISTED
    endable = [node(each.name, *(replace(h, was_in_job=True) for h in each.holders)) for each in nodes]
    assert len(look(*endable)[0].processes) == 80


def test_memory_that_nvml_does_not_say_of_each_process_is_at_least_what_it_says() -> None:
    (found,) = look(node("n1", held(0), held(1, memory_bytes=None)))
    assert "at least 3.0 GiB in all" in found.summary
    assert "how much memory is not known" in look(node("n1", held(0, memory_bytes=None)))[0].summary


def test_jobs_users_and_those_without_a_job_are_told_apart() -> None:
    forged = held(2, uid=1001, user="mallory")
    strangers = held(3, job_id=None), held(4, job_id=None)
    found = look(node("n1", held(0), held(1, job_id="7"), forged, *strangers), node("n2", held(5, job_id=None)))
    assert [each.subject for each in found] == [
        "leftovers:6/1000", "leftovers:7/1000", "leftovers:6/1001", "holders:n1/1000", "holders:n2/1000",
    ]  # fmt: skip
    assert found[3].summary.startswith("2 processes of eve, of no job, still hold GPU-3, GPU-4 on n1: 6.0 GiB in all")
    assert not any(each.processes for each in found[3:])


def test_orphan_of_an_earlier_run_is_not_attributed_to_a_finished_job() -> None:
    again = JobView(job=slurm_job(job_id="6", restarts=1), run_age_s=100.0)
    (found,) = orphan_gpu_process.detect(ClusterView(now=NOW, jobs=(again,), nodes=(node("n1", HOLDER),)))
    assert found.summary.startswith("1 process of an earlier run of eve's job 6 still holds")


def test_orphan_is_unknown_while_running_jobs_are_not_known() -> None:
    (found,) = look(node("n1", replace(HOLDER, orphan_for_s=None)))
    assert (found.truth, found.culprits) == (Truth.UNKNOWN, ())


def test_orphan_is_resolved_when_no_node_has_any_left() -> None:
    gone, left = node("n1", released=(held(0),)), node("n2", held(1))
    assert look(gone, left)[0].truth is Truth.BAD
    (found,) = look(gone, node("n2", released=(held(1),)))
    assert (found.subject, found.truth) == ("leftovers:6/1000", Truth.OK)


def test_a_silent_node_that_had_some_of_them_clears_nothing() -> None:
    (found,) = look(node("n1", released=(held(0),)), node("n2", held(1)), silent_nodes=("n2",))
    assert found.truth is Truth.UNKNOWN
    (found,) = look(node("n1", held(0)), node("n2", held(1)), silent_nodes=("n2",))
    assert found.truth is Truth.BAD and found.summary.startswith("1 process")
    assert "1 more on n2: what became of them is not known" in found.facts


def test_a_node_that_was_restarted_has_none_of_them_any_more() -> None:
    nodes = Nodes()

    def report(boot_id: str, *holders: GpuHolder) -> ClusterView:
        nodes.apply(Report(node="n1", boot_id=boot_id, agent_id="a", sequence=1, gpu_holders=holders), NOW)
        return ClusterView(now=NOW, nodes=nodes.views())

    assert orphan_gpu_process.detect(report("b", HOLDER))[0].truth is Truth.BAD
    assert orphan_gpu_process.detect(report("c"))[0].truth is Truth.OK


def test_a_rank_of_a_running_job_is_no_matter_of_this_detector() -> None:
    assert orphan_gpu_process.detect(cluster(job(processes=(seen(0),)))) == []
