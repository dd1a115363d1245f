"""memory_kill: the rank that the kernel killed, before any cascade; nobody of another job, and nothing that did not
matter."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect import lingering_job
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.crash_loop import chain_broken
from slurm_watchdog.detect.memory_kill import detect
from slurm_watchdog.detect.registry import causes_of
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.node_view import NodeView, SeenEvent, SeenUsage
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent, Resource, Role, Usage
from tests.builders.ended_jobs import ended
from tests.builders.kernel_messages import parse_kernel_line
from tests.builders.views import cluster, job, process, progress, seen, slurm_job

NOW = 10_000.0
GROUP = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm/uid_1000/job_{job},"
    "task_memcg=/slurm/uid_1000/job_{job}/step_0/task_1,task=python3,pid={pid},uid=1000"
)
OWN = "/user.slice/user-1000.slice/user@1000.service"
KILLED = (
    "Memory cgroup out of memory: Killed process {pid} (python3) total-vm:75228kB, anon-rss:16777216kB, "
    "file-rss:1024kB, shmem-rss:1024kB, UID:1000 pgtables:184kB oom_score_adj:0"
)
NODE = "Out of memory: Killed process {pid} (python3) total-vm:75228kB, anon-rss:1048576kB, file-rss:0kB, shmem-rss:0kB"


def said(line: str, age_s: float = 12.0) -> SeenEvent:
    fact = parse_kernel_line(line)
    assert fact is not None and fact.name == "oom_kill"
    event = NodeEvent(
        source="kernel_log", name=fact.name, severity=FaultSeverity.ERROR, age_s=0.0, line=fact.message, pid=fact.pid,
        process=fact.process, mount=fact.mount,
    )  # fmt: skip
    return SeenEvent(at=NOW - age_s, event=event)


def kill(pid: int = 103, job_id: str = "7", age_s: float = 12.0) -> tuple[SeenEvent, ...]:
    return tuple(said(line.format(pid=pid, job=job_id), age_s) for line in (GROUP, KILLED))


def view(events: tuple[SeenEvent, ...], node: str = "n2", **changes: Any) -> ClusterView:
    given: dict[str, Any] = {
        "processes": (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=10.0)),
        "progress": progress(15.0, total_steps=1000),
    }
    nodes = tuple(NodeView(name=n, reported_at=NOW - 2, events=events if n == node else ()) for n in ("n1", "n2", "n9"))
    return cluster(job(**{**given, **changes}), nodes=nodes)


WRONG = view(kill())


def found(seen_: ClusterView) -> Finding:
    (finding,) = detect(seen_, CollectiveHang())
    return finding


def test_rank_that_the_kernel_killed_is_named_with_what_it_held() -> None:
    finding = found(WRONG)
    assert finding.truth is Truth.BAD and finding.subject == "run:7.0"
    assert [(c.rank, c.node, c.pid) for c in finding.culprits] == [(3, "n2", 103)]
    assert finding.summary == (
        "Rank 3 (pid 103 on n2) of job 7 was killed by the kernel for memory: it held 16.0 GiB, and its job had none "
        "left, 12 s ago."
    )
    assert {"dead_rank", "log_error"} <= {
        kind for kind in ("dead_rank", "log_error") if "memory_kill" in causes_of(kind)
    }


def test_kill_with_a_known_limit_says_how_much_of_it() -> None:
    row = Usage(resource=Resource.MEMORY, used=1, limit=17 << 30, job_id="7")
    nodes = tuple(replace(node, usages=(SeenUsage(at=NOW, usage=row),)) for node in WRONG.nodes)
    finding = found(replace(WRONG, nodes=nodes))
    assert "was killed by the kernel for memory: 16.0 GiB of 17.0 GiB, 12 s ago." in finding.summary
    small = SeenUsage(at=NOW, usage=replace(row, limit=1 << 30, step_id="1"))
    nodes = tuple(replace(node, usages=(*node.usages, small)) for node in nodes)
    assert found(replace(WRONG, nodes=nodes)).summary == finding.summary, "the limit of another step is none of it"


def test_a_step_that_is_killed_as_one_begins_with_the_process_that_was_chosen_and_has_each_rank_once() -> None:
    """As Linux writes it with memory.oom.group: the chosen one has a line among all others, too."""
    others = (103, 102, 103)
    lines = [GROUP.format(pid=103, job="7"), *(KILLED.format(pid=pid) for pid in others)]
    events = tuple(said(line, 12.0 - number / 1000) for number, line in enumerate(lines))
    finding = found(view(events, processes=(seen(0), seen(1), seen(2, gone_s=10.0), seen(3, gone_s=10.0))))
    assert [each.rank for each in finding.culprits] == [3, 2]
    assert finding.summary.startswith("Rank 3 (pid 103 on n2) and rank 2 of job 7 were killed by the kernel for memory")


def test_kernels_that_call_the_limit_of_a_job_no_constraint_mean_it_all_the_same() -> None:
    line = GROUP.format(pid=103, job="7").replace("CONSTRAINT_MEMCG", "CONSTRAINT_NONE")
    assert "its job had none left" in found(view((said(line), said(KILLED.format(pid=103))))).summary


def test_limit_that_a_job_set_itself_is_not_the_one_that_slurm_gave_it() -> None:
    """As of a container with a limit, within a task."""
    inside = GROUP.replace(
        "oom_memcg=/slurm/uid_1000/job_{job}", "oom_memcg=/slurm/uid_1000/job_{job}/step_0/task_1/libpod-9c"
    )
    row = Usage(resource=Resource.MEMORY, used=1, limit=17 << 30, job_id="7")
    seen_ = view((said(inside.format(pid=103, job="7")), said(KILLED.format(pid=103))))
    nodes = tuple(replace(node, usages=(SeenUsage(at=NOW, usage=row),)) for node in seen_.nodes)
    assert (
        "it held 16.0 GiB, and a control group that its job made had none left"
        in found(replace(seen_, nodes=nodes)).summary
    )


def test_limit_of_a_group_above_the_job_is_not_the_jobs() -> None:
    """As where a site bounds what all jobs of a node may have (MemoryMax of their slice)."""
    above = GROUP.replace("oom_memcg=/slurm/uid_1000/job_{job}", "oom_memcg=/slurm")
    seen_ = view((said(above.format(pid=103, job="7")), said(KILLED.format(pid=103))))
    assert "it held 16.0 GiB, and n2 had none left" in found(seen_).summary


def test_counter_that_rose_names_the_one_rank_that_ended_then_where_the_kernels_log_is_not_read() -> None:
    row = Usage(resource=Resource.MEMORY, used=1, limit=17 << 30, refused=1, by_limit=True, job_id="7", step_id="0")
    other = replace(row, limit=1 << 30, refused=0, step_id="1")
    rose = (SeenUsage(at=NOW - 5, usage=row, refused_at=NOW - 5), SeenUsage(at=NOW - 5, usage=other))
    blind = view(())
    blind = replace(blind, nodes=tuple(replace(n, usages=rose if n.name == "n2" else ()) for n in blind.nodes))
    finding = found(blind)
    assert finding.truth is Truth.BAD and finding.culprits[0].rank == 3
    assert "its job had used up the 17.0 GiB that it may have there" in finding.summary
    both = replace(blind.jobs[0], processes=(seen(0), seen(1), seen(2, gone_s=12.0), seen(3, gone_s=10.0)))
    assert found(replace(blind, jobs=(both,))).truth is Truth.UNKNOWN


@pytest.mark.parametrize(("by_limit", "who"), [(None, "its job or its node"), (False, "n2")])
def test_counter_alone_says_that_the_limit_was_reached_only_where_it_knows(by_limit: bool | None, who: str) -> None:
    """The kernel counts in a job's group also those that it killed because the node had no memory left."""
    row = Usage(resource=Resource.MEMORY, used=1, limit=17 << 30, refused=1, by_limit=by_limit, job_id="7")
    rose = (SeenUsage(at=NOW - 5, usage=row, refused_at=NOW - 5),)
    blind = view(())
    blind = replace(blind, nodes=tuple(replace(n, usages=rose if n.name == "n2" else ()) for n in blind.nodes))
    assert f"was killed by the kernel for memory: {who} had none left" in found(blind).summary


