"""What the `identify` child does: everything about a process that may take its memory's lock, and the tables of mounts.

It tells each answer as soon as it has it: when it hangs, the first that is missing is the process that it hangs on.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Set as AbstractSet
from typing import Any, Final

from slurm_watchdog.agent.proc import mapped_files
from slurm_watchdog.agent.proc.entry import parse_status
from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.agent.proc.job_membership import may_hold_a_rank
from slurm_watchdog.agent.proc.process_facts import as_slurm_job
from slurm_watchdog.agent.proc.system_call import parse_syscall
from slurm_watchdog.agent.processes.environment import parse_settings
from slurm_watchdog.agent.processes.owner import check_process, read_refusal
from slurm_watchdog.agent.workers.request_types import BlockedCall
from slurm_watchdog.base.mounts import Mount, mount_of, read_mounts, strip_deleted
from slurm_watchdog.knowledge import collective_timeouts
from slurm_watchdog.knowledge.checkpoint_options import directories_in
from slurm_watchdog.knowledge.launchers import ENVIRONMENT
from slurm_watchdog.knowledge.syscalls import FD_ARGUMENT, NOT_STORAGE, PAGE_FAULT, PATH_ARGUMENT, name_of

MAX_ENVIRON = 1 << 20
MAX_COMMAND_LINE = 1 << 18
MAX_FDS = 4096
LOG_SUFFIXES = (".log", ".out", ".txt", ".jsonl", ".err")
MAX_PATH = 4096  # linux/limits.h
ELSEWHERE: Final = {"path": None, "error": "it is in another call now"}


def identify(args: list[tuple[int, int | None]], state: dict[str, Any]) -> list[dict[str, Any]]:
    """For each [pid, start_ticks or None]: start time, the variables of ENVIRONMENT, program, title of a
    slurmstepd, and of what
    may hold a rank the working directory, the directories of checkpoints that its command line names, the
    time-out of its
    collectives, with whether that is only assumed, and the `settings` that evidence shows.

    A process that ended meanwhile, or that may not be read, has `environ` None and the reason in `error`;
    `denied` says that it
    is the second. `index` is the place of the question, `uid` the process's real user. Of one that is not an
    ordinary user's through
    and through nothing is read, and `foreign` says so: see slurm_watchdog.agent.processes.owner.
    """
    tell = state.get("tell")
    found: list[dict[str, Any]] = []
    for index, (pid, start_ticks) in enumerate(args):
        answer = _identify_one(pid, start_ticks, state) | {"index": index}
        if tell is None:
            found.append(answer)
        else:
            tell(answer)
    return found


def _identify_one(pid: int, start_ticks: int | None, state: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"pid": pid, "start": start_ticks, "environ": None, "exe": "", "title": ""}
    try:
        if start_ticks is None:
            answer["start"] = read_stat(pid).start_ticks
        comm = _read(f"/proc/{pid}/comm", 64).strip().decode(errors="replace")
        if comm == "slurmstepd" and _is_slurms(pid):
            # Anybody may read it, whereas the environment is for its owner and root.
            answer["title"] = _read(f"/proc/{pid}/cmdline", 4096).split(b"\0")[0].decode(errors="replace")
        answer["uid"] = parse_status(_read(f"/proc/{pid}/status", 8192)).real_uid
        if (refusal := read_refusal(pid, state)) is not None:
            return _nothing_of(pid, answer["start"], answer["uid"], refusal) | {"title": answer["title"]}
        variables = _read(f"/proc/{pid}/environ", MAX_ENVIRON)
        environ = answer["environ"] = as_slurm_job(parse_environ(variables))
        answer["exe"] = os.path.basename(strip_deleted(os.readlink(f"/proc/{pid}/exe")))
        if comm != "slurmstepd" and may_hold_a_rank(comm, answer["exe"], environ):
            words = _read(f"/proc/{pid}/cmdline", MAX_COMMAND_LINE).decode(errors="replace").split("\0")
            answer["cwd"] = os.readlink(f"/proc/{pid}/cwd")
            answer["settings"] = parse_settings(variables)
            answer["checkpoint_directories"] = list(directories_in(words, strip_deleted(answer["cwd"])))
            answer["collective_timeout"] = collective_timeouts.timeout_in(
                parse_environ(variables, collective_timeouts.NAMES), words
            )
        if (refusal := read_refusal(pid, state)) is not None:  # it has become another program meanwhile
            return _nothing_of(pid, answer["start"], answer["uid"], refusal)
    except (OSError, ValueError) as error:
        answer["error"] = str(error)
        answer["denied"] = isinstance(error, PermissionError)
    return answer


def _nothing_of(pid: int, start: int, uid: int, refusal: str) -> dict[str, Any]:
    """The answer about a process of which nothing is to be known: a set-user-id program, root's, the system's."""
    return {
        "pid": pid, "start": start, "uid": uid, "foreign": True, "environ": {}, "exe": "", "title": "", "error": refusal,
    }  # fmt: skip


def _is_slurms(pid: int) -> bool:
    """Whether a process that calls itself slurmstepd may be believed: anybody can take that name, and a title.

    The real one is root's, or belongs to the one user for whom a slurmd without root starts jobs, as whom the
    agent runs
    then, too. Its real uid is asked for: the effective one is the job owner's for moments.
    """
    return parse_status(_read(f"/proc/{pid}/status", 8192)).real_uid in (0, os.getuid())


def parse_environ(data: bytes, names: AbstractSet[str] = frozenset(ENVIRONMENT)) -> dict[str, str]:
    """The variables of these names in the text of /proc/PID/environ; of one given twice, the first, as getenv
    has it."""
    wanted: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, separator, value = entry.partition(b"=")
        key = name.decode(errors="replace")
        if separator and key in names and key not in wanted:
            wanted[key] = value.decode(errors="replace")[:1024]
    return wanted


def resolve(args: list[BlockedCall], state: dict[str, Any]) -> list[dict[str, Any]]:
    """For each {pid, thread, syscall, args}: the file that the call concerns (`path`), and the mount it lies
    on; `index` is its place.

    A path is read from the process's memory only if the thread stands in this very call, and is believed only
    if it still does
    afterwards: nobody learns what lies elsewhere.
    """
    tell = state.get("tell")
    found: list[dict[str, Any]] = []
    for index, each in enumerate(args):
        answer = _resolve_one(each.pid, each.thread, each.syscall, each.args, state) | {"index": index}
        if tell is None:
            found.append(answer)
        else:
            tell(answer)
    return found


def name_users(args: list[int], state: dict[str, Any]) -> dict[str, str]:
    """The names of these numeric users, by number in decimal; those that nobody knows are left out. Asks the
    site's directory."""
    names: dict[str, str] = {}
    for uid in args:
        try:
            names[str(uid)] = pwd.getpwuid(uid).pw_name
        except KeyError:
            continue
    return names


