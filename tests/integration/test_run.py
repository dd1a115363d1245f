"""`slurm-watchdog run`: no Slurm, and none of root's rights."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent_tree import tree_of
from tests.integration.ordinary import prefix
from tests.rig.stack import COMMAND, QUICK, TRAINER

PATIENCE_S = 120.0


class Started:
    """One `slurm-watchdog run`, in a directory of its own."""

    def __init__(self, place: Path, *command: str, options: tuple[str, ...] = ()) -> None:
        self.place = place
        self.directory = place / "run"
        config = place / "config.yaml"
        config.write_text(json.dumps(QUICK))
        place.chmod(0o777)
        self.errors = place / "errors.txt"
        words = [
            "run",
            "--config",
            str(config),
            "--directory",
            str(self.directory),
            "--no-page",
            *options,
            "--",
            *command,
        ]
        with self.errors.open("wb") as errors, (place / "shown.txt").open("wb") as shown:
            self.process = subprocess.Popen(
                [*prefix(), str(COMMAND), *words], stdout=shown, stderr=errors, cwd=place, start_new_session=True,
                env={**os.environ, "HOME": str(place)},
            )  # fmt: skip

    def output(self) -> str:
        found = ""
        for name in ("output.log", "errors.log"):
            with contextlib.suppress(FileNotFoundError):
                found += (self.directory / name).read_text(errors="replace")
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, (
                f"not in time: {what}\n{self.errors.read_text()}\n{self.output()[-2000:]}"
            )
            time.sleep(0.1)

    def ends(self) -> int:
        self.until(lambda: self.process.poll() is not None, "the end")
        return self.process.returncode

    def ask(self, *words: str) -> Any:
        """A command against its socket, as the same user."""
        done = subprocess.run(
            [str(COMMAND), *words, "--json", "--socket", str(self.directory / "controller.sock")],
            capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        return json.loads(done.stdout)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path("/tmp") or parent.stat().st_uid != os.getuid():
            break
        parent.chmod(parent.stat().st_mode | 0o011)
    started: list[Started] = []

    def begin(*command: str, options: tuple[str, ...] = ()) -> Started:
        started.append(Started(tmp_path, *command, options=options))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def trainer(place: Path, *more: str) -> tuple[str, ...]:
    (place / "faults").mkdir(exist_ok=True)
    (place / "faults").chmod(0o777)
    return (
        sys.executable, str(TRAINER), "--steps", "400", "--step-seconds", "0.2", "--save-interval", "10",
        "--checkpoint-dir", "checkpoints", "--fault-dir", "faults", *more,
    )  # fmt: skip


def test_a_hang_is_named_and_the_command_goes_on_from_its_checkpoint(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    run = start(*trainer(tmp_path))
    run.until(lambda: "iteration       22/" in run.output(), "some steps")
    fault = tmp_path / "faults" / "dataloader_hang.rank0"
    fault.touch()
    run.until(lambda: "fault injected" in run.output(), "the fault")
    fault.unlink(missing_ok=True)
    run.until(lambda: "loaded checkpoint" in run.output(), "the second run")
    run.until(lambda: any(i["state"] == "resolved" for i in run.ask("incidents")), "the incident to be over")
    (incident,) = [i for i in run.ask("incidents") if i["kind"] == "collective_hang"]
    (culprit,) = incident["culprits"]
    assert (culprit["rank"], incident["decisions"][0]["verdict"]) == (0, "allowed")
    assert "waits for its data loader" in incident["summary"]
    assert "first new step" in incident["decisions"][0]["outcome"]
    job = run.ask("status")["jobs"][0]
    assert (job["restarts"], job["state"]) == (1, "RUNNING")


SAVES = """
import os, time
os.makedirs("ck", exist_ok=True)
for step in range(1, 91):
    time.sleep(0.3)
    print(f"step {step} loss 2.{step}", flush=True)
    if step % 20 == 0:
        if step == 40:
            print("saving checkpoint at step 40", flush=True)
            time.sleep(130)
        with open("ck/last.pt.tmp", "wb") as file:
            file.write(b"state" * 1000)
        os.replace("ck/last.pt.tmp", "ck/last.pt")
