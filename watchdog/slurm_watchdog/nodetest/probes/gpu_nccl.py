"""An all-reduce over all GPUs of a node by nccl-tests (or rccl-tests), where they are installed. Standard library only.

Written against the sources of nccl-tests (src/util.cu); never run on a GPU so far.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

from slurm_watchdog.nodetest.probes.gpu_health import usable_gpus

PROGRAM = "all_reduce_perf"
SIZE = "256M"
"""Of a buffer: above it the rate of a node's GPUs hardly rises any more (a judgement)."""
OPTIONS = ("-b", SIZE, "-e", SIZE, "-w", "5", "-n", "50")
"""Smallest and greatest size; repetitions that count for nothing, and that count (README of nccl-tests)."""
BANDWIDTH = re.compile(r"^# Avg bus bandwidth\s*:\s*([0-9.eE+-]+)", re.MULTILINE)
WRONG = re.compile(r"^# Out of bounds values\s*:\s*(\d+)", re.MULTILINE)


def measure_gpu_nccl(asked: dict[str, Any]) -> dict[str, Any]:
    """Figure `gpu_nccl` in GB/s of the bus, and as a fact `wrong`, how many values it got wrong. `skipped`: there is no
    such program, one GPU, or it failed."""
    program = shutil.which(PROGRAM)
    if program is None:
        return _skipped(f"{PROGRAM} is not installed on the node")
    gpus = usable_gpus()
    if gpus < 2:
        return _skipped("fewer than two GPUs are known")
    try:
        done = subprocess.run(
            [program, *OPTIONS, "-g", str(gpus)], stdin=subprocess.DEVNULL, capture_output=True, check=False,
            timeout=asked["nccl_s"], cwd="/", env=dict(os.environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _skipped(f"{PROGRAM} did not end within {asked['nccl_s']:g} s")
    except OSError as error:
        return _skipped(f"{PROGRAM} cannot be started: {error.strerror}")
    found = parse_nccl(done.stdout.decode(errors="replace"))
    if found is None:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        return _skipped(f"{PROGRAM} ended with {done.returncode}: {lines[-1] if lines else 'no answer'}"[:300])
    return found | {"facts": {**found["facts"], "gpus": gpus}}


def parse_nccl(text: str) -> dict[str, Any] | None:
    """Given what it prints: figure and fact; None: it is no result."""
    rate, wrong = BANDWIDTH.search(text), WRONG.search(text)
    try:
        value = float(rate[1]) if rate else 0.0
    except ValueError:
        return None
    if wrong is None or not 0 < value < 1e6:
        return None
    return {"figures": {"gpu_nccl": [value, 0.0, 1, False]}, "facts": {"wrong": int(wrong[1])}}


def _skipped(why: str) -> dict[str, Any]:
    return {"figures": {}, "facts": {"skipped": why}}
