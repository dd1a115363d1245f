"""Whose a process is, for all that looks into it: what is not one ordinary user's, through and through, is
not looked into.

A set-user-id program, one with file capabilities and one whose rights were changed under way belong to
someone else than the user who started them: the kernel shows that by users that differ, or by another owner
of its directory in /proc (it may not be dumped, proc(5)).
"""

from __future__ import annotations

import errno
import os

from slurm_watchdog.agent.workers.become_user import refusal_as
from slurm_watchdog.agent.workers.request_types import WorkerState


def parse_uids(status: bytes) -> tuple[int, ...]:
    """Real, effective, saved and file-system user in the text of /proc/PID/status; empty where they are missing."""
    for line in status.splitlines():
        if line.startswith(b"Uid:"):
            return tuple(int(word) for word in line.split()[1:5])
    return ()


def refusal_to_look(uids: tuple[int, ...], shown_uid: int, own: int | None) -> str | None:
    """Why a process with these users is not looked into; None if it is one ordinary user's, or all of it `own`'s.
    `shown_uid` is the owner of its /proc/PID: another one than its user where it may not be dumped."""
    if not uids:
        return "whose process it is cannot be read"
    if {*uids, shown_uid} != {uids[0]}:
        shown = "/".join(str(uid) for uid in dict.fromkeys((*uids, shown_uid)))
        return f"it is a set-user-id program, or may not be looked into (uid {shown})"
    return None if uids[0] == own else refusal_as(uids[0])


def read_refusal(pid: int, worker: WorkerState) -> str | None:
    """Why a living process is not looked into, None if it may be. Never blocks. Raises OSError if it has ended."""
    with open(f"/proc/{pid}/status", "rb") as file:
        uids = parse_uids(file.read(8192))
    return refusal_to_look(uids, os.stat(f"/proc/{pid}").st_uid, worker.own_uid)


def check_process(pid: int, worker: WorkerState) -> None:
    """Raises PermissionError with the reason if it is not to be looked into, another OSError if it is gone."""
    if (refusal := read_refusal(pid, worker)) is not None:
        raise PermissionError(errno.EPERM, f"process {pid}: {refusal}")
