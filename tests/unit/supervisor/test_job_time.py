"""The end of a job's time, as squeue prints it, and how Slurm is asked."""

from __future__ import annotations

from slurm_watchdog.supervisor.job_questions import asking, parse_end, queue_id


def test_end_of_a_job_is_a_date_or_not_known() -> None:
    found = parse_end("2026-11-23T13:05:01\n")
    later = parse_end("2026-11-23T14:05:01\n")
    assert found is not None
    assert later is not None
    assert later - found == 3600
    assert [parse_end(text) for text in ("N/A\n", "NONE\n", "Unknown\n", "")] == [None] * 4


def test_squeue_is_asked_for_one_element_of_an_array_and_not_for_all() -> None:
    element = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert queue_id("7", element) == "7_3"
    assert queue_id("8", element) == "8"
    assert queue_id("7", {"SLURM_JOB_ID": "7"}) == "7"


def test_what_shapes_a_persons_own_calls_does_not_shape_ours() -> None:
    theirs = {
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_STATES": "PD",
        "SCANCEL_INTERACTIVE": "1",
        "SLURM_CONF": "/x",
        "PATH": "/bin",
    }
    assert asking(theirs) == {"SLURM_CONF": "/x", "PATH": "/bin"}
