"""The end of a job's time, as squeue prints it, and how Slurm is asked."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from slurm_watchdog.supervisor.job_questions import JobQuestions, asking, queue_id


@pytest.mark.parametrize(
    ("said", "end_at"), [("1970-01-02T00:00:00", 86_400.0), ("N/A", None), ("NONE", None), ("", None)]
)
def test_end_of_a_job_is_a_date_or_not_known(tmp_path: Path, said: str, end_at: float | None) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho {said}\n")
    squeue.chmod(0o700)
    found = asyncio.run(JobQuestions("7", {"PATH": str(tmp_path)}).end_at())
    assert found == (None if end_at is None else end_at + time.timezone)


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