"""


@pytest.mark.thorough
def test_a_first_save_of_130_s_that_is_announced_is_left_alone_though_an_earlier_file_is_found_meanwhile(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(SAVES)
    run = start(sys.executable, "t.py", options=("--checkpoint-dir", "ck"))
    run.until(lambda: "saving checkpoint" in run.output(), "the save")
    began, seen = time.monotonic(), []
    while "step 50" not in run.output():
        assert time.monotonic() - began < 130 + PATIENCE_S
        seen.append((time.monotonic() - began, run.ask("status")["jobs"][0]))
        time.sleep(2)
    of_save = [job for at, job in seen if 10 < at < 120]
    assert len(of_save) > 10
    assert {job["phase"] for job in of_save} == {"checkpointing"}
    assert min(job["limit_s"] for job in of_save) >= 1800
    assert of_save[-1]["checkpoint_step"] is None
    assert of_save[-1]["saved_age_s"] > 60, "last.pt says of no step"
    run.until(lambda: run.ask("status")["jobs"][0]["step"] > 41, "steps after the save")  # told some seconds late
    after = run.ask("status")["jobs"][0]
    assert (after["phase"], after["limit_s"]) == ("training", 8.0), "what is announced is not learnt as a step"
    assert run.ends() == 0
    assert "0 incidents" in run.errors.read_text()


@pytest.mark.thorough
def test_a_restart_that_is_asked_for_loses_nothing(start: Callable[..., Started], tmp_path: Path) -> None:
    run = start(*trainer(tmp_path))
    run.until(lambda: "iteration       12/" in run.output(), "some steps")
    run.until(lambda: not run.ask("status")["controller"]["warming_up"], "the controller to act")
    job = run.ask("status")["jobs"][0]["job_id"]
    run.ask("restart", job, "--no-wait")
    run.until(lambda: "loaded checkpoint" in run.output(), "the second run")
    run.until(lambda: any(i["state"] == "resolved" for i in run.ask("incidents")), "the incident to be over")
    (incident,) = run.ask("incidents")
    assert "0 steps lost" in incident["decisions"][0]["outcome"]
    assert not list(run.directory.glob("kill-*/kill")), "the switch was taken away"


def test_after_a_nan_the_next_start_is_named_the_last_good_checkpoint(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    run = start(*trainer(tmp_path))
    run.until(lambda: any(job.get("step") for job in run.ask("status").get("jobs", ())), "its first losses to be seen")
    good_step = (int(re.findall(r"iteration +(\d+)/", run.output())[-1]) // 10 + 1) * 10
    run.until(lambda: f"iteration {good_step + 2:8d}/" in run.output(), "a checkpoint")
    fault = tmp_path / "faults" / "nan.rank0"
    fault.touch()
    run.until(lambda: "fault injected" in run.output(), "the fault")
    fault.unlink(missing_ok=True)
    run.until(
        lambda: f"successfully saved checkpoint at iteration {good_step + 10:7d}" in run.output(),
        "a checkpoint that is damaged",
    )
    good = f"{tmp_path}/checkpoints/global_step{good_step}"
    run.until(lambda: any(i["kind"] == "loss_nan" for i in run.ask("incidents")), "the incident")
    (incident,) = [i for i in run.ask("incidents") if i["kind"] == "loss_nan"]
    run.until(lambda: good in str(run.ask("explain", incident["id"])), "the last good one to be named")
    run.until(lambda: not run.ask("status")["controller"]["warming_up"], "the controller to act")
    run.ask("restart", run.ask("status")["jobs"][0]["job_id"], "--no-wait")
    run.until(
        lambda: f"successfully loaded checkpoint from {tmp_path}/checkpoints at iteration {good_step}" in run.output(),
        "the second run",
    )


HOOKED = """
import sys, time
sys.path.insert(0, {hooks!r})
from slurm_watchdog_hooks import Watchdog

watchdog = Watchdog(total=5000, poll_seconds=0.1)
for step in watchdog.steps(700, 5000):
    time.sleep(0.1)
    watchdog.report(step, loss=1.5)
if watchdog.leaving:
    print("successfully saved checkpoint at iteration", step, flush=True)
