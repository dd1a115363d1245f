"""What pyslurm says becomes the same values as what squeue and sinfo say of the same moment."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.slurm import parse, pyslurm_child
from slurm_watchdog.slurm.node_names import ParseError, all_or_none
from slurm_watchdog.slurm.pyslurm_client import dependency_text, list_jobs, list_nodes
from tests.builders.slurm_listings import parse_jobs, parse_nodes

CAPTURES = Path(__file__).parents[2] / "captures/slurm"
RECORDED = sorted(path.parent for path in CAPTURES.glob("*/pyslurm.json"))
MARKS = parse.Marks("q7f", "q8r")


@pytest.fixture(params=RECORDED, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    return request.param


def rows_of(release: Path) -> dict[str, Any]:
    return json.loads((release / "pyslurm.json").read_text())


def comparable(job: SlurmJob) -> SlurmJob:
    """Without what squeue can't list, what pyslurm can't say (a job that was stopped runs, for it cuts off the higher
    flags of a state), and of elements that have not started the output, which does not exist, and their list, which
    both cut off after so many characters."""
    unstarted = "[" in job.job_id
    return replace(
        job,
        job_id=f"{job.array_job_id}_[...]" if unstarted else job.job_id,
        array_tasks="..." if unstarted else job.array_tasks,
        excluded_nodes=(),
        state="RUNNING" if job.state == "STOPPED" else job.state,
        stdout=None if unstarted else job.stdout,
        stderr=None if unstarted else job.stderr,
    )


def comparable_nodes(nodes: Iterable[SlurmNode]) -> dict[str, SlurmNode]:
    """By name. MIXED is sinfo's word for an allocated node that has free cores."""
    return {node.name: replace(node, state=node.state.replace("MIXED", "ALLOCATED")) for node in nodes}


def read_jobs(rows: Any) -> tuple[SlurmJob, ...]:
    return all_or_none(list_jobs(rows))


def read_nodes(rows: Any) -> tuple[SlurmNode, ...]:
    return all_or_none(list_nodes(rows))


def test_there_are_recordings() -> None:
    assert RECORDED


def test_jobs_are_the_same_as_in_the_commands_listing(release: Path) -> None:
    text = (release / "jobs.txt").read_text()
    listed = {job.job_id: job for job in map(comparable, parse_jobs(text, MARKS))}
    told = {job.job_id: job for job in map(comparable, read_jobs(rows_of(release)["jobs"]))}
    assert told.keys() == listed.keys()
    for job_id, job in listed.items():
        assert told[job_id] == job


def test_nodes_are_the_same_as_in_the_commands_listing(release: Path) -> None:
    listed = parse_nodes((release / "nodes.txt").read_text(), MARKS)
    told = read_nodes(rows_of(release)["nodes"])
    assert comparable_nodes(told) == comparable_nodes(listed)


def test_excluded_nodes_are_in_the_listing(release: Path) -> None:
    plain = json.loads((release / "story.json").read_text())["jobs"]["plain"]
    excluded = {job.job_id: job.excluded_nodes for job in read_jobs(rows_of(release)["jobs"])}
    assert excluded[plain] == ("n2",)


@pytest.mark.parametrize("tasks", ["0-4000000:2", ",".join(str(2 * each) for each in range(1000)) + "..."])
def test_of_a_long_list_of_elements_the_beginning_is_kept_as_of_the_commands(tasks: str) -> None:
    (job,) = read_jobs([row(array_id=20, array_tasks_waiting=tasks)])
    assert job.array_tasks.startswith("0,2,4,6,8,10,") and job.array_tasks.endswith(",...")
    assert parse.REST_LIMIT - 10 < len(job.array_tasks) <= parse.REST_LIMIT + 3


def row(**values: Any) -> dict[str, Any]:
    """As the program gives it; `values` by pyslurm's names."""
    given = {"id": 20, "state": "RUNNING", "user_id": 0, **values}
    return {field: given.get(name) for field, name in pyslurm_child.JOB.items()} | {"username": "root"}


@pytest.mark.parametrize(
    ("values", "job_id", "array", "tasks"),
    [
        ({}, "20", "", ""),
        ({"array_id": 18, "array_task_id": 3}, "18_3", "18", "3"),
        # pyslurm says None for the element 0.
        ({"array_id": 18}, "18_0", "18", "0"),
        ({"array_id": 20}, "20_0", "20", "0"),
        ({"array_id": 20, "array_tasks_waiting": "2-9"}, "20_[2-9]", "20", "2-9"),
        ({"array_id": 20, "array_tasks_waiting": "4"}, "20_4", "20", "4"),
        ({"array_id": 20, "array_tasks_waiting": "0-18:3"}, "20_[0,3,6,9,12,15,18]", "20", "0,3,6,9,12,15,18"),
        ({"array_id": 20, "array_tasks_waiting": "0-1,36..."}, "20_[0-1,36...]", "20", "0-1,36..."),
        # An array that was cancelled before all had started.
        ({"array_id": 20, "state": "CANCELLED"}, "20", "", ""),
        ({"array_id": 20, "state": "CANCELLED", "allocated_nodes": "n1"}, "20_0", "20", "0"),
        ({"array_id": 20, "state": "CANCELLED", "array_task_id": 4}, "20_4", "20", "4"),
        ({"heterogeneous_id": 20}, "20", "", ""),
        ({"heterogeneous_id": 19, "heterogeneous_offset": 1}, "19+1", "", ""),
    ],
)
def test_ids_are_as_squeue_writes_them(values: dict[str, Any], job_id: str, array: str, tasks: str) -> None:
    (job,) = read_jobs([row(**values)])
    assert (job.job_id, job.array_job_id, job.array_tasks, job.raw_id) == (job_id, array, tasks, "20")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"afterok": [1, 2], "afterany": [], "singleton": False, "satisfy": "all"}, "afterok:1:2"),
        (
            {"afterok": ["1(unfulfilled)"], "singleton": True, "satisfy": "all"},
            "singleton,afterok:1(unfulfilled)",
        ),
        ({"afterok": [1], "afternotok": ["2+5"], "satisfy": "any"}, "afterok:1?afternotok:2+5"),
    ],
)
def test_a_dependency_is_put_together_again(given: dict[str, Any], text: str) -> None:
    assert dependency_text(given) == text


@pytest.mark.parametrize("rows", [None, [{}], [row(id="x")], [row(id=None)]])
def test_rows_that_are_not_as_expected_are_no_answer(rows: Any) -> None:
    with pytest.raises(ParseError):
        read_jobs(rows)


def node_row(**values: Any) -> dict[str, Any]:
    return dict.fromkeys(pyslurm_child.NODE) | {"statecomplete": "IDLE", **values}


@pytest.mark.parametrize("rows", [None, [{}], [node_row()], [node_row(nodelist="n 1")]])
def test_nodes_that_are_not_as_expected_are_no_answer(rows: Any) -> None:
    with pytest.raises(ParseError):
        read_nodes(rows)


@pytest.mark.parametrize(
    ("name", "field"),
    [("state", "state"), ("requeue_count", "restarts"), ("start_time", "start_at"), ("user_id", "uid"),
     ("allocated_nodes", "nodes"), ("is_batch_job", "is_batch"), ("excluded_nodes", "excluded")],
)  # fmt: skip
def test_what_pyslurm_cannot_read_is_unknown_and_no_default(name: str, field: str) -> None:
    (job,) = read_jobs([row(**{"requeue_count": 0, "is_batch_job": True, name: {"unreadable": "OverflowError"}})])
    assert field in job.unreadable
