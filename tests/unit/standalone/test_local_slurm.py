"""A command in the place of a job: it answers, and obeys, as Slurm would."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.knowledge.log_signatures import SIGNATURES
from slurm_watchdog.slurm.client import Refusal, SignalTo, SlurmClient, SlurmRefused, Submission
from slurm_watchdog.standalone.local_slurm import LocalLauncher, LocalSlurm
from slurm_watchdog.supervisor.machine import LAST_S
from slurm_watchdog.supervisor.parent import PR_SET_CHILD_SUBREAPER, become_subreaper
from slurm_watchdog.supervisor.placement import Allocation
from slurm_watchdog.supervisor.state import Settings

LOOP = "echo run $SLURM_WATCHDOG_RESTARTS $SLURM_WATCHDOG_JOB_ID; while :; do sleep 0.05; done"


Answers = Iterator[float | None]
"""What Slurm says of the end of the job's time, question by question."""


def local(
    tmp_path: Path, *command: str, environ: Mapping[str, str] | None = None, max_restarts: int = 0,
    end_at: float | None = None, answers: Answers | None = None,
) -> LocalSlurm:  # fmt: skip
    """`answers`: the command is in a job of Slurm's, which ends at `end_at`."""
    allocation = Allocation(job_id="77", nodes=("here",), batch_host="here", end_at=end_at)
    output, switch = tmp_path / "output", str(tmp_path / "{job_id}.{restarts}" / "kill")
    environ = {**os.environ, **(environ or {})}
    launcher = LocalLauncher(command, allocation, environ, output=output, errors=output, kill_switch=switch)

    async def ask() -> float | None:
        return next(answers or iter(()), None)

    launcher.ask.end_at = ask  # type: ignore[method-assign]
    launcher.helpers |= {each.pid for each in launcher.processes()}
    settings = Settings(
        allocation=allocation, count=1, least=1, max_restarts=max_restarts, in_slurm=answers is not None, patient=True,
        kill_wait_s=1.0, restart_delay_s=0.2,
    )  # fmt: skip
    return LocalSlurm(settings, launcher, "here")


def with_job(
    tmp_path: Path, script: str, talk: Callable[[LocalSlurm], Awaitable[Any]], *, max_restarts: int = 0,
    end_at: float | None = None, answers: Answers | None = None,
) -> Any:  # fmt: skip
    async def run() -> Any:
        job = local(tmp_path, "sh", "-c", script, max_restarts=max_restarts, end_at=end_at, answers=answers)
        client: SlurmClient = job  # the type is checked: every question and lever is there
        assert client
        await job.start()
        try:
            return await asyncio.wait_for(talk(job), 30)
        finally:
            await job.close()
            assert job.launcher.processes() == []

    return asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    async with timeout(20):
        while not condition():  # noqa: ASYNC110, what is waited for is in the world
            await asyncio.sleep(0.02)


async def refusal(call: Awaitable[Any]) -> Refusal:
    with pytest.raises(SlurmRefused) as caught:
        await call
    return caught.value.kind


def lines(job: LocalSlurm) -> list[str]:
    return job.launcher.output.read_text().splitlines()


