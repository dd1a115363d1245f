"""Files for administrators fit the program: units start real commands, the task prolog names the configured path."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from watchdog.cli.main import main
from watchdog.config import Config

UNITS = ["slurm-watchdog-agent", "slurm-watchdog-controller"]


def prolog(checkout: Path, **environment: str) -> str:
    done = subprocess.run(
        ["sh", str(checkout / "deploy/slurm/task_prolog.sh")],
        env=environment, capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


def default_switch(job_id: str, restarts: int) -> str:
    path = Config().jobs.kill_switch.replace("{job_id}", job_id).replace("{restarts}", str(restarts))
    return f"export SLURM_WATCHDOG_KILL_SWITCH={path}\n"


@pytest.mark.parametrize(
    ("environment", "job_id", "restarts"),
    [
        ({"SLURM_JOB_ID": "7"}, "7", 0),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7", 2),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "9", 0),
        ({"SLURM_JOB_ID": "7", "SLURM_WATCHDOG_KILL_SWITCH": "/run/slurm-watchdog/jobs/6.0/kill"}, "7", 0),
    ],
)
def test_the_task_prolog_names_the_path_that_the_configuration_has(
    checkout: Path, environment: dict[str, str], job_id: str, restarts: int
) -> None:
    assert prolog(checkout, **environment) == default_switch(job_id, restarts)


def test_a_path_of_the_users_own_is_kept_and_without_a_job_nothing_is_said(checkout: Path) -> None:
    assert prolog(checkout, SLURM_JOB_ID="7", SLURM_WATCHDOG_KILL_SWITCH="/shared/me/kill") == ""
    assert prolog(checkout) == ""


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_a_command_that_exists(checkout: Path, unit: str) -> None:
    text = (checkout / "systemd" / f"{unit}.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, command, *options = shlex.split(line)
    assert program == "/opt/slurm-watchdog/bin/slurm-watchdog"
    known = {name for option in main.commands[command].params for name in option.opts}
    assert {option for option in options if option.startswith("-")} <= known
    for setting in ("Type=notify", "WatchdogSec=", "Restart=always", "NoNewPrivileges=yes"):
        assert f"\n{setting}" in text


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_understands_the_unit(checkout: Path, tmp_path: Path, unit: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (checkout / "systemd" / f"{unit}.service").read_text()
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
    file = tmp_path / f"{unit}.service"
    file.write_text(re.sub(r"^(User|Group)=slurm-watchdog$", r"\1=root", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    about_us = [line for line in done.stderr.splitlines() if unit in line]
    assert not about_us


def test_the_controllers_unit_leaves_little_open(checkout: Path) -> None:
    """As systemd-analyze counts it, from 0 (nothing) to 10. The agent's is higher until what needs rights is a helper of its own."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = checkout / "systemd" / "slurm-watchdog-controller.service"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= 1.5
