"""The files between the supervisor and the controller: orders and the kill switch are read, the status is written.

Their directory is made by the node's agent, some seconds after the job's start; it lies in memory (tmpfs), and always
answers.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_watchdog.model.kill_switch import parse_line
from slurm_watchdog.model.supervisor import (
    MAX_STATUS_BYTES,
    ORDER_PREFIX,
    STATUS_FILE,
    RestartOrder,
    SupervisorState,
    SupervisorStatus,
    order_in,
    parse_status,
)

MAX_ORDER_BYTES = 4096
MAX_ORDERS = 256  # Of one look: a directory of more is not the controller's work.
NO_AGENT_S = 60.0
"""After so long without that directory no one is thought to watch: a dozen of the agent's ticks of 5 s. A judgement."""


class Ordered(NamedTuple):
    """An order that was found, and when its file was written, since the epoch."""

    order: RestartOrder
    written_at: float


def misses_agent(directory: str, age_s: float) -> bool | None:
    """Whether no agent has made the run's `directory`, `age_s` after our start; None: it may still come."""
    return False if os.path.isdir(directory) else True if age_s >= NO_AGENT_S else None


def other_writer(directory: str, own_pid: int, lives: Callable[[int], bool]) -> int:
    """The process of another supervisor that has written the status last, and lives; 0: there is none."""
    try:
        status = parse_status(_read_own(os.path.join(directory, STATUS_FILE), MAX_STATUS_BYTES + 1)[0])
    except (OSError, ValueError):
        return 0
    over = status.state is SupervisorState.OVER or status.pid in (0, own_pid)
    return status.pid if not over and lives(status.pid) else 0


def read_orders(directory: str) -> list[Ordered]:
    """The orders that lie there, oldest first; what is none, or is still being written, is left out."""
    found: list[Ordered] = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory))[: 4 * MAX_ORDERS]:
            if name.startswith(ORDER_PREFIX) and len(found) < MAX_ORDERS:
                with contextlib.suppress(OSError, ValueError):
                    found.append(_read(os.path.join(directory, name)))
    return sorted(found, key=lambda each: each.written_at)


def is_our_switch(path: str) -> bool:
    """Whether a kill switch of ours lies in that directory."""
    try:
        return parse_line(_read_own(path, MAX_ORDER_BYTES)[0].decode(errors="replace")) is not None
    except (OSError, ValueError):
        return False


def remove_switch(path: str) -> None:
    """Takes it away; no one else's."""
    if is_our_switch(path):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _read(path: str) -> Ordered:
    data, written_at = _read_own(path, MAX_ORDER_BYTES)
    fields = parse_line(data.decode(errors="replace"))
    return Ordered(order_in(fields or {}), written_at)


def _read_own(path: str, most: int) -> tuple[bytes, float]:
    """(what a file of ours or of root's holds, when it was written). Raises OSError, ValueError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (os.getuid(), 0):
            raise ValueError("another user's, or not a file")
        return os.read(fd, most), facts.st_mtime
    finally:
        os.close(fd)


def write_status(directory: str, status: SupervisorStatus) -> None:
    """Replaces the status; nothing where there is no directory yet, or no room."""
    data = msgspec.json.encode(status)
    if len(data) > MAX_STATUS_BYTES:
        data = msgspec.json.encode(msgspec.structs.replace(status, nodes=(), spares=()))
    place = Path(directory)
    temporary = place / f".{STATUS_FILE}.new"
    with contextlib.suppress(OSError):
        temporary.write_bytes(data)
        temporary.replace(place / STATUS_FILE)
