"""slurm_watchdog_hooks inside the real frameworks: two ranks on the CPU, `make trainers` installs what it needs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainers.scripts import SCRIPTS

HOOKS = Path(__file__).parents[2] / "hooks"
PYTHON = os.environ.get("TRAINERS_PYTHON", str(HOOKS.parent / ".venv-trainers" / "bin" / "python"))
RANKS = 2
FOREIGN = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PYTHONPATH")
LEFT = re.compile(r"leaves at step (\d+)")
STEP = re.compile(r"^step (\d+)$", re.MULTILINE)

pytestmark = pytest.mark.timeout(280)


class Run:
    """The ranks of one start of a script in `place`."""

    def __init__(self, place: Path, script: str, switch: str) -> None:
        self.output = place / "output.txt"
        (place / "train.py").write_text(script.format(trainers=str(HOOKS)))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        mine = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(RANKS),
            "SLURM_WATCHDOG_KILL_SWITCH": switch,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self.output.open("wb") as output:
            self.ranks = [
                subprocess.Popen(
                    [PYTHON, "train.py"],
                    cwd=place,
                    env={**clean, **mine, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(RANKS)
            ]

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 90
        while len(STEP.findall(self.text())) < count:
            assert time.monotonic() < deadline, self.text()[-3000:]
            assert all(rank.poll() is None for rank in self.ranks), self.text()[-3000:]
            time.sleep(0.1)

    def end(self) -> list[int]:
        """The exit codes; nobody may still run after half a minute."""
        deadline = time.monotonic() + 30
        return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in self.ranks]

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.kill()


def script_of(framework: str) -> str:
    there = Path(PYTHON).exists() and (
        subprocess.run([PYTHON, "-c", f"import importlib.util as u; assert u.find_spec({framework!r})"]).returncode == 0
    )
    if not there:
        pytest.skip(f"{framework} is not in {PYTHON}: `make trainers` installs it (some GB)")
    return SCRIPTS[framework]


@pytest.mark.parametrize("framework", SCRIPTS)
@pytest.mark.parametrize("how", ["a file", "a signal to one rank"])
def test_all_ranks_save_together_leave_and_the_next_run_goes_on_from_there(
    framework: str, how: str, tmp_path: Path, runs: list[Run]
) -> None:
    script = script_of(framework)
    switch = tmp_path / "kill"
    runs.append(Run(tmp_path, script, str(switch)))
    runs[0].wait_for_steps(5)
    if how == "a file":
        switch.write_text('{"by": "slurm-watchdog", "why": "node n3 is slow"}\n')
    else:
        runs[0].ranks[1].send_signal(signal.SIGUSR1)
    assert runs[0].end() == [0] * RANKS, runs[0].text()[-3000:]
    left = {int(step) for step in LEFT.findall(runs[0].text())}
    assert len(left) == 1, f"all at the same step: {runs[0].text()[-1000:]}"
    switch.unlink(missing_ok=True)
    runs.append(Run(tmp_path, script, str(switch)))
    runs[1].wait_for_steps(3)
    first = int(STEP.findall(runs[1].text())[0])
    assert first == left.pop() + 1, "not one step is lost"


def test_a_switch_that_was_left_over_does_not_end_the_next_run(tmp_path: Path, runs: list[Run]) -> None:
    script = script_of("torch")
    switch = tmp_path / "kill"
    switch.write_text("of last week\n")
    runs.append(Run(tmp_path, script, str(switch)))
    runs[0].wait_for_steps(40)
    assert "was there before this run and is ignored" in runs[0].text()
    switch.unlink()
    switch.write_text("meant for this one\n")
    assert runs[0].end() == [0] * RANKS
