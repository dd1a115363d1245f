"""What may be asked of a child that has rights, and with which arguments: a closed list, checked there, not by the one who asks.

Two kinds. What is done with the helper's own rights looks into other users' processes, at the kernel's log, and makes the directory
of a kill switch: it gets numbers of processes, and no path but those two. It ends a process in one case alone, and finds out for
itself whether it is that: one on a GPU whose job is over. What touches files is done as the files' owner, who is
an ordinary user with processes on this node, and never root: whatever path it gets, it can do no more than that user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from slurm_watchdog.agent.processes.owner import OWN
from slurm_watchdog.agent.workers.become_user import refusal_as
from slurm_watchdog.agent.workers.child import OVER, Function
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE, MAX_FIELD, RUN_NAME, problem_of_path
from slurm_watchdog.model.observations import Process

KERNEL_LOG: Final = "/dev/kmsg"
MAX_REQUEST: Final = 2 << 20
"""Bytes. The longest is a look at checkpoints, which carries back what the last one saw."""
MAX_PATH: Final = 4096  # linux/limits.h
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class RefusedError(Exception):
    """Why a request is not carried out, in one sentence."""


Pid = Annotated[int, Meta(ge=1, le=2**22)]  # PID_MAX_LIMIT, linux/threads.h
Ticks = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=600.0)]
Word = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Path = Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]
Pattern = Annotated[str, Meta(max_length=2048)]
Field = Annotated[str, Meta(max_length=MAX_FIELD)]


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Call(_Strict):
    """One thread in a system call: which file is it about?"""

    pid: Pid
    thread: Pid
    syscall: Annotated[str, Meta(max_length=64)] | None
    args: Annotated[list[int], Meta(max_length=6)]


class Looks(_Strict):
    processes: Annotated[list[tuple[Pid, Ticks]], Meta(max_length=256)]
    silent_mounts: Annotated[list[Path], Meta(max_length=256)]


class Dump(_Strict):
    node: Name
    budget_s: Seconds
    processes: Annotated[list[Process], Meta(max_length=64)]


class KernelLog(_Strict):
    path: Path


class Directory(_Strict):
    base: Path
    name: Name
    uid: int = -1


class OwnDirectory(_Strict):
    base: Path
    name: Name


class Follow(_Strict):
    files: Annotated[list[tuple[Word, Path, int | None]], Meta(max_length=4096)]
    globs: Annotated[list[tuple[Word, Path]], Meta(max_length=4096)] = []
    own: Annotated[dict[Word, Annotated[list[Pattern], Meta(max_length=64)]], Meta(max_length=512)] = {}
    taken: Word | None = None


class LogEnds(_Strict):
    files: Annotated[list[tuple[Word, Path]], Meta(max_length=64)]


class Find(_Strict):
    files: Annotated[list[tuple[Path, int | None, float]], Meta(max_length=1024)]
    uid: int
    max_bytes: Annotated[int, Meta(ge=0, le=8 << 20)]
    places: Annotated[list[tuple[Path, Name]], Meta(max_length=256)]
    max_age_s: float
    pids: Annotated[list[Pid], Meta(max_length=256)]


class Core(_Strict):
    path: Path
    program: Path | None


class Checkpoints(_Strict):
    mount: Path
    others: Annotated[list[Path], Meta(max_length=4096)]
    budget_s: Seconds
    directories: Annotated[list[tuple[Word, Path, dict[str, Any] | None]], Meta(max_length=64)]
    trackers: Annotated[list[tuple[Word, Path]], Meta(max_length=64)]
    clocks: Annotated[list[tuple[Word, Path]], Meta(max_length=64)]


class MountLook(_Strict):
    directory: Path
    mount: Path
    write: bool
    node: Name


class Ending(_Strict):
    """One process that outlived its job on a GPU: see slurm_watchdog.agent.processes.terminate, which believes none of it."""

    pid: Pid
    start_ticks: Ticks
    uid: int
    comm: Annotated[str, Meta(max_length=64)]
    boot_id: Annotated[str, Meta(max_length=64)]
    job_id: Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]
    minors: Annotated[list[Annotated[int, Meta(ge=0, le=1023)]], Meta(min_length=1, max_length=1024)]
    how: Literal["look", "term", "kill"]


class Switch(_Strict):
    """A kill switch: its line is composed of these values by the child, and never handed to it."""

    path: Path
    node: Name
    by: Field
    why: Field
    incident: Field
    decision: Field


@dataclass(frozen=True)
class Task:
    """One thing that can be asked: the type of its arguments, what else must hold, and who does it."""

    type: Any
    as_owner: bool = False
    """Done as the user whose files they are; otherwise with the helper's own rights."""
    check: Callable[[Any, int], None] = lambda args, uid: None
    """Given the arguments and the user; raises RefusedError."""
    of_anybody: bool = False
    """Also for a user who has no process here any more."""
    is_switch: bool = False
    """Its `path` has to be one where a kill switch may lie."""


