"""One odd row of a listing hides itself at most: each field of each listing against garbage, nothing, and far
too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.runs import jobs_now
from slurm_watchdog.model.slurm import NEEDED, SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import OVER
from slurm_watchdog.slurm import parse, pyslurm_client
from slurm_watchdog.slurm.listings import view_of
from slurm_watchdog.slurm.pyslurm_child import JOB as JOB_ATTRIBUTES
from slurm_watchdog.slurm.pyslurm_child import NODE as NODE_ATTRIBUTES
from tests.builders.slurm_listings import parse_jobs
from tests.builders.views import slurm_job

CAPTURES = Path(__file__).parents[2] / "captures/slurm"
RELEASE = CAPTURES / "25.11"
STORY = json.loads((RELEASE / "story.json").read_text())
MARKS = parse.Marks("q7f", "q8r")
ODD = (
    "",
    " ",
    "-1",
    "2",
    "x;y",
    "n[1-",
    "None\n",
    "9" * 30,
    "9" * 5000,
    "n[1-999999999]",
    "\ufffd",
    "(null)",
)

UNKNOWN = {
    # What squeue is asked for -> the field of the job that is unknown where it is garbage. The others are
    # text, and any text will do.
    "state": "state",
    "restartcnt": "restarts",
    "batchflag": "is_batch",
    "requeue": "requeueable",
    "prioritylong": "priority",
    "starttime": "start_at",
    "userid": "uid",
    "nodelist": "nodes",
    "reqnodes": "required_nodes",
    "submittime": "submit_at",
    "eligibletime": "eligible_at",
    "hetjoboffset": "het_offset",
}
FAR_TOO_MUCH = {"numnodes": "node_count", "timelimit": "time_limit_s"}
"""Of these most garbage is one of Slurm's words for nothing."""
IDS = ("jobid", "jobarrayid")


def listing_with(name: str, fields: tuple[str, ...], row_of: str, field: str, value: str) -> str:
    """The capture `name`, with one field of the row that begins with `row_of` replaced."""
    records = (RELEASE / f"{name}.txt").read_text().split("q8r\n")
    rows = [record.split("q7f") for record in records[:-1]]
    next(row for row in rows if row[0] == row_of)[fields.index(field)] = value
    return "".join("q7f".join(row) + "q8r\n" for row in rows)


@pytest.mark.parametrize("field", parse.JOB_FIELDS)
def test_a_job_with_one_odd_field_is_unknown_in_that_and_all_others_are_as_they_were(field: str) -> None:
    job_id = STORY["jobs"]["plain"]
    before, _ = parse.list_jobs((RELEASE / "jobs.txt").read_text(), MARKS)
    others = [job for job in before if job.job_id != job_id]
    for value in ODD:
        listed, dropped = parse.list_jobs(listing_with("jobs", parse.JOB_FIELDS, job_id, field, value), MARKS)
        mine = [job for job in listed if job not in others]
        assert [job for job in listed if job in others] == others, value[:40]
        assert len(mine) + len(dropped) == 1, value[:40]
        if mine:
            assert set(mine[0].unreadable) <= {(UNKNOWN | FAR_TOO_MUCH).get(field, "")}, value[:40]
            assert not mine[0].unsure or set(mine[0].unreadable) & set(NEEDED)


@pytest.mark.parametrize("field", UNKNOWN)
def test_garbage_in_a_field_is_unknown_and_no_default(field: str) -> None:
    job_id = STORY["jobs"]["plain"]
    listed, dropped = parse.list_jobs(listing_with("jobs", parse.JOB_FIELDS, job_id, field, "n[x;"), MARKS)
    assert dropped == ()
    assert next(job for job in listed if job.raw_id == job_id).unreadable == (UNKNOWN[field],)


@pytest.mark.parametrize("field", IDS)
def test_a_row_without_an_id_is_left_out_with_a_reason_and_the_listing_is_not_whole(field: str) -> None:
    text = listing_with("jobs", parse.JOB_FIELDS, STORY["jobs"]["plain"], field, "x")
    view = view_of(parse.list_jobs(text, MARKS), ((), ()))
    assert "id of a job" in view.dropped[0] or "number of a job" in view.dropped[0]
    assert "cannot be read" in view.partial
    with pytest.raises(ValueError, match="of a job"):
        parse_jobs(text, MARKS)


@pytest.mark.parametrize("field", parse.NODE_FIELDS)
def test_a_node_with_one_odd_field_hides_no_other(field: str) -> None:
    before, _ = parse.list_nodes((RELEASE / "nodes.txt").read_text(), MARKS)
    name = before[0].name
    for value in ODD:
        listed, dropped = parse.list_nodes(listing_with("nodes", parse.NODE_FIELDS, name, field, value), MARKS)
        others = [node for node in listed if node.name not in (name, value)]
        assert others == list(before[1:]), value[:40]
        assert len(listed) + len(dropped) >= len(before)


