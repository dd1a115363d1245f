"""The section `policy` of the configuration: what may be done, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from slurm_watchdog.config.exceptions import Values
from slurm_watchdog.config.types import Count, Percent, Seconds, Span


class Policy(Values, frozen=True):
    """What may be done, and how often. Each limit can only take an action away."""

    budget_percent: Percent = 20.0
    """Actions within `budget_window` on never more than this share of the running jobs (at least one: where one
    job has the whole cluster, one action an hour, unless `budget_window` is shorter)."""
    budget_window: Span = 3600.0
    """The window of this budget and of restarts_per_hour."""
    storm_jobs: Count = 3
    """Take no action while jobs of this many users have the same problem at once: the fabric or the storage is at
    fault. While this many jobs of one user have it: none on the jobs of that user."""
    storm_cooldown: Seconds = 120.0
    """Wait this long after a storm before acting again."""
    max_excluded_nodes: Count = 8
    """Never exclude more nodes than this from one job."""
    exclusion_lifetime: Span = 604800.0
    """Exclusions that the watchdog added are dropped after this time, from a job that waits or when it is
    requeued."""
    max_drained_nodes: Count = 2
    """No node is drained where so many are drained or down already, for any reason, …"""
    drained_percent: Percent = 5.0
    """… or this share of all nodes."""
    drain_lifetime: Seconds = 0.0
    """Our own drains are taken back after this time, if they are unchanged since; 0s = never."""
    suspects: Literal["ignore", "prefer", "exclude"] = "ignore"
    """Whether a restart avoids nodes that are suspect (detectors.suspect_node): prefer, where enough others are
    free now; exclude, where enough others are there."""
    quarantine: bool = False
    """Whether suspect nodes are drained (in mode act, within max_drained_nodes and drained_percent), and
    returned to service when an operator's test passes or they are repaired."""
    quarantine_test: bool = False
    """Whether the controller itself tests a node in quarantine once no job runs there (test-nodes, by its own
    user), and returns it to service or keeps it by the result."""
    quarantine_test_again: Span = 86400.0
    """Time before a node that failed its test, or could not be judged, is tested again."""
    renamed_nodes: dict[str, str] = {}
    """Nodes that have another name now, {old: new}: what is remembered of the one is the other's."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.quarantine_test and not self.quarantine:
            yield "quarantine_test: needs policy.quarantine: true, or there is nothing to be tested"
