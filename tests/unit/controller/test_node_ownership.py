"""A node is heard about jobs that it has or had, and about no others."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.door import JobNodes, admit
from slurm_watchdog.model.observations import Event, EventKind, LogFile
from slurm_watchdog.model.report import JobDirectives, Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from tests.builders.views import process, slurm_job


def event(job_id: str) -> Event:
    return Event(kind=EventKind.PROGRESS, job_id=job_id, age_s=0.0, source="/log", step=5)


def report(node: str) -> Report:
    return Report(
        node=node, boot_id="b", agent_id="a", sequence=1, processes=(process(0, job_id="7"), process(1, job_id="8")),
        events=(event("7"), event("8")), logs=(LogFile(job_id="8", path="/log"),), problems=("nvml",),
    )  # fmt: skip


def listed(*jobs: tuple[str, tuple[str, ...]]) -> JobNodes:
    nodes = JobNodes()
    nodes.update([slurm_job(job_id=job_id, nodes=names) for job_id, names in jobs])
    return nodes


def of_own_jobs(said: Report, nodes: JobNodes) -> tuple[Report, int]:
    return admit(said, lambda job_id: None, nodes.stranger, lambda node: (), LeftOut())[:2]


def of_owners(said: Report, job: SlurmJob) -> tuple[Report, int]:
    return admit(said, {"7": job}.get, None, lambda node: (), LeftOut())[:2]


def test_what_is_said_of_another_node_s_job_is_left_out_and_the_rest_stays() -> None:
    nodes = listed(("7", ("n1",)), ("8", ("n2",)))
    kept, dropped = of_own_jobs(report("n1"), nodes)
    assert ({row.job_id for row in kept.processes}, {row.job_id for row in kept.events}, kept.logs) == (
        {"7"},
        {"7"},
        (),
    )
    assert dropped == 3
    assert kept.problems == ("nvml",)


def test_a_report_about_its_own_jobs_is_the_same_object() -> None:
    whole = report("n1")
    kept, dropped = of_own_jobs(whole, listed(("7", ("n1",)), ("8", ("n1", "n2"))))
    assert kept is whole
    assert dropped == 0


def test_of_a_job_that_never_had_a_node_nobody_speaks() -> None:
    nodes = listed(("7", ()))
    assert nodes.stranger("n1", "7")
    assert nodes.stranger("n1", "9")


def test_the_last_words_of_the_nodes_before_are_heard_after_a_job_has_moved() -> None:
    nodes = listed(("7", ("n1",)))
    job = slurm_job(job_id="7", nodes=("n1",))
    nodes.update([replace(job, nodes=())])
    nodes.update([replace(job, nodes=("n2",), restarts=1)])
    assert not nodes.stranger("n1", "7")
    assert not nodes.stranger("n2", "7")
    assert nodes.stranger("n3", "7")


def test_jobs_that_are_listed_no_more_are_forgotten() -> None:
    nodes = listed(("7", ("n1",)))
    nodes.update([])
    assert nodes.stranger("n1", "7")
    assert nodes._had == {}


def step_of(own_only: bool, node: str) -> int | None:
    """The step that the controller believes job 7, which has n1 and n2, to be at, after `node` has told one."""
    state = ClusterState(silent_after_s=15, report_lifetime_s=60)
    state.require_node_ownership = own_only
    nodes = tuple(SlurmNode(name=name, address=name, state="IDLE") for name in ("n1", "n2", "n3"))
    state.apply_slurm(SlurmView(jobs=(slurm_job(job_id="7", nodes=("n1", "n2")),), nodes=nodes), 1000.0)
    told = Report(node=node, boot_id="b", agent_id="a", sequence=1, events=(replace(event("7"), pattern="p"),))
    assert state.apply_report(told, 1005.0) == "accepted"
    view = state.job_view("7", 1006.0)
    assert view is not None
    return None if view.progress is None else view.progress.known_step


def test_a_node_that_has_proven_who_it_is_moves_no_other_node_s_job() -> None:
    assert step_of(True, "n1") == 5
    assert step_of(True, "n3") is None
    assert step_of(False, "n3") == 5, "where nobody proves anything, as in a trace of somebody else's making"


OWNER, OTHER = 1000, 1500
UIDS = (OWNER, OTHER, 0, 65534)


@pytest.mark.parametrize(("uid", "member_by"), [*itertools.product(UIDS, ("slurm", "claim", ""))])
def test_a_process_counts_as_its_owners_or_where_slurm_itself_put_it_into_the_job(uid: int, member_by: str) -> None:
    job = slurm_job(job_id="7", uid=OWNER)
    row = process(0, job_id="7", uid=uid, member_by=member_by)
    told = Report(node="n1", boot_id="b", agent_id="a", sequence=1, processes=(row,))
    kept, dropped = of_owners(told, job)
    assert bool(kept.processes) == (uid == OWNER or member_by == "slurm")
    assert dropped == 1 - len(kept.processes)


WISH = JobDirectives(job_id="7", restarts=0, variables=(("SLURM_WATCHDOG", "off"),), uid=OWNER)


@pytest.mark.parametrize(
    ("uid", "node", "state", "restarts"),
    [*itertools.product(UIDS, ("n1", "n3"), ("RUNNING", "PENDING", "COMPLETED"), (0, 1))],
)
def test_a_wish_counts_as_the_owners_from_a_node_of_this_run_while_it_runs(
    uid: int, node: str, state: str, restarts: int
) -> None:
    nodes = () if state == "PENDING" else ("n1", "n2")
    job = slurm_job(job_id="7", uid=OWNER, state=state, nodes=nodes)
    told = Report(node=node, boot_id="b", agent_id="a", sequence=1, wishes=(replace(WISH, uid=uid, restarts=restarts),))
    kept, dropped = of_owners(told, job)
    assert bool(kept.wishes) == ((uid, node, state, restarts) == (OWNER, "n1", "RUNNING", 0))
    assert dropped == 1 - len(kept.wishes)


def test_a_pending_job_of_somebody_else_is_not_switched_off_by_what_was_said_before_it_ran() -> None:
    """A process of another user, with the job's number in its environment, on a node that the job never gets."""
    state = ClusterState(silent_after_s=15, report_lifetime_s=60)
    pending = slurm_job(job_id="7", uid=OWNER, state="PENDING", nodes=())
    state.apply_slurm(SlurmView(jobs=(pending,), nodes=()), 1000.0)
    forged = Report(
        node="n3", boot_id="b", agent_id="a", sequence=1, wishes=(replace(WISH, uid=OTHER), WISH),
        processes=(process(0, job_id="7", uid=OTHER, member_by="claim"),),
    )  # fmt: skip
    state.apply_report(forged, 1001.0)
    running = replace(pending, state="RUNNING", nodes=("n1",))
    state.apply_slurm(SlurmView(jobs=(running,), nodes=()), 1002.0)
    assert state.variables_of(running) == {}
    assert state.dropped == 3
    state.apply_report(replace(forged, sequence=2), 1003.0)
    assert state.variables_of(running) == {} and state.dropped == 6
    view = state.job_view("7", 1004.0)
    assert view is not None and not view.processes
