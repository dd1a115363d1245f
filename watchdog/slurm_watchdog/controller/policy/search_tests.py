"""Which nodes a test may tell apart, so that the search for a slow node needs no restart for them. Pure."""

from __future__ import annotations

from typing import Final

from slurm_watchdog.analysis.slow_node_search import judge
from slurm_watchdog.model.slow_search import JobSearch, SearchState

MOST: Final = 16
"""Nodes of one test. A search has come down to so few of 4,096 after eight runs; to test them takes the minutes of one
restart, and spares about four."""


def to_be_tested(search: JobSearch, idle: frozenset[str]) -> tuple[str, ...]:
    """Suspects that are idle because the job runs without them, and that this search has not tested yet; none before
    so few are left that it is cheaper than restarts, and none once the search is over.

    Only of the smallest group in which a slow node must be: of others a fault would prove nothing about this job.
    """
    verdict = judge(search.search)
    if search.state is not SearchState.SEARCHING or verdict.over or not verdict.suspects:
        return ()
    group, tested = verdict.suspects[0], {each.node for each in search.tests}
    used = search.search.runs[-1].nodes if search.search.runs else search.search.suspects
    if len(group) > MOST or not set(group).isdisjoint(used):
        return ()
    return tuple(node for node in group if node in idle and node not in tested)
