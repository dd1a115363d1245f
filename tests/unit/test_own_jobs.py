"""A node is heard about jobs that it has or had, and about no others."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.builders import process, slurm_job
from watchdog.controller.own_jobs import JobNodes, of_own_jobs
from watchdog.controller.state import ClusterState
from watchdog.model.messages import Report
from watchdog.model.observed import Event, EventKind, LogFile
from watchdog.model.slurm import SlurmNode, SlurmView
from watchdog.report_changes import changes_between


def event(job_id: str) -> Event:
    return Event(kind=EventKind.PROGRESS, job_id=job_id, age_s=0.0, source="/log", step=5)


def report(node: str) -> Report:
    return Report(
        node=node, boot_id="b", agent_id="a", sequence=1, processes=(process(0, job_id="7"), process(1, job_id="8")),
        events=(event("7"), event("8")), logs=(LogFile(job_id="8", path="/log"),), problems=("nvml",),
    )  # fmt: skip


def listed(*jobs: tuple[str, tuple[str, ...]]) -> JobNodes:
    nodes = JobNodes()
    nodes.note([slurm_job(job_id=job_id, nodes=names) for job_id, names in jobs])
    return nodes


def test_what_is_said_of_another_node_s_job_is_left_out_and_the_rest_stays() -> None:
    nodes = listed(("7", ("n1",)), ("8", ("n2",)))
    kept, dropped = of_own_jobs(report("n1"), nodes.stranger)
    assert ({row.job_id for row in kept.processes}, {row.job_id for row in kept.events}, kept.logs) == (
        {"7"},
        {"7"},
        (),
    )
    assert dropped == 3
    assert kept.problems == ("nvml",)


def test_a_report_about_its_own_jobs_is_the_same_object() -> None:
    whole = report("n1")
    kept, dropped = of_own_jobs(whole, listed(("7", ("n1",)), ("8", ("n1", "n2"))).stranger)
    assert kept is whole
    assert dropped == 0


def test_a_job_of_which_no_node_is_known_may_be_spoken_of_by_all_for_listings_are_late() -> None:
    nodes = listed(("7", ()))
    assert not nodes.stranger("n1", "7")
    assert not nodes.stranger("n1", "9")


def test_the_last_words_of_the_nodes_before_are_heard_after_a_job_has_moved() -> None:
    nodes = listed(("7", ("n1",)))
    job = slurm_job(job_id="7", nodes=("n1",))
    nodes.note([replace(job, nodes=())])
    nodes.note([replace(job, nodes=("n2",), restarts=1)])
    assert not nodes.stranger("n1", "7")
    assert not nodes.stranger("n2", "7")
    assert nodes.stranger("n3", "7")


def test_jobs_that_are_listed_no_more_are_forgotten() -> None:
    nodes = listed(("7", ("n1",)))
    nodes.note([])
    assert not nodes.stranger("n2", "7")
    assert nodes._had == {}


def step_of(own_only: bool, node: str) -> int | None:
    """The step that the controller believes job 7, which has n1 and n2, to be at, after `node` has told one."""
    state = ClusterState(silent_after_s=15, report_lifetime_s=60)
    state.only_own = own_only
    nodes = tuple(SlurmNode(name=name, address=name, state="IDLE") for name in ("n1", "n2", "n3"))
    state.apply_slurm(SlurmView(jobs=(slurm_job(job_id="7", nodes=("n1", "n2")),), nodes=nodes), 1000.0)
    told = Report(
        node=node, boot_id="b", agent_id="a", sequence=1, events=(replace(event("7"), pattern="p"),)
    )
    assert state.apply_report(told, 1005.0) == "accepted"
    view = state.job_view("7", 1006.0)
    assert view is not None
    return None if view.progress is None else view.progress.known_step


def test_a_node_that_has_proven_who_it_is_moves_no_other_node_s_job() -> None:
    assert step_of(True, "n1") == 5
    assert step_of(True, "n3") is None
    assert step_of(False, "n3") == 5, "where nobody proves anything, as in a trace of somebody else's making"


def test_a_report_of_changes_still_builds_on_all_that_the_node_has_said() -> None:
    state = ClusterState(silent_after_s=15, report_lifetime_s=60)
    state.only_own = True
    nodes = (SlurmNode(name="n1", address="n1", state="IDLE"),)
    job = slurm_job(job_id="7", nodes=("n2",))
    state.apply_slurm(SlurmView(jobs=(job, replace(job, job_id="8", nodes=("n1",))), nodes=nodes), 1000.0)
    first = Report(
        node="n1",
        boot_id="b",
        agent_id="a",
        sequence=1,
        processes=(process(0, job_id="7"), process(1, job_id="8")),
    )
    state.apply_report(first, 1005.0)
    assert state.dropped == 1
    second = replace(
        first, sequence=2, processes=(first.processes[0], replace(first.processes[1], cpu_s=9.0))
    )
    small = changes_between(first, second)
    assert small is not None
    whole = state.complete(small)
    assert whole is not None
    assert [row.cpu_s for row in whole.processes] == [0.0, 9.0]
