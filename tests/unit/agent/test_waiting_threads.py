"""What the threads of a process wait for, as its kernel has it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import pytest

from slurm_watchdog.agent.evidence import stacks
from slurm_watchdog.agent.evidence.stacks import read_threads
from slurm_watchdog.model.evidence import WaitingThreads


def sleeping(rows: Sequence[WaitingThreads], call: str) -> int:
    return sum(row.threads for row in rows if row.state == "S" and row.call == call)


def test_waiting_threads_tells_the_call_of_each_thread_but_the_main_one() -> None:
    reading, writing = os.pipe()
    locked = threading.Event()
    mine = [threading.Thread(target=os.read, args=(reading, 1)), threading.Thread(target=locked.wait)]
    before = read_threads(os.getpid())[0]
    for each in mine:
        each.start()
    try:
        assert before is not None
        end = time.monotonic() + 20.0
        while True:  # until both have come so far; threads of the test's own runner may come and go meanwhile
            rows = read_threads(os.getpid())[0]
            assert rows is not None
            if all(sleeping(rows, call) > sleeping(before, call) for call in ("read", "futex")):
                break
            assert time.monotonic() < end, rows
    finally:
        os.write(writing, b".")
        locked.set()
        for each in mine:
            each.join()
        os.close(reading)
        os.close(writing)


def test_waiting_threads_knows_nothing_of_a_process_that_has_ended() -> None:
    assert read_threads(0)[0] is None


def test_waiting_threads_are_not_known_where_the_call_of_one_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    sleeper = threading.Thread(target=stopped.wait)
    sleeper.start()
    monkeypatch.setattr(stacks, "read_words", lambda path: None)
    try:
        end = time.monotonic() + 20.0
        while read_threads(os.getpid())[0] is not None:  # one that runs at this moment is in no call
            assert time.monotonic() < end
    finally:
        stopped.set()
        sleeper.join()
