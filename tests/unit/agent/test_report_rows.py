"""What a controller takes of a report: shares, and nobody who looks dead for want of room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

from slurm_watchdog.agent.service import LONGEST_NAME, reduced
from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.base.python310 import is_class
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.door import BOUNDS, INNER, PROCESSES_OF_JOB, Admitted, admit, share_of
from slurm_watchdog.model.observations import Gpu, HungProbe, Process, Role
from slurm_watchdog.model.report import LeftOut as Unnamed
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmView
from tests.builders.views import blocked, process, slurm_job


def rows(
    count: int, first: int = 1000, *, uid: int = 1500, job: str = "1", role: Role = Role.HELPER, **more: Any
) -> tuple[Process, ...]:
    return tuple(
        process(
            pid=first + n, start_ticks=first + n, uid=uid, job_id=job, role=role, rank=n if role is Role.RANK else None, **more
        )
        for n in range(count)
    )  # fmt: skip


def report(processes: tuple[Process, ...] = (), sequence: int = 1, **more: Any) -> Report:
    return Report(node="n1", boot_id="b", agent_id="a", sequence=sequence, processes=processes, **more)


def test_fair_share_of_one_owner_with_many_rows_leaves_the_others_theirs() -> None:
    many = [("a", n) for n in range(50_000)] + [("b", n) for n in range(3)]
    kept, lost = fair_share(many, 10, lambda row: row[0])
    assert [row for row in kept if row[0] == "b"] == [("b", 0), ("b", 1), ("b", 2)]
    assert kept[:7] == tuple(("a", n) for n in range(7)) and lost == {"a": 49_993}


def test_reduced_keeps_every_process_and_drops_long_names() -> None:
    call = blocked(60.0, mount="/shared", path="/shared/" + "x" * LONGEST_NAME)
    small = reduced(report(rows(3, blocked=call)), "8 MiB").processes
    assert [row.pid for row in small] == [1000, 1001, 1002]
    assert small[0].blocked is not None
    assert (small[0].blocked.mount, small[0].blocked.path) == ("/shared", None)


def admitted(said: Report, left_out: LeftOut | None = None, known: Any = (), nodes: int = 1) -> Admitted:
    job = slurm_job(nodes=tuple(f"n{n}" for n in range(nodes)), uid=-1)
    return admit(said, lambda job_id: job, None, lambda node: known, left_out or LeftOut())


def test_an_honest_report_is_admitted_as_it_is() -> None:
    honest = report((*rows(256, role=Role.RANK), *rows(700, 5000, role=Role.WORKER)))
    assert admitted(honest, nodes=4) == (honest, 0, {}) and admitted(honest, nodes=4).report is honest


def test_of_too_many_those_that_are_known_are_admitted_and_it_is_reported_whose_the_others_are() -> None:
    left_out, ranks = LeftOut(), rows(PROCESSES_OF_JOB + 100, role=Role.RANK)
    known = {(row.pid, row.start_ticks) for row in ranks[-PROCESSES_OF_JOB:]}
    taken, _, missing = admitted(report(ranks), left_out, known)
    assert {(row.pid, row.start_ticks) for row in taken.processes} == known
    assert missing == {"1": 100}
    (said,) = left_out.lately(0.0)
    assert (said.what, said.whose, said.uid, said.count) == ("processes", "n1", 1500, 100)


def test_of_many_jobs_each_user_has_his_share() -> None:
    many = tuple(row for job in range(40) for row in rows(500, 10_000 * job + 1, job=f"m{job}"))
    victim = rows(9, 3, uid=1501, job="v", role=Role.RANK)
    taken, _, missing = admitted(report((*many, *victim)))
    most = BOUNDS["processes"].rows
    assert len(taken.processes) == most and set(victim) <= set(taken.processes)
    assert missing.total() == 20_009 - most and "v" not in missing


def test_rows_beyond_each_bound_and_rows_that_are_swollen_are_left_out_and_counted() -> None:
    left_out = LeftOut()
    hung = tuple(HungProbe(probe=f"p{n}", seconds=1) for n in range(BOUNDS["hung_probes"].rows + 5))
    gpus = (Gpu(uuid="a", index=0), Gpu(uuid="b", index=1, pids=tuple(range(INNER + 1))))
    taken = admitted(report(hung_probes=hung, gpus=gpus), left_out).report
    assert (taken.hung_probes, taken.gpus) == (hung[:-5], gpus[:1])
    assert (left_out.totals["hung_probes"], left_out.totals["gpus"]) == (5, 1)


def test_the_share_of_a_job_on_a_node_is_smaller_for_one_with_many_nodes() -> None:
    shares = [share_of(slurm_job(nodes=("n",) * nodes)) for nodes in (0, 1, 256, 1000, 100_000)]
    assert shares == [1024, 1024, 1024, 262, 128] and share_of(None) == 1024


class Cluster:
    """A node with a job, seen by the real state."""

    def __init__(self, restarts: int = 0) -> None:
        self.state = ClusterState(silent_after_s=15, report_lifetime_s=60)
        self.now, self.sequence = 0.0, 0
        job = slurm_job(job_id="1", nodes=("n1",), restarts=restarts, uid=1500)
        self.state.apply_slurm(SlurmView(jobs=(job,), nodes=()), self.now)

    def take(self, processes: tuple[Process, ...], after_s: float = 5.0, **more: Any) -> None:
        self.now += after_s
        self.sequence += 1
        assert self.state.apply_report(report(processes, self.sequence, **more), self.now) == "accepted"

    def known(self) -> int:
        return len(self.state.runs._runs["1"].processes)


def test_state_of_a_job_of_short_processes_remembers_those_that_live_alone() -> None:
    cluster, seen = Cluster(), []
    for number in range(60):
        cluster.take((*rows(2, role=Role.RANK), *rows(128, 10_000 + 200 * number)))
        seen.append(cluster.known())
    assert set(seen) == {130}
    assert len(cluster.state.runs._runs["1"].processes) == 130


def test_state_of_ranks_that_live_for_a_moment_remembers_a_bounded_number_of_them() -> None:
    cluster = Cluster()
    for number in range(40):
        cluster.take(rows(64, 10_000 + 100 * number, role=Role.RANK))
    assert cluster.known() == 64 + 256
    view = cluster.state.job_view("1", cluster.now)
    assert view is not None and all(rank.alive for rank in view.ranks)


def test_state_of_loaders_that_come_and_go_remembers_the_death_of_a_rank() -> None:
    cluster = Cluster()
    cluster.take(rows(2, role=Role.RANK))
    for number in range(20):
        workers = rows(64, 10_000 + 100 * number, role=Role.WORKER)
        cluster.take((*rows(1, role=Role.RANK), *workers))
    view = cluster.state.job_view("1", cluster.now)
    assert view is not None
    assert [rank.alive for rank in view.ranks] == [True, False]


def test_state_that_is_told_of_unnamed_processes_says_so_until_all_are_named() -> None:
    cluster = Cluster()
    cluster.take(rows(1, role=Role.RANK), left_out=(Unnamed(job_id="1", uid=1500, count=136),))
    view = cluster.state.job_view("1", cluster.now)
    assert view is not None and view.unlisted == 136
    assert cluster.state.left_out.lately(cluster.now)[0].uid == 1500
    cluster.take(rows(1, role=Role.RANK))
    view = cluster.state.job_view("1", cluster.now)
    assert view is not None and view.unlisted == 0


def test_every_list_within_a_row_of_a_report_is_bounded() -> None:
    rows = {
        name: get_args(hint)[0] for name, hint in get_type_hints(Report).items() if name in BOUNDS.keys() - {"results"}
    }
    for kind, row in rows.items():
        fields = [
            inner
            for inner, hint in (get_type_hints(row) if is_class(row) and row is not str else {}).items()
            if any(get_origin(each) is tuple for each in (hint, *get_args(hint)))
        ]
        lists = BOUNDS[kind].lists
        for field in fields:
            marked = SimpleNamespace(**dict.fromkeys(fields, ()) | {field: "marked"})
            assert lists is not None and "marked" in lists(marked), (kind, field)
