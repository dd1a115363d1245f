"""What threads do, seen through the children of their users: asked at once, and not seen is not the same as gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from slurm_watchdog.agent.children.answers import ThreadCall, ThreadFacts
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ReadThreads, WorkerState
from slurm_watchdog.agent.proc.blocked_calls import UNSEEN_S, BlockedThreads, NotSeenError
from slurm_watchdog.agent.proc.entry import Entry, ProcessFacts, Stat
from slurm_watchdog.agent.processes.thread_calls import read_threads
from slurm_watchdog.agent.processes.thread_reads import ThreadReads
from tests.builders.fake_children import looks

ME = os.getpid()
READ = "0 0x3 0x7f00 0x10 0x0 0x0 0x0 0x7ffe 0x7f01\n"
SWITCHES = "Name:\tpython\nvoluntary_ctxt_switches:\t4\nnonvoluntary_ctxt_switches:\t1\n"
STAT = "%d (python) D 1 1 1 0 -1 4194304 0 0 0 0 %d 0 0 0 20 0 1 0 5 0 0\n"


class Child:
    """Answers as the child would, or not at all; counts the requests."""

    def __init__(self, look: Callable[[Any], Any] | None = None) -> None:
        self.look = look or (lambda items: read_threads(ReadThreads(items), WorkerState(os.getuid())))
        self.answers = True
        self.asked: list[list[Any]] = []

    def ask(
        self, key: str, request: ReadThreads, deadline_s: float, now: float, then: Any, uid: int, **_: Any
    ) -> int | None:
        assert key == f"look:{uid}"
        self.asked.append(request.files)
        if not self.answers:
            return None
        then(Answer(1, key, self.look(request.files)))
        return 1

    def settle(self, seconds: float, requests: list[int]) -> None:
        pass


def far(child: Child) -> ThreadReads:
    made = looks(child)
    for pid in (ME, 7, 1000, 2000, 3000):
        facts = ProcessFacts(pid, 5, 1, "python", os.getuid())
        made.table.entries[pid] = Entry(facts, Stat("python", "S", 1, 0, 0, 5))
    return ThreadReads(made, read_clock=lambda: 0.0)


def test_what_is_announced_comes_in_one_request_and_is_asked_once() -> None:
    child = Child()
    files = far(child)
    files.fetch([("io", ME, ME), ("call", ME, ME), ("call", ME, 2**22), ("io", 2**22, 2**22)])
    counters = files.counters_of(ME)
    assert counters is not None and str(counters.io).startswith("rchar:") and counters.cpu_ticks is not None
    assert files.counters_of(2**22) is None, "it is of no process that is known"
    assert len(files.read(f"/proc/{ME}/task/{ME}/syscall").split()) >= 1
    with pytest.raises(ProcessLookupError):
        files.read(f"/proc/{ME}/task/{2**22}/syscall")
    assert len(child.asked) == 1
    assert not files.unseen
    files.begin()
    files.read(f"/proc/{ME}/task/{ME}/syscall")
    assert len(child.asked) == 2, "a new tick asks anew"
    with pytest.raises(ValueError):
        files.read(f"/proc/{ME}/stat")


def test_devices_are_told_and_no_other_files() -> None:
    with open("/dev/null") as null, open("/proc/self/stat"):
        assert null
        found, gone = far(Child()).devices_of([(ME, ME), (2**22, 2**22)])
    assert found is not None and gone is None
    assert "/dev/null" in found.devices
    assert all(name.startswith("/dev/") for name in found.devices)
    assert found.open_files >= len(found.devices)


def test_who_could_not_look_has_seen_nobody_go() -> None:
    child = Child()
    files = far(child)
    child.answers = False
    with pytest.raises(NotSeenError):
        files.read(f"/proc/{ME}/task/{ME}/syscall")
    assert files.unseen == {os.getuid()}
    assert list(files.read_calls(ME, [ME])) == []


class Proc(Child):
    """A process that stands in one read on /shared, as a child would tell."""

    def __init__(self) -> None:
        super().__init__(
            lambda items: [
                ThreadFacts(
                    call=ThreadCall(
                        READ, STAT % (7, 3), SWITCHES, "rpc_wait_bit_killable", "syscr: 5\nsyscw: 5\n", "/shared/data"
                    )
                )
                for _ in items
            ]
        )
        self.files = far(self)


def test_a_stall_goes_on_where_the_child_does_not_answer_for_moments_and_grows_by_nothing_that_was_not_seen() -> None:
    proc = Proc()
    threads = BlockedThreads("x86_64", proc.files.read, proc.files.read_calls, proc.files.file_of)
    for now in (0.0, 10.0):
        proc.files.begin()
        threads.look([(7, 5, "D")], now)
    (track,) = threads.blocked(10.0).values()
    assert (track.path, track.wchan, track.first_at, track.seen_at) == (
        "/shared/data",
        "rpc_wait_bit_killable",
        0.0,
        10.0,
    )

    proc.answers = False
    for now in (15.0, 10.0 + UNSEEN_S):
        proc.files.begin()
        threads.look([(7, 5, "D")], now)
        (track,) = threads.blocked(now).values()
        assert track.seen_at == 10.0
    proc.answers = True
    proc.files.begin()
    threads.look([(7, 5, "D")], 42.0)
    (track,) = threads.blocked(42.0).values()
    assert (track.first_at, track.seen_at) == (0.0, 42.0), "the same call: it never left it"

    proc.answers = False
    proc.files.begin()
    threads.look([(7, 5, "D")], 42.0 + UNSEEN_S + 1)
    assert threads.blocked(42.0 + UNSEEN_S + 1) == {}, "for longer nothing is said of it"


def test_a_tick_of_a_calm_job_costs_one_request_whoever_has_the_turn() -> None:
    child = Child(lambda items: [ThreadFacts(call=ThreadCall("202 0x1 0x0\n")) for _ in items])
    files = far(child)
    threads = BlockedThreads("x86_64", files.read, read_calls=files.read_calls, file_of=files.file_of)
    threads.list_threads = lambda pid: list(range(pid, pid + 20))
    processes = [(1000, 5, 20), (2000, 5, 20), (3000, 5, 20)]
    seen: set[int] = set()
    for tick in range(4):
        files.begin()
        turn = threads.take_turn(processes)
        files.fetch([("call", process[0], thread) for process, some in turn for thread in some])
        threads.scan(processes, set(), 5.0 * tick, turn)
        seen |= {thread for _, some in turn for thread in some}
    assert len(child.asked) == 4
    assert len(seen) == 57, "every thread but the main ones had its turn"