def _resolve_one(
    pid: int, thread: int, syscall: str | None, args: list[int], state: dict[str, Any]
) -> dict[str, Any]:
    path = None
    try:
        check_process(pid, state)
        began = read_stat(pid).start_ticks
        if syscall == PAGE_FAULT:
            return mapped_files.read_fault(pid)
        if syscall in PATH_ARGUMENT and not _stands_in(pid, thread, syscall, args):
            return ELSEWHERE
        if syscall in FD_ARGUMENT:
            path = os.readlink(f"/proc/{pid}/fd/{_int32(args[FD_ARGUMENT[syscall]])}")
        elif syscall in PATH_ARGUMENT:
            directory, place = PATH_ARGUMENT[syscall]
            path = _read_path(pid, args[place])
            # Only now it is known whose memory that was: a set-user-id program may have taken the place of
            # the one in this call.
            check_process(pid, state)
            if not _stands_in(pid, thread, syscall, args) or read_stat(pid).start_ticks != began:
                return ELSEWHERE
            if not path.startswith("/"):
                at = _int32(args[directory]) if directory is not None else -100
                base = os.readlink(f"/proc/{pid}/cwd" if at < 0 else f"/proc/{pid}/fd/{at}")
                path = os.path.normpath(f"{strip_deleted(base)}/{path}")
        if path is None or not path.startswith("/") or path.startswith(NOT_STORAGE):
            return {"path": path}
        return describe_mount(path, read_mounts(pid))
    except (OSError, IndexError, ValueError) as error:
        return {"path": None, "error": str(error)}


