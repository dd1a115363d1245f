"""slurm_watchdog.agent.evidence.stacks: real processes that sleep."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from slurm_watchdog.agent.evidence.stacks import FOR_EVER_S, read_sleep_s
from slurm_watchdog.agent.proc.files import read_call_name

C_LIBRARY = "import ctypes; c = ctypes.CDLL(None); "
SLEEPS = {
    "time.sleep, until a moment": ("import time; time.sleep(5000)", 4900, 5000),
    "nanosleep, for so long": (C_LIBRARY + "c.sleep(7000)", 6900, 7000),
    "select without files (Python 3.10)": ("import select; select.select([], [], [], 6000)", 5900, 6000),
    "select without files, for ever": ("import select; select.select([], [], [])", FOR_EVER_S, FOR_EVER_S),
    "pause": ("import signal; signal.pause()", FOR_EVER_S, FOR_EVER_S),
}
ELSEWHERE = {
    "a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a pipe": "import sys; sys.stdin.read()",
    "files, with a time-out": "import select, sys; select.select([sys.stdin], [], [], 6000)",
}


def sleep_of(code: str) -> float | None:
    """What is read of a Python that runs `code`, once it waits."""
    program = [sys.executable, "-c", f"print(flush=True); {code}"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            until, last = time.monotonic() + 20, None
            while time.monotonic() < until:
                call = read_call_name(f"/proc/{process.pid}")
                if call is not None and call == last:
                    return read_sleep_s(process.pid)
                last = call
                time.sleep(0.3)
            raise AssertionError(f"it is in {last!r}")
        finally:
            process.kill()


@pytest.mark.parametrize("name", SLEEPS)
def test_a_sleep_is_as_long_as_was_asked_for(name: str) -> None:
    code, least_s, most_s = SLEEPS[name]
    found = sleep_of(code)
    assert found is not None
    assert least_s <= found <= most_s


@pytest.mark.parametrize("name", ELSEWHERE)
def test_who_waits_for_something_else_does_not_sleep(name: str) -> None:
    assert sleep_of(ELSEWHERE[name]) is None


def test_of_a_process_that_is_gone_nothing_is_said() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert read_sleep_s(process.pid) is None
