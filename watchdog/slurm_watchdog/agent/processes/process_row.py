"""One process as a row of the report."""

from __future__ import annotations

import os

import msgspec

from slurm_watchdog.agent.proc.entry import LASTING_STATES, Entry
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory
from slurm_watchdog.agent.processes.identity_cache import UnidentifiedProcess
from slurm_watchdog.model.observations import Blocked, Process, Role


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of the processes of its node: who stood in a call yesterday has stood there since
    yesterday."""

    entries: tuple[Entry, ...] = ()
    to_identify: tuple[int, ...] = ()
    stuck: dict[int, UnidentifiedProcess] = {}
    tracks: tuple[tuple[tuple[int, int, int], BlockedCallHistory], ...] = ()


CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def describe(entry: Entry, blocked: Blocked | None, now: float) -> Process:
    known, member, stat = entry.known, entry.member, entry.stat
    assert member is not None
    age_s = now - entry.state_since
    timeout = known.collective_timeout if member.role is Role.RANK else None
    return Process(
        pid=known.pid,
        start_ticks=known.start_ticks,
        job_id=member.job_id,
        role=member.role,
        comm=known.comm,
        state=stat.state,
        state_age_s=age_s if age_s > 0 and stat.state in LASTING_STATES else None,
        uid=known.uid,
        member_by=member.by,
        step_id=member.step_id,
        rank=member.rank,
        local_rank=member.local_rank,
        world_size=member.world_size,
        cpu_s=stat.cpu_ticks / CLOCK_TICKS,
        io_bytes=entry.io_bytes,
        threads=stat.threads,
        context_switches=entry.switches,
        runnable_s=entry.runnable_s,
        container_pid=entry.container_pid,
        blocked=blocked,
        collective_timeout_s=None if timeout is None else timeout[0],
        collective_timeout_assumed=timeout is not None and timeout[1],
    )
