"""A cluster with slow nodes, and a search for them: each restart takes its nodes back but those that are left out. And
clusters in which something else makes jobs slower for a while, which a search must not take for a node."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from slurm_watchdog.analysis.slow_node_search import (
    SLOW,
    Verdict,
    judge,
    leave_out,
    measure,
    without,
)
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.controller.slow_searches import SURE
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


NOTHING = Verdict(named=(), suspects=(), height=0.0, unclear=0, unclear_now=0, acquitted=False)
"""Of a search that does not begin."""
Factor = Callable[[float], tuple[float, float | None]]
"""At so many seconds since the search began: by which factor every step takes longer whatever the nodes are, and the
batch size, where the log says it."""


def _undisturbed(chance: random.Random, starts: bool) -> Factor:
    return lambda at: (1.0, None)


def _evaluation(chance: random.Random, starts: bool) -> Factor:
    """Within a step, every 5 to 20 min, for 10 to 120 s: nobody announces it. From the beginning of the search on, if it
    `starts` then."""
    every_s, takes_s, phase = chance.uniform(300, 1200), chance.uniform(10, 120), chance.random()

    def at(now: float) -> tuple[float, float | None]:
        due = (now / every_s + phase) % 1 < STEP_S / every_s and (now >= 0 or not starts)
        return (1 + takes_s / STEP_S if due else 1.0), None

    return at


def _ramp(chance: random.Random, starts: bool) -> Factor:
    """The batch grows by a few per cent every two hours or so, three times, and the log says it."""
    at_s = sorted([0.0] * starts + [chance.uniform(1800, 21_600) for _ in range(3 - starts)])
    grows = [chance.uniform(1.03, 1.15) for _ in at_s]

    def at(now: float) -> tuple[float, float | None]:
        size = math.prod(more for begin, more in zip(at_s, grows, strict=True) if now >= begin)
        return size, round(256 * size)

    return at


def _ramp_not_logged(chance: random.Random, starts: bool) -> Factor:
    """The same, and the log says nothing of batches."""
    at = _ramp(chance, starts)
    return lambda now: (at(now)[0], None)


def _storage(chance: random.Random, starts: bool) -> Factor:
    """A filesystem that others use: 5 min to an hour, some hours apart, every step waits for its data."""
    times, begin = list[tuple[float, float, float]](), 0.0 if starts else chance.expovariate(1 / 7200)
    while begin < 200_000:
        end = begin + chance.uniform(300, 3600)
        times.append((begin, end, chance.uniform(1.04, 1.4)))
        begin = end + 1800 + chance.expovariate(1 / 7200)

    def at(now: float) -> tuple[float, float | None]:
        return next((factor for begin, end, factor in times if begin <= now < end), 1.0), None

    return at


LOOK_ALIKES: dict[str, Callable[[random.Random, bool], Factor]] = {
    "": _undisturbed,
    "evaluation": _evaluation,
    "ramp": _ramp,
    "storage": _storage,
    "ramp_not_logged": _ramp_not_logged,
}


def search_cluster(
    nodes: int, in_job: int, slow_nodes: int, seed: int, most: int = 60, noise: float = 0.02, swing: float = 0.01,
    place: float = 0.0, like: str = "",
) -> Searched:  # fmt: skip
    """1 to 3 nodes of the job become 3 to 10 % slower; its step times scatter by `noise` and swing by so much with the
    hour of the day; what a slow node costs differs by up to `place` of it from run to run. `like`: what else makes steps
    longer (LOOK_ALIKES); with no slow node it is what the search began with. Ends with the verdict, or after `most`
    restarts."""
    chance = random.Random(f"{nodes}/{in_job}/{slow_nodes}/{seed}{like}")
    names = [f"n{number:04d}" for number in range(nodes)]
    job, spares = names[:in_job], names[in_job:]
    slow = {node: chance.uniform(0.03, 0.10) for node in chance.sample(job, slow_nodes)}
    phase = chance.random()
    other = LOOK_ALIKES[like](chance, not slow_nodes)
    batch = other(0.0)[1]

    def run(used: tuple[str, ...], at: float, steps: int = STEPS) -> tuple[float, float] | None:
        """Level and error of a run that begins then; None: nothing of it can be compared with the first one."""
        cost = 1 + place * chance.uniform(-1, 1) if place else 1.0
        top = cost * max((slow.get(node, 0.0) for node in used), default=0.0)
        day = 1 + swing * math.sin(2 * math.pi * (at / 86400 + phase))
        seconds, now = list[float](), at
        for _ in range(steps):
            factor, size = other(now)
            step_s = STEP_S * (1 + top) * day * (1 + chance.gauss(0, noise)) * factor
            now += step_s
            if size == batch or at < 0:
                seconds.append(step_s)
        return measure(seconds)

    before = run((), -3 * STEPS * STEP_S - 600.0, 3 * STEPS)
    after = run(tuple(job), 0.0, STEPS)
    assert before is not None and after is not None
    (fast, error), (level, slow_error) = before, after
    if level - fast < SLOW or (like == "ramp" and not slow_nodes):  # as SlowSearches and slow_job: nothing begins
        return Searched(NOTHING, 0, None, frozenset(slow), frozenset())
    search = SlowSearch(
        suspects=tuple(job), fast=fast, slow=level, error=error, at=0.0,
        slow_error=max(error, slow_error) if like else None,
    )  # fmt: skip
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
        measured = run(used, restarts * RESTART_EVERY_S)
        if measured is None:
            continue
        level, error = measured
        seen = SearchRun(nodes=used, level=level, error=error, at=restarts * RESTART_EVERY_S)
        search = SlowSearch(
            suspects=search.suspects, fast=search.fast, slow=search.slow, error=search.error, at=search.at,
            runs=(*search.runs, seen), slow_error=search.slow_error,
        )  # fmt: skip
    after_restarts, who = first or (None, frozenset())
    return Searched(verdict, restarts, after_restarts, frozenset(slow), who)


def confirmed(found: Searched) -> frozenset[str]:
    """Nodes that are held against in full at its end, as SlowSearches writes them down."""
    return frozenset(each.node for each in found.verdict.named if each.confirmed and each.confidence >= SURE)


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