def test_nodes_that_share_a_kernel_name_the_process_where_it_was_and_no_other_rank_that_ended() -> None:
    both = view(kill(), processes=(seen(0), seen(1, gone_s=9.0, comm="python3"), seen(2), seen(3, gone_s=10.0)))
    both = replace(both, nodes=tuple(replace(node, events=kill()) for node in both.nodes))
    assert [each.rank for each in found(both).culprits if each.rank is not None] == [3]


def test_node_without_memory_is_said_to_be_the_place() -> None:
    assert "it held 1.0 GiB, and n2 had none left" in found(view((said(NODE.format(pid=103)),))).summary


def test_process_that_was_never_seen_is_known_by_its_control_group_and_waited_for() -> None:
    unseen = {"processes": tuple(seen(r) for r in range(4))}
    assert found(view(kill(9999), **unseen)).truth is Truth.UNKNOWN
    assert found(view(kill(9999, age_s=300.0), **unseen, progress=progress(400.0))).truth is Truth.BAD


@pytest.mark.parametrize(
    ("seen_", "truth"),
    [
        (view(kill(job_id="8")), Truth.OK),
        (
            view(
                tuple(
                    said(line.replace("/slurm/", OWN + "/slurm/").format(pid=9999, job="7")) for line in (GROUP, KILLED)
                )
            ),
            Truth.OK,
        ),
        (view((said(NODE.format(pid=9999)),)), Truth.OK),
        (view(kill(), node="n9"), Truth.OK),
        (view(kill(), progress=progress(1.0)), Truth.OK),
        (view(kill(age_s=700.0)), Truth.OK),
        (view(()), Truth.OK),
        (view((), silent_nodes=("n2",)), Truth.UNKNOWN),
        (
            view(kill(110), processes=(*(seen(r) for r in range(4)), seen(3, pid=110, role=Role.WORKER, gone_s=9.0))),
            Truth.UNKNOWN,
        ),
    ],
    ids=[
        "another job's",
        "of a group that a user made",
        "nobody's",
        "another node",
        "steps since",
        "long ago",
        "nothing",
        "silent",
        "a worker",
    ],
)
def test_what_is_of_another_job_or_did_not_matter_accuses_nobody(seen_: ClusterView, truth: Truth) -> None:
    finding = found(seen_)
    assert finding.truth is truth and not finding.culprits


