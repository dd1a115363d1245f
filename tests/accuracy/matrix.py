"""The whole matrix: every case at several sizes and seeds, every healthy thing for thousands of hours;
figures and tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from lab.bench.figures import Figures, quantile
from tests.accuracy.cases import CASES, Case
from tests.accuracy.healthy import THINGS, Thing
from tests.accuracy.run import run_case, run_thing
from tests.accuracy.score import Score

SEEDS = {1: 5, 2: 5, 4: 3, 8: 2, 16: 1, 48: 1}
"""Runs of each case, by its number of nodes."""
REPLAYED_SIZE = 2
"""Of this size each case is recorded once, too, and its replay judged."""
HOURS = 10_000.0
LEAST_HOURS = 12.0
"""Of each healthy thing, whatever its share."""


@dataclass
class Healthy:
    """What came of one healthy thing."""

    hours: float = 0.0
    runs: int = 0
    false: list[str] = field(default_factory=list)


@dataclass
class Results:
    scores: list[Score] = field(default_factory=list)
    healthy: dict[str, Healthy] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """One thing to do in a process of the pool: places in CASES or THINGS, for functions do not travel."""

    is_case: bool
    place: int
    seed: int
    nodes: int = 0
    way: str = "direct"


def plan(hours: float, names: tuple[str, ...] = (), seed_from: int = 0) -> list[Job]:
    """Everything that is to be run. `names` are parts of the names of cases and things; none: all."""
    jobs = []
    for place, case in enumerate(CASES):
        if names and not any(name in case.key for name in names):
            continue
        for nodes in case.sizes:
            jobs += [Job(True, place, seed_from + n, nodes, "direct") for n in range(SEEDS[nodes])]
            if nodes == REPLAYED_SIZE and case.by_frames:
                jobs.append(Job(True, place, seed_from, nodes, "replay"))
    things = [
        (place, thing) for place, thing in enumerate(THINGS) if not names or any(name in thing.key for name in names)
    ]
    shares = sum(thing.share for thing in THINGS)
    for place, thing in things:
        wanted = max(LEAST_HOURS * min(1.0, hours / HOURS), hours * thing.share / shares)
        seed, planned = seed_from, 0.0
        while planned < wanted:
            lasts = thing.hours(seed)
            jobs.append(Job(False, place, seed, thing.sizes[seed % len(thing.sizes)][0]))
            planned += lasts
            seed += 1
    return _mixed(jobs)


def _mixed(jobs: list[Job]) -> list[Job]:
    """Cases and healthy things side by side, seed after seed: a run that is cut short has done some of each."""
    parts = [[job for job in jobs if job.is_case is is_case] for is_case in (True, False)]
    places = []
    for part in parts:
        part.sort(key=lambda job: (job.seed, job.nodes, job.place, job.way))
        places += [((number + 0.5) / len(part), not job.is_case, job) for number, job in enumerate(part)]
    return [job for _, _, job in sorted(places, key=lambda each: each[:2])]


def work(job: Job) -> tuple[Job, Score | None, Healthy | None]:
    """One job, in a process of its own or in this one."""
    if job.is_case:
        case: Case = CASES[job.place]
        return job, run_case(case, job.seed, job.nodes, job.way), None
    thing: Thing = THINGS[job.place]
    hours, said, failures, _ = run_thing(thing, job.seed)
    false = [f"{i.kind} at {i.fired_at:.0f} s: {i.summary} (--case {thing.key} --seed {job.seed})" for i in said]
    false += [f"detector {name} failed (--case {thing.key} --seed {job.seed})" for name in dict.fromkeys(failures)]
    return job, None, Healthy(hours=hours, runs=1, false=false)


def run(jobs: list[Job], processes: int, minutes: float = float("inf")) -> Results:
    """Runs them all, or what can be done in so many `minutes`, and tells on standard error how far it is."""
    results, began = Results(), time.monotonic()
    for done, (job, score, healthy) in enumerate(_each(jobs, processes, began + 60.0 * minutes), 1):
        if score is not None:
            results.scores.append(score)
        if healthy is not None:
            known = results.healthy.setdefault(THINGS[job.place].key, Healthy())
            known.hours, known.runs = known.hours + healthy.hours, known.runs + 1
            known.false += healthy.false
        if done % 100 == 0:
            hours = sum(each.hours for each in results.healthy.values())
            _say(f"{done} of {len(jobs)} runs, {hours:.0f} healthy job-hours, {time.monotonic() - began:.0f} s")
    for known in results.healthy.values():
        known.false.sort()
    results.scores.sort(key=lambda each: (each.case, each.way, each.nodes, each.seed))
    results.seconds = time.monotonic() - began
    return results


def _each(jobs: list[Job], processes: int, until: float) -> Iterator[tuple[Job, Score | None, Healthy | None]]:
    """What comes of each; from `until` on (of time.monotonic()) none is begun any more."""
    if processes <= 1:
        for job in jobs:
            if time.monotonic() < until:
                yield work(job)
        return
    with ProcessPoolExecutor(processes) as pool:
        waiting = iter(jobs)
        running = {pool.submit(work, job) for job in islice(waiting, 2 * processes)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            more = islice(waiting, len(done)) if time.monotonic() < until else ()
            running |= {pool.submit(work, job) for job in more}


# ------------------------------------------------------------------------------------ figures


@dataclass(frozen=True)
class Row:
    """One case, one way."""

    case: str
    way: str
    runs: int
    found: float
    culprit: float | None
    p50_s: float | None
    p99_s: float | None
    bound_s: float
    late: int
    false: int


def rows(scores: Iterable[Score]) -> list[Row]:
    """The scores, a row for each case and way."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for each in scores:
        groups.setdefault((each.case, each.way), []).append(each)
    return [_row(case, way, group) for (case, way), group in sorted(groups.items())]


