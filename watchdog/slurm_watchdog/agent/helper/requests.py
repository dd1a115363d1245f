"""Requests that a worker with rights serves: a closed table, checked in that worker, whatever the agent sends.

Two kinds. What is done with the helper's own rights reads other users' processes and the kernel's log, and
makes the directory of a kill switch: it gets numbers of processes, and no path but those two. It signals a
process in one case alone, and finds out for itself whether it is that: one on a GPU whose job is over. What
touches files is done as the files' owner, who is an ordinary user with processes on this node, and never root:
whatever path it gets, it can do no more than that user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from slurm_watchdog.agent.checkpoints import scan
from slurm_watchdog.agent.evidence import found_files, last_lines, nccl_ras, process_state, stacks
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.files.safe_open import open_log
from slurm_watchdog.agent.logs import follow
from slurm_watchdog.agent.processes import identify, open_mounts, terminate, thread_calls
from slurm_watchdog.agent.workers.answer_types import SupervisorFile
from slurm_watchdog.agent.workers.become_user import refusal_as
from slurm_watchdog.agent.workers.child import Function
from slurm_watchdog.agent.workers.request_types import (
    DumpProcessStacks,
    EmptyDirectory,
    FindFiles,
    FindListeners,
    Follow,
    IdentifyProcesses,
    KillSwitch,
    LastKernelLines,
    LastLines,
    ListMounts,
    ListOpenLogs,
    ListOpenMounts,
    PrepareDirectory,
    ProbeDirectory,
    ReadProcessStates,
    ReadSharedMemory,
    ReadSupervisor,
    ReadThreads,
    RemoveDirectory,
    RemoveSwitch,
    Request,
    ResolveCalls,
    ScanCheckpoints,
    SignalProcess,
    SwitchDirectory,
    WorkerState,
    WriteSwitch,
)
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import closing
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE, RUN_NAME, is_absolute_path, problem_of_path
from slurm_watchdog.model.supervisor import MAX_STATUS_BYTES, STATUS_FILE, parse_status


def read_supervisor(request: ReadSupervisor, worker: WorkerState) -> SupervisorFile | None:
    """The status in the directory of a run; None: there is none. Raises OSError, also for one that cannot be used."""
    try:
        fd = open_log(f"{request.base}/{request.name}/{STATUS_FILE}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    with closing(fd):
        data = os.read(fd, MAX_STATUS_BYTES + 1)
        age_s = max(0.0, clock.wall() - os.fstat(fd).st_mtime)
    try:
        return SupervisorFile(status=parse_status(data), age_s=age_s)
    except ValueError as problem:
        raise OSError(0, str(problem)) from None


KERNEL_LOG = "/dev/kmsg"
MAX_REQUEST = 2 << 20  # Bytes. The longest is a look at checkpoints, which carries back what the last one saw.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class RefusedError(Exception):
    """Why a request is not carried out, in one sentence."""


@dataclass(frozen=True)
class Task:
    """One request that workers serve: its type, the function that does it, and what else must hold."""

    request: type[Request[Any]]
    do: Function  # Given a `request` and the worker's state; returns the answer that the request's type names.
    as_owner: bool = False  # Done as the user whose files they are; otherwise with the helper's own rights.
    check: Callable[[Any, int], None] = lambda args, uid: None  # Given the arguments and the user; raises RefusedError.
    paths: Callable[[Any], Iterable[str]] = lambda args: ()  # Of the arguments; each has to be absolute.
    about_user: bool = False  # Its `uid` has to be an ordinary user.
    of_anybody: bool = False  # Also for a user who has no process here any more.
    is_switch: bool = False  # Its `path` has to be one where a kill switch may lie.


def _check_paths(paths: Iterable[str]) -> None:
    for path in paths:
        if not is_absolute_path(path):
            raise RefusedError(f"{path[:100]!r} is not an absolute path")


def _check_kernel_log(args: LastKernelLines, uid: int) -> None:
    if args.path != KERNEL_LOG:
        raise RefusedError(f"the kernel's log is {KERNEL_LOG}, not {args.path[:100]!r}")


def _check_directory(args: SwitchDirectory | ReadSupervisor, uid: int) -> None:
    if args.base != KILL_SWITCH_BASE or not RUN_NAME.fullmatch(args.name):
        raise RefusedError(f"directories are made below {KILL_SWITCH_BASE} and called JOB.RUN, not {args.name[:60]!r}")


def _check_find(args: FindFiles, uid: int) -> None:
    if args.uid != uid:
        raise RefusedError(f"files of uid {args.uid} are not looked for as uid {uid}")


def _check_node(args: ProbeDirectory | KillSwitch, uid: int) -> None:
    if not _NODE.fullmatch(args.node):
        raise RefusedError(f"{args.node[:60]!r} is not a node's name")


def _check_switch(args: KillSwitch, uid: int) -> None:
    _check_node(args, uid)
    if not args.by:
        raise RefusedError("a kill switch says who wrote it")


def tasks_by_name(*tasks: Task) -> Mapping[str, Task]:
    """A table of tasks."""
    return {task.request.task: task for task in tasks}


TASKS = tasks_by_name(
    Task(IdentifyProcesses, identify.identify),
    Task(ResolveCalls, identify.resolve_calls),
    Task(ListMounts, identify.list_mounts),
    Task(ListOpenLogs, identify.list_open_logs),
    Task(ListOpenMounts, open_mounts.list_open_mounts),
    Task(ReadSharedMemory, open_mounts.read_shared_memory),
    Task(ReadThreads, thread_calls.read_threads),
    Task(ReadProcessStates, process_state.read_process_states),
    Task(DumpProcessStacks, stacks.dump_stacks),
    Task(FindListeners, nccl_ras.find_listeners),
    Task(SignalProcess, terminate.end_process, about_user=True),
    Task(LastKernelLines, last_lines.last_kernel_lines, check=_check_kernel_log),
    Task(PrepareDirectory, as_owner.prepare_directory, check=_check_directory, about_user=True),
    Task(EmptyDirectory, as_owner.empty_directory, as_owner=True, check=_check_directory, of_anybody=True),
    Task(RemoveDirectory, as_owner.remove_directory, check=_check_directory),
    Task(Follow, follow.follow, as_owner=True, paths=lambda args: (each[1] for each in (*args.files, *args.globs))),
    Task(LastLines, last_lines.last_lines, as_owner=True, paths=lambda args: (path for _, path in args.files)),
    Task(
        FindFiles, found_files.find_files, as_owner=True, check=_check_find,
        paths=lambda args: (
            *(path.removeprefix("~") for path, _, _ in args.files), *(place for place, _ in args.places),
            *(path for path, _ in (*args.pipes, *args.error_files)),
        ),
    ),
    Task(
        ScanCheckpoints, scan.scan_checkpoints, as_owner=True,
        paths=lambda args: (
            args.mount, *args.others, *(each[1] for each in (*args.directories, *args.trackers, *args.clocks))
        ),
    ),
    Task(
        ProbeDirectory, as_owner.probe_mount, as_owner=True, check=_check_node,
        paths=lambda args: (args.directory, args.mount),
    ),
    Task(ReadSupervisor, read_supervisor, as_owner=True, check=_check_directory),
    Task(WriteSwitch, as_owner.write_kill_switch, as_owner=True, check=_check_switch, is_switch=True),
    Task(
        RemoveSwitch, as_owner.remove_kill_switch, as_owner=True, check=_check_switch, of_anybody=True,
        is_switch=True,
    ),
)  # fmt: skip
"""Everything that the helper does: a request that is not here reaches no function. What the agent does for
itself (NVML, its own state, names of users) is in slurm_watchdog.agent.context."""


def check_request(
    name: str, args: Any, uid: int, is_here: bool = True, prefixes: tuple[str, ...] = (), itself: bool = False,
    tasks: Mapping[str, Task] = TASKS,
) -> Any:  # fmt: skip
    """The request as a value of its type, if it may be done as `uid` (-1: as the helper itself).

    `is_here`: that user has, or had within the hour, a process on this node. `prefixes`: directories, allowed
    by root, below which kill switches may lie besides KILL_SWITCH_BASE. `itself`: -1 is the files' owner, too,
    for the agent runs as no one else. Raises RefusedError with the reason.
    """
    task = tasks.get(str(name))
    if task is None:
        raise RefusedError(f"{str(name)[:60]!r} is nothing that can be asked here")
    stays = itself and uid == -1
    if not stays and task.as_owner != (uid >= 0):
        who = "as the owner of the files" if task.as_owner else "as no one else"
        raise RefusedError(f"{name} is done {who}")
    if task.as_owner and not stays:
        check_user(uid)
        if not is_here and not task.of_anybody:
            raise RefusedError(f"uid {uid} has no process on this node")
    try:
        value = msgspec.convert(args, task.request)
    except msgspec.ValidationError as error:
        raise RefusedError(f"{name}: {error}") from error
    _check_paths(task.paths(value))
    task.check(value, uid)
    if task.about_user:
        check_user(value.uid)
    if task.is_switch and (problem := problem_of_path(value.path, prefixes)) is not None:
        raise RefusedError(problem)
    return value


def check_user(uid: int) -> None:
    """Raises RefusedError for root, the system's users, and what is no user."""
    if (refusal := refusal_as(uid)) is not None:
        raise RefusedError(refusal)


Report = Callable[[str], None]


@dataclass(frozen=True)
class Dispatch:
    """What one worker does: each request is checked against `tasks`, and handed to the function that stands there."""

    tasks: Mapping[str, Task]
    is_here: bool  # Whether the worker's user had a process on this node when it was started.
    report: Report  # Hears of each refusal.
    prefixes: tuple[str, ...] = ()
    own: int | None = None
    """The one user, an agent's own, whose files and processes need no other rights; then the worker stays that user."""

    def get(self, name: str) -> Function:
        """Checks and does one request; also for a name that is not in the table: that is refused like all else."""

        def checked(args: Any, worker: WorkerState) -> Any:
            worker.own_uid = self.own
            try:
                request = check_request(
                    name, args, worker.uid, self.is_here, self.prefixes, self.own is not None, self.tasks
                )
            except RefusedError as error:
                self.report(str(error))
                # The user may have a process by the next request, for which a fresh child is started: this one
                # knows what was true at its start.
                worker.ends = not self.is_here
                raise OSError(0, f"the helper refuses: {error}") from error
            return self.tasks[name].do(request, worker)

        return checked
