"""What is known of the logs of one job, and what the next agent has to know of it."""

from __future__ import annotations

import msgspec

from slurm_watchdog.knowledge.ray_train import WorkerRank
from slurm_watchdog.model.observations import Event, LogFile


class FollowedJob(msgspec.Struct):
    uid: int
    seen_at: float
    opened: list[str] = []
    found: dict[str, list[str]] = {}  # What stands for each pattern with wildcards.
    left_out: list[str] = []  # Logs that are not followed, for there are too many.
    seats: dict[int, WorkerRank] = {}  # Pid, as the job sees it -> rank, as a log of this run said last.
    said: tuple[tuple[int, int, int, int], ...] = ()  # The rows of that, also where an earlier run wrote them.
    restarts: int | None = None


class LogMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of logs, for the one that it becomes: how far each was read, and the recent past."""

    jobs: dict[str, FollowedJob] = {}
    rows: tuple[tuple[LogFile, float], ...] = ()
    recent: tuple[tuple[float, Event], ...] = ()  # In the order in which they were read.
