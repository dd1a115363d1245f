"""The supervisor's loop says once, in the job's log, that nobody watches."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.supervisor import service
from slurm_watchdog.supervisor.allocation import Allocation
from slurm_watchdog.supervisor.launcher import Launcher
from slurm_watchdog.supervisor.mailbox import NO_AGENT_S
from slurm_watchdog.supervisor.parent import SharedPid
from slurm_watchdog.supervisor.state import Settings


def said_in(directory: Path, age_s: float, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `age_s` after its start a supervisor says in three looks, whose run has this directory."""
    monkeypatch.setattr(service, "run_directory", lambda job_id, restarts: str(directory))
    allocation = Allocation(job_id="7", nodes=("n1",), batch_host="n1")
    launcher = Launcher(("true",), allocation, {"PATH": "/nonexistent"})
    supervisor = service._Service(Settings(allocation=allocation, count=1, max_restarts=0), launcher, {}, SharedPid())
    began_at = clock.monotonic() - age_s
    monkeypatch.setattr(supervisor, "_began_at", began_at)
    for _ in range(3):
        supervisor._poll()
    supervisor._voice.close()
    launcher.close()
    return capfd.readouterr().err


def test_that_no_agent_is_there_is_said_once_after_a_minute(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        "slurm-watchdog: no agent has been seen on this node: only a command that fails is started again; "
        "`slurm-watchdog run --alone` watches for hangs itself\n"
    )
    missing = tmp_path / "7.0"
    assert said_in(missing, NO_AGENT_S + 1, capfd, monkeypatch) == line
    assert said_in(missing, NO_AGENT_S - 30, capfd, monkeypatch) == ""
    assert said_in(tmp_path, NO_AGENT_S + 1, capfd, monkeypatch) == ""
