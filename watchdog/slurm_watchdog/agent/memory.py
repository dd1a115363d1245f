"""What an agent knows when it ends, for the next one on the same boot: no log line is read twice or lost, no report is
lost, no command is done twice, and what a child hung on is not touched again.

It is one file in a directory in memory (/run), which the loop reads and writes itself: such a file cannot hang.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.child import decode, encode
from slurm_watchdog.agent.children.children import HungChild
from slurm_watchdog.agent.delivery.spool import Waiting
from slurm_watchdog.agent.gpu.orphan_processes import OrphanMemory
from slurm_watchdog.agent.logs.job_logs import LogMemory
from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.agent.processes.reader import ProcessMemory
from slurm_watchdog.agent.sums import NodeSums
from slurm_watchdog.base.descriptors import describe

log = logging.getLogger(__name__)
FILE = "memory.json"
MAX_BYTES = 64 << 20  # The largest spool takes 11 MiB, 10,000 processes 10.
LIFETIME_S = 600.0  # As long as a report waits: of what is older only the kernel log's position counts.


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Times are of the monotonic clock, which all processes of one boot share."""

    boot_id: str = ""
    node: str = ""
    written_at: float = 0.0
    kernel_log: int | None = None  # Sequence number of the next record.
    hung: tuple[HungChild, ...] = ()
    reports: tuple[Waiting, ...] = ()  # Encoded, and not taken by the controller yet.
    processes: ProcessMemory = ProcessMemory()
    logs: LogMemory = LogMemory()
    orphans: OrphanMemory = OrphanMemory()
    jobs: JobsHere = msgspec.field(default_factory=JobsHere)
    commands: tuple[str, ...] = ()  # Ids of those that were done or refused.
    controller_id: str = ""
    sums: NodeSums = msgspec.field(default_factory=NodeSums)


class MemoryFile:
    """The file of an agent. An empty directory: nothing is kept."""

    def __init__(self, directory: str, boot_id: str, node: str):
        self.path = os.path.join(directory, FILE) if directory else ""
        self._boot_id, self._node, self._problem = boot_id, node, ""

    def take(self, now: float) -> Memory:
        """What the agent before this one has left. It counts once: the file is removed."""
        if not self.path:
            return Memory()
        try:
            with open(self.path, "rb") as file:
                data = file.read(MAX_BYTES)
            found = _parse(data)
            os.unlink(self.path)
        except FileNotFoundError:
            return Memory()
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read (%s): the agent starts without it", self.path, error)
            return Memory()
        if not self._boot_id or (found.boot_id, found.node) != (self._boot_id, self._node):
            return Memory()
        position = Memory(kernel_log=found.kernel_log)
        self.write(position, now)
        return found if 0 <= now - found.written_at <= LIFETIME_S else position

    def write(self, memory: Memory, now: float) -> None:
        """Replaces the file in one step. What hinders is logged once."""
        if not self.path:
            return
        memory = replace(memory, boot_id=self._boot_id, node=self._node, written_at=now)
        temporary, problem = f"{self.path}.new", ""
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o755, exist_ok=True)
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                # File names may not be UTF-8, which `encode` handles.
                file.write(encode(msgspec.to_builtins(memory, str_keys=True)))
            os.replace(temporary, self.path)
        except OSError as error:
            problem = describe(error)
        if problem and problem != self._problem:
            log.warning("%s cannot be written (%s): a restarted agent knows nothing of before", self.path, problem)
        self._problem = problem


def _parse(data: bytes) -> Memory:
    """A part that another release wrote differently is left out. Raises ValueError or msgspec.MsgspecError."""
    given, parts = msgspec.convert(decode(data), dict[str, Any]), dict[str, Any]()
    for part in msgspec.structs.fields(Memory):
        try:
            if part.name in given:
                parts[part.name] = msgspec.convert(given[part.name], part.type, str_keys=True)
        except msgspec.ValidationError as error:
            log.warning("%s of the agent before this one cannot be read (%s): it starts without that", part.name, error)
    position = parts.get("kernel_log")
    return Memory(**(parts | ({} if position is None or 0 <= position < 2**63 else {"kernel_log": None})))