def test_local_command_is_listed_as_a_running_job_of_one_node(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        view = await job.read_view()
        (listed,) = view.jobs
        assert (listed.state, listed.nodes, listed.restarts, listed.stdout) == (
            "RUNNING",
            ("here",),
            0,
            str(job.launcher.output),
        )
        assert [node.name for node in view.nodes] == ["here"]
        assert await job.read_job("78") is None
        assert await job.read_node("there") is None

    with_job(tmp_path, LOOP, talk)


def test_a_requeue_counts_at_once_and_the_held_job_runs_again_when_it_is_released(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        await until(lambda: lines(job))
        await job.requeue_hold("77", only_unfinished=True)
        listed = await job.read_job("77")
        assert listed is not None
        assert (listed.restarts, listed.held, listed.state) == (1, True, "COMPLETING")
        await until(lambda: job.state == "PENDING")
        await job.requeue_hold("77", only_unfinished=True)  # once more is no error, and no second restart
        assert (await job.read_job("77")).state == "REQUEUE_HOLD"  # type: ignore[union-attr]
        await asyncio.sleep(0.3)
        assert lines(job) == ["run 0 77"]
        await job.release("77")
        await until(lambda: lines(job) == ["run 0 77", "run 1 77"])
        await job.release("77")  # of one that is not held: nothing

    with_job(tmp_path, LOOP, talk)


def test_a_command_that_has_ended_is_run_again_only_for_who_says_so(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        await asyncio.wait_for(job.over.wait(), 20)
        assert (job.state, job.exit_code) == ("COMPLETED", 0)
        assert await refusal(job.requeue_hold("77", only_unfinished=True)) is Refusal.FINISHED
        await job.requeue_hold("77", only_unfinished=False)
        assert not job.over.is_set()
        await until(lambda: job.state == "PENDING")
        await job.release("77")
        await until(lambda: len(lines(job)) == 2)

    with_job(tmp_path, "echo done", talk)


def test_command_that_ignores_sigterm_is_killed_with_all_its_children(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        await until(lambda: lines(job))
        await job.requeue_hold("77", only_unfinished=True)
        await until(lambda: job.state == "PENDING")
        left = subprocess.run(["pgrep", "-f", "sleep 98765"], capture_output=True, check=False)  # noqa: ASYNC221
        assert left.stdout == b""

    with_job(tmp_path, "trap '' TERM; sleep 98765 & echo up; wait; sleep 98765", talk)


def test_end_of_a_stopped_process_lets_it_end_by_its_own_handler(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        job.supervisor.run = replace(job._run, settings=replace(job._run.settings, kill_wait_s=10.0))
        await until(lambda: lines(job))
        await job.send_signal("77", "STOP", SignalTo.FULL)
        await until(lambda: all(each.status() == "stopped" for each in job.launcher.processes()))
        await job.requeue_hold("77", only_unfinished=True)
        await until(lambda: job.state == "PENDING")
        assert lines(job)[-1] == "saved"

    with_job(tmp_path, "trap 'echo saved; exit' TERM; " + LOOP, talk)


def test_who_saves_after_the_end_of_its_shell_is_asked_once_and_waited_for(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        await until(lambda: "ready" in lines(job))
        job.ask(signal.SIGTERM, ends=True)
        await asyncio.wait_for(job.over.wait(), 20)
        assert [line for line in lines(job) if line != "Terminated"] == ["ready", "asked", "saved"]

    (tmp_path / "trainer.sh").write_text(
        "trap 'echo asked; asked=1' TERM; echo ready; while [ -z \"$asked\" ]; do sleep 0.05; done; "
        "for i in 1 2 3 4 5; do sleep 0.1; done; echo saved"
    )
    become_subreaper()
    try:
        with_job(tmp_path, f"sh {tmp_path}/trainer.sh & wait", talk)
    finally:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


def test_a_failure_is_run_again_as_often_as_was_said_and_keeps_its_code(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        await until(lambda: job.state == "FAILED")
        (listed,) = (await job.read_view()).jobs
        assert listed.starts_again
        await asyncio.wait_for(job.over.wait(), 20)
        assert (job.state, job.exit_code, job.restarts) == ("FAILED", 9, 2)
        assert lines(job) == ["run"] * 3
        (listed,) = (await job.read_view()).jobs
        assert not listed.starts_again

    with_job(tmp_path, "echo run; exit 9", talk, max_restarts=2)


def test_a_step_that_its_owner_cancels_and_a_failure_in_the_last_minute_are_not_run_again(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        await asyncio.wait_for(job.over.wait(), 20)
        (listed,) = (await job.read_view()).jobs
        assert (job.exit_code, job.restarts, listed.starts_again) == (137, 0, "")
        states.append(job.state)

    states: list[str] = []
    line = "slurmstepd-n1: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-11-23T13:05:01 ***"
    with_job(tmp_path, f"echo '{line}'; exit 137", talk, max_restarts=2, answers=iter(()))
    with_job(tmp_path, "exit 137", talk, max_restarts=2, end_at=1.0, answers=iter(()))
    assert states == ["CANCELLED", "FAILED"]


def test_in_a_job_a_command_that_ends_after_a_notice_is_not_run_again(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        await until(lambda: lines(job) == ["run"])
        job.ask(signal.SIGUSR1, ends=False)
        await asyncio.wait_for(job.over.wait(), 20)
        assert (job.exit_code, job.restarts, job.state) == (7, 0, "CANCELLED")

    script = "trap 'exit 7' USR1; echo run; while :; do sleep 0.05; done"
    with_job(tmp_path, script, talk, max_restarts=2, answers=iter(()))


def last_minute_begins() -> Answers:
    """At the first question there is just a minute left, at later ones there is less."""
    yield clock.wall() + LAST_S + 0.1


def test_a_restart_is_not_begun_if_the_last_minute_has_begun_since_it_was_decided(tmp_path: Path) -> None:
    async def fails(job: LocalSlurm) -> None:
        await asyncio.wait_for(job.over.wait(), 20)
        assert (job.state, job.exit_code) == ("FAILED", 3)

    async def is_requeued(job: LocalSlurm) -> None:
        await job.requeue_hold("77", only_unfinished=True)
        await until(lambda: job.state == "PENDING")
        await asyncio.sleep(0.2)
        await job.release("77")
        await until(job.over.is_set)
        assert job.state == "FAILED"

    with_job(tmp_path, "echo run; exit 3", fails, max_restarts=2, end_at=1.0, answers=last_minute_begins())
    assert (tmp_path / "output").read_text() == "run\n"
    with_job(tmp_path, LOOP, is_requeued, end_at=1.0, answers=last_minute_begins())


def test_a_requeue_in_the_last_minute_of_the_job_is_refused(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        assert await refusal(job.requeue_hold("77", only_unfinished=True)) is Refusal.FINISHED
        assert job.state == "RUNNING"

    with_job(tmp_path, LOOP, talk, end_at=1.0, answers=iter(()))


def test_a_command_that_ends_while_slurm_is_asked_for_the_time_is_run_again_all_the_same(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        async def ask() -> float | None:
            (tmp_path / "go").touch()
            await job.over.wait()
            return time.time() + 3600

        await until(lambda: lines(job))
        job.launcher.ask.end_at = ask  # type: ignore[method-assign]
        await job.requeue_hold("77", only_unfinished=False)
        await job.release("77")
        await until(lambda: len(lines(job)) == 2)

    script = f"echo run; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    with_job(tmp_path, script, talk, end_at=time.time() + LAST_S / 2, answers=iter(()))


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGSEGV, "segmentation_fault"), (signal.SIGKILL, "killed")])
def test_local_command_ended_by_a_signal_leaves_a_line_as_a_shell_does(
    tmp_path: Path, number: signal.Signals, kind: str
) -> None:
    async def talk(job: LocalSlurm) -> None:
        await asyncio.wait_for(job.over.wait(), 20)
        assert job.exit_code == 128 + number
        (said,) = lines(job)
        assert said.startswith("slurm-watchdog run: line 1: ")
        assert kind in {row.name for row in SIGNATURES if row.regex.search(said)}

    with_job(tmp_path, f"kill -{number} $$", talk)


@pytest.mark.parametrize(
    ("to", "said"),
    [(SignalTo.BATCH, ["shell"]), (SignalTo.STEPS, ["child"]), (SignalTo.FULL, ["child", "shell"])],
)
def test_a_signal_reaches_whom_it_is_for(tmp_path: Path, to: SignalTo, said: list[str]) -> None:
    child = "trap 'echo child' USR1; echo ready; while :; do sleep 0.05; done"
    (tmp_path / "child.sh").write_text(child)
    script = f"trap 'echo shell' USR1; sh {tmp_path}/child.sh & while :; do sleep 0.05; done"

    async def talk(job: LocalSlurm) -> None:
        await until(lambda: "ready" in lines(job))
        await job.send_signal("77", "USR1", to)  # a shell may say as well that its `sleep` was hit
        await until(lambda: sorted(set(lines(job)) & {"child", "shell"}) == said)

    with_job(tmp_path, script.replace("sleep 0.05", "sleep 0.05 || :"), talk)


def test_levers_that_one_machine_lacks_are_refused_for_good(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        node = await job.read_node("here")
        assert node is not None
        refused = (
            job.hold("77"),
            job.set_excluded_nodes("77", ["here"]),
            job.read_script("77"),
            job.submit(Submission(script=b"", uid=0, workdir="/")),
            job.drain_node("here", "why"),
            job.undrain_node(node),
        )
        assert [await refusal(call) for call in refused] == [Refusal.NOT_BATCH] * len(refused)

    with_job(tmp_path, LOOP, talk)


def test_cancel_ends_it_for_good(tmp_path: Path) -> None:
    async def talk(job: LocalSlurm) -> None:
        await until(lambda: lines(job))
        await job.cancel("77")
        await asyncio.wait_for(job.over.wait(), 20)
        assert job.state == "CANCELLED"
        await job.cancel("77")

    with_job(tmp_path, LOOP, talk, max_restarts=3)


def test_a_program_that_cannot_be_started_is_an_error_of_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        job = local(tmp_path, str(tmp_path / "nothing"))
        with pytest.raises(OSError, match="nothing"):
            await job.start()

    asyncio.run(run())


def test_a_function_of_the_script_is_a_command_and_gets_the_signals_that_do_not_ask_for_the_end(tmp_path: Path) -> None:
    body = '() {  echo "run $1"; sh -c "trap \'echo asked; exit 3\' USR1; while :; do sleep 0.05; done"\n}'

    async def run() -> int | None:
        job = local(tmp_path, "bash", "-c", '"$@"', "run", "train", "now", environ={"BASH_FUNC_train%%": body})
        await job.start()
        await until(lambda: lines(job) == ["run now"] and len(job.launcher.processes()) > 2)
        job.ask(signal.SIGUSR1, ends=False)
        await until(job.over.is_set)
        assert lines(job) == ["run now", "asked"]
        return job.exit_code

    assert asyncio.run(run()) == 3
