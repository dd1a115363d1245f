"""Disposable children: they answer, hang, die and become users, and the one who asks never waits for them."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_watchdog.agent.workers.admission import MAX_HUNG_OF_GROUP, MAX_HUNG_OF_USER
from slurm_watchdog.agent.workers.child import _work_for_ever, child_main, frame
from slurm_watchdog.agent.workers.spawner import SpawnerDied
from slurm_watchdog.agent.workers.worker import STARVED, STOPPED, Answer, Look, hangs_in_call
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from tests.builders.requests import plain_request
from tests.builders.workers import FUNCTIONS, Asker, everything_of


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
    asker.answer("a", "echo")
    asker.answers.clear()
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
def test_a_user_that_can_not_exist_is_an_error_and_no_crash(asker: Asker) -> None:
    answer = asker.answer("a", "echo", uid=2**40)
    assert answer.error is not None and "is not an ordinary user" in answer.error


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become someone else")
def test_a_child_becomes_its_user_for_good(asker: Asker) -> None:
    assert asker.answer("a", "echo", uid=64983).value[3] == 64983
    assert asker.answer("a", "echo", uid=64984).value[3] == 64984


def test_an_answer_that_cannot_be_used_stops_nothing(asker: Asker) -> None:
    def then(answer: Answer) -> None:
        raise RuntimeError("x")

    request = asker.probes.ask("a", plain_request("echo", 1), 5, clock.monotonic(), then)
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
    with pytest.raises(SpawnerDied):
        asker.probes.check()


def test_parts_come_before_the_answer_and_say_how_far_a_hung_child_got(asker: Asker) -> None:
    assert asker.answer("a", "tell", [0, 0]).value == "all"
    assert asker.parts == [0, 0]
    request = asker.ask("a", "tell", [0, 0.5, 0.1], deadline_s=0.2)
    assert request is not None
    asker.probes.settle(5, [request])
    assert asker.answers[-1].timed_out
    assert asker.parts[2:] == [0, 0.5]
    wait_readable(asker.probes.filenos(), 3)
    time.sleep(0.2)
    asker.probes.poll(clock.monotonic())
    assert asker.parts[2:] == [0, 0.5]  # what came after the deadline was dropped, as the answer is
    assert asker.answer("a", "tell", [0]).value == "all"
    assert asker.parts[4:] == [0]


def test_a_hung_child_goes_on_under_another_name_and_ends_when_it_is_back(asker: Asker) -> None:
    pid = asker.answer("identify", "echo").value[2]
    asker.hang("identify", 0.5)
    assert asker.probes.rename("identify", "identify:17")
    assert asker.answer("identify", "echo").value[2] != pid
    (hung,) = asker.probes.hung(clock.monotonic())
    assert hung.probe == "identify:17"
    assert asker.ask("identify:17", "echo") is None
    assert alive(pid)
    time.sleep(0.6)
    asker.probes.poll(clock.monotonic())
    assert asker.probes.hung(clock.monotonic()) == ()
    assert asker.probes.names() == ["identify"]
    assert wait_until(lambda: not alive(pid))


def test_only_a_hung_child_is_set_aside_and_two_never_share_a_name(asker: Asker) -> None:
    assert not asker.probes.rename("identify", "identify:1")
    asker.answer("identify", "echo")
    assert not asker.probes.rename("identify", "identify:1")
    asker.hang("identify")
    assert asker.probes.rename("identify", "identify:1")
    asker.hang("identify")
    assert not asker.probes.rename("identify", "identify:1")
    assert sorted(asker.probes.names()) == ["identify", "identify:1"]


def test_the_hung_of_one_kind_are_limited_and_the_others_go_on() -> None:
    asker = Asker(max_workers=MAX_HUNG_OF_GROUP + 4)
    try:
        for number in range(MAX_HUNG_OF_GROUP):
            asker.hang("identify")
            assert asker.probes.rename("identify", f"identify:{number}")
            assert len(asker.probes.problems()) == (number == MAX_HUNG_OF_GROUP - 1)
        assert asker.probes.problems() == ("probes: 8 children of identify hang: no more of them are started",)
        assert asker.ask("identify", "echo") is None
        assert asker.ask("identify:99", "echo") is None
        assert asker.answer("files:/a:1", "echo").error is None
        assert asker.probes.counts() == {"idle": 1, "busy": 0, "hung": 8}
    finally:
        asker.probes.close()


def test_a_child_that_is_rarely_needed_ends_when_it_has_answered(asker: Asker) -> None:
    now = clock.monotonic()
    request = asker.probes.ask("a", plain_request("echo", 1), 5, now, asker.answers.append, idle_s=0)
    assert request is not None
    asker.probes.settle(5, [request])
    assert asker.answers[-1].error is None
    assert asker.probes.names() == []
    assert wait_until(lambda: not alive(asker.answers[-1].value[2]))


def test_an_idle_child_ends_after_a_time_that_suits_its_kind(asker: Asker) -> None:
    for key in ("identify", "nvml"):
        asker.answer(key, "echo")
    asker.probes.poll(clock.monotonic() + 100)
    assert asker.probes.names() == ["nvml"]
    asker.probes.poll(clock.monotonic() + 700)
    assert asker.probes.names() == []


def test_names_that_are_no_utf8_arrive_as_they_were(asker: Asker) -> None:
    name = os.fsdecode(b"/shared/caf\xe9.log")
    assert asker.answer("a", "echo", name).value[0] == name
    mount = os.fsdecode(b"files:/caf\xe9")  # and children are called after mount points
    assert asker.answer(mount, "echo", 1).error is None


def test_a_child_that_never_stops_talking_does_not_hold_up_the_loop(asker: Asker) -> None:
    asker.answer("a", "echo")
    asker.answers.clear()
    asker.ask("a", "babble", deadline_s=0.1)
    end = clock.monotonic() + 5
    while not asker.answers and clock.monotonic() < end:
        asker.probes.poll(clock.monotonic())
    assert asker.answers[-1].error is not None


def test_without_descriptors_nothing_is_asked_and_the_reason_is_a_problem(asker: Asker) -> None:
    asker.answer("a", "echo")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        assert asker.ask("b", "echo") is None
        assert asker.answer("a", "echo").error is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert asker.probes.problems() == ("probes: no child can be started: EMFILE: Too many open files",)
    assert asker.answer("b", "echo").error is None
    assert asker.probes.problems() == ()


@pytest.mark.skipif(os.getuid() != 0, reason="a limit of its own for another user's processes")
def test_where_no_process_can_be_forked_the_answer_says_so_and_the_agent_lives_on() -> None:
    read_fd, write_fd = os.pipe()
    agent = os.fork()
    if agent == 0:
        try:
            os.setresuid(64999, 64999, 64999)
            asker = Asker()
            resource.prlimit(asker.probes.spawner_pid, resource.RLIMIT_NPROC, (2, 100))
            first = str(asker.answer("a", "echo").error)
            problem = asker.probes.problems()
            resource.prlimit(asker.probes.spawner_pid, resource.RLIMIT_NPROC, (100, 100))
            then = str(asker.answer("a", "echo").error)
            os.write(write_fd, repr((first, problem, then, asker.probes.problems())).encode())
        finally:
            os._exit(1)
    os.close(write_fd)
    with open(read_fd) as pipe:
        first, problem, then, no_problem = eval(pipe.read())
    os.waitpid(agent, 0)
    assert "no child can be started: EAGAIN" in first
    assert problem == (f"probes: {first}",)
    assert (then, no_problem) == ("None", ())


def test_a_spawner_that_is_stopped_holds_nobody_up(asker: Asker) -> None:
    os.kill(asker.probes.spawner_pid, signal.SIGSTOP)
    try:
        request = asker.ask("a", "echo", deadline_s=0.1)
        assert request is not None
        asker.probes.settle(5, [request])
        assert not asker.answers[-1].timed_out  # nobody has looked at anything: no resource is to blame
        assert "was not started" in str(asker.answers[-1].error)
        assert [each.probe for each in asker.probes.hung(clock.monotonic())] == ["start:a"]
        assert asker.probes.hung_since("a", clock.monotonic()) is None
        asker.probes.check()
    finally:
        os.kill(asker.probes.spawner_pid, signal.SIGCONT)
    assert wait_until(lambda: asker.probes.poll(clock.monotonic()) or not asker.probes.hung(clock.monotonic()))
    assert asker.answer("a", "echo").error is None


def test_a_child_that_is_stopped_is_no_answer_and_the_next_question_goes_to_a_fresh_one(asker: Asker) -> None:
    pid = asker.answer("a", "echo").value[2]
    os.kill(pid, signal.SIGSTOP)
    request = asker.ask("a", "echo", deadline_s=0.1)
    assert request is not None
    asker.probes.settle(5, [request])
    assert (asker.answers[-1].timed_out, asker.answers[-1].error) == (False, STOPPED)
    assert asker.probes.hung(clock.monotonic()) == ()
    assert asker.answer("a", "echo").value[2] != pid
    assert wait_until(lambda: not alive(pid)), "SIGKILL ends who is stopped"


def test_a_child_that_is_stopped_while_it_hangs_is_replaced_too(asker: Asker) -> None:
    asker.hang("a")
    pid = next(worker.pid for worker in asker.probes._workers.values())
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: asker.probes.poll(clock.monotonic() + 5) or asker.probes.is_free("a"))
    assert not asker.probes.is_stuck("a")
    assert wait_until(lambda: not alive(pid))


def test_a_child_that_computes_beyond_its_deadline_is_no_answer(asker: Asker) -> None:
    asker.answer("a", "echo")
    request = asker.ask("a", "spin", deadline_s=0.3)
    assert request is not None
    asker.probes.settle(5, [request])
    assert (asker.answers[-1].timed_out, asker.answers[-1].error) == (False, STARVED)


def test_a_child_that_sleeps_in_no_call_about_files_hangs_and_convicts_nothing(asker: Asker) -> None:
    asker.hang("a")
    for later in (2.0, 4.0, 6.0):
        asker.probes.poll(clock.monotonic() + later)
    assert asker.probes.hung_since("a", clock.monotonic()) is not None
    assert not asker.probes.is_stuck("a")


WRITING = "1 0x1 0x7f 0x10 0x0 0x0 0x0 0x7ffd 0x7f11"
FAULT = "-1 0x7ffd 0x7f11"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (Look(0.0, "D", 5, WRITING), Look(1.0, "D", 5, WRITING), True),
        (Look(0.0, "S", 5, WRITING), Look(1.0, "S", 6, WRITING), True),
        (Look(0.0, "D", 5, WRITING), Look(0.5, "D", 5, WRITING), False),
        (Look(0.0, "T", 5, WRITING), Look(1.0, "S", 5, WRITING), False),
        (Look(0.0, "S", 5, WRITING), Look(1.0, "T", 5, WRITING), False),
        (Look(0.0, "D", 5, WRITING), Look(1.0, "D", 90, WRITING), False),
        (Look(0.0, "D", 5, WRITING), Look(1.0, "D", 5, WRITING.replace("0x10", "0x20")), False),
        (Look(0.0, "D", 5, FAULT), Look(1.0, "D", 5, FAULT), False),
        (Look(0.0, "D", 5, ""), Look(1.0, "D", 5, ""), False),
        (Look(0.0, "S", 5, "running"), Look(1.0, "S", 5, "running"), False),
        (Look(0.0, "", 0, ""), Look(1.0, "", 0, ""), False),
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64's calls")
def test_a_look_only_a_call_about_files_that_does_not_return_convicts(
    first: Look, second: Look, expected: bool
) -> None:
    assert hangs_in_call(first, second) is expected


@pytest.mark.skipif(os.getuid() != 0, reason="children become users")
def test_a_user_whose_every_resource_hangs_leaves_all_others_working() -> None:
    asker = Asker(48)
    try:
        for _ in range(3):
            for uid in (64001, 64002, 64003):
                for key, user in everything_of(uid):
                    asker.ask(key, "hang", 600.0, deadline_s=0.05, uid=user)
            time.sleep(0.3)
            asker.probes.poll(clock.monotonic() + 1)
        hung = Counter(worker.uid for worker in asker.probes._workers.values() if worker.hung)
        assert set(hung) == {64001, 64002, 64003}
        assert max(hung.values()) <= MAX_HUNG_OF_USER
        for key in (
            "identify",
            "identify:in D",
            "look",
            "nvml",
            "stacks",
            "evidence:processes",
            "end_process",
        ):
            assert asker.answer(key, "echo").error is None
        for number in range(5):
            assert asker.answer(f"files:/m{number}:64004", "echo", uid=64004).value[3] == 64004
        assert any("uid 64001" in problem for problem in asker.probes.problems())
        assert not any("uid 64004" in problem for problem in asker.probes.problems())
    finally:
        asker.probes.close()


@pytest.mark.skipif(os.getuid() != 0, reason="children become users")
def test_a_pool_full_of_hanging_users_keeps_places_for_what_is_everybodys() -> None:
    asker = Asker(16)
    try:
        for uid in range(64001, 64009):
            for key, user in everything_of(uid)[:6]:
                asker.ask(key, "hang", 600.0, deadline_s=0.05, uid=user)
        time.sleep(0.3)
        asker.probes.poll(clock.monotonic() + 1)
        for key in ("identify", "look", "nvml", "stacks"):
            assert asker.answer(key, "echo").error is None
    finally:
        asker.probes.close()


@pytest.mark.parametrize("function", ["echo", "hang"])
def test_a_child_that_is_killed_idle_or_hung_is_replaced(asker: Asker, function: str) -> None:
    pid = asker.answer("a", "echo").value[2]
    if function == "hang":
        asker.hang("a")
    os.kill(pid, signal.SIGKILL)
    assert wait_readable(asker.probes.filenos(), 5)
    asker.probes.poll(clock.monotonic())
    assert asker.probes.names() == []
    assert asker.answer("a", "echo").value[2] != pid


def test_after_a_pause_of_its_own_the_agent_accuses_no_child(asker: Asker) -> None:
    asker.answer("a", "echo")
    asker.answers.clear()
    now = clock.monotonic()
    asker.probes.ask("a", plain_request("hang", 0.3), 10.0, now, asker.answers.append)
    asker.probes.poll(now + 5)
    asker.probes.poll(now + 65)
    assert asker.probes.hung(now + 65) == ()
    time.sleep(0.4)
    asker.probes.poll(now + 66)
    assert [answer.timed_out for answer in asker.answers] == [False]
    asker.probes.ask("a", plain_request("hang", 60), 10.0, now + 70, asker.answers.append)
    time.sleep(0.4)
    asker.probes.poll(now + 130)
    asker.probes.poll(now + 135)
    assert [answer.timed_out for answer in asker.answers] == [False, True]


def test_a_child_whose_answer_nobody_waits_for_goes_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(frame([1, "echo", plain_request("echo", "x")]))
    parent, child = os.getpid(), os.fork()
    if child == 0:
        ours.close()
        logging.getLogger().handlers.clear()  # pytest's: what is logged goes to standard error now
        child_main(lambda: _work_for_ever(theirs.detach(), "a", -1, {"echo": FUNCTIONS["echo"]}, parent))
    theirs.close()
    ours.recv(1, socket.MSG_PEEK)  # its answer is there
    ours.close()
    os.waitpid(child, 0)
    assert capfd.readouterr().err == ""
