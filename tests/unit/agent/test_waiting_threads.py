"""What the threads of a process wait for, as its kernel has it."""

from __future__ import annotations

import os
import threading

from slurm_watchdog.agent.evidence.waiting_threads import waiting_threads


def test_waiting_threads_tells_the_call_of_each_thread_but_the_main_one() -> None:
    reading, writing = os.pipe()
    locked = threading.Event()
    mine = [threading.Thread(target=os.read, args=(reading, 1)), threading.Thread(target=locked.wait)]
    before = waiting_threads(os.getpid())
    for each in mine:
        each.start()
    try:
        found: set[str] = set()
        for _ in range(1000):  # until both have come so far
            rows = waiting_threads(os.getpid())
            assert rows is not None
            found = {row.call for row in rows if row.state == "S"}
            if {"read", "futex"} <= found:
                break
        assert {"read", "futex"} <= found
        assert before is not None
        assert sum(row.threads for row in rows) - sum(row.threads for row in before) == 2
    finally:
        os.write(writing, b".")
        locked.set()
        for each in mine:
            each.join()
        os.close(reading)
        os.close(writing)


def test_waiting_threads_knows_nothing_of_a_process_that_has_ended() -> None:
    assert waiting_threads(0) is None
