"""What an agent leaves to the one that it becomes: over a new configuration nothing is reported twice, nothing is
lost, no one is forgotten.

It goes through a file in memory that exec leaves open, never to disk. What cannot be read of it is as after
any other restart.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from slurm_watchdog.agent.delivery.spool import Waiting
from slurm_watchdog.agent.processes.jobs_here import JobsMemory
from slurm_watchdog.agent.reload.settings import write_in_memory
from slurm_watchdog.agent.workers.child import decode, encode
from slurm_watchdog.agent.workers.worker import InheritedWorker

log = logging.getLogger(__name__)


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Times are of the monotonic clock, which continues over exec."""

    children: tuple[InheritedWorker, ...] = ()  # Those that had something to do, or hung.
    reports: tuple[Waiting, ...] = ()  # Encoded, and not taken by the controller yet.
    memories: dict[str, Any] = {}  # What each collector knew, by its name: of the type that its CollectorSpec says.
    jobs: JobsMemory = JobsMemory()
    commands: tuple[str, ...] = ()  # Ids of those that were done or refused.
    controller_id: str = ""


def write_handover(handover: Handover) -> int:
    """Puts it into a file in memory; returns its descriptor. Raises OSError."""
    data = encode(msgspec.to_builtins(handover, str_keys=True))  # file names may be no UTF-8, and it knows what to do
    return write_in_memory("handover", data)


def read_handover(fd: int) -> Handover:
    """What `write_handover` put there, empty if it is none; closes `fd`."""
    try:
        with open(fd, "rb") as file:
            return msgspec.convert(decode(file.read()), Handover, str_keys=True)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("what the agent before this one knew cannot be read (%s): it starts without that", error)
        return Handover()
