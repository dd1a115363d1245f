"""Nothing looks into a process that is not one ordinary user's, through and through: every task of a child,
on real processes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from slurm_watchdog.agent.children.answers import Listeners, OpenFiles, SeenThreads
from slurm_watchdog.agent.children.become_user import MIN_UID, Kind, read_refusal, refusal_to_look
from slurm_watchdog.agent.children.requests import WorkerState
from slurm_watchdog.agent.proc.entry import parse_status
from slurm_watchdog.agent.proc.files import read_file, read_stat
from slurm_watchdog.model.evidence import ProcessState
from slurm_watchdog.model.observations import Process, Role
from tests.builders.requests import BY_NAME, do

USER, OTHER = 64983, 64984
SECRET = "the-secret-of-this-process"
PROGRAM = """
import os, sys, time
real, effective, saved = (int(word) for word in sys.argv[1:4])
os.setgroups([]); os.setresuid(real, effective, saved)
sys.stdout.write("x"); sys.stdout.flush()
os.environ["RANK"] = "0"
time.sleep(600)
"""
ROWS = [
    (0, 0, 0), (USER, 0, 0), (USER, USER, 0), (USER, OTHER, OTHER), (USER, OTHER, USER), (MIN_UID - 1,) * 3, (65534,) * 3,
]  # fmt: skip
"""Users (real, effective, saved) of root's, of set-user-id programs of root's and of another user's, of the
system's, of nobody's."""


@pytest.mark.parametrize(("uids", "shown", "own"), [*itertools.product(ROWS, (0, USER), (OTHER, USER))])
def test_only_one_ordinary_user_through_and_through_is_looked_into(uids: tuple[int, ...], shown: int, own: int) -> None:
    whole = (*uids, uids[1])
    assert refusal_to_look(whole, shown, own) is not None
    assert (refusal_to_look((USER,) * 4, USER, own) is None) is (own == USER), "his own child alone"
    assert refusal_to_look((USER,) * 4, 0, own) is not None, "it may not be dumped: it is more than its user's"
    assert refusal_to_look((0,) * 4, 0, 0) is None, "an agent of root's own, of `run`"
    assert refusal_to_look((), USER, own) is not None


def test_the_users_are_found_in_the_status_of_a_process() -> None:
    assert parse_status(b"Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t5\t5\t5\n").uids == (1, 2, 3, 4)
    assert parse_status(b"Name:\tUid:\n").uids == ()


@pytest.fixture(params=ROWS, ids=str)
def stranger(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process of these users that looks like a rank, and holds a secret in its environment and a log."""
    if os.geteuid() != 0:
        pytest.skip("needs root: processes of several users")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, request.param)], stdout=subprocess.PIPE, cwd="/",
        env={"SLURM_JOB_ID": "7", "RANK": "0", "NCCL_DEBUG": SECRET, "SECRET": SECRET},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1) == b"x"
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]


@pytest.mark.parametrize(
    ("command", "is_his"),
    [
        ([*AS_USER, "sleep", "60"], True),
        ([*AS_USER, "unshare", "-U", "-r", "sleep", "60"], True),  # a rank in a container without root
        # What has changed its user, and runs no new program since, may hold secrets of the one before.
        ([sys.executable, "-c", f"import os, time; os.setresuid({USER}, {USER}, {USER}); time.sleep(60)"], False),
    ],
)
def test_what_may_not_be_dumped_is_not_looked_into_and_what_runs_in_a_user_namespace_is(
    command: list[str], is_his: bool
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: processes of several users")
    with subprocess.Popen(command) as process:
        try:
            end = time.monotonic() + 10.0
            while set(parse_status(read_file(f"/proc/{process.pid}/status")).uids) != {USER}:
                assert time.monotonic() < end
                time.sleep(0.02)
            time.sleep(0.3)  # it becomes the next program
            assert (read_refusal(process.pid, USER) is None) is is_his
        finally:
            process.kill()


def asked(pid: int) -> dict[str, tuple[Any, Any]]:
    """For each task that takes a process, its arguments, and what an answer that tells nothing looks like."""
    row = Process(
        pid=pid,
        start_ticks=read_stat(pid).start_ticks,
        job_id="7",
        role=Role.RANK,
        comm="python",
        state="S",
        uid=USER,
    )
    return {
        "identify": ({"pids": [pid]}, None),
        "resolve_calls": (
            {"calls": [{"pid": pid, "thread": pid, "syscall": "write", "args": [1, 0, 0, 0, 0, 0]}]}, None
        ),
        "list_open_files": ({"processes": [["7", pid, "rank", True]]}, {"7": OpenFiles()}),
        "read_shared_memory": ({"pids": [pid]}, [None]),
        "read_threads": ({"files": [[what, pid, pid] for what in ("io", "call", "devices")]}, SeenThreads(3, [])),
        "read_process_states": ({"processes": [[pid, row.start_ticks]]}, None),
        "dump_stacks": ({"node": "n1", "budget_s": 5.0, "processes": [msgspec.to_builtins(row)]}, None),
        "find_listeners": ({"processes": [[pid, row.start_ticks]], "port": 28028}, Listeners()),
        "end_process": (
            {"pid": pid, "start_ticks": row.start_ticks, "uid": USER, "comm": "python3", "job_id": "7", "minors": [0], "how": "kill",
             "boot_id": open("/proc/sys/kernel/random/boot_id").read().strip()}, None,
        ),
    }  # fmt: skip


def test_every_task_about_processes_is_tried_here() -> None:
    """A new task that is given a process belongs into `asked`."""
    assert set(asked(os.getpid())) == {name for name, task in BY_NAME.items() if task.kind is Kind.PROCESSES}


@pytest.mark.parametrize("name", sorted(asked(os.getpid())))
def test_nothing_is_learnt_of_and_nothing_done_to_root_the_system_and_set_user_id_programs(
    stranger: int, name: str
) -> None:
    args, nothing = asked(stranger)[name]
    answer = do(name, args, WorkerState(USER))
    text = json.dumps(msgspec.to_builtins(answer))
    assert SECRET not in text and "SLURM_JOB_ID" not in text and "/dev/null" not in text
    if nothing is not None:
        assert answer == nothing
    if name == "identify":
        assert answer[0].foreign and answer[0].environ == {} and answer[0].exe == ""
    elif name == "read_process_states":
        assert answer[0].error and answer[0] == ProcessState(pid=stranger, error=answer[0].error)
    elif name == "dump_stacks":
        (stack,) = answer
        assert (not stack.threads and f"not uid {USER}'s" in stack.error) or "set-user-id" in stack.error
        assert not any((stack.wchan, stack.syscall, stack.io_bytes, stack.resident_bytes))
    elif name == "resolve_calls":
        assert answer[0].target.path is None
    assert read_stat(stranger).state != "Z", "it lives on"
