"""What a supervisor costs while it waits: nothing of the agent or the controller is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("aiohttp", "sqlalchemy", "uvloop", "prometheus_client", "pynvml", "yaml")


def loaded_by(module: str) -> set[str]:
    program = f"import sys; import {module}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_supervisor_loads_no_package_of_agent_or_controller() -> None:
    assert loaded_by("slurm_watchdog.cli.main, slurm_watchdog.supervisor.service") & set(HEAVY) == set()


@pytest.mark.parametrize("module", ["slurm_watchdog.supervisor.srun", "slurm_watchdog.supervisor.look"])
def test_what_runs_at_each_srun_and_on_each_node_loads_the_standard_library(module: str) -> None:
    ours = {name for name in loaded_by(module) if name.startswith("slurm_watchdog.")}
    assert ours <= {
        "slurm_watchdog.supervisor", "slurm_watchdog.supervisor.srun", "slurm_watchdog.supervisor.look",
        "slurm_watchdog.knowledge", "slurm_watchdog.knowledge.srun_options", "slurm_watchdog.base",
        "slurm_watchdog.base.clock",
    }  # fmt: skip
    assert loaded_by(module) & {"msgspec", "psutil", "ClusterShell", "asyncio"} == set()
