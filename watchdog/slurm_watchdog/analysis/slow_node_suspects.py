"""Which node makes a job slow, from the speed of its runs on different nodes. Pure.

A job is as slow as its slowest node: a run that is as fast as the job was clears every node that it used, and one that
is slow used a slow node. No restart is made to find out; those that happen anyway tell, and tests of the nodes do. Only
like is compared with like (runs of one batch size and of as many nodes), and a run that is neither clearly fast nor
clearly slow says nothing.
"""

from __future__ import annotations

from math import exp, hypot, pi, sin

from slurm_watchdog.analysis.level_shift import DAY_SWING
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import fold, plural
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.past_runs import SearchRun, SlowSearch

SAME = 0.006
"""Two levels that differ by less (on logarithms) are one: the spread that equal nodes have anyway is about half of a
per cent (P. Sinha et al., "Not all GPUs are created equal", SC 2022, without the slow ones)."""
ERRORS = 3.0  # Standard errors by which a run may miss its level.
SLOW, LEAST_HEIGHT, TALLER = 0.025, 0.02, 2.0
"""A run that is slower by less than SLOW may be so by the hour of the day, by less than LEAST_HEIGHT it is fast; one
that is slower than twice what the search began with has something else."""
CONFIRMED_BY = 3  # Slow runs with a node, and a fast one without it, before it is held against it in full.


class Verdict(Struct):
    """What is known so far."""

    suspects: tuple[str, ...]  # Nodes of the first run of which one must be slow; empty: it is none of them.
    named: str = ""  # The one that is left, once the job was fast without it, or that failed a test.
    confirmed: bool = False


def judge(search: SlowSearch) -> Verdict:
    """What the runs say, each of the nodes that it used."""
    cleared, slow = set[str](), [frozenset(search.first.nodes)]
    for run in search.runs:
        fast = is_fast(search, run)
        if fast:
            cleared.update(run.nodes)
        elif fast is False:
            slow.append(frozenset(run.nodes))
    left = set(search.first.nodes) - cleared
    if any(nodes <= cleared for nodes in slow):
        left = set()  # a slow run used only nodes that a fast one has used, too
    both = left.intersection(*slow)
    left = both or left  # of several slow nodes none may be in all slow runs
    left = left.intersection(search.faulty) or left
    named = min(left) if len(left) == 1 and (cleared or left <= set(search.faulty)) else ""
    seen = sum(named in nodes for nodes in slow)
    return Verdict(
        suspects=tuple(sorted(left)), named=named,
        confirmed=bool(named) and (named in search.faulty or (seen >= CONFIRMED_BY and bool(cleared))),
    )  # fmt: skip


def is_fast(search: SlowSearch, run: SearchRun) -> bool | None:
    """Whether a run is as fast as the job was; None: it is neither clearly fast nor clearly slow."""
    hours = min(12.0, abs(run.at - search.first.at) / 3600)
    room = max(SAME, ERRORS * hypot(run.error, search.error), 2 * DAY_SWING * sin(pi / 24 * hours))
    height, first = run.level - search.fast, search.first.level - search.fast
    if height < LEAST_HEIGHT - room or (height <= SAME and room <= LEAST_HEIGHT):
        return True
    if height > TALLER * first + 2 * room or height <= max(SLOW, LEAST_HEIGHT / 2 + room):
        return None
    return False


def is_first_run(search: SlowSearch, job: JobView) -> bool:
    """Whether the job's present run is the one that became slow."""
    return (search.first.restarts, search.first.step_id) == (job.job.restarts, job.step_id)


def is_run_of(run: SearchRun, job: JobView) -> bool:
    """Whether it is the job's present one."""
    return (run.restarts, run.step_id, run.nodes) == (job.job.restarts, job.step_id, job.ranks_on)


def present_speed(search: SlowSearch, job: JobView) -> tuple[bool, str] | None:
    """Whether the present run is slow, and by how much, compared with the job as it was; None: it is the run that
    became slow, or its speed cannot be told yet."""
    run = search.runs[-1] if search.runs else search.first
    if is_first_run(search, job) or not is_run_of(run, job) or (fast := is_fast(search, run)) is None:
        return None
    return not fast, f"{_seconds(search.fast)} s a step then, {_seconds(run.level)} s now"


# ---------------------------------------------------------------------------------------------- in sentences


def search_facts(search: SlowSearch) -> tuple[str, ...]:
    """What is known, and what comes next."""
    verdict = judge(search)
    seen = f"{plural(1 + len(search.runs), 'run')} compared"
    if verdict.named:
        return (named_words(search, verdict),)
    if not verdict.suspects:
        return (
            f"it is not one of the nodes ({seen}): runs are slow that used only nodes of fast ones. Look at what they "
            f"share: storage, network, the job's own data",
        )
    names = ", ".join(fold(verdict.suspects))
    return (
        f"one of {plural(len(verdict.suspects), 'node')} may make it slow: {names} ({seen}). Each restart on other "
        f"nodes narrows them; `slurm-watchdog test-nodes` on those that are idle is sooner",
    )


def named_words(search: SlowSearch, verdict: Verdict) -> str:
    """`n17 makes a step of job 7 7.1 % longer: …`, with the figures of the runs with and without it."""
    node, runs = verdict.named, (search.first, *search.runs)
    used, without = ([run.level for run in runs if (node in run.nodes) is there] for there in (True, False))
    tested = "; a test of it failed" if node in search.faulty else ""
    takes = f"; not confirmed: that takes {CONFIRMED_BY} slow runs with it and a fast one without, or a failed test"
    unsure = "" if verdict.confirmed else takes
    percent = 100 * (exp(search.first.level - search.fast) - 1)
    return (
        f"{node} makes a step of job {search.job_id} {percent:.1f} % longer: {_range(used)} s in "
        f"{plural(len(used), 'run')} with it, {_range(without)} s in {len(without)} without, "
        f"{_seconds(search.fast)} s before step {search.step}{tested}{unsure}"
    )


def _range(levels: list[float]) -> str:
    low, high = (_seconds(each(levels)) for each in (min, max)) if levels else ("?", "?")
    return low if low == high else f"{low} to {high}"


def _seconds(level: float) -> str:
    return f"{exp(level):.4g}"
