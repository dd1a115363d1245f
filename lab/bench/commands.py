"""What an operator waits for: `status` of a large cluster, and the start of a command beside `python -c pass`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.bench.figures import Figures
from tests.builders.cli import FakeController, job, status

NODES = 10_000
NODES_OF_A_JOB = 8
MAX_STATUS_S = 1.0
TRIES = 5
PROGRAM = str(Path(sys.executable).with_name("slurm-watchdog"))
MAX_STARTS = {"help": 8.0, "status": 15.0, "scan-log": 15.0}
"""Times the processor time of `python -c pass`."""
START_TRIES = 15


def run(figures: Figures) -> None:
    figures.add(f"status.seconds_{NODES}_nodes", _status_s(), "s", at_most=MAX_STATUS_S)
    with tempfile.TemporaryDirectory() as directory:
        for name, (cpu, wall) in _starts(Path(directory)).items():
            figures.add(f"start.{name}_cpu", cpu, "x", at_most=MAX_STARTS[name])
            figures.add(f"start.{name}_wall", wall, "x")


def _starts(directory: Path) -> dict[str, tuple[float, float]]:
    """Processor time and seconds of each command in those of `python -c pass`, each the least of some tries in turn.
    The modules are compiled, as those of a package are."""
    controller = FakeController(directory / "c.sock")
    controller.answers["GET", "/v1/status"] = status(jobs=[job(job_id="4711")])
    (directory / "one.log").write_text("step 1 loss 2.0\n")
    commands = {
        "help": [PROGRAM, "--help"],
        "status": [PROGRAM, "status", "--socket", str(controller.path)],
        "scan-log": [PROGRAM, "scan-log", str(directory / "one.log")],
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(directory / "compiled")
    rounds = []
    try:
        for _ in range(START_TRIES + 1):  # the first one compiles
            base = _cost([sys.executable, "-c", "pass"], environment)
            rounds.append({"pass": base} | {name: _cost(argv, environment) for name, argv in commands.items()})
    finally:
        controller.close()
    cpu, wall = ({name: min(each[name][place] for each in rounds[1:]) for name in rounds[0]} for place in (0, 1))
    return {name: (cpu[name] / cpu["pass"], wall[name] / wall["pass"]) for name in commands}


def _cost(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Processor time and seconds of one process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(argv, env=environment, capture_output=True, timeout=60, check=True)
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, took


def _status_s() -> float:
    """From the command line to the end of the process, the best of some tries."""
    names = [f"gpu{number:05d}" for number in range(NODES)]
    starts = range(0, NODES, NODES_OF_A_JOB)
    document = status(
        nodes={"reporting": names[: NODES * 99 // 100], "silent": names[NODES * 99 // 100 :]},
        jobs=[job(job_id=str(at), nodes=names[at : at + NODES_OF_A_JOB], step_times_s=[4.2] * 24) for at in starts],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        controller = FakeController(Path(directory) / "c.sock")
        controller.answers["GET", "/v1/status"] = document
        try:
            return min(_timed([PROGRAM, "status", "--socket", str(controller.path)]) for _ in range(TRIES))
        finally:
            controller.close()


def _timed(argv: list[str]) -> float:
    began = time.monotonic()
    done = subprocess.run(argv, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began
