"""What is known of one job whose logs are followed, and what one child is asked about them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from slurm_watchdog.agent.workers.request_types import Follow
from slurm_watchdog.knowledge.ray_train import WorkerRank
from slurm_watchdog.model.observations import Event, LogFile


@dataclass
class FollowedJob:
    uid: int
    seen_at: float
    opened: list[str] = field(default_factory=list)
    found: dict[str, list[str]] = field(default_factory=dict)
    """What stands for each pattern with wildcards."""
    left_out: list[str] = field(default_factory=list)
    """Logs that are not followed, for there are too many."""
    seats: dict[int, WorkerRank] = field(default_factory=dict)
    """Pid, as the job sees it -> rank, as a log of this run said last."""
    said: tuple[tuple[int, int, int, int], ...] = ()
    """The rows of that, also where an earlier run wrote them."""
    restarts: int | None = None


class LogMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of logs, for the one that it becomes: how far each was read, and the recent past."""

    jobs: dict[str, FollowedJob] = {}
    rows: tuple[tuple[LogFile, float], ...] = ()
    recent: tuple[tuple[float, Event], ...] = ()
    """In the order in which they were read."""


@dataclass
class Plan:
    """What one child is asked in one look."""

    files: list[tuple[str, str, int | None]] = field(default_factory=list)
    globs: list[tuple[str, str]] = field(default_factory=list)
    own: dict[str, list[str]] = field(default_factory=dict)
    """Of each job, the site's patterns of progress."""

    def request(self, taken: str | None) -> Follow:
        return Follow(self.files, self.globs, self.own, taken)
