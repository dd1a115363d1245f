"""What a start finds in its environment, and who of its processes gets a signal that does not ask for its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from slurm_watchdog.supervisor.launcher import Launcher, receivers, takes
from slurm_watchdog.supervisor.placement import Allocation, Placement

BLOCKS = "env --block-signal=USR1"
WAITS = f"{BLOCKS} sleep 60"  # As one that takes it by sigwait or signalfd, which blocks it.


@contextmanager
def command(tmp_path: Path, script: str) -> Iterator[list[psutil.Process]]:
    """A shell and what it starts; `srun` is a sleep of that name."""
    srun = tmp_path / "srun"
    srun.symlink_to("/bin/sleep")
    with subprocess.Popen(
        ["bash", "-c", f"{script} echo ready; read x; wait", str(srun)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None and shell.stdout.readline()
        own = psutil.Process(shell.pid)
        everyone = [own, *own.children(recursive=True)]
        end = time.monotonic() + 10
        while any(each.name() in ("bash", "env") for each in everyone[1:]):  # not executed yet
            assert time.monotonic() < end
            time.sleep(0.01)
        yield everyone
        for each in everyone:
            each.kill()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param("$0 60 &", "srun", id="srun hands it to its tasks"),
        pytest.param("trap : USR1; $0 60 & $0 61 &", "bash", id="a script with a trap, or mpirun"),
        pytest.param("$0 60 & $0 61 &", "srun srun", id="a function of the script"),
        pytest.param("trap '' USR1; $0 60 & $0 61 &", "srun srun", id="a script that lives on, for its sruns"),
        pytest.param(f"{WAITS} &", "sleep", id="a launcher, or a function, without srun"),
        pytest.param(
            f"exec {BLOCKS} bash -c '$0 60 & echo ready; read x; wait' $0;", "bash", id="one that waits for it"
        ),
        pytest.param("sleep 60 &", "bash", id="a helper that would die of it"),
        pytest.param(f"trap '' USR1; {WAITS} &", "bash", id="a program that ignores it"),
        pytest.param("", "bash", id="a program"),
        pytest.param("trap : USR2; $0 60 &", "srun", id="a trap for another one"),
    ],
)
def test_a_signal_goes_to_whom_it_would_have_gone(tmp_path: Path, script: str, expected: str) -> None:
    with command(tmp_path, script) as everyone:
        found = receivers(everyone, everyone[0].pid, signal.SIGUSR1)
        assert " ".join(each.name() for each in found) == expected


def test_a_process_that_is_gone_takes_nothing() -> None:
    assert not takes(2**22 + 1, signal.SIGUSR1)


def test_a_start_finds_the_last_good_checkpoint_that_an_order_has_named(tmp_path: Path) -> None:
    allocation = Allocation(job_id="7", nodes=("n1",), batch_host="n1")
    script = f"echo ${{SLURM_WATCHDOG_RESUME_FROM-none}} >>{tmp_path}/named"
    launcher = Launcher(("sh", "-c", script), allocation, {"PATH": os.defpath})

    async def starts() -> None:
        for number, named in enumerate(("", "/d/run/global step20", "")):
            process = await launcher.start(Placement(nodes=("n1",)), number, named)
            assert await process.wait() == 0

    asyncio.run(starts())
    launcher.close()
    assert (tmp_path / "named").read_text().splitlines() == ["none", "/d/run/global step20", "none"]


def test_the_end_of_a_child_that_is_not_known_yet_is_left_to_who_starts_it() -> None:
    launcher = Launcher(("true",), Allocation(job_id="7", nodes=("n1",), batch_host="n1"), {"PATH": os.defpath})
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        launcher.ask.starting = 1
        launcher.reap()
        assert child.wait(10) == 0
    launcher.close()
