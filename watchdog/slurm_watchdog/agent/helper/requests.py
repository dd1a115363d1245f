"""Requests that a worker with rights serves: a closed table, checked in that worker, whatever the agent sends.

Two kinds. What is done with the helper's own rights reads other users' processes and the kernel's log: it gets numbers
of processes, and no path. It signals a process in one case alone, and finds out for itself whether it is that: one on a
GPU whose job is over. What touches files is done as the files' owner, who is an ordinary user with processes on this
node, and never root: whatever path it gets, it can do no more than that user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from slurm_watchdog.agent.checkpoints import scan
from slurm_watchdog.agent.evidence import found_files, last_lines, nccl_ras, process_state, stacks
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.logs import follow
from slurm_watchdog.agent.processes import identify, open_mounts, terminate, thread_calls
from slurm_watchdog.agent.workers.become_user import refusal_as
from slurm_watchdog.agent.workers.child import Function
from slurm_watchdog.agent.workers.request_types import (
    DumpProcessStacks,
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
    ProbeDirectory,
    ReadProcessStates,
    ReadSharedMemory,
    ReadThreads,
    RemoveSwitch,
    Request,
    ResolveCalls,
    ScanCheckpoints,
    SignalProcess,
    WorkerState,
    WriteSwitch,
)
from slurm_watchdog.model.kill_switch import problem_of_path

MAX_REQUEST = 2 << 20  # Bytes. The longest is a look at checkpoints, which carries back what the last one saw.


class RefusedError(Exception):
    """Why a request is not carried out, in one sentence."""


@dataclass(frozen=True)
class Task:
    """One request that workers serve: its type, the function that does it, and what else must hold."""

    request: type[Request[Any]]
    do: Function  # Given a `request` and the worker's state; returns the answer that the request's type names.
    as_owner: bool = False  # Done as the user whose files they are; otherwise with the helper's own rights.
    of_anybody: bool = False  # Also for a user who has no process here any more.


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
    Task(SignalProcess, terminate.end_process),
    Task(LastKernelLines, last_lines.last_kernel_lines),
    Task(Follow, follow.follow, as_owner=True),
    Task(LastLines, last_lines.last_lines, as_owner=True),
    Task(FindFiles, found_files.find_files, as_owner=True),
    Task(ScanCheckpoints, scan.scan_checkpoints, as_owner=True),
    Task(ProbeDirectory, as_owner.probe_mount, as_owner=True),
    Task(WriteSwitch, as_owner.write_kill_switch, as_owner=True),
    Task(RemoveSwitch, as_owner.remove_kill_switch, as_owner=True, of_anybody=True),
)
"""Everything that the helper does: a request that is not here reaches no function. What the agent does for
itself (NVML, its own state, names of users) is in slurm_watchdog.agent.context."""


def check_user(uid: int) -> None:
    """Raises RefusedError for root, the system's users, and what is no user."""
    if (refusal := refusal_as(uid)) is not None:
        raise RefusedError(refusal)


Report = Callable[[str], None]


@dataclass(frozen=True)
class Dispatch:
    """What one worker does: each request is checked against `tasks`, and handed to the function that stands there."""

    tasks: Mapping[str, Task]
    is_here: bool  # Whether the worker's user had a process on this node, within the hour, when it was started.
    report: Report  # Hears of each refusal.
    prefixes: tuple[str, ...] = ()  # Directories of root's choice for kill switches, besides KILL_SWITCH_BASE.
    own: int | None = None  # The one user, an agent's own, that the worker stays.

    def check(self, name: str, args: Any, uid: int) -> Any:
        """The request as a value of its type, if it may be done as `uid` (-1: as the helper itself). Raises
        RefusedError with the reason."""
        task = self.tasks.get(str(name))
        if task is None:
            raise RefusedError(f"{str(name)[:60]!r} is nothing that can be asked here")
        stays = self.own is not None and uid == -1
        if not stays and task.as_owner != (uid >= 0):
            raise RefusedError(f"{name} is done as {'the owner of the files' if task.as_owner else 'no one else'}")
        if task.as_owner and not stays:
            check_user(uid)
            if not self.is_here and not task.of_anybody:
                raise RefusedError(f"uid {uid} has no process on this node")
        try:
            value = msgspec.convert(args, task.request)
        except msgspec.ValidationError as error:
            raise RefusedError(f"{name}: {error}") from error
        about = getattr(value, "uid", None)  # the user that the request names
        if about is not None:
            wanted = self.own if stays else uid
            if task.as_owner and about != wanted:
                raise RefusedError(f"files of uid {about} are not looked for as uid {wanted}")
            check_user(about)
        if isinstance(value, KillSwitch) and (problem := problem_of_path(value.path, self.prefixes)) is not None:
            raise RefusedError(problem)
        return value

    def get(self, name: str) -> Function:
        """Checks and does one request; also for a name that is not in the table: that is refused like all else."""

        def checked(args: Any, worker: WorkerState) -> Any:
            worker.own_uid = self.own
            try:
                request = self.check(name, args, worker.uid)
            except RefusedError as error:
                self.report(str(error))
                # The user may have a process by the next request, for which a fresh child is started: this one
                # knows what was true at its start.
                worker.ends = not self.is_here
                raise OSError(0, f"the helper refuses: {error}") from error
            return self.tasks[name].do(request, worker)

        return checked
