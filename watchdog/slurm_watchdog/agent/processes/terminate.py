"""Ends one process that holds a GPU and whose job is over: in a child, with the right to signal, and after
its own look at everything.

A pid is used again at once, and everything that is known about it is some seconds old. So the kernel's handle
on the process is taken first (pidfd_open(2)); then all is read again; then the handle says whether that
process still lives, in which case all that was read under its number was about it; and the signal goes to the
handle, never to the number. An exec keeps number, handle and start time: user, name and open devices are
looked at for that. No one's word is taken here, the agent's neither: a process below a slurmstepd, in the
control group of a job that has one, or of a user whose job runs here, is left alone, and so are the system's.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.become_user import refusal_as
from slurm_watchdog.agent.children.requests import SignalProcess, WorkerState
from slurm_watchdog.agent.proc.entry import KERNEL_THREAD, Status, parse_cgroup, parse_status, parse_stepd
from slurm_watchdog.agent.proc.files import (
    BOOT_ID,
    DEVICES,
    gpu_pattern,
    links_of,
    other_thread,
    read_file,
    read_stat,
    read_words,
)
from slurm_watchdog.base.descriptors import closing, describe
from slurm_watchdog.base.mounts import strip_deleted
from slurm_watchdog.knowledge.gpu_daemons import COMMS, MAX_NAME, is_system_service
from slurm_watchdog.model.observations import ProcessOnGpu
from slurm_watchdog.model.protocol import ProcessEnd

WAIT_S = 2.0  # After a signal: what has nothing to save ends in milliseconds, and then one answer says it all.
SIGNALS = {"term": signal.SIGTERM, "kill": signal.SIGKILL}
MAX_THREADS = 4096  # Of one process: whose state is read.
MAX_DEPTH = 100  # Ancestors that are followed upwards.
_STUCK = "DZTtSRI"  # States, the one that says most about why a process does not end first.


class ProcessToEnd(ProcessOnGpu):
    """The process that is meant, as the command described it."""

    devices: str = DEVICES  # What the name of a GPU's device begins with.


class NotEndedError(Exception):
    """Why this process gets no signal, in one sentence."""


def end_process(request: SignalProcess, worker: WorkerState) -> ProcessEnd:
    """Sends the signal of an EndProcess command (`look`: none) if all that the command says still holds. Raises OSError
    where the kernel gives no handle on processes (before Linux 5.3): then nothing is ever sent."""
    return end(msgspec.convert(request, ProcessToEnd, from_attributes=True), request.how)


def end(wanted: ProcessToEnd, how: str, wait_s: float = WAIT_S) -> ProcessEnd:
    """What became of it, at most `wait_s` after the signal. `how`: `look`, `term` or `kill`. Raises OSError."""
    if read_file(BOOT_ID).decode().strip() != wanted.boot_id:
        return ProcessEnd(gone=True)  # that process ended with its kernel
    try:
        handle = os.pidfd_open(wanted.pid)
    except ProcessLookupError:
        return ProcessEnd(gone=True)
    with closing(handle):
        return _end(handle, wanted, how, wait_s)


def _end(handle: int, wanted: ProcessToEnd, how: str, wait_s: float) -> ProcessEnd:
    seen = _read_state(handle, wanted)
    if seen.gone or seen.released or how == "look":
        return seen
    try:
        check(wanted)
    except NotEndedError as reason:
        refusal = str(reason)
    except (OSError, ValueError) as error:  # its files are gone with it, or hidden: nothing is known
        refusal = f"it could not be looked at: {describe(error) if isinstance(error, OSError) else error}"
    else:
        refusal = ""
    if _has_ended(handle):
        return ProcessEnd(gone=True)
    if refusal:
        return replace(seen, refusal=refusal)
    try:
        signal.pidfd_send_signal(handle, SIGNALS[how])
    except ProcessLookupError:
        return ProcessEnd(gone=True)
    except PermissionError as error:
        return replace(seen, refusal=f"it may not be signalled from here: {describe(error)}")
    if _has_ended(handle, wait_s):
        return ProcessEnd(gone=True, sent=True)
    return replace(_read_state(handle, wanted), sent=True, released=False)  # whether it let go says the next look


def _has_ended(handle: int, wait_s: float = 0.0) -> bool:
    """Whether the process of this handle has ended, its last thread too; a zombie counts as ended."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


# ------------------------------------------------------------------------------------------ what it is like


def _read_state(handle: int, wanted: ProcessToEnd) -> ProcessEnd:
    """Whether it is there, whether it holds what it held, and where it hangs."""
    try:
        is_it = read_stat(wanted.pid).start_ticks == wanted.start_ticks
        state, wchan = _most_stuck(wanted.pid) if is_it else ("", "")
    except (OSError, ValueError):
        return ProcessEnd(gone=True) if _has_ended(handle) else ProcessEnd()
    if not is_it or _has_ended(handle):
        return ProcessEnd(gone=True)
    return ProcessEnd(state=state, wchan=wchan, released=_has_let_go(wanted, state))


def _has_let_go(wanted: ProcessToEnd, state: str) -> bool:
    """Whether it has files open, and no GPU among them. Of one that is ending the kernel shows no files, while the
    driver may not have let go of the memory yet: that is not it."""
    try:
        count, minors = held(wanted)
    except OSError:
        return False
    return count > 0 and not minors and state not in ("D", "Z", "X")


