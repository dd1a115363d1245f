"""Disposable children: they answer, hang, die and become users, and the one who asks never waits for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from watchdog import clock
from watchdog.agent.probe import Answer, Probes, ProbesLost
from watchdog.runner import wait_readable


def echo(args: Any, state: dict[str, Any]) -> Any:
    state["count"] = state.get("count", 0) + 1
    return [args, state["count"], os.getpid(), os.getuid()]


def hang(args: Any, state: dict[str, Any]) -> None:
    time.sleep(args)


def fail(args: Any, state: dict[str, Any]) -> None:
    raise OSError(13, "Permission denied", "/x")


def die(args: Any, state: dict[str, Any]) -> None:
    os._exit(1)


def large(args: Any, state: dict[str, Any]) -> str:
    return "x" * args


FUNCTIONS = {"echo": echo, "hang": hang, "fail": fail, "die": die, "large": large}


class Asker:
    def __init__(self) -> None:
        self.probes = Probes(FUNCTIONS, max_workers=3)
        self.answers: list[Answer] = []

    def ask(
        self, key: str, function: str, args: Any = None, deadline_s: float = 5.0, uid: int = -1
    ) -> int | None:
        return self.probes.ask(key, function, args, deadline_s, clock.monotonic(), self.answers.append, uid)

    def answer(self, key: str, function: str, args: Any = None, uid: int = -1) -> Answer:
        request = self.ask(key, function, args, uid=uid)
        assert request is not None
        self.probes.settle(10, [request])
        return self.answers[-1]


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker()
    yield asker
    asker.probes.close()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any, seconds: float = 5.0) -> bool:
    end = clock.monotonic() + seconds
    while not condition() and clock.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def test_a_worker_lives_on_and_remembers(asker: Asker) -> None:
    first, second = asker.answer("a", "echo", [1, "x"]).value, asker.answer("a", "echo").value
    assert first[0] == [1, "x"]
    assert second[1] == 2
    assert first[2] == second[2] != os.getpid()
    assert asker.answer("b", "echo").value[2] != first[2]


def test_an_error_is_an_answer(asker: Asker) -> None:
    assert asker.answer("a", "fail").error == "EACCES: Permission denied: '/x'"
    assert asker.answer("a", "nonsense").error == "no function 'nonsense'"
    assert asker.answer("a", "echo").error is None


def test_a_large_answer_comes_whole_and_a_huge_one_is_refused(asker: Asker) -> None:
    assert len(asker.answer("a", "large", 3_000_000).value) == 3_000_000
    assert "too large" in str(asker.answer("a", "large", 20_000_000).error)


def test_a_child_that_hangs_is_counted_left_alone_and_free_when_it_answers(asker: Asker) -> None:
    began = clock.monotonic()
    request = asker.ask("a", "hang", 0.6, deadline_s=0.1)
    assert clock.monotonic() - began < 0.1
    assert asker.ask("a", "echo") is None
    time.sleep(0.15)
    asker.probes.poll(clock.monotonic())
    assert [(answer.request, answer.timed_out) for answer in asker.answers] == [(request, True)]
    (hung,) = asker.probes.hung(clock.monotonic())
    assert hung.probe == "a"
    assert hung.seconds > 0.1
    assert asker.ask("a", "echo") is None
    assert asker.answer("b", "echo").error is None
    wait_readable(asker.probes.filenos(), 3)
    asker.probes.poll(clock.monotonic())
    assert asker.probes.hung(clock.monotonic()) == ()
    assert len(asker.answers) == 2  # its late answer was dropped
    assert asker.answer("a", "echo").error is None


def test_a_child_that_dies_is_replaced(asker: Asker) -> None:
    assert asker.answer("a", "die").error == "the child ended"
    assert asker.answer("a", "echo").error is None


def test_there_is_a_limit_to_children_and_idle_ones_make_room(asker: Asker) -> None:
    for key in "abc":
        asker.ask(key, "hang", 30, deadline_s=60)
    assert asker.ask("d", "echo") is None


def test_idle_children_make_room(asker: Asker) -> None:
    for key in "abcde":
        assert asker.answer(key, "echo").error is None
    assert len(asker.probes.names()) == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become someone else")
def test_a_child_becomes_its_user_for_good(asker: Asker) -> None:
    assert asker.answer("a", "echo", uid=65534).value[3] == 65534
    assert asker.answer("a", "echo", uid=1).value[3] == 1


def test_an_answer_that_cannot_be_used_stops_nothing(asker: Asker) -> None:
    def then(answer: Answer) -> None:
        raise RuntimeError("x")

    request = asker.probes.ask("a", "echo", 1, 5, clock.monotonic(), then)
    assert request is not None
    asker.probes.settle(5, [request])
    assert asker.answer("a", "echo").error is None


def test_all_children_end_with_their_agent() -> None:
    read_fd, write_fd = os.pipe()
    agent = os.fork()
    if agent == 0:
        try:
            asker = Asker()
            pids = [asker.answer(key, "echo").value[2] for key in "ab"] + [asker.probes.spawner_pid]
            asker.ask("b", "hang", 60)
            os.write(write_fd, " ".join(map(str, pids)).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    pids = [int(word) for word in os.read(read_fd, 100).split()]
    assert all(alive(pid) for pid in pids)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_without_its_spawner_an_agent_has_to_start_anew(asker: Asker) -> None:
    asker.probes.check()
    os.kill(asker.probes.spawner_pid, signal.SIGKILL)
    assert wait_readable(asker.probes.filenos(), 5)
    with pytest.raises(ProbesLost):
        asker.probes.check()
