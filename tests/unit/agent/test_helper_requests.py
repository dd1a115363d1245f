"""What a helper does and what it refuses: every task with what it may be asked, and with what it must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.agent.context import OWN_TASKS
from slurm_watchdog.agent.helper.requests import (
    TASKS,
    Dispatch,
    RefusedError,
    Task,
)
from slurm_watchdog.agent.workers.become_user import MIN_UID, become, read_overflow_uids
from slurm_watchdog.agent.workers.request_types import ListMounts, WorkerState, answer_type
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from slurm_watchdog.model.observations import Process, Role
from tests.builders.requests import check_request

USER = 4242
SWITCH = {
    "path": f"{KILL_SWITCH_BASE}/7.0/kill", "node": "n1", "by": "slurm-watchdog", "why": "a hang", "incident": "i", "decision": "d",
}  # fmt: skip
ENDING = {
    "pid": 7, "start_ticks": 9, "uid": USER, "comm": "python", "boot_id": "b", "job_id": "1", "minors": [0], "how": "term",
}  # fmt: skip
RANK = Process(pid=7, start_ticks=9, job_id="1", role=Role.RANK, comm="python", state="D", uid=USER)

ALLOWED: dict[str, tuple[Any, int]] = {
    "identify": ({"processes": [[7, 9], [8, None]]}, -1),
    "resolve_calls": ({"calls": [{"pid": 7, "thread": 7, "syscall": "read", "args": [3, 2**64 - 1]}]}, -1),
    "list_mounts": ({}, -1),
    "list_open_logs": ({"processes": [["1", 7, True]]}, -1),
    "list_open_mounts": ({"processes": [["1", 7, True]]}, -1),
    "read_shared_memory": ({"pids": [7]}, -1),
    "read_threads": ({"files": [["io", 7, 7], ["call", 7, 8], ["devices", 7, 7]]}, -1),
    "read_process_states": ({"processes": [[7, 9]], "silent_mounts": ["/shared"]}, -1),
    "dump_stacks": ({"node": "n1", "budget_s": 50.0, "processes": [msgspec.to_builtins(RANK)]}, -1),
    "end_process": (ENDING, -1),
    "last_kernel_lines": ({}, -1),
    "follow": (
        {"files": [["1", "/home/u/a.out", None], ["1", "/b", 5]], "globs": [["1", "/home/u/*.out"]], "own": {"1": ["x"]}, "taken": None},
        USER,
    ),
    "last_lines": ({"files": [["1", "/home/u/a.out"]]}, USER),
    "find_files": (
        {"files": [["~/.cache/x0", 0, 5.0]], "uid": USER, "max_bytes": 100, "places": [["/home/u", "core.*"]], "max_age_s": 9.5,
         "error_files": [["/tmp/e/0/error.json", 0]]},
        USER,
    ),
    "find_listeners": ({"processes": [[7, 9]], "port": 28028}, -1),
    "scan_checkpoints": (
        {
            "mount": "/home", "others": [], "budget_s": 2.0, "places": [
                ["directory", "1", "/home/u/c", None], ["directory", "1", "/home/u/d", {"size": ["/home/u/d", 7, None]}],
                ["tracker", "1", "/home/u/latest", None], ["clock", "1", "/home/u/clock", None],
            ],
        },
        USER,
    ),
    "probe_mount": ({"directory": "/home/u", "mount": "/home", "write": True, "node": "n1"}, USER),
    "write_kill_switch": (SWITCH, USER),
    "remove_kill_switch": (SWITCH, USER),
}  # fmt: skip


@pytest.mark.parametrize("task", OWN_TASKS.values(), ids=OWN_TASKS)
def test_the_function_of_a_task_takes_its_request_and_returns_its_answer(task: Task) -> None:
    hints = get_type_hints(task.do)
    assert issubclass(task.request, hints["request"])
    assert hints["return"] == answer_type(task.request)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_is_done_as_one_kind_of_user_and_takes_nothing_else(name: str) -> None:
    args, uid = ALLOWED[name]
    check_request(name, args, uid)
    with pytest.raises(RefusedError, match="is done as"):
        check_request(name, args, USER if uid < 0 else -1)
    for other in (None, "x", 7, {"path": 1}, [["x"]]):
        with pytest.raises(RefusedError):
            check_request(name, other, uid)
    if isinstance(args, dict):
        for field in args:
            with pytest.raises(RefusedError):
                check_request(name, args | {field: object()}, uid)
        with pytest.raises(RefusedError):
            check_request(name, args | {"shell": "rm -rf /"}, uid)


def test_what_the_agent_does_for_itself_besides_the_tasks_of_the_helper_takes_no_rights() -> None:
    own = {
        "parse_ras",
        "read_gpus",
        "read_links",
        "name_users",
        "read_node_settings",
        "probe_mount_point",
    }
    assert own == set(OWN_TASKS) - set(TASKS)
    assert not any(OWN_TASKS[name].as_owner for name in own)


REFUSED: tuple[tuple[str, Any, int, str], ...] = (
    ("eval", "1", -1, "nothing that can be asked"),
    ("follow", ALLOWED["follow"][0], 0, "is not an ordinary user"),
    ("write_kill_switch", SWITCH, 0, "is not an ordinary user"),
    ("write_kill_switch", SWITCH, 33, "is not an ordinary user"),
    ("write_kill_switch", SWITCH, 2**32 - 1, "is not an ordinary user"),
    ("last_kernel_lines", {"path": "/etc/shadow"}, -1, "unknown field"),
    ("end_process", ENDING | {"uid": 0}, -1, "not an ordinary user"),
    ("end_process", ENDING | {"how": "stop"}, -1, "Invalid enum value"),
    ("end_process", ENDING | {"pid": -1}, -1, ">= 1"),
    ("end_process", ENDING | {"minors": []}, -1, "length >= 1"),
    ("find_files", ALLOWED["find_files"][0] | {"uid": USER + 1}, USER, "are not looked for"),
    ("probe_mount", ALLOWED["probe_mount"][0] | {"node": "../x"}, USER, "matching regex"),
    ("dump_stacks", ALLOWED["dump_stacks"][0] | {"py_spy": "/tmp/evil"}, -1, "unknown field"),
    ("write_kill_switch", SWITCH | {"path": "run/kill"}, USER, "matching regex"),
    ("write_kill_switch", SWITCH | {"path": f"{KILL_SWITCH_BASE}/7.0/../8.0/kill"}, USER, "no detours"),
    ("write_kill_switch", SWITCH | {"path": f"{KILL_SWITCH_BASE}/7.0/.kill"}, USER, "hidden file"),
    ("write_kill_switch", SWITCH | {"path": "/home/u/a\0b"}, USER, "matching regex"),
    ("write_kill_switch", SWITCH | {"content": "#!/bin/sh\nid\n"}, USER, "unknown field"),
    ("write_kill_switch", SWITCH | {"by": ""}, USER, "length >= 1"),
    ("write_kill_switch", SWITCH | {"why": "y" * 70_000}, USER, "length <= 300"),
    ("write_kill_switch", SWITCH | {"node": "../x"}, USER, "matching regex"),
    ("identify", {"processes": [[0, None]]}, -1, ">= 1"),
    ("identify", {"processes": [[1, None]] * 1000}, -1, "length <= 512"),
    ("read_threads", {"files": [["environ", 1, 1]]}, -1, "Invalid enum value"),
)  # fmt: skip


@pytest.mark.parametrize(("function", "args", "uid", "why"), REFUSED)
def test_what_is_refused_says_why(function: str, args: Any, uid: int, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        check_request(function, args, uid)


def test_of_a_user_without_a_process_here_only_our_own_switch_is_removed() -> None:
    check_request("remove_kill_switch", SWITCH, USER, is_here=False)
    for name in ("write_kill_switch", "follow", "find_files", "probe_mount"):
        with pytest.raises(RefusedError, match="has no process on this node"):
            check_request(name, ALLOWED[name][0], USER, is_here=False)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(function=st.sampled_from(sorted(TASKS)) | st.text(max_size=12), args=ANYTHING, uid=st.integers(-1, 2**33))
def test_whatever_comes_is_done_or_refused_and_nothing_else(function: str, args: Any, uid: int) -> None:
    try:
        check_request(function, args, uid)
    except RefusedError as error:
        assert str(error)


def test_a_refusal_is_told_and_the_function_is_not_called() -> None:
    told: list[str] = []
    called: list[Any] = []
    noted = replace(TASKS["list_mounts"], do=lambda args, state: called.append(args))
    functions = Dispatch({"list_mounts": noted}, True, told.append)
    functions.get("list_mounts")({}, WorkerState())
    for name, args in (("list_mounts", [1]), ("secret", "x"), ("eval", "1")):
        with pytest.raises(OSError, match="the helper refuses"):
            functions.get(name)(args, WorkerState())
    assert called == [ListMounts()]
    assert len(told) == 3


NO_USERS = sorted({0, 1, 33, MIN_UID - 1, 65534, 65535, 2**32 - 1, *read_overflow_uids()})
"""Root, the system's, nobody under every name that the kernel has for him, and no number at all."""


