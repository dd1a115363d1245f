"""Which node makes a job slow, from the speed of its runs on different nodes. Pure.

A job is as slow as its slowest node. So a run that is fast clears every node that it used, and one that is slow used
a slow node: group testing (R. Dorfman, "The detection of defective members of large populations", 1943) with runs for
pools and nodes that were left out for what is not in the pool; halving the suspects finds one of N in log2 N runs. Of
several slow nodes of different speed a run shows the slowest it used: each height above the fast level is searched for
by itself, and one run halves the suspects of all of them.

Only like is compared with like: the caller gives runs of one batch size. What the hour of the day explains is followed
from run to run; a run that fits no known height, or two of them, is unclear and says nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from math import ceil, erfc, exp, hypot, inf, log, log2, pi, sin, sqrt
from statistics import fmean

from slurm_watchdog.analysis.level_shift import DAY_SWING
from slurm_watchdog.analysis.memo import by_identity
from slurm_watchdog.base.midmean import midmean
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.slow_search import SearchRun, SlowSearch

BATCH = 10
"""Steps of one batch (see level_shift)."""
LEAST_BATCHES = 6
"""Of a run whose speed is measured."""
SAME = 0.006
"""Two heights that differ by less (on logarithms) are one: the spread that equal nodes have anyway is about half of a
per cent (P. Sinha et al., "Not all GPUs are created equal", SC 2022, without the slow ones)."""
ERRORS = 3.0
"""Standard errors by which a run may miss its height."""
LIKE = 1.5
"""Standard errors by which a slow run may miss the height of the first one and be taken for the same: of two slow
nodes that differ by less one may pass for the other, and does little harm."""
SLOW = 0.025
"""A run that is slower by less may be so by the hour of the day: it says nothing."""
ROUGH, TALLER = 0.35, 2.0
"""Of a height: what a slow node, or a slow link, costs differs with its place among the others. A run that is slower
than twice what the search began with has something else."""
LEAST_HEIGHT = 0.02
"""Slower by less is not searched for: the runs of one job differ by that."""
SEEN = 2
"""Slow runs that nobody but a node explains, the one in which the job became slow among them, before it is named beside
another one: what the hour of the day did to a single run has named a wrong one."""
CONFIRMED_BY = 3
"""Slow runs with a node, and a fast one without it, before it is held against the node in full. Of searches that began
with no slow node at all, but with a filesystem that others slow down for 5 min to an hour every two hours or so, 0.6 %
end with a confirmed name (2,000 searches); if two runs sufficed 7 %, and with one a third (300). Of searches with one
slow node 80 % confirm it, 96 % if two runs sufficed; a failed test confirms the others. Beside a batch that grows, and
of which the log says nothing, 0.3 % confirm a wrong name, and 2.8 % if no run had to be fast (800; slow_clusters of the
tests)."""
SKIPPED = 5
"""First steps of a run, which compile, warm caches and fill pipelines."""


class SlowNode(Struct, frozen=True, kw_only=True):
    """A node that makes the job slow."""

    node: str
    percent: float
    """By which a step takes longer with it."""
    confidence: float
    """That no run on which this rests was misread."""
    confirmed: bool = False
    """By CONFIRMED_BY slow runs, once the job has been fast without it, or by a test that it failed: anything may have
    made the job slow in one of them, and a batch that has grown makes all of them slow."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What is known so far."""

    named: tuple[SlowNode, ...]
    """Slowest first."""
    suspects: tuple[tuple[str, ...], ...]
    """Of each height for which no node is named yet, the tallest first."""
    height: float
    """Of the newest clear run: 0 where it was fast."""
    unclear: int
    """Runs that said nothing."""
    unclear_now: int
    """Of these the newest, one after the other."""
    acquitted: bool
    """A run was slow although every node that it used has been in a faster one: it is none of the nodes, and what
    contradicts itself names nobody."""
    uncleared: tuple[str, ...] = ()
    """Nodes that were in no fast run yet."""
    to_confirm: tuple[str, ...] = ()
    """Nodes that one run alone speaks against: the next one has to use them."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to be found."""
        names = {each.node for each in self.named}
        return self.acquitted or (not self.suspects and names.issuperset(self.uncleared))


