"""What is known of the processes of a node, for the agent that this one becomes."""

from __future__ import annotations

import msgspec

from slurm_watchdog.agent.proc.entry import Stat
from slurm_watchdog.agent.proc.process_facts import JobMember, ProcessFacts
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory
from slurm_watchdog.agent.processes.identity_cache import UnidentifiedProcess


class EntryMemory(msgspec.Struct, frozen=True, array_like=True):
    """One process, for the agent that this one becomes."""

    known: ProcessFacts
    stat: Stat
    member: JobMember | None
    container_pid: int | None
    ticks: int
    identified: int
    state_since: float


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of the processes of its node: who stood in a call yesterday has stood there since
    yesterday."""

    entries: tuple[EntryMemory, ...] = ()
    to_identify: tuple[int, ...] = ()
    stuck: dict[int, UnidentifiedProcess] = {}
    tracks: tuple[tuple[tuple[int, int, int], BlockedCallHistory], ...] = ()
