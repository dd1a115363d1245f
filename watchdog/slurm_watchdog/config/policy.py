"""The section `policy` of the configuration: what may be done, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from slurm_watchdog.config.exceptions import Values
from slurm_watchdog.config.types import Count, Percent, Seconds, Span


class Policy(Values, frozen=True):
    """What may be done, and how often. Each limit can only take an action away."""

    budget_percent: Percent = 20.0
    """Actions within `budget_window` on at most this share of the running jobs, and at least one."""
    budget_window: Span = 3600.0
    """The window of this budget and of restarts_per_hour."""
    storm_jobs: Count = 3
    """No action while so many users have the same problem, and none on jobs of a user with so many of them."""
    storm_cooldown: Seconds = 120.0
    """Wait this long after a storm before acting again."""
    max_excluded_nodes: Count = 8
    """Never exclude more nodes than this from one job."""
    exclusion_lifetime: Span = 604800.0
    """Exclusions of ours are dropped after this time, from a job that waits or is requeued."""
    max_drained_nodes: Count = 2
    """No node is drained where so many are drained or down already, for any reason, …"""
    drained_percent: Percent = 5.0
    """… or this share of all nodes."""
    drain_lifetime: Seconds = 0.0
    """Our own drains are taken back after this time, if they are unchanged since; 0s = never."""
    suspects: Literal["ignore", "prefer", "exclude"] = "ignore"
    """Whether a restart avoids suspect nodes: ignore, prefer (where others are free) or exclude."""
    quarantine: bool = False
    """Whether suspect nodes are drained, and returned when an operator's test passes or they are repaired."""
    quarantine_test: bool = False
    """Whether the controller tests a node in quarantine itself, and returns or keeps it by the result."""
    quarantine_test_again: Span = 86400.0
    """Time before a node that failed its test, or could not be judged, is tested again."""
    renamed_nodes: dict[str, str] = {}
    """Nodes that have another name now, {old: new}: what is remembered of the one is the other's."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.quarantine_test and not self.quarantine:
            yield "quarantine_test: needs policy.quarantine: true, or there is nothing to be tested"