def measure(seconds: Sequence[float]) -> tuple[float, float] | None:
    """(level, standard error) of the steps of a run that can be compared; None: they are too few."""
    logs = [log(value) for value in seconds[SKIPPED:] if value > 0]
    return level_of([midmean(logs[at : at + BATCH]) for at in range(0, len(logs) - BATCH + 1, BATCH)])


def level_of(means: Sequence[float]) -> tuple[float, float] | None:
    """The same of the means of batches, on logarithms."""
    if len(means) < LEAST_BATCHES:
        return None
    level = fmean(means)
    rest = [mean - level for mean in means]
    whole = sum(v * v for v in rest)
    together = sum(a * b for a, b in pairwise(rest)) / whole if whole else 0.0
    r = min(0.9, together) if together > 2 / sqrt(len(rest)) else 0.0  # less is what chance gives
    return level, sqrt(whole / (len(rest) - 1) / len(rest) * (1 + r) / (1 - r))


class _Read(Struct, frozen=True):
    """A run as it was read."""

    nodes: tuple[str, ...]
    height: float
    """Above the fast level; 0 where it was fast."""
    room: float
    """By so much the height may be wrong."""
    doubt: float
    """Probability that it was fast and not slow, or the other way round."""


def judge(search: SlowSearch) -> Verdict:
    """What the runs say, each of the nodes that it used."""
    return _judge(search.runs, search)


@by_identity
def _judge(_: tuple[SearchRun, ...], search: SlowSearch) -> Verdict:
    clear, unclear_now = _read(search)
    at_most = _at_most(clear)
    slow = [run for run in clear if run.height > 0]
    groups = _narrowed([(run, _group(run, search.suspects, at_most)) for run in slow], search.faulty)
    groups.sort(key=lambda each: (len(each[1]), -each[0].height))
    tested = any(run.height < slow[0].height - slow[0].room for run in clear)
    acquitted = any(not group for _, group in groups)
    back = any(run.height == 0 for run in clear)
    doubt = sum(run.doubt for run in clear)
    alone = Counter(node for _, group in groups if len(group) == 1 and tested for node in group)
    least = min(SEEN, max(alone.values(), default=SEEN))
    named: dict[str, SlowNode] = {}
    for run, group in groups:
        (node,) = group if len(group) == 1 else ("",)
        if alone[node] >= least and node not in named and (least == SEEN or not named):
            seen = sum(node in each.nodes for each in slow)
            named[node] = SlowNode(
                node=node, percent=percent_of(run.height), confidence=max(0.0, 1 - doubt),
                confirmed=(seen >= CONFIRMED_BY and back) or node in search.faulty,
            )  # fmt: skip
    left = [group for _, group in groups if group and not any(node in group for node in named)]
    return Verdict(
        named=() if acquitted else tuple(sorted(named.values(), key=lambda each: -each.percent)),
        suspects=tuple(tuple(sorted(group)) for group in left),
        height=clear[-1].height,
        unclear=1 + len(search.runs) - len(clear),
        unclear_now=unclear_now,
        acquitted=acquitted,
        uncleared=tuple(node for node in search.suspects if at_most[node] >= LEAST_HEIGHT),
        to_confirm=tuple(sorted(alone.keys() - named.keys())),
    )


def _group(run: _Read, suspects: tuple[str, ...], at_most: dict[str, float]) -> frozenset[str]:
    """Nodes of which one made the run slow: of those that the job had used when it became slow or, where it is none of
    them, of those that came in their place."""
    found = [node for node in run.nodes if at_most[node] >= run.height - run.room]
    return frozenset(found).intersection(suspects) or frozenset(found)


_Groups = list[tuple[_Read, frozenset[str]]]


def _narrowed(groups: _Groups, faulty: tuple[str, ...]) -> _Groups:
    """The groups of nodes of which one is slow, by the tests of those nodes: who failed is it, as long as that explains
    every slow run. A test that passed clears nobody: what makes the job slow may be nothing that it measures."""
    found = [(run, group.intersection(faulty)) for run, group in groups]
    return found if all(group for _, group in found) else groups