def held(wanted: ProcessToEnd) -> tuple[int, set[int]]:
    """How many files it has open, and the numbers of the GPUs among them. Raises OSError."""
    pid = wanted.pid
    thread = pid if read_stat(pid).state not in ("Z", "X") else other_thread(pid)
    count, names = links_of(pid, thread)
    if count and not names:
        raise PermissionError(errno.EACCES, "its open files may not be looked at")
    pattern = gpu_pattern(wanted.devices)
    return count, {int(match[1]) for name in names if (match := pattern.fullmatch(name))}


def _most_stuck(pid: int) -> tuple[str, str]:
    """State and wait channel of the thread that says most. Raises OSError, ValueError."""
    found: tuple[int, str, int] | None = None
    for name in os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]:
        try:
            state = read_stat(f"{pid}/task/{name}").state
        except (OSError, ValueError):
            continue
        row = (_STUCK.find(state) % (len(_STUCK) + 1), state, int(name))
        found = row if found is None else min(found, row)
    if found is None:
        raise ProcessLookupError(f"process {pid} has no thread")
    return found[1], read_words(f"/proc/{pid}/task/{found[2]}/wchan") or ""


# ------------------------------------------------------------------------------------------ may it be ended


def check(wanted: ProcessToEnd) -> None:
    """Whether this process may get a signal, by /proc at this moment. Raises NotEndedError, OSError, ValueError."""
    stat = read_stat(wanted.pid)
    if stat.start_ticks != wanted.start_ticks:
        raise NotEndedError("its number belongs to another process by now")
    if (refusal := refusal_as(wanted.uid)) is not None:
        raise NotEndedError(refusal)
    uids = _uids(wanted.pid)
    if set(uids) != {wanted.uid}:
        raise NotEndedError(f"it runs as uid {'/'.join(map(str, uids))}, not {wanted.uid}")
    if stat.comm != wanted.comm:
        raise NotEndedError(f"it is another program now: {stat.comm}, not {wanted.comm}")
    if stat.flags & KERNEL_THREAD or wanted.pid in (1, os.getpid(), os.getppid()):
        raise NotEndedError("it is the system's or ours")
    if stat.comm[:MAX_NAME] in COMMS:
        raise NotEndedError(f"{stat.comm} is the name of a daemon that holds GPUs by right")
    _check_place(wanted, read_file(f"/proc/{wanted.pid}/cgroup").decode(errors="replace"))
    _, minors = held(wanted)
    if not minors.intersection(wanted.minors):
        raise NotEndedError("it does not hold the GPU any more that it held")


def _check_place(wanted: ProcessToEnd, cgroup: str) -> None:
    """Whether it stands in no job that lives, nor may be used by one. Raises NotEndedError."""
    if is_system_service(cgroup):
        raise NotEndedError("it is part of a service of the system")
    place = parse_cgroup(cgroup)
    if place is not None and place.job_id != wanted.job_id:
        raise NotEndedError(f"it is in the control group of job {place.job_id}, not {wanted.job_id}")
    processes = dict(_processes())
    steps = dict(_steps(processes))
    if unclear := [pid for pid, job_id in steps.items() if job_id is None]:
        raise NotEndedError(f"slurmstepd {unclear[0]} does not say for which job it is")
    if wanted.job_id in steps.values():
        raise NotEndedError(f"job {wanted.job_id} has a slurmstepd here: it is not over")
    if _step_above(wanted.pid, processes, steps) is not None:
        raise NotEndedError("a slurmstepd is above it: it is part of a job")
    if place is not None:
        return
    for pid in processes:
        step = _step_above(pid, processes, steps)
        with suppress(OSError, ValueError):  # it ended
            if step is not None and wanted.uid in _uids(pid):
                raise NotEndedError(f"its user has job {steps[step]} here now, which may be using it")


def _processes() -> Iterator[tuple[int, Status]]:
    """By what no lock of theirs can hold: they are everybody's."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                yield int(name), parse_status(read_file(f"/proc/{name}/status"))
            except (OSError, ValueError):
                continue  # it ended


def _steps(processes: dict[int, Status]) -> Iterator[tuple[int, str | None]]:
    """Every real slurmstepd, and the job it looks after; None if it does not say."""
    for pid, stat in processes.items():
        if stat.comm != "slurmstepd" or not _is_slurms(pid):
            continue
        try:
            title = read_file(f"/proc/{pid}/cmdline").decode(errors="replace")
        except OSError:
            continue  # it ended
        place = parse_stepd(title.split("\0", maxsplit=1)[0])
        if place is not None:
            yield pid, place.job_id
        elif title and "infinity" not in title.split("\0"):  # the one that keeps the jobs' scope open has no job
            yield pid, None


def _is_slurms(pid: int) -> bool:
    """Whether it is root's, by its real user (the effective one is the job owner's for moments), and runs a
    program of that name: one of root's that someone has started under another name, as sudo, does not. What
    cannot be read protects: it may be the real one."""
    try:
        if (uids := _uids(pid)) and uids[0] != 0:
            return False
        return os.path.basename(strip_deleted(os.readlink(f"/proc/{pid}/exe"))) == "slurmstepd"
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended
    except (OSError, ValueError):
        return True


def _step_above(pid: int, processes: dict[int, Status], steps: dict[int, str | None]) -> int | None:
    """The slurmstepd that is an ancestor of this process."""
    for _ in range(MAX_DEPTH):
        stat = processes.get(pid)
        if stat is None or stat.ppid <= 1:
            return None
        pid = stat.ppid
        if pid in steps:
            return pid
    return None


def _uids(pid: int) -> tuple[int, ...]:
    """Real, effective, saved and file-system user. Raises OSError, ValueError."""
    if uids := parse_status(read_file(f"/proc/{pid}/status")).uids:
        return uids
    raise ValueError("no user is given")
