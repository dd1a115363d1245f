"""What threads do, seen through the children of their users: asked at once, and not seen is not the same as gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from slurm_watchdog.agent.children.answers import SeenThreads, ThreadFacts
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import ReadThreads, WorkerState
from slurm_watchdog.agent.proc.blocked_calls import UNSEEN_S, BlockedThreads
from slurm_watchdog.agent.proc.entry import Entry, ProcessFacts, Stat
from slurm_watchdog.agent.proc.system_call import SeenCall
from slurm_watchdog.agent.processes.thread_calls import read_threads
from slurm_watchdog.agent.processes.thread_reads import ThreadReads
from tests.builders.fake_children import looks

ME = os.getpid()


class Child:
    """Answers as the child would, or not at all; counts the requests."""

    def __init__(self, look: Callable[[Any], Any] | None = None) -> None:
        self.look = look or (lambda items: read_threads(ReadThreads(items), WorkerState(os.getuid())))
        self.answers, self.silent = True, set[int]()
        self.asked: list[list[Any]] = []

    def ask(
        self, key: str, request: ReadThreads, deadline_s: float, now: float, then: Any, uid: int, **_: Any
    ) -> int | None:
        assert key == f"look:{uid}"
        self.asked.append(request.files)
        if not self.answers or uid in self.silent:
            return len(self.asked)
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


def test_what_is_wanted_comes_in_one_request_and_is_asked_once() -> None:
    child = Child()
    files = far(child)
    items: list[Any] = [("io", ME, ME), ("call", ME, ME), ("call", ME, 2**22), ("io", 2**22, 2**22)]
    files.fetch(items)
    counters = files.counters_of(ME)
    assert counters is not None and counters.io_bytes is not None and counters.cpu_ticks is not None
    assert files.counters_of(2**22) is None, "it is of no process that is known"
    assert files.calls == {(ME, ME): None, (ME, 2**22): None}
    files.fetch(items)
    assert len(child.asked) == 1 and not files.unseen
    files.begin()
    files.fetch(items)
    assert len(child.asked) == 2, "a new tick asks again"


def test_a_silent_child_of_one_user_takes_the_answers_of_no_other() -> None:
    child, now = Child(), [0.0]
    made = looks(child)
    for pid, uid in ((ME, os.getuid()), (7, 1000)):
        made.table.entries[pid] = Entry(ProcessFacts(pid, 5, 1, "python", uid), Stat("python", "S", 1, 0, 0, 5))
    files = ThreadReads(made, read_clock=lambda: now[0])
    child.silent = {1000}
    child.settle = lambda seconds, requests: now.__setitem__(0, now[0] + seconds)  # type: ignore[method-assign]
    files.fetch([("call", 7, 7)])
    files.fetch([("io", ME, ME)])
    assert files.counters_of(ME) is not None
    assert files.unseen == {1000}


def test_devices_are_told_and_no_other_files() -> None:
    with open("/dev/null") as null, open("/proc/self/stat"):
        assert null
        found, gone = far(Child()).devices_of([(ME, ME), (2**22, 2**22)])
    assert found is not None and gone is None
    assert "/dev/null" in found and all(name.startswith("/dev/") for name in found)


def test_who_could_not_look_has_seen_nobody_go() -> None:
    child = Child()
    files = far(child)
    child.answers = False
    files.fetch([("call", ME, ME)])
    assert files.unseen == {os.getuid()}
    assert files.calls == {}


def test_an_answer_about_more_than_was_asked_is_none() -> None:
    child = Child(lambda items: SeenThreads(5, [(3, ThreadFacts(1))]))
    files = far(child)
    files.fetch([("cpu", ME, ME)])
    assert files.counters_of(ME) is None


SEEN = SeenCall("0 0x3 0x7f00", "D", "rpc_wait_bit_killable", "read", "/shared/data", 3, 4, 10)


def test_a_stall_goes_on_where_the_child_does_not_answer_for_moments_and_grows_by_nothing_that_was_not_seen() -> None:
    child = Child(lambda items: SeenThreads(len(items), [(0, ThreadFacts(call=SEEN))]))
    files, threads = far(child), BlockedThreads()

    def look(now: float) -> None:
        files.begin()
        asked = threads.wanted([(7, 5, 1)], [(7, 5)], ())
        files.fetch([("call", pid, thread) for pid, _, thread in asked])
        threads.take(asked, files.calls, now)

    look(0.0)
    look(10.0)
    (track,) = threads.blocked().values()
    assert (track.seen, track.first_at, track.seen_at) == (SEEN, 0.0, 10.0)

    child.answers = False
    for now in (15.0, 10.0 + UNSEEN_S):
        look(now)
        (track,) = threads.blocked().values()
        assert track.seen_at == 10.0
    child.answers = True
    look(42.0)
    (track,) = threads.blocked().values()
    assert (track.first_at, track.seen_at) == (0.0, 42.0), "the same call: it never left it"

    child.answers = False
    look(42.0 + UNSEEN_S + 1)
    assert threads.blocked() == {}, "for longer nothing is said of it"


def test_a_stall_on_which_the_child_hangs_goes_on_as_long_as_the_process_may_stand_in_it() -> None:
    child = Child(lambda items: SeenThreads(len(items), [(0, ThreadFacts(call=SEEN))]))
    files, threads = far(child), BlockedThreads()
    stuck = files._looks.stuck

    def look(now: float, state: str = "D") -> list[tuple[float, float]]:
        files.begin()
        asked = threads.wanted([(7, 5, 1)], [(7, 5)], ())
        files.fetch([("call", pid, thread) for pid, _, thread in asked])
        threads.take(asked, files.calls, now, dict.fromkeys(stuck, state))
        return [(track.first_at, track.seen_at) for track in threads.blocked().values()]

    look(0.0)
    assert look(10.0) == [(0.0, 10.0)] and not files.unseen
    stuck[7] = "look:1000:7"
    for now in (15.0, 45.0, 75.0, 3600.0):
        assert look(now) == [(0.0, 10.0)], "it is not over, and no one has seen it go on"
        assert files.unseen == {os.getuid()}
    stuck.clear()
    child.answers = False
    assert look(3605.0) == [(0.0, 10.0)], "the fresh child takes a moment"
    child.answers = True
    assert look(3610.0) == [(0.0, 3610.0)]
    stuck[7] = "look:1000:7"
    assert look(3610.0 + UNSEEN_S, "S") == [(0.0, 3610.0)]
    assert look(3611.0 + UNSEEN_S, "S") == [], "it is in D no more"
    assert threads.wanted([], [], ()) == []


def test_a_tick_of_a_calm_job_costs_one_request_whoever_has_the_turn() -> None:
    child = Child(lambda items: SeenThreads(len(items), []))
    files = far(child)
    threads = BlockedThreads(lambda pid: list(range(pid, pid + 20)))
    seen: set[int] = set()
    for tick in range(4):
        files.begin()
        asked = threads.wanted([(1000, 5, 20), (2000, 5, 20), (3000, 5, 20)], [], ())
        files.fetch([("call", pid, thread) for pid, _, thread in asked])
        threads.take(asked, files.calls, 5.0 * tick)
        seen |= {thread for _, _, thread in asked}
    assert len(child.asked) == 4
    assert len(seen) == 57, "every thread but the main ones had its turn"