def _at_most(clear: Sequence[_Read]) -> dict[str, float]:
    """By how much each node may slow a run down at most: it was in one that was only so slow."""
    found: dict[str, float] = {}
    for run in clear:
        for node in run.nodes:
            found[node] = min(run.height + run.room * (run.height > 0), found.get(node, inf))
    return found


def _read(search: SlowSearch) -> tuple[list[_Read], int]:
    """The runs that were clearly slow or clearly fast, the one in which it became slow first; and how many of the
    newest are not among them."""
    height, slow_error = search.slow - search.fast, search.error if search.slow_error is None else search.slow_error
    read = [_Read(search.suspects, height, max(SAME, ERRORS * slow_error, ROUGH * height), 0.0)]
    drift, spread, clear_at, unclear = 0.0, 0.0, search.at, 0
    uncleared = set(search.suspects)
    for run in search.runs:
        hours = abs(run.at - clear_at) / 3600
        spread = hypot(spread, 2 * DAY_SWING * sin(pi / 24 * min(12.0, hours)) / ERRORS)
        error = sqrt(run.error**2 + search.error**2 + spread**2)
        room, raw = max(SAME, ERRORS * error), run.level - search.fast - drift
        innocent = unclear > 0 and abs(raw) <= 2 * DAY_SWING and uncleared.isdisjoint(run.nodes)
        if innocent:  # it cannot but be fast, and says what fast is at this hour
            drift, spread, raw = drift + raw, run.error, 0.0
        elif raw > TALLER * height + 2 * room or LEAST_HEIGHT - room <= raw <= max(SLOW, LEAST_HEIGHT / 2 + room):
            unclear += 1
            continue  # slower than ever: something else is wrong; or neither slow nor fast
        unclear = 0
        is_fast = innocent or raw < LEAST_HEIGHT - room
        if is_fast:
            uncleared.difference_update(run.nodes)
        doubt = erfc(abs(raw - LEAST_HEIGHT * 0.75) / max(error, 1e-9) / sqrt(2)) / 2
        seen = 0.0 if is_fast else min(raw, height + room)
        read.append(_Read(run.nodes, seen, max(room, ROUGH * seen), doubt))
        off = raw if is_fast else raw - height
        if is_fast or abs(off) <= LIKE * error:  # of a level that is known: so much the hour of the day has changed
            gain = spread**2 / error**2 if error > 0 else 0.0
            drift, spread = drift + gain * off, spread * sqrt(1 - gain)
        clear_at = run.at
    return read, unclear


def leave_out(verdict: Verdict, at_most: int, chance: random.Random) -> tuple[str, ...]:
    """Nodes that the next run should do without, the named ones among them; `at_most` so many can be replaced.

    Half of the smallest group in which a slow node must be; and as far as there are enough others, whatever else was
    in no fast run: then a slow run says that the slow node is in the half that it used, however many there are.
    After an unclear run it is all who were in no fast run: the next one shows what fast is at this hour.
    """
    out = [each.node for each in verdict.named]
    if verdict.unclear_now:
        out += [node for node in verdict.uncleared if node not in out]
    elif verdict.suspects:
        group = verdict.suspects[0]
        if group[0] not in verdict.to_confirm:
            out += chance.sample(group, max(1, len(group) // 2))
        out += [node for node in verdict.uncleared if node not in group and node not in out]
    return tuple(out[:at_most])


def restarts_needed(suspects: int, at_most: int) -> int:
    """Runs until one slow node among so many is named, where `at_most` can be left out at once: each takes as many as
    are allowed, and then halves."""
    if at_most <= 0:
        return 0
    linear = max(0, ceil(suspects / at_most) - 2)
    left = min(suspects, 2 * at_most)
    return linear + max(1, ceil(log2(left))) + 1


def percent_of(height: float) -> float:
    """Of a height on logarithms."""
    return 100 * (exp(height) - 1)


def without(nodes: Sequence[str], out: Collection[str], spares: Sequence[str]) -> tuple[str, ...]:
    """The nodes of a run that leaves some out and takes spares in their place, as a scheduler would."""
    kept = [node for node in nodes if node not in out]
    fresh = [node for node in spares if node not in out and node not in kept]
    return tuple(kept + fresh[: len(nodes) - len(kept)])
