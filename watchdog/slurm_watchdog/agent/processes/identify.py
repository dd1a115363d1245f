"""Identifies processes, and resolves blocked calls to files: what may take a process's memory lock. For children.

What the child is about to look at is noted first: when it hangs, that is the process that it hangs on.
"""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import IdentifiedProcess, ResolvedCall
from slurm_watchdog.agent.children.become_user import check_process, read_refusal
from slurm_watchdog.agent.children.requests import (
    BlockedCall,
    IdentifyProcesses,
    ListMounts,
    NameUsers,
    ReadTitles,
    ResolveCalls,
    WorkerState,
)
from slurm_watchdog.agent.proc.entry import as_slurm_job, parse_status
from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.agent.proc.job_membership import may_hold_a_rank
from slurm_watchdog.agent.proc.system_call import int32, parse_syscall
from slurm_watchdog.agent.processes.open_mounts import read_fault
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.base.mounts import Mount, mount_of, read_mounts, strip_deleted
from slurm_watchdog.base.redact import MARGIN, masked_value
from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.launchers import ENVIRONMENT, KILL_SWITCH_OPTION
from slurm_watchdog.knowledge.syscalls import FD_ARGUMENT, NOT_STORAGE, PAGE_FAULT, PATH_ARGUMENT, name_of
from slurm_watchdog.knowledge.trainer_options import READ_VARIABLES, directories_in, kill_switch_in, timeout_in
from slurm_watchdog.model.observations import CallTarget

# Which environment variables are kept of a rank, and what in them is masked.
# An environment holds passwords, so there is an allow-list and nothing else; and what is allowed may still hold a
# secret, in an address or by mistake, so values that look like one are masked.

PREFIXES = (
    "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "CUDA_", "NVIDIA_", "OMP_", "KMP_", "MKL_", "GLOO_", "UCX_", "FI_",
    "OMPI_MCA_",
    "SHARP_", "HSA_", "HIP_", "ROCR_", "XLA_", "JAX_", "TF_", "DEEPSPEED_", "MEGATRON_", "ACCELERATE_", "TORCHELASTIC_",
    "TORCHINDUCTOR_", "TRITON_", "TOKENIZERS_", "AWS_OFI_", "EFA_", "MELLANOX_", "SLURM_WATCHDOG_",
)  # fmt: skip
"""Families of variables that decide how a rank computes and communicates."""
NAMES = frozenset(
    """
    MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK
    SLURM_JOB_ID SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NNODES SLURM_STEP_ID SLURM_RESTART_COUNT
    SLURM_JOB_PARTITION SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_JOB_NODELIST SLURMD_NODENAME
    LD_PRELOAD LD_LIBRARY_PATH VIRTUAL_ENV CONDA_DEFAULT_ENV CONDA_PREFIX PYTHONPATH PYTHONHASHSEED PYTHONUNBUFFERED
    MALLOC_ARENA_MAX TMPDIR XDG_CACHE_HOME HF_HOME HF_HUB_OFFLINE TRANSFORMERS_OFFLINE LANG TZ
    """.split()  # noqa: SIM905  a table of words
)
MAX_VARIABLES = 96
MAX_VALUE = 300
MAX_SEARCHED = MAX_VALUE + MARGIN
"""Characters of a value that are decoded and searched for secrets: a variable may hold 128 KiB
(MAX_ARG_STRLEN), an environment MiBs."""


def is_wanted(name: str) -> bool:
    """Whether a variable of this name is kept at all."""
    return name in NAMES or name.startswith(PREFIXES)


def choose(environ: Mapping[str, str]) -> dict[str, str]:
    """What of a whole environment is kept: wanted, masked, bounded, in the order of names."""
    kept = sorted((name, value) for name, value in environ.items() if is_wanted(name))[:MAX_VARIABLES]
    return {name: masked_value(name, value[:MAX_SEARCHED])[:MAX_VALUE] for name, value in kept}


def parse_settings(data: bytes) -> dict[str, str]:
    """What is kept of the text of /proc/PID/environ."""
    return choose(_first_of_each(data, is_wanted, MAX_SEARCHED))


