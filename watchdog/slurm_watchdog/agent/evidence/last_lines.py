"""The last lines of a job's logs, read in children, and of the kernel's log, as they are, for people."""

from __future__ import annotations

import os
from collections.abc import Iterable

from slurm_watchdog.agent.children.answers import LogEnd
from slurm_watchdog.agent.children.requests import LastLines, WorkerState
from slurm_watchdog.agent.files.safe_open import open_log
from slurm_watchdog.agent.logs.follow import FollowMemory
from slurm_watchdog.base.descriptors import closing
from slurm_watchdog.base.redact import MARGIN, mask_cut, mask_lines

LOG_BYTES = 64 * 1024  # Of the end of each file.
LOG_LINES = 120
MAX_LINE = 500


def last_lines(request: LastLines, worker: WorkerState) -> list[LogEnd]:
    """The last lines of each log. Runs in the child that follows these files, and reads through its open
    descriptors, so that a file is found whose name has gone."""
    tails = worker.memory(FollowMemory).tails
    found = []
    for job, path in request.files:
        tail = tails.get((job, path))
        try:
            lines = _end_of(path, tail.fd if tail is not None else -1)
            found.append(LogEnd(path=path, lines=tuple(lines)))
        except OSError as error:
            found.append(LogEnd(path=path, error=error.strerror or str(error)))
    return found


def _end_of(path: str, open_fd: int) -> list[str]:
    with closing(os.dup(open_fd) if open_fd >= 0 else open_log(path)) as fd:
        size = os.fstat(fd).st_size
        return clean_end(os.pread(fd, LOG_BYTES, max(0, size - LOG_BYTES)), whole=size <= LOG_BYTES)


def clean_end(data: bytes, whole: bool) -> list[str]:
    """The last lines of the end of a file: bars redrawn with a carriage return as they stood last, secrets masked."""
    text = data.replace(b"\0", b"").decode(errors="replace").replace("\r\n", "\n")
    lines = text.split("\n") if whole else text.split("\n")[1:]
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    masked = mask_lines(line[: MAX_LINE + MARGIN] for line in shown if line.strip())
    return [line[:MAX_LINE] for line in masked[-LOG_LINES:]]


def last_kernel_lines(records: Iterable[bytes]) -> list[str]:
    """The last records of the kernel's log above level "info", as `[seconds since boot] text`. Where this machine keeps
    the kernel's log from ordinary users (kernel.dmesg_restrict), only lines that our knowledge names as a fault:
    evidence is for the job's owner, who may not read the others."""
    restricted = is_restricted()
    return [line for data in records if (line := parse_record(data, restricted)) is not None]


def is_restricted(path: str = "/proc/sys/kernel/dmesg_restrict") -> bool:
    """Whether only privileged users may read the kernel's log here; True where that is not known."""
    try:
        with open(path, "rb") as file:
            return file.read(16).strip() != b"0"
    except OSError:
        return True


def parse_record(data: bytes, restricted: bool = False) -> str | None:
    """One record of /dev/kmsg as dmesg prints it; None for information and debugging (levels 6 and 7), and for what is
    none. `restricted`: only what is the kernel's own, and named by a signature of ours."""
    # Imported here: the tables are large, and this is asked once in an incident.
    from slurm_watchdog.parse.kernel_log import file, line

    record = file.parse_record(data)
    if record is None or record.level >= 6:
        return None
    if restricted and (record.facility != file.KERN or not line.parse_message(file.readable(record.message))):
        return None
    return f"[{record.time_us / 1e6:12.6f}] {mask_cut(record.message.decode(errors='replace'), MAX_LINE)}"
