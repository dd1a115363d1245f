"""A cluster with slow nodes, and a search for them: each restart takes its nodes back but those that are left out."""

from __future__ import annotations

import math
import random

from slurm_watchdog.analysis.slow_node_search import (
    Verdict,
    judge,
    leave_out,
    measure,
    without,
)
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.slow_search import JobSearch, SearchRun, SearchState, SlowSearch

STEPS = 180
"""Of a run that are measured, half an hour; three times as many were seen before the search."""
STEP_S = 10.0
RESTART_EVERY_S = 2400.0


class Searched(Struct, frozen=True):
    """What a search came to."""

    verdict: Verdict
    restarts: int
    first_named_after: int | None
    slow: frozenset[str]
    first_named: frozenset[str]
    """The names of the first verdict that had one."""


def search_cluster(
    nodes: int, in_job: int, slow_nodes: int, seed: int, most: int = 60, noise: float = 0.02, swing: float = 0.01,
    place: float = 0.0,
) -> Searched:  # fmt: skip
    """1 to 3 nodes of the job become 3 to 10 % slower; its step times scatter by `noise` and swing by so much with the
    hour of the day; what a slow node costs differs by up to `place` of it from run to run. Ends with the verdict, or after `most` restarts."""
    chance = random.Random(f"{nodes}/{in_job}/{slow_nodes}/{seed}")
    names = [f"n{number:04d}" for number in range(nodes)]
    job, spares = names[:in_job], names[in_job:]
    slow = {node: chance.uniform(0.03, 0.10) for node in chance.sample(job, slow_nodes)}
    phase = chance.random()

    def run(used: tuple[str, ...], at: float, steps: int = STEPS) -> tuple[float, float]:
        cost = 1 + place * chance.uniform(-1, 1) if place else 1.0
        top = cost * max((slow.get(node, 0.0) for node in used), default=0.0)
        day = 1 + swing * math.sin(2 * math.pi * (at / 86400 + phase))
        found = measure([STEP_S * (1 + top) * day * (1 + chance.gauss(0, noise)) for _ in range(steps)])
        assert found is not None
        return found

    fast, error = run((), -2400.0, 3 * STEPS)
    search = SlowSearch(suspects=tuple(job), fast=fast, slow=run(tuple(job), 0.0, STEPS)[0], error=error, at=0.0)
    first: tuple[int, frozenset[str]] | None = None
    restarts = 0
    while True:
        verdict = judge(search)
        if verdict.named and first is None:
            first = restarts, frozenset(each.node for each in verdict.named)
        if verdict.over or restarts >= most:
            break
        restarts += 1
        used = without(job, leave_out(verdict, len(spares), chance), spares)
        level, error = run(used, restarts * RESTART_EVERY_S)
        seen = SearchRun(nodes=used, level=level, error=error, at=restarts * RESTART_EVERY_S)
        search = SlowSearch(
            suspects=search.suspects, fast=search.fast, slow=search.slow, error=search.error, at=search.at,
            runs=(*search.runs, seen),
        )  # fmt: skip
    after, who = first or (None, frozenset())
    return Searched(verdict, restarts, after, frozenset(slow), who)


def job_search(nodes: str, *runs: tuple[str, float]) -> JobSearch:
    """Job 7 became slower by 0.07 (on logarithms) on these nodes, and ran again on others, slower by so much."""
    found = tuple(
        SearchRun(nodes=tuple(used.split()), level=2.0 + height, error=0.001, at=1800.0 * number)
        for number, (used, height) in enumerate(runs, 1)
    )
    search = SlowSearch(suspects=tuple(nodes.split()), fast=2.0, slow=2.07, error=0.001, at=0.0, runs=found)
    return JobSearch(
        job_id="7", chain="", incident_id="s1", opened_at=0.0, updated_at=0.0, restarts=0, step_id="0", step=9,
        batch=None, logged=True, search=search, state=SearchState.SEARCHING,
    )  # fmt: skip