def _paths(*paths: str) -> None:
    for path in paths:
        if not path.startswith("/") or "\0" in path or len(path.encode(errors="replace")) >= MAX_PATH:
            raise RefusedError(f"{path[:100]!r} is no absolute path")


def _check_kernel_log(args: KernelLog, uid: int) -> None:
    if args.path != KERNEL_LOG:
        raise RefusedError(f"the kernel's log is {KERNEL_LOG}, not {args.path[:100]!r}")


def _check_directory(args: Directory | OwnDirectory, uid: int) -> None:
    if args.base != KILL_SWITCH_BASE or not RUN_NAME.fullmatch(args.name):
        raise RefusedError(
            f"directories are made below {KILL_SWITCH_BASE} and called JOB.RUN, not {args.name[:60]!r}"
        )


def _check_new_directory(args: Directory, uid: int) -> None:
    _check_directory(args, uid)
    check_user(args.uid)


def _check_follow(args: Follow, uid: int) -> None:
    _paths(*(path for _, path, _ in args.files), *(pattern for _, pattern in args.globs))


def _check_ends(args: LogEnds, uid: int) -> None:
    _paths(*(path for _, path in args.files))


def _check_find(args: Find, uid: int) -> None:
    _paths(*(path.removeprefix("~") for path, _, _ in args.files), *(place for place, _ in args.places))
    if args.uid != uid:
        raise RefusedError(f"files of uid {args.uid} are not looked for as uid {uid}")


def _check_core(args: Core, uid: int) -> None:
    _paths(args.path, *([args.program] if args.program is not None else []))


def _check_checkpoints(args: Checkpoints, uid: int) -> None:
    named = [*args.trackers, *args.clocks]
    _paths(args.mount, *args.others, *(each[1] for each in args.directories), *(path for _, path in named))


def _check_mount(args: MountLook, uid: int) -> None:
    _paths(args.directory, args.mount)
    _check_node(args.node)


def _check_node(node: str) -> None:
    if not _NODE.fullmatch(node):
        raise RefusedError(f"{node[:60]!r} is no name of a node")


def _check_switch(args: Switch, uid: int) -> None:
    _check_node(args.node)
    if not args.by:
        raise RefusedError("a kill switch says who wrote it")


def _check_ending(args: Ending, uid: int) -> None:
    check_user(args.uid)


def _list(each: Any, limit: int) -> Any:
    return Annotated[list[each], Meta(max_length=limit)]