def _row(case: str, way: str, group: list[Score]) -> Row:
    seconds = [each.seconds for each in group if each.seconds is not None]
    named = [each.culprit for each in group if each.culprit is not None]
    return Row(
        case=case, way=way, runs=len(group), found=100.0 * sum(each.found for each in group) / len(group),
        culprit=100.0 * sum(named) / len(named) if named else None, p50_s=quantile(seconds, 0.5) if seconds else None,
        p99_s=quantile(seconds, 0.99) if seconds else None, bound_s=max(each.bound_s for each in group),
        late=sum(1 for each in group if each.found and not each.in_time), false=sum(len(each.false) for each in group),
    )  # fmt: skip


def write_figures(figures: Figures, results: Results) -> None:
    """One line of JSON a figure."""
    for row in rows(results.scores):
        name = f"accuracy.{row.case}" if row.way == "direct" else f"accuracy.{row.case}.replayed"
        figures.add(f"{name}.found_percent", row.found, "%", at_least=100)
        figures.add(
            f"{name}.right_culprit_percent",
            row.culprit if row.culprit is not None else 0.0,
            "%",
            at_least=100,
        )
        if row.p99_s is not None:
            figures.add(f"{name}.seconds_to_verdict_p99", row.p99_s, "s", at_most=round(row.bound_s, 1))
        figures.add(f"{name}.late", row.late, "runs", at_most=0)
        figures.add(f"{name}.false_incidents", row.false, "incidents", at_most=0)
    for key, each in sorted(results.healthy.items()):
        figures.add(f"accuracy.{key}.false_per_1000_job_hours", per_1000_hours(each), "incidents", at_most=0)
    if results.healthy:
        everything = Healthy(
            sum(e.hours for e in results.healthy.values()),
            0,
            [f for e in results.healthy.values() for f in e.false],
        )
        figures.add("accuracy.healthy.job_hours", everything.hours, "h")
        figures.add("accuracy.healthy.false_per_1000_job_hours", per_1000_hours(everything), "incidents", at_most=0)


def per_1000_hours(healthy: Healthy) -> float:
    return 1000.0 * len(healthy.false) / healthy.hours if healthy.hours else 0.0


def table(results: Results) -> list[str]:
    """For people: every case, and then whatever went wrong with the command that shows it again."""
    lines = [
        f"{'case':46} {'way':6} {'runs':>4} {'found':>6} {'named':>6} {'p50':>6} {'p99':>6} {'bound':>6} {'false':>5}"
    ]
    for row in rows(results.scores):
        lines.append(
            f"{row.case:46} {row.way:6} {row.runs:4} {row.found:5.0f}% {_percent(row.culprit):>6} {_s(row.p50_s):>6} {_s(row.p99_s):>6} "
            f"{row.bound_s:6.0f} {row.false:5}"
        )
    lines.append("")
    lines += [
        f"{key:46} {each.hours:8.0f} job-hours, {each.runs:4} runs, {len(each.false)} false incidents"
        for key, each in sorted(results.healthy.items())
    ]
    wrong = [each for each in results.scores if not each.perfect]
    lines += [
        "",
        f"{len(wrong)} of {len(results.scores)} runs are not as they should be" + (":" if wrong else ""),
    ]
    for each in wrong:
        lines.append(f"  {_what(each)}  {each.command()}")
        lines += [f"      {text[:220]}" for text in (*each.false[:3], *each.failures[:3])]
    for key, thing in sorted(results.healthy.items()):
        lines += [f"  false ({key}): {text}" for text in thing.false[:10]]
    return lines


def summary(results: Results, date: str, commit: str) -> dict[str, Any]:
    """What docs/evaluation.md shows of a run of `date` (YYYY-MM-DD) at `commit`, for a file of JSON:
    tools/docs/evaluation.py makes the tables of it."""
    return {
        "date": date,
        "commit": commit,
        "minutes": round(results.seconds / 60),
        "cases": [
            {
                "case": row.case,
                "way": row.way,
                "runs": row.runs,
                "found": row.found,
                "culprit": row.culprit,
                "p50_s": row.p50_s,
                "p99_s": row.p99_s,
                "late": row.late,
                "false": row.false,
            }
            for row in rows(results.scores)
        ],
        "healthy": [
            {"thing": key, "hours": each.hours, "false": len(each.false)}
            for key, each in sorted(results.healthy.items())
        ],
    }


def _what(score: Score) -> str:
    if not score.found:
        return "not found"
    if score.failures:
        return "a detector failed"
    if score.culprit is False:
        return "wrong culprit"
    if not score.in_time:
        return f"late ({score.seconds:.0f} s, bound {score.bound_s:.0f} s)"
    return "said more than it should"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


def _say(text: str) -> None:
    sys.stderr.write(f"accuracy: {text}\n")
    sys.stderr.flush()
