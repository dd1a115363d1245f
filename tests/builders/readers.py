"""The agent's reader of processes with real children."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from slurm_watchdog.agent.children import become_user
from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.proc.table import ProcessTable
from slurm_watchdog.agent.processes.reader import ProcessReader
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.agent.tasks import TASKS
from slurm_watchdog.base.mounts import read_mounts


def reader(owners: Mapping[str, int] | None = None, children: Children | None = None) -> ProcessReader:
    """Of the processes of this machine, and of these jobs."""
    looks = UserLooks(children or Children(TASKS), ProcessTable())
    return ProcessReader(looks, read_mounts, owners=owners or {})


@contextmanager
def serving(uid: int) -> Iterator[None]:
    """As an agent that serves this user alone, who may be root."""
    before = list(become_user._alone)
    become_user.serve_alone(uid)
    try:
        yield
    finally:
        become_user._alone[:] = before