TASKS: Final[Mapping[str, Task]] = {
    "identify": Task(_list(tuple[Pid, Ticks | None], 512)),
    "resolve": Task(_list(Call, 512)),
    "list_mounts": Task(_list(int, 0)),
    "list_open_logs": Task(_list(tuple[Word, Pid, bool], 256)),
    "list_open_mounts": Task(_list(tuple[Word, Pid, bool], 256)),
    "look_at_calls": Task(_list(tuple[Literal["io", "call", "devices"], Pid, Pid], 4096)),
    "look_at_processes": Task(Looks),
    "dump_stacks": Task(Dump),
    "end_process": Task(Ending, check=_check_ending),
    "last_kernel_lines": Task(KernelLog, check=_check_kernel_log),
    "prepare_directory": Task(Directory, check=_check_new_directory),
    "empty_directory": Task(OwnDirectory, as_owner=True, check=_check_directory, of_anybody=True),
    "remove_directory": Task(OwnDirectory, check=_check_directory),
    "follow": Task(Follow, as_owner=True, check=_check_follow),
    "last_lines": Task(LogEnds, as_owner=True, check=_check_ends),
    "find_files": Task(Find, as_owner=True, check=_check_find),
    "read_core": Task(Core, as_owner=True, check=_check_core),
    "look_at_checkpoints": Task(Checkpoints, as_owner=True, check=_check_checkpoints),
    "probe_mount": Task(MountLook, as_owner=True, check=_check_mount),
    "write_kill_switch": Task(Switch, as_owner=True, check=_check_switch, is_switch=True),
    "remove_kill_switch": Task(Switch, as_owner=True, check=_check_switch, of_anybody=True, is_switch=True),
}
"""Everything that the helper does. What the agent does for itself (NVML, its own state, names of users) is not in it."""


def check_request(
    function: str,
    args: Any,
    uid: int,
    is_here: bool = True,
    prefixes: tuple[str, ...] = (),
    itself: bool = False,
) -> None:
    """Whether `function` may be done with `args` as `uid` (-1: as the helper itself). Raises RefusedError with the reason.

    `is_here`: that user has, or had within the hour, a process on this node. `prefixes`: directories, allowed by root, below which
    kill switches may lie besides KILL_SWITCH_BASE. `itself`: -1 is the files' owner, too, for the asker is nobody else.
    """
    task = TASKS.get(str(function))
    if task is None:
        raise RefusedError(f"{str(function)[:60]!r} is nothing that can be asked here")
    stays = itself and uid == -1
    if not stays and task.as_owner != (uid >= 0):
        who = "as the owner of the files" if task.as_owner else "as nobody else"
        raise RefusedError(f"{function} is done {who}")
    if task.as_owner and not stays:
        check_user(uid)
        if not is_here and not task.of_anybody:
            raise RefusedError(f"uid {uid} has no process on this node")
    try:
        value = msgspec.convert(args, task.type)
    except msgspec.ValidationError as error:
        raise RefusedError(f"{function}: {error}") from error
    task.check(value, uid)
    if task.is_switch and (problem := problem_of_path(value.path, prefixes)) is not None:
        raise RefusedError(problem)


def check_user(uid: int) -> None:
    """Raises RefusedError for root, the system's users, and what is no user."""
    if (refusal := refusal_as(uid)) is not None:
        raise RefusedError(refusal)


Report = Callable[[str], None]


class CheckedFunctions(dict[str, Function]):
    """Functions behind check_request. The child's user is in its `state["uid"]`; `report` hears of each refusal."""

    def __init__(
        self,
        functions: Mapping[str, Function],
        is_here: bool,
        report: Report,
        prefixes: tuple[str, ...] = (),
        own: int | None = None,
        free: Mapping[str, Function] = {},
    ):
        """`own`: the one user, an agent's own, whose files and processes need no other rights; then the child stays that user. `free`: what
        is not in the list, and is not checked."""
        super().__init__({name: function for name, function in functions.items() if name in TASKS})
        self._is_here, self._report, self._prefixes = is_here, report, prefixes
        self._own, self._free = own, free

    def get(self, name: str, default: Any = None) -> Function:
        """One that checks first; also for a name that is not in the list: that is refused like all else."""

        if name in self._free:
            return self._free[name]

        def checked(args: Any, state: dict[str, Any]) -> Any:
            state[OWN] = self._own
            try:
                check_request(name, args, state["uid"], self._is_here, self._prefixes, self._own is not None)
                if name not in self:
                    raise RefusedError(f"{name} is off: the helper was started without it")
            except RefusedError as error:
                self._report(str(error))
                # He may have a process by the next question, whom a fresh child is started for: this one knows what was true at its start.
                state[OVER] = not self._is_here
                raise OSError(0, f"the helper refuses: {error}") from error
            return self[name](args, state)

        return checked
