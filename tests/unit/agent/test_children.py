"""Disposable children: they answer, hang, die and become users, and the one who asks never waits for them."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_watchdog.agent.children.become_user import CAP_SYS_PTRACE, Kind, capabilities
from slurm_watchdog.agent.children.child import child_main, frame, serve
from slurm_watchdog.agent.children.children import MAX_HUNG_OF_MOUNT, MAX_HUNG_OF_USER, Answer, Children
from slurm_watchdog.agent.children.look import STARVED, STOPPED, Look, hangs_in_call
from slurm_watchdog.agent.children.requests import WorkerState
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from tests.builders.requests import plain, plain_request
from tests.builders.workers import TASKS, Asker, echo, everything_of


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker()
    yield asker
    asker.children.close()


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
    asker.children.poll(clock.monotonic())
    assert [(answer.request, answer.timed_out) for answer in asker.answers] == [(request, True)]
    (hung,) = asker.children.hung(clock.monotonic())
    assert hung.probe == "a"
    assert hung.seconds > 0.1
    assert asker.ask("a", "echo") is None
    assert asker.answer("b", "echo").error is None
    wait_readable(asker.children.filenos(), 3)
    asker.children.poll(clock.monotonic())
    assert asker.children.hung(clock.monotonic()) == ()
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
    assert len(asker.children.names()) == 3


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

    request = asker.children.ask("a", plain_request("echo", 1), 5, clock.monotonic(), then)
    assert request is not None
    asker.children.settle(5, [request])
    assert asker.answer("a", "echo").error is None


def test_all_children_end_with_their_agent() -> None:
    read_fd, write_fd = os.pipe()
    agent = os.fork()
    if agent == 0:
        try:
            asker = Asker()
            pids = [asker.answer(key, "echo").value[2] for key in "ab"]
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


def test_a_hung_child_goes_on_under_another_name_and_ends_when_it_is_back(asker: Asker) -> None:
    pid = asker.answer("identify", "echo").value[2]
    asker.hang("identify", 0.5)
    assert asker.children.set_aside("identify", "identify:17")
    assert asker.answer("identify", "echo").value[2] != pid
    (hung,) = asker.children.hung(clock.monotonic())
    assert hung.probe == "identify:17"
    assert asker.ask("identify:17", "echo") is None
    assert alive(pid)
    time.sleep(0.6)
    asker.children.poll(clock.monotonic())
    assert asker.children.hung(clock.monotonic()) == ()
    assert asker.children.names() == ["identify"]
    assert wait_until(lambda: not alive(pid))


def test_only_a_hung_child_is_set_aside_and_two_never_share_a_name(asker: Asker) -> None:
    assert not asker.children.set_aside("identify", "identify:1")
    asker.answer("identify", "echo")
    assert not asker.children.set_aside("identify", "identify:1")
    asker.hang("identify")
    assert asker.children.set_aside("identify", "identify:1")
    asker.hang("identify")
    assert not asker.children.set_aside("identify", "identify:1")
    assert sorted(asker.children.names()) == ["identify", "identify:1"]


def test_a_child_that_is_rarely_needed_ends_when_it_has_answered(asker: Asker) -> None:
    now = clock.monotonic()
    request = asker.children.ask("a", plain_request("echo", 1), 5, now, asker.answers.append, idle_s=0)
    assert request is not None
    asker.children.settle(5, [request])
    assert asker.answers[-1].error is None
    assert asker.children.names() == []
    assert wait_until(lambda: not alive(asker.answers[-1].value[2]))


def test_names_that_are_no_utf8_arrive_as_they_were(asker: Asker) -> None:
    name = os.fsdecode(b"/shared/caf\xe9.log")
    assert asker.answer("a", "echo", name).value[0] == name
    mount = os.fsdecode(b"files:/caf\xe9")  # and children are called after mount points
    assert asker.answer(mount, "echo", 1).error is None


def test_without_descriptors_nothing_is_asked_and_the_reason_is_a_problem(asker: Asker) -> None:
    asker.answer("a", "echo")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        assert asker.ask("b", "echo") is None
        assert asker.answer("a", "echo").error is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert asker.children.problems() == ("children: none can be started: EMFILE: Too many open files",)
    assert asker.answer("b", "echo").error is None
    assert asker.children.problems() == ()


@pytest.mark.skipif(os.getuid() != 0, reason="a limit of its own for another user's processes")
def test_where_no_process_can_be_forked_the_answer_says_so_and_the_agent_lives_on() -> None:
    read_fd, write_fd = os.pipe()
    agent = os.fork()
    if agent == 0:
        try:
            os.setresuid(64999, 64999, 64999)
            asker = Asker()
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 100))
            first = asker.ask("a", "echo")
            problem = asker.children.problems()
            resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))
            then = str(asker.answer("a", "echo").error)
            os.write(write_fd, repr((first, problem, then, asker.children.problems())).encode())
        finally:
            os._exit(1)
    os.close(write_fd)
    with open(read_fd) as pipe:
        first, problem, then, no_problem = eval(pipe.read())
    os.waitpid(agent, 0)
    assert first is None
    assert len(problem) == 1 and problem[0].startswith("children: none can be started: EAGAIN")
    assert (then, no_problem) == ("None", ())


def test_a_child_that_is_stopped_is_no_answer_and_the_next_question_goes_to_a_fresh_one(asker: Asker) -> None:
    pid = asker.answer("a", "echo").value[2]
    os.kill(pid, signal.SIGSTOP)
    request = asker.ask("a", "echo", deadline_s=0.1)
    assert request is not None
    asker.children.settle(5, [request])
    assert (asker.answers[-1].timed_out, asker.answers[-1].error) == (False, STOPPED)
    assert asker.children.hung(clock.monotonic()) == ()
    assert asker.answer("a", "echo").value[2] != pid
    assert wait_until(lambda: not alive(pid)), "SIGKILL ends who is stopped"


def test_a_child_that_is_stopped_while_it_hangs_is_replaced_too(asker: Asker) -> None:
    asker.hang("a")
    pid = next(child.pid for child in asker.children._children.values())
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: asker.children.poll(clock.monotonic() + 5) or asker.children.is_free("a"))
    assert not asker.children.is_stuck("a")
    assert wait_until(lambda: not alive(pid))


def test_a_child_that_computes_beyond_its_deadline_is_no_answer(asker: Asker) -> None:
    asker.answer("a", "echo")
    request = asker.ask("a", "spin", deadline_s=0.3)
    assert request is not None
    asker.children.settle(5, [request])
    assert (asker.answers[-1].timed_out, asker.answers[-1].error) == (False, STARVED)


def test_a_child_that_sleeps_in_no_call_about_files_hangs_and_convicts_nothing(asker: Asker) -> None:
    asker.hang("a")
    for later in (2.0, 4.0, 6.0):
        asker.children.poll(clock.monotonic() + later)
    assert asker.children.hung_since("a", clock.monotonic()) is not None
    assert not asker.children.is_stuck("a")


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
            asker.children.poll(clock.monotonic() + 1)
        hung = Counter((child.uid, child.kind) for child in asker.children._children.values() if child.hung)
        assert {uid for uid, _ in hung} == {64001, 64002, 64003}
        assert max(hung.values()) <= MAX_HUNG_OF_USER
        for key in ("look:own", "nvml", "links", "node:mounts"):
            assert asker.answer(key, "echo").error is None
        for number in range(5):
            assert asker.answer(f"files:/m{number}:64004", "echo", uid=64004).value[3] == 64004
        assert any("uid 64001" in problem for problem in asker.children.problems())
        assert not any("uid 64004" in problem for problem in asker.children.problems())
    finally:
        asker.children.close()


@pytest.mark.parametrize("function", ["echo", "hang"])
def test_a_child_that_is_killed_idle_or_hung_is_replaced(asker: Asker, function: str) -> None:
    pid = asker.answer("a", "echo").value[2]
    if function == "hang":
        asker.hang("a")
    os.kill(pid, signal.SIGKILL)
    assert wait_readable(asker.children.filenos(), 5)
    asker.children.poll(clock.monotonic())
    assert asker.children.names() == []
    assert asker.answer("a", "echo").value[2] != pid


def test_after_a_pause_of_its_own_the_agent_accuses_no_child(asker: Asker) -> None:
    asker.answer("a", "echo")
    asker.answers.clear()
    now = clock.monotonic()
    asker.children.ask("a", plain_request("hang", 0.3), 10.0, now, asker.answers.append)
    asker.children.poll(now + 5)
    asker.children.poll(now + 65)
    assert asker.children.hung(now + 65) == ()
    time.sleep(0.4)
    asker.children.poll(now + 66)
    assert [answer.timed_out for answer in asker.answers] == [False]
    asker.children.ask("a", plain_request("hang", 60), 10.0, now + 70, asker.answers.append)
    time.sleep(0.4)
    asker.children.poll(now + 130)
    asker.children.poll(now + 135)
    assert [answer.timed_out for answer in asker.answers] == [False, True]


@pytest.mark.skipif(os.getuid() != 0, reason="children become users")
def test_children_of_a_user_that_hang_on_files_leave_room_for_those_that_look_at_his_processes(asker: Asker) -> None:
    asker = Asker(48)
    try:
        for number in range(MAX_HUNG_OF_USER + 2):
            asker.ask(f"files:/m{number}:64001", "hang", 600.0, 0.05, 64001)
        time.sleep(0.3)
        asker.children.poll(clock.monotonic() + 1)
        assert len(asker.children.hung(clock.monotonic())) == MAX_HUNG_OF_USER
        for key in ("look:64001", "stacks:64001"):
            assert asker.answer(key, "echo", uid=64001).error is None
    finally:
        asker.children.close()


@pytest.mark.skipif(os.getuid() != 0, reason="children become users")
def test_what_a_child_leaves_behind_counts_as_hung_of_its_user_until_it_has_ended(asker: Asker) -> None:
    pid = asker.answer("stacks:64001", "leave", 600, uid=64001).value
    wait_readable(asker.children.filenos(), 5)
    asker.children.poll(clock.monotonic())
    assert [each.probe for each in asker.children.hung(clock.monotonic())] == [f"stacks:64001:{pid}"]
    assert asker.children.room(64001) == MAX_HUNG_OF_USER - 1 and asker.children.room(64002) == MAX_HUNG_OF_USER
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: asker.children.poll(clock.monotonic()) or not asker.children.hung(clock.monotonic()))


@pytest.mark.skipif(os.getuid() != 0, reason="children become users")
def test_it_is_reported_that_places_of_users_run_out(asker: Asker) -> None:
    asker = Asker(4)
    try:
        for uid in (64001, 64002, 64003):
            assert asker.ask(f"look:{uid}", "hang", 600.0, uid=uid) is not None
        assert asker.children.problems() == ()
        assert asker.ask("look:64004", "echo", uid=64004) is None
        assert asker.answer("nvml", "echo").error is None, "the places that are kept free"
        (problem,) = asker.children.problems()
        assert problem == "children: all 3 places for those of users are taken: some users' are not started"
    finally:
        asker.children.close()


def test_the_hung_of_one_mount_are_limited_and_the_others_go_on() -> None:
    asker = Asker(max_workers=MAX_HUNG_OF_MOUNT + 4)
    try:
        for number in range(MAX_HUNG_OF_MOUNT):
            asker.hang(f"files:/a:{number}")
        asker.children.poll(clock.monotonic())
        assert asker.children.problems() == ("children: 8 of files:/a hang: no more of them are started",)
        assert asker.ask("files:/a:99", "echo") is None
        assert asker.answer("files:/b:1", "echo").error is None
        assert asker.children.counts() == {"idle": 1, "busy": 0, "hung": 8}
    finally:
        asker.children.close()


def test_an_idle_child_ends_after_a_time_that_suits_its_kind(asker: Asker) -> None:
    for key in ("stacks:1", "nvml"):
        asker.answer(key, "echo")
    asker.children.poll(clock.monotonic() + 100)
    assert asker.children.names() == ["nvml"]
    asker.children.poll(clock.monotonic() + 700)
    assert asker.children.names() == []


def test_a_child_that_hangs_says_at_which_place_of_its_request(asker: Asker) -> None:
    assert asker.answer("a", "tell", [0, 0]).place == 1
    request = asker.ask("a", "tell", [0, 0.5, 0.1], deadline_s=0.2)
    assert request is not None
    asker.children.settle(5, [request])
    assert (asker.answers[-1].timed_out, asker.answers[-1].place) == (True, 1)


@pytest.mark.skipif(os.getuid() != 0, reason="children become users")
def test_no_child_is_started_as_a_user_who_is_not_here() -> None:
    children = Children(TASKS, is_here=lambda uid, now: uid == 64001)
    try:
        for uid, started in ((64001, True), (64002, False)):
            request = plain_request("echo_files", 1)
            asked = children.ask("files:/a", request, 5.0, clock.monotonic(), lambda answer: None, uid)
            assert (asked is not None) is started
    finally:
        children.close()


@pytest.mark.skipif(os.getuid() != 0, reason="children become users")
@pytest.mark.parametrize(("kind", "kept"), [(Kind.OWN, 0), (Kind.FILES, 0), (Kind.PROCESSES, 1 << CAP_SYS_PTRACE)])
def test_a_child_keeps_what_its_kind_needs_inherits_no_descriptor_and_serves_no_other_kind(
    kind: Kind, kept: int
) -> None:
    task = plain(rights, kind, f"rights_{kind.name}")
    children = Children((task, plain(rights, next(each for each in Kind if each is not kind), "other")), 3)
    answers: list[Answer] = []
    uid = -1 if kind is Kind.OWN else 64001
    try:
        for name in (f"rights_{kind.name}", "other"):
            request = children.ask("a", plain_request(name), 5.0, clock.monotonic(), answers.append, uid)
            assert request is not None
            children.settle(5.0, [request])
        held, open_files = answers[0].value
        assert (held, len(open_files)) == (kept, 1), "its own socket"
        assert "is not done in a child for" in str(answers[1].error)
    finally:
        children.close()


def rights(args: object, state: WorkerState) -> list[object]:
    open_files = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    return [capabilities(), open_files[:-1]]  # without that of the listing


def test_a_child_whose_answer_nobody_waits_for_goes_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(frame(1, 0, plain_request("echo", "x")))
    parent, child = os.getpid(), os.fork()
    if child == 0:
        ours.close()
        logging.getLogger().handlers.clear()  # pytest's: what is logged goes to standard error now
        child_main(lambda: serve(theirs.detach(), "a", Kind.OWN, (plain(echo),), WorkerState(), parent))
    theirs.close()
    ours.recv(1, socket.MSG_PEEK)  # its answer is there
    ours.close()
    os.waitpid(child, 0)
    assert capfd.readouterr().err == ""


def test_what_an_agent_before_has_left_in_this_process_is_waited_for() -> None:
    program = (
        "import os, sys, time\n"
        "from slurm_watchdog.agent.children.children import Children\n"
        "if len(sys.argv) < 2:\n"
        "    for _ in range(3):\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(0.3); os._exit(0)\n"
        "    os.execv(sys.executable, [sys.executable, '-c', os.environ['PROGRAM'], 'again'])\n"
        "children = Children(())\n"
        "children.adopt()\n"
        "left = len(children.pids())\n"
        "time.sleep(0.6); children.poll(0.0)\n"
        "print(left, len(children.pids()), open(f'/proc/self/task/{os.getpid()}/children').read().split())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PROGRAM": program},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "3 0 []\n"
