"""Memory that the agent gains in a day of ticks, by the endurance driver of the integration tests: its clock jumps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.bench.figures import Figures, say
from tests.rig.standin_nvml import standin

DRIVER = Path(__file__).resolve().parents[2] / "tests/integration" / "test_agent_endurance.py"
DAY_TICKS = 17_280
MAX_DRIFT_MIB = 1.0
"""What the project promises, a day at an interval of 5 s."""
TICK_S = 0.2
"""No tick takes so long; a run that does is given up."""


def run(figures: Figures, ticks: int = DAY_TICKS, warm_up: int = 2000, name: str = "agent") -> None:
    """The sum of what the loop and each of its lasting children have gained, for a day. Falls are not set off
    against gains."""
    if os.geteuid() != 0 or not DRIVER.exists():
        say("the drift is measured as root, by tests/integration/test_agent_endurance.py: no figure")
        return
    result = endure(ticks, warm_up)
    gained_kib = sum(max(0, kib) for kib in result["drift_kib"].values())
    say(f"{ticks} ticks, {result['jobs']} jobs: KiB gained by {result['drift_kib']}")
    figures.add(
        f"{name}.memory_drift_mib_per_day",
        gained_kib / 1024 * DAY_TICKS / ticks,
        "MiB",
        at_most=MAX_DRIFT_MIB,
        doubtful=ticks < DAY_TICKS / 2,  # what a heap rounds up weighs as much as what it loses in so short a time
    )
    for what in ("descriptors", "threads"):
        figures.add(f"{name}.{what}_drift", result["after"][what] - result["before"][what], "1", at_most=0)


def endure(ticks: int, warm_up: int) -> dict[str, Any]:
    """What the driver says of so many ticks, in a PID namespace of its own."""
    with tempfile.TemporaryDirectory(prefix="slurm-watchdog-bench-") as directory:
        library = standin.build(Path(directory))
        scenario = standin.Scenario(Path(directory) / "gpus.txt", gpus=standin.eight_cards())
        # One arena, as one would run it: else what a thread frees stays with that thread.
        environment = {
            **os.environ,
            **standin.environment_of(library, scenario.path),
            "MALLOC_ARENA_MAX": "1",
        }
        driver = [sys.executable, str(DRIVER), "--ticks", str(ticks), "--warm-up", str(warm_up)]
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *driver]
        done = subprocess.run(
            ["setpriv", "--pdeathsig", "KILL", *command], check=True, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, timeout=60 + (ticks + warm_up) * TICK_S, cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout)
    return result