def _first_of_each(data: bytes, is_wanted: Callable[[str], bool], most: int) -> dict[str, str]:
    """The wanted variables in the text of /proc/PID/environ; of one given twice, the first, as getenv has it."""
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, separator, value = entry.partition(b"=")
        key = name.decode(errors="replace")
        if separator and key not in found and is_wanted(key):
            found[key] = value[:most].decode(errors="replace")
    return found


STEPD = "slurmstepd"
MAX_ENVIRON = 1 << 20
MAX_COMMAND_LINE = 1 << 18
MAX_PATH = 4096  # linux/limits.h


def identify(request: IdentifyProcesses, state: WorkerState) -> list[IdentifiedProcess]:
    """Who each process is, with `error` where it ended meanwhile or may not be read."""
    return [_identify_one(pid, state) for pid in state.each(request.pids)]


def _identify_one(pid: int, state: WorkerState) -> IdentifiedProcess:
    known = IdentifiedProcess(pid=pid)
    try:
        known = replace(known, start_ticks=read_stat(pid).start_ticks)
        known = replace(known, uid=parse_status(_read(f"/proc/{pid}/status", 8192)).real_uid)
        if (refusal := read_refusal(pid, state.own)) is not None:
            return _foreign(known, refusal)
        comm = _read(f"/proc/{pid}/comm", 64).strip().decode(errors="replace")
        variables = _read(f"/proc/{pid}/environ", MAX_ENVIRON)
        environ = as_slurm_job(parse_environ(variables))
        known = replace(known, environ=environ)
        exe = os.path.basename(strip_deleted(os.readlink(f"/proc/{pid}/exe")))
        known = replace(known, exe=exe)
        if comm != STEPD and may_hold_a_rank(comm, exe, environ):
            words = _read(f"/proc/{pid}/cmdline", MAX_COMMAND_LINE).decode(errors="replace").split("\0")
            cwd = os.readlink(f"/proc/{pid}/cwd")
            if switch := kill_switch_in(words, strip_deleted(cwd)):
                known = replace(known, environ={**environ, KILL_SWITCH_OPTION: switch[:1024]})
            known = replace(
                known, cwd=cwd, settings=parse_settings(variables),
                checkpoint_directories=tuple(directories_in(words, strip_deleted(cwd))),
                collective_timeout=timeout_in(
                    parse_environ(variables, READ_VARIABLES), words
                ),
            )  # fmt: skip
        if (refusal := read_refusal(pid, state.own)) is not None:  # it has become another program meanwhile
            return _foreign(known, refusal)
    except (OSError, ValueError) as error:
        return replace(known, error=str(error), denied=isinstance(error, PermissionError))
    return known


def _foreign(known: IdentifiedProcess, refusal: str) -> IdentifiedProcess:
    """A process of which nothing is to be known: a set-user-id program, root's, the system's."""
    return picked(IdentifiedProcess, known, "pid", "start_ticks", "uid", foreign=True, environ={}, error=refusal)


def read_titles(request: ReadTitles, state: WorkerState) -> list[IdentifiedProcess]:
    """Of processes of root's and the system's: when each began, and the title of a slurmstepd. Anybody can take that
    name, and a title. The real one is root's, or belongs to the one user for which a slurmd without root starts jobs:
    then the agent runs as that user, too. The real uid counts: the effective one is the job owner's for moments."""
    return [_read_title(pid, state) for pid in state.each(request.pids)]


def _read_title(pid: int, state: WorkerState) -> IdentifiedProcess:
    known = IdentifiedProcess(pid=pid)
    try:
        stat, status = read_stat(pid), parse_status(_read(f"/proc/{pid}/status", 8192))
        known = replace(known, start_ticks=stat.start_ticks, uid=status.real_uid)
        if status.comm == STEPD and status.real_uid in (0, state.own):
            # Anybody may read it, whereas the environment is for its owner and root.
            title = _read(f"/proc/{pid}/cmdline", 4096).split(b"\0")[0].decode(errors="replace")
            return replace(known, title=title)
    except (OSError, ValueError) as error:
        return replace(known, error=str(error))
    return known


