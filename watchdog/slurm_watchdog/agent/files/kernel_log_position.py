"""How far the kernel's log was read: a small file with the boot it belongs to, which only a child touches."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from slurm_watchdog.agent.workers.request_types import ReadState, WriteState
from slurm_watchdog.agent.workers.worker_state import WorkerState

MAX_STATE_BYTES = 4096


def read_state(request: ReadState, worker: WorkerState) -> str | None:
    """In a child: the text of the state file, bounded; None if there is none."""
    try:
        with open(request.path, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_STATE_BYTES)
    except FileNotFoundError:
        return None


def write_state(request: WriteState, worker: WorkerState) -> None:
    """In a child: replaces the state file in one step, making its directory if need be."""
    path = Path(request.path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(request.text)
        file.flush()
        os.fsync(fd)
    temporary.replace(path)


def parse_state(text: str | None, boot_id: str) -> int | None:
    """The position in a state file; None if there is none, if it is another boot's, or if it is garbage."""
    try:
        value = msgspec.json.decode(text or "null")
        sequence = value["sequence"]
        matches = value["boot_id"] == boot_id
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError):
        return None
    is_position = isinstance(sequence, int) and not isinstance(sequence, bool) and 0 <= sequence < 2**63
    return sequence if matches and boot_id and is_position else None
