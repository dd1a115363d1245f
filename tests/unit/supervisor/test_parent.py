"""A supervisor that dies costs the supervision: its parent waits for the command, and hands signals on to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

CHILD = """
import os, signal, subprocess, sys, time
from slurm_watchdog.supervisor.parent import SIGNALS, in_child

def supervise(command):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    {begin}
    {end}

sys.exit(in_child(supervise))
"""
BEGIN = (
    "work = subprocess.Popen(['sh', '-c', 'trap \"exit 8\" TERM; echo begun; "
    "for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done; exit 9'], start_new_session=True); command.value = work.pid"
)


@pytest.mark.parametrize(
    ("begin", "end", "code"),
    [
        pytest.param("pass", "return 5", 5, id="its end"),
        pytest.param("pass", "raise SystemExit(6)", 6, id="refused"),
        pytest.param("pass", "os.kill(os.getpid(), signal.SIGKILL)", 137, id="killed before a start"),
        pytest.param(BEGIN, "os.kill(os.getpid(), signal.SIGKILL)", 9, id="killed"),
        pytest.param(BEGIN, "os._exit(70)", 9, id="an error of ours"),
        pytest.param(BEGIN, "work.wait(); command.value = 0; return 4", 4, id="over"),
        pytest.param(f"{BEGIN}; work.wait()", "os.kill(os.getpid(), signal.SIGKILL)", 137, id="killed at the end"),
    ],
)
def test_the_exit_code_is_that_of_the_supervisor_or_of_the_command_that_outlives_it(
    begin: str, end: str, code: int
) -> None:
    text = CHILD.format(begin=begin, end=end)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code, done.stderr
    assert ("its supervisor has died" in done.stderr) is (code == 9)


def test_a_signal_reaches_the_supervisor_and_afterwards_the_command() -> None:
    waits = "signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGKILL)); os.write(1, b'ready\\n')"
    text = CHILD.format(begin=f"{waits}; {BEGIN}; os.write(1, b'put\\n')", end="time.sleep(20)")
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        assert {parent.stdout.readline() for _ in range(3)} == {"ready\n", "begun\n", "put\n"}
        parent.send_signal(signal.SIGUSR1)
        assert "its supervisor has died (exit code 137)" in parent.stderr.readline()
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(timeout=20) == 8


def test_a_kill_of_all_that_have_the_name_of_the_supervisor_leaves_the_parent() -> None:
    """As `pkill -9 slurm-watchdog` does; here with a name that nothing else on the machine has."""
    name = f"swd-t{os.getpid()}"
    text = CHILD.format(begin=f"{BEGIN}; os.write(1, b'put\\n')", end="time.sleep(20)")
    text = f"from slurm_watchdog.base.process_setup import set_name\nset_name({name!r})\n{text}"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        assert {parent.stdout.readline() for _ in range(2)} == {"begun\n", "put\n"}
        for each in psutil.process_iter(["name"]):
            if each.info["name"] == name:
                each.kill()
        assert "its supervisor has died (exit code 137)" in parent.stderr.readline()
        assert parent.wait(timeout=20) == 9