def parse_environ(data: bytes, names: AbstractSet[str] = frozenset(ENVIRONMENT)) -> dict[str, str]:
    """The variables of these names in the text of /proc/PID/environ."""
    return _first_of_each(data, names.__contains__, 1024)


def resolve_calls(request: ResolveCalls, state: WorkerState) -> list[ResolvedCall]:
    """The file of each blocked call, and the mount that it lies on. A path is read from the process's memory only if
    the thread is in this very call, and believed only if it still is afterwards: no one learns what lies elsewhere."""
    return [_resolved(call, state) for call in state.each(request.calls)]


def _resolved(call: BlockedCall, state: WorkerState) -> ResolvedCall:
    try:
        return ResolvedCall(target=_resolve(call, state))
    except (OSError, IndexError, ValueError) as error:
        return ResolvedCall(error=str(error))


def name_users(request: NameUsers, state: WorkerState) -> dict[str, str]:
    """The names of users, by number in decimal, from the site's directory; unknown ones are left out."""
    names: dict[str, str] = {}
    for uid in request.uids:
        try:
            names[str(uid)] = pwd.getpwuid(uid).pw_name
        except KeyError:
            continue
    return names


def _resolve(call: BlockedCall, state: WorkerState) -> CallTarget:
    pid, syscall, args = call.pid, call.syscall, call.args
    path, task = None, f"{pid}/task/{call.thread}"  # a main thread that has ended has no memory and no files any more
    check_process(pid, state.own)
    began = read_stat(pid).start_ticks
    if syscall == PAGE_FAULT:
        return read_fault(task)
    if syscall in PATH_ARGUMENT:
        _check_in_call(call)
        directory, place = PATH_ARGUMENT[syscall]
        path = _read_path(task, args[place])
        # Only now it is known whose memory that was: a set-user-id program may have taken the place of the
        # one in this call.
        check_process(pid, state.own)
        _check_in_call(call)
        if read_stat(pid).start_ticks != began:
            raise OSError(errno.ESRCH, "it is another process now")
        if not path.startswith("/"):
            at = int32(args[directory]) if directory is not None else -100
            base = os.readlink(f"/proc/{task}/cwd" if at < 0 else f"/proc/{task}/fd/{at}")
            path = os.path.normpath(f"{strip_deleted(base)}/{path}")
    elif syscall in FD_ARGUMENT:
        path = os.readlink(f"/proc/{task}/fd/{int32(args[FD_ARGUMENT[syscall]])}")
    if path is None or not path.startswith("/") or path.startswith(NOT_STORAGE):
        return CallTarget(path)
    return mount_target(path, read_mounts(task))


def _check_in_call(call: BlockedCall) -> None:
    """Raises OSError if the thread is in another call by now."""
    found = parse_syscall(_read(f"/proc/{call.pid}/task/{call.thread}/syscall", 512))
    if found is None or list(found.args) != call.args or name_of(found.number, os.uname().machine) != call.syscall:
        raise OSError(errno.ESRCH, "it is in another call now")


def mount_target(path: str, mounts: tuple[Mount, ...]) -> CallTarget:
    """`path`, and the mount that it lies on."""
    mount = mount_of(strip_deleted(path), mounts)
    return CallTarget(path) if mount is None else CallTarget(path, mount.point, mount.fs_type, mount.device)


def _read_path(task: str, pointer: int) -> str:
    """The C string at `pointer` in the memory of `task` (`PID/task/TID`), read page by page to its end."""
    data = b""
    with opened(f"/proc/{task}/mem", os.O_RDONLY) as fd:
        while len(data) < MAX_PATH and b"\0" not in data:
            at = pointer + len(data)
            chunk = os.pread(fd, 4096 - at % 4096, at)
            if not chunk:
                break
            data += chunk
    return data.split(b"\0")[0].decode(errors="replace")


def list_mounts(request: ListMounts, state: WorkerState) -> list[Mount]:
    """The agent's own mounts."""
    return list(read_mounts())


def _read(path: str, limit: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(limit)
