"""The supervisor's loop says once, in the job's log, that nobody watches."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.model.supervisor import PROTOCOL, STATUS_FILE, SupervisorState, SupervisorStatus, parse_status
from slurm_watchdog.supervisor import service
from slurm_watchdog.supervisor.allocation import Allocation
from slurm_watchdog.supervisor.launcher import Launcher
from slurm_watchdog.supervisor.parent import SharedPid
from slurm_watchdog.supervisor.service import NO_AGENT_S, write_status
from slurm_watchdog.supervisor.state import Settings


def said_in(directory: Path, age_s: float, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `age_s` after its start a supervisor says in three looks, whose run has this directory."""
    monkeypatch.setattr(service, "run_directory", lambda job_id, restarts: str(directory))
    allocation = Allocation(job_id="7", nodes=("n1",), batch_host="n1")
    launcher = Launcher(("true",), allocation, {"PATH": "/nonexistent"})
    supervisor = service.JobSupervisor(
        Settings(allocation=allocation, count=1, least=1, max_restarts=0), launcher, {}, SharedPid()
    )
    monkeypatch.setattr(supervisor, "_missed_at", clock.monotonic() - age_s + NO_AGENT_S)
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


def test_two_supervisors_of_one_job_see_each_other_and_the_one_that_is_left_takes_orders_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with a supervisor's name stands for the other one."""
    monkeypatch.setattr(service, "run_directory", lambda job_id, restarts: str(tmp_path))
    allocation = Allocation(job_id="7", nodes=("n1",), batch_host="n1")
    launcher = Launcher(("true",), allocation, {"PATH": "/nonexistent"})
    mine = service.JobSupervisor(
        Settings(allocation=allocation, count=1, least=1, max_restarts=0), launcher, {}, SharedPid()
    )

    def beside() -> int:
        mine._poll()
        while not mine._events.empty():
            asyncio.run(mine._handle(mine._events.get_nowait()))
        mine._changed()
        return parse_status((tmp_path / STATUS_FILE).read_bytes()).beside

    program = "from slurm_watchdog.base.process_setup import set_name as s; s('slurm-watchdog'); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline()
        status = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, pid=other.pid, step_id="0")
        write_status(str(tmp_path), status)
        assert beside() == other.pid
        assert beside() == other.pid, "known until it ends, though the file is ours now"
        other.stdin.close()
        other.wait(10)
    assert beside() == 0
    mine._voice.close()
    launcher.close()