@pytest.mark.parametrize("uid", NO_USERS)
@pytest.mark.parametrize("name", sorted(name for name, task in TASKS.items() if task.as_owner))
def test_no_task_is_done_as_root_a_system_account_or_nobody(name: str, uid: int) -> None:
    args, _ = ALLOWED[name]
    if isinstance(args, dict) and "uid" in args:
        args = args | {"uid": uid}
    with pytest.raises(RefusedError, match="is not an ordinary user"):
        check_request(name, args, uid)


@pytest.mark.parametrize("uid", NO_USERS)
@pytest.mark.parametrize(
    "name", sorted(n for n, task in TASKS.items() if not task.as_owner and "uid" in task.request.__struct_fields__)
)  # fmt: skip
def test_no_task_names_root_a_system_account_or_nobody_as_the_one_it_is_about(name: str, uid: int) -> None:
    args, _ = ALLOWED[name]
    with pytest.raises(RefusedError, match="is not an ordinary user"):
        check_request(name, args | {"uid": uid}, -1)


@pytest.mark.parametrize("uid", NO_USERS)
def test_no_child_becomes_root_a_system_account_or_nobody(uid: int) -> None:
    assert "is not an ordinary user" in (become(uid) or "")


def test_a_child_that_refuses_for_want_of_the_users_processes_ends_with_its_answer() -> None:
    # A job's prolog may take minutes: the child that was started for its log before that is not the one to
    # say no for ever.
    worker = WorkerState(uid=USER)
    absent = Dispatch(TASKS, False, lambda reason: None)
    with pytest.raises(OSError, match="has no process on this node"):
        absent.get("last_lines")({"files": []}, worker)
    assert worker.ends
    worker = WorkerState(uid=USER)
    present = Dispatch(TASKS, True, lambda reason: None)
    with pytest.raises(OSError, match="nothing that can be asked"):
        present.get("anything")({}, worker)
    assert not worker.ends