def test_job_that_ended_with_the_kill_is_reported_and_its_chain_says_why() -> None:
    over = ended("OUT_OF_MEMORY", job=slurm_job(job_id="9", state="OUT_OF_MEMORY", nodes=("n1", "n2")))
    assert over.run is not None
    over = replace(
        over, ended_at=NOW - 130.0, run=replace(over.run, ended_at=NOW - 130.0, rose_at=NOW - 140.0, nodes=("n1", "n2"))
    )
    node = NodeView(name="n2", reported_at=NOW - 2, events=kill(9999, "9", age_s=135.0))
    whole = cluster(ended=(over,), nodes=(node,))
    finding = found(whole)
    assert finding.truth is Truth.BAD and finding.culprits[0].node == "n2"
    (broken,) = chain_broken(whole)
    assert "killed by the kernel for memory" in broken.summary


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"])
def test_helper_that_was_killed_in_a_run_with_another_end_did_not_end_it(state: str) -> None:
    over = ended(state, job=slurm_job(job_id="9", state=state, nodes=("n1", "n2")))
    assert over.run is not None
    run = replace(over.run, ended_at=NOW - 130.0, rose_at=NOW - 140.0, nodes=("n1", "n2"), state=state)
    node = NodeView(name="n2", reported_at=NOW - 2, events=kill(9999, "9", age_s=135.0))
    assert found(cluster(ended=(replace(over, ended_at=NOW - 130.0, run=run),), nodes=(node,))).truth is Truth.OK


@pytest.mark.parametrize(("rose_s", "age_s"), [(131.0, 140.0), (3100.0, 3000.0)], ids=["steps since", "long before"])
def test_kill_that_a_run_outlived_is_neither_told_nor_the_reason_why_its_chain_broke(
    rose_s: float, age_s: float
) -> None:
    over = ended("FAILED", job=slurm_job(job_id="9", state="FAILED", nodes=("n1", "n2")))
    assert over.run is not None
    run = replace(over.run, ended_at=NOW - 130.0, rose_at=NOW - rose_s, nodes=("n1", "n2"))
    node = NodeView(name="n2", reported_at=NOW - 2, events=kill(9999, "9", age_s=age_s))
    whole = cluster(ended=(replace(over, ended_at=NOW - 130.0, run=run),), nodes=(node,))
    assert found(whole).truth is not Truth.BAD
    (broken,) = chain_broken(whole)
    assert broken.truth is Truth.BAD and "killed by the kernel" not in broken.summary


def test_ranks_that_linger_after_it_are_reported_with_the_cause() -> None:
    lingers = view(
        kill(age_s=400.0), processes=(*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=398.0)), progress=progress(402.0)
    )
    (finding,) = lingering_job.detect(lingers, lingering_job.LingeringJob(), CollectiveHang())
    assert finding.truth is Truth.BAD and "was killed by the kernel for memory: it held 16.0 GiB" in finding.summary


def test_no_incident_open_and_no_kill_says_nothing() -> None:
    quiet = replace(view(()), asked=frozenset())
    assert detect(quiet, CollectiveHang()) == []


def test_pid_of_an_array_element_is_known_by_slurms_plain_number() -> None:
    element = {"job": slurm_job(job_id="7_3", raw_id="12"), "processes": (seen(0), seen(1, gone_s=9.0))}
    finding = found(view(kill(101, "12"), node="n1", **element))
    assert finding.job_ids == ("7_3",) and finding.culprits[0].rank == process(1).rank
