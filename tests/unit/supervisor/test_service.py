"""The supervisor's loop says once, in the job's log, that nobody watches."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.supervisor import BATCH_STEP, FromAgent, OrderAnswer, RestartOrder
from slurm_watchdog.supervisor import machine
from slurm_watchdog.supervisor.launcher import Launcher, is_our_switch
from slurm_watchdog.supervisor.placement import Allocation
from slurm_watchdog.supervisor.service import JobSupervisor
from slurm_watchdog.supervisor.state import Settings


def supervisor_of_a_job(*command: str, max_restarts: int = 0) -> JobSupervisor:
    allocation = Allocation(job_id="7", nodes=("n1",), batch_host="n1")
    launcher = Launcher(command or ("true",), allocation, {"PATH": "/nonexistent"})
    settings = Settings(allocation=allocation, count=1, least=1, max_restarts=max_restarts)
    return JobSupervisor(settings, launcher)


def close(mine: JobSupervisor) -> None:
    mine.voice.close()
    mine.launcher.close()


@pytest.mark.parametrize("connected", [False, True])
def test_that_no_agent_is_there_is_said_once(connected: bool, capfd: pytest.CaptureFixture[str]) -> None:
    line = (
        "slurm-watchdog: no agent has been seen on this node: only a command that fails is started again; "
        "`slurm-watchdog run --alone` watches for hangs itself\n"
    )
    mine = supervisor_of_a_job()
    mine.link.was_connected = connected
    asyncio.run(mine.miss_agent(0.0))
    close(mine)
    assert capfd.readouterr().err == ("" if connected else line)


def handle(mine: JobSupervisor) -> None:
    while not mine.supervisor._events.empty():
        asyncio.run(mine.supervisor.handle(mine.supervisor._events.get_nowait()))


def test_an_order_is_answered_once_however_often_it_is_heard_and_none_while_another_supervisor_lives() -> None:
    mine = supervisor_of_a_job()
    order = RestartOrder(decision="d1", step_id="9", start=1)
    answers = []
    for said in (
        FromAgent(order=order, given_at=clock.wall()), FromAgent(beside=11), FromAgent(order=order, given_at=clock.wall()),
        FromAgent(order=RestartOrder(decision="d2", step_id="9", start=1), given_at=clock.wall()), FromAgent(beside=0),
    ):  # fmt: skip
        mine.hear(said)
        handle(mine)
        assert mine._said is not None
        answers.append((mine._said.order, mine._said.answer, mine._said.beside))
    assert answers[0] == ("d1", OrderAnswer.REFUSED, 0)
    assert [each[2] for each in answers] == [0, 11, 11, 11, 0]
    assert [each[0] for each in answers] == ["d1", "d1", "d1", "d2", "d2"]
    close(mine)


def test_an_order_that_is_handled_after_the_command_has_ended_well_starts_nothing(tmp_path: Path) -> None:
    mine = supervisor_of_a_job("/bin/sh", "-c", f"echo >>{tmp_path}/starts", max_restarts=3)

    async def day() -> None:
        supervisor = mine.supervisor
        await supervisor.begin()
        while not supervisor.run.starts:
            await supervisor.next()
        await supervisor.handle(machine.event(machine.steps_seen, (BATCH_STEP,)))
        mine.hear(FromAgent(order=RestartOrder(decision="d1", step_id=BATCH_STEP, start=1), given_at=clock.wall()))
        while not mine.launcher.has_finished:  # noqa: ASYNC110, what is waited for is in the world
            await asyncio.sleep(0.01)
        await asyncio.wait_for(supervisor.follow(), 20)
        supervisor.cancel()

    asyncio.run(day())
    close(mine)
    assert (mine.supervisor.run.exit_code, mine.supervisor.run.answer) == (0, OrderAnswer.REFUSED)
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


def test_a_job_that_has_lost_a_node_is_requeued_after_the_last_restart(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    asked = f"echo $* >>{tmp_path}/asked; exit 1"
    for name, script in {"squeue": f"[ -e {lost} ] && echo n1 || echo n1,n2", "srun": "", "scontrol": asked}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o700)
    allocation = Allocation(job_id="7", nodes=("n1", "n2"), batch_host="n1", end_at=clock.wall() + 3600)
    environ = {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}
    launcher = Launcher(("sh", "-c", f"touch {lost}; exit 3"), allocation, environ)
    mine = JobSupervisor(Settings(allocation=allocation, count=2, least=2, max_restarts=0), launcher)

    async def day() -> None:
        await mine.supervisor.begin()
        await asyncio.wait_for(mine.supervisor.follow(), 30)
        mine.supervisor.cancel()

    asyncio.run(day())
    close(mine)
    assert "requeue 7" in (tmp_path / "asked").read_text().splitlines()
    assert (mine.supervisor.run.starts, mine.supervisor.run.exit_code) == (1, 3), "Slurm has refused"


def test_only_a_kill_switch_of_ours_is_seen(tmp_path: Path) -> None:
    switch = tmp_path / "kill"
    assert not is_our_switch(str(switch))
    switch.write_text("stop\n")
    assert not is_our_switch(str(switch))
    switch.write_text(compose_line({"by": "slurm-watchdog", "decision": "c"}))
    assert is_our_switch(str(switch))