"""


@pytest.mark.thorough
def test_a_loop_with_hooks_and_no_log_is_seen_by_its_heartbeat_and_leaves_by_its_switch(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    hooks = Path(__file__).parents[2] / "hooks"
    run = start(sys.executable, "-c", HOOKED.format(hooks=str(hooks)))
    run.until(lambda: (run.ask("status").get("jobs") or [{}])[0].get("step"), "a step from the heartbeat")
    job = run.ask("status")["jobs"][0]
    assert job["step"] >= 700
    assert (job["total_steps"], run.output()) in ((5000, ""), (None, "")), "nothing was logged"
    run.until(lambda: not run.ask("status")["controller"]["warming_up"], "the controller to act")
    run.ask("restart", job["job_id"], "--no-wait")
    run.until(lambda: "successfully saved checkpoint" in run.output(), "the loop to save and leave")
    run.until(
        lambda: (run.ask("status").get("jobs") or [{}])[0].get("restarts") == 1,
        "the second run",
    )


def test_a_command_that_fails_is_started_again_as_often_as_was_said(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    run = start("sh", "-c", "echo run $SLURM_WATCHDOG_RESTARTS; sleep 300 & exit 7", options=("--max-restarts", "1"))
    assert run.ends() == 7
    assert [line for line in run.output().splitlines() if line.startswith("run")] == ["run 0", "run 1"]
    assert (tmp_path / "shown.txt").read_text() == run.output()


def test_a_command_that_ends_well_is_left_at_that_and_nothing_outlives_it(
    start: Callable[..., Started],
) -> None:
    run = start("sh", "-c", "(setsid sleep 4321 &) ; sleep 1; exit 0")
    assert run.ends() == 0
    left = subprocess.run(["pgrep", "-f", "sleep 4321"], capture_output=True, text=True, check=False).stdout
    assert left == ""
    assert "again" not in run.errors.read_text()


def test_who_asks_it_to_end_gets_the_commands_end(start: Callable[..., Started]) -> None:
    run = start("sh", "-c", "trap 'echo saved; exit 3' TERM; echo ready; while :; do sleep 0.1; done")
    run.until(lambda: "ready" in run.output(), "its first line")
    run.process.send_signal(signal.SIGTERM)
    assert run.ends() == 3
    assert "saved" in run.output()


def test_an_agent_that_dies_is_started_again(start: Callable[..., Started]) -> None:
    run = start("sh", "-c", "sleep 60")

    def agents() -> set[int]:
        found = subprocess.run(
            ["pgrep", "-P", str(run.process.pid), "-x", "slurm-watchdog"],
            capture_output=True,
            text=True,
            check=False,
        )
        return {int(pid) for pid in found.stdout.split()}

    run.until((run.directory / "controller.sock").exists, "the controller")
    run.until(lambda: run.ask("status").get("nodes", {}).get("reporting"), "a report")
    (first,) = agents()
    os.kill(first, signal.SIGKILL)
    run.until(lambda: agents() - {first}, "another agent")


def test_what_cannot_be_started_is_said_at_once(start: Callable[..., Started]) -> None:
    run = start("no-such-program-here")
    assert run.ends() == 2
    assert "There is no program 'no-such-program-here'" in run.errors.read_text()


def listening_ports(pids: set[int]) -> set[str]:
    """Local addresses of TCP at which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_agent_and_controller_meet_at_a_socket_of_their_user_s_own_directory_and_at_no_port(
    start: Callable[..., Started],
) -> None:
    run = start("sh", "-c", "sleep 90")
    run.until((run.directory / "controller.sock").exists, "the controller")
    run.until(lambda: run.ask("status").get("nodes", {}).get("reporting"), "a report")
    assert (run.directory.stat().st_mode & 0o777, run.directory.stat().st_uid) == (0o700, os.geteuid())
    assert (run.directory / "agents.sock").is_socket()
    assert not (run.directory / "token").exists()
    assert listening_ports(set(tree_of(run.process.pid))) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="it is root who is warned")
def test_run_as_root_says_so_and_runs_the_command(tmp_path: Path) -> None:
    words = [
        str(COMMAND),
        "run",
        "--directory",
        str(tmp_path / "run"),
        "--no-page",
        "--",
        "sh",
        "-c",
        "exit 0",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "running as root" in done.stderr
