"""What an operator waits for: `status` of a large cluster."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.bench.figures import Figures
from tests.builders.cli import FakeController, job, status

NODES = 10_000
NODES_OF_A_JOB = 8
MAX_STATUS_S = 1.0
TRIES = 5


def run(figures: Figures) -> None:
    figures.add(f"status.seconds_{NODES}_nodes", _status_s(), "s", at_most=MAX_STATUS_S)


def _status_s() -> float:
    """From the command line to the end of the process, the best of some tries."""
    names = [f"gpu{number:05d}" for number in range(NODES)]
    starts = range(0, NODES, NODES_OF_A_JOB)
    document = status(
        nodes={"reporting": names[: NODES * 99 // 100], "silent": names[NODES * 99 // 100 :]},
        jobs=[job(job_id=str(at), nodes=names[at : at + NODES_OF_A_JOB], step_times_s=[4.2] * 24) for at in starts],
    )  # fmt: skip
    program = str(Path(sys.executable).with_name("slurm-watchdog"))
    with tempfile.TemporaryDirectory() as directory:
        controller = FakeController(Path(directory) / "c.sock")
        controller.answers["GET", "/v1/status"] = document
        try:
            return min(_timed([program, "status", "--socket", str(controller.path)]) for _ in range(TRIES))
        finally:
            controller.close()


def _timed(argv: list[str]) -> float:
    began = time.monotonic()
    done = subprocess.run(argv, capture_output=True, timeout=60)
    assert done.returncode == 1, done.stderr  # some nodes are silent
    return time.monotonic() - began