def test_a_record_of_too_many_fields_hides_no_other() -> None:
    records = (RELEASE / "jobs.txt").read_text().split("q8r\n")
    whole, _ = parse.list_jobs("q8r\n".join(records), MARKS)
    listed, dropped = parse.list_jobs("q8r\n".join([*records[:2], "1q7f2", *records[2:]]), MARKS)
    assert (listed, len(dropped)) == (whole, 1)


PYSLURM_ODD: tuple[Any, ...] = (
    None,
    "",
    "x;y",
    -1,
    10**30,
    1.5,
    [1],
    {"unreadable": "OverflowError"},
    "n[1-999999999]",
    True,
)


@pytest.mark.parametrize("name", [*JOB_ATTRIBUTES, "username"])
def test_a_row_of_pyslurm_with_one_odd_attribute_hides_no_other(name: str) -> None:
    rows = json.loads((RELEASE / "pyslurm.json").read_text())["jobs"]
    before, _ = pyslurm_client.list_jobs(rows)
    for value in PYSLURM_ODD:
        listed, dropped = pyslurm_client.list_jobs([{**rows[0], name: value}, *rows[1:]])
        assert listed[-len(rows) + 1 :] == before[1:], value
        assert len(listed) + len(dropped) == len(before), value


@pytest.mark.parametrize("name", NODE_ATTRIBUTES)
def test_a_node_of_pyslurm_with_one_odd_attribute_hides_no_other(name: str) -> None:
    rows = json.loads((RELEASE / "pyslurm.json").read_text())["nodes"]
    before, _ = pyslurm_client.list_nodes(rows)
    for value in PYSLURM_ODD:
        listed, dropped = pyslurm_client.list_nodes([{**rows[0], name: value}, *rows[1:]])
        assert listed[-len(rows) + 1 :] == before[1:], value
        assert len(listed) + len(dropped) == len(before), value


# ------------------------------------------------------------------------------------------------- what is made of it

NODE = SlurmNode(name="n1", address="", state="MIXED")
JOB = slurm_job(job_id="7", nodes=("n1",), restarts=2, uid=1000)


def state_after(*views: SlurmView) -> ClusterState:
    state = ClusterState(silent_after_s=45.0, report_lifetime_s=60.0)
    for number, view in enumerate(views):
        state.apply_slurm(view, 100.0 + 10.0 * number)
    return state


def listed(*jobs: SlurmJob, partial: str = "") -> SlurmView:
    return SlurmView(jobs=jobs, nodes=(NODE,), partial=partial)


@pytest.mark.parametrize("field", NEEDED)
def test_run_is_kept_while_a_field_of_its_job_cannot_be_read(field: str) -> None:
    blank: dict[str, Any] = {
        "state": "UNREADABLE",
        "restarts": 0,
        "start_at": None,
        "uid": -1,
        "nodes": (),
        "is_batch": True,
    }
    odd = replace(JOB, unreadable=(field,), **{field: blank[field]})
    state = state_after(listed(JOB), listed(odd))
    (seen,) = state.view(110.0).jobs
    assert (seen.job.restarts, seen.job.nodes, seen.job.uid, seen.job.state) == (2, ("n1",), 1000, "RUNNING")
    assert state.view(110.0).ended == ()
    assert state.running_on("n1", 110.0, 60.0) == (JOB.process_id,)
    assert state.jobs["7"].unsure


def test_a_job_of_which_nobody_can_read_where_it_runs_may_have_processes_anywhere() -> None:
    state = state_after(listed(replace(JOB, nodes=(), unreadable=("nodes",))))
    assert state.running_on("n1", 100.0, 60.0) == (JOB.process_id,)


def test_a_job_that_is_missing_from_a_listing_that_is_not_whole_is_not_over() -> None:
    state = state_after(listed(JOB), listed(partial="PrivateData hides jobs"))
    assert [view.job.job_id for view in state.view(110.0).jobs] == ["7"]
    assert state.running_on("n1", 110.0, 60.0) is None, "nor is any process one that outlived its job"
    state.apply_slurm(listed(), 120.0)
    assert state.view(120.0).jobs == ()


@pytest.mark.parametrize("over", sorted(OVER))
def test_a_job_that_was_over_is_not_kept_for_a_listing_that_is_not_whole(over: str) -> None:
    before = {"7": replace(JOB, state=over)}
    assert jobs_now(before, listed(partial="PrivateData hides jobs")) == {}