def _stands_in(pid: int, thread: int, syscall: str, args: list[int]) -> bool:
    call = parse_syscall(_read(f"/proc/{pid}/task/{thread}/syscall", 512))
    return (
        call is not None and list(call.args) == args and name_of(call.number, os.uname().machine) == syscall
    )


def describe_mount(path: str, mounts: tuple[Mount, ...]) -> dict[str, Any]:
    """`path` with `mount`, `fs_type` and `device` of the mount that it lies on."""
    mount = mount_of(strip_deleted(path), mounts)
    if mount is None:
        return {"path": path}
    return {"path": path, "mount": mount.point, "fs_type": mount.fs_type, "device": mount.device}


def _read_path(pid: int, pointer: int) -> str:
    """The C string at `pointer` in the memory of `pid`, read page by page so that the page behind its end is
    not touched."""
    data = b""
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while len(data) < MAX_PATH and b"\0" not in data:
            at = pointer + len(data)
            chunk = os.pread(fd, 4096 - at % 4096, at)
            if not chunk:
                break
            data += chunk
    finally:
        os.close(fd)
    return data.split(b"\0")[0].decode(errors="replace")


def list_mounts(args: Any, state: dict[str, Any]) -> list[list[Any]]:
    """The agent's own mounts: point, type, device, the user who serves it, number."""
    return [[mount.point, mount.fs_type, mount.device, mount.owner, mount.number] for mount in read_mounts()]


def list_open_logs(args: list[tuple[str, int, bool]], state: dict[str, Any]) -> dict[str, list[str]]:
    """For each [job id, pid, thorough]: names of open files that look like logs, by job.

    Descriptors 1 and 2 count whatever their name; with `thorough` also files open for appending, and those open for
    writing with one of LOG_SUFFIXES. Nothing is opened or looked up: the names come from the links in /proc.
    """
    found: dict[str, list[str]] = {}
    for job_id, pid, thorough in args:
        paths = found.setdefault(job_id, [])
        try:
            check_process(pid, state)
            directory = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            for fd in os.listdir(directory)[:MAX_FDS] if thorough else ("1", "2"):
                path = _log_path(pid, directory, fd)
                if path and path not in paths:
                    paths.append(path)
        except OSError:
            continue  # it ended
        finally:
            os.close(directory)
    return found


def _log_path(pid: int, directory: int, fd: str) -> str | None:
    """`directory` is an open /proc/PID/fd: walking the whole path for each of hundreds would double the cost."""
    try:
        path = os.readlink(fd, dir_fd=directory)
        if not path.startswith("/") or path.startswith(NOT_STORAGE) or path.endswith(" (deleted)"):
            return None
        flags = parse_fd_flags(_read(f"/proc/{pid}/fdinfo/{fd}", 4096))
    except OSError:
        return None
    if not flags & (os.O_WRONLY | os.O_RDWR):
        return None
    wanted = fd in ("1", "2") or flags & os.O_APPEND or path.endswith(LOG_SUFFIXES)
    return path if wanted else None


def parse_fd_flags(text: bytes) -> int:
    """The flags that a file was opened with, from /proc/PID/fdinfo/FD (octal there); 0 where they are missing."""
    for line in text.splitlines():
        if line.startswith(b"flags:"):
            return int(line.split()[1], 8)
    return 0


def _read(path: str, limit: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(limit)


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
