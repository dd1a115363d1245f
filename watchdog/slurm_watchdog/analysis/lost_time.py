"""Where the time of jobs went: what a report counts, from the runs of each job and what was reported of them. Pure.

Effective training time is the time of those steps that were kept: the steps that a run made, less those that the next
run made again, times the usual time of a step of that run. Its share of the time for which nodes were allocated is
what Meta calls the effective training time ratio (A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters", 2024), without the time in the queue, which costs nobody a GPU and is counted beside it.

slurm_watchdog.analysis.run_time divides each run. One whose steps could not be read is `not measured`, and in no share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

from msgspec.structs import replace

from slurm_watchdog.analysis.run_time import KEPT, divide, end_of, has_failed, seconds_within
from slurm_watchdog.analysis.saved_time import savings
from slurm_watchdog.model.lost_time import JobTime, Report
from slurm_watchdog.model.run_record import RunRecord, Spell

NOT_MEASURED = "not measured"
HOUR_S = 3600.0


def _share(effective_h: float, measured_h: float) -> float | None:
    return effective_h / measured_h if measured_h > 0 else None


def report(runs: Iterable[RunRecord], spells: Iterable[Spell], since: float, until: float) -> Report:
    """What happened from `since` to `until` (dates). What a run did outside of these is left out; what ended before is
    what savings are compared with."""
    runs, spells = list(runs), list(spells)
    of_job: dict[str, list[Spell]] = defaultdict(list)
    within = [each for each in spells if each.ended_at >= since and each.began_at <= until]
    for each in spells:
        of_job[each.job_id].append(each)
    ordered = sorted(runs, key=lambda run: (run.job_id, run.restarts))
    jobs = [
        job
        for job_id, mine in groupby(ordered, key=lambda run: run.job_id)
        if (job := _job_time(list(mine), of_job[job_id], since, until)) is not None
    ]
    lost: dict[str, float] = defaultdict(float)
    to_be_noticed: dict[str, float] = defaultdict(float)
    for job in jobs:
        _add(lost, dict(job.lost_h))
        _add(to_be_noticed, dict(job.to_be_noticed_h))
    failures, allocated_h = sum(job.failures for job in jobs), sum(job.allocated_h for job in jobs)
    measured_h, effective_h = sum(job.measured_h for job in jobs), sum(job.effective_h for job in jobs)
    return Report(
        since=since,
        until=until,
        known_jobs=len(jobs),
        jobs=tuple(sorted(jobs, key=lambda job: (-sum(hours for _, hours in job.lost_h), job.job_id))),
        allocated_h=allocated_h,
        measured_h=measured_h,
        effective_h=effective_h,
        lost_h=_largest(lost),
        to_be_noticed_h=_largest(to_be_noticed),
        failures=failures,
        node_hours_between_failures=allocated_h / failures if failures else None,
        incidents=tuple(Counter(each.kind for each in within).most_common()),
        nodes=tuple(Counter(node for each in within if not each.planned for node in each.nodes).most_common(20)),
        savings=savings(runs, spells, since, until),
        share=_share(effective_h, measured_h),
    )


def _job_time(runs: Sequence[RunRecord], spells: Sequence[Spell], since: float, until: float) -> JobTime | None:
    """The runs of one job, in their order; None if it did nothing in that time."""
    lost: dict[str, float] = defaultdict(float)
    to_be_noticed: dict[str, float] = defaultdict(float)
    allocated_h = measured_h = effective_h = 0.0
    counted, failures = [], 0
    for number, run in enumerate(runs):
        following = runs[number + 1] if number + 1 < len(runs) else None
        ended_at = end_of(run)
        inside_s = _overlap_s(run.began_at, ended_at, since, until)
        if inside_s <= 0:
            continue
        mine = [each for each in spells if each.restarts in (None, run.restarts)]
        watched = replace(run, began_at=max(run.began_at, min(run.watched_from or run.began_at, ended_at)))
        division = divide(watched, following, mine, is_first=number == 0 and run.restarts == 0)
        watched_s = min(inside_s, max(0.0, _overlap_s(watched.began_at, ended_at, since, until)))
        hours = run.nodes / HOUR_S
        counted.append(run)
        allocated_h += inside_s * hours
        if division is None:
            watched_s = 0.0
        else:
            of = seconds_within(division.parts, since, until)
            effective_h += of.pop(KEPT, 0.0) * hours
            _add(lost, {cause: seconds * hours for cause, seconds in of.items()})
            before = seconds_within(division.to_be_noticed, since, until)
            _add(to_be_noticed, {kind: seconds * hours for kind, seconds in before.items()})
        measured_h += watched_s * hours
        if watched_s < inside_s:
            lost[NOT_MEASURED] += (inside_s - watched_s) * hours
        failures += has_failed(run, mine) and since <= ended_at <= until
    if not counted:
        return None
    last = counted[-1]
    return JobTime(
        job_id=last.job_id,
        name=last.name,
        user=last.user,
        account=last.account,
        partition=last.partition,
        nodes=max(run.nodes for run in counted),
        runs=len(counted),
        began_at=counted[0].began_at,
        ended_at=end_of(last),
        allocated_h=allocated_h,
        measured_h=measured_h,
        effective_h=effective_h,
        lost_h=_largest(lost),
        to_be_noticed_h=_largest(to_be_noticed),
        queued_h=sum(max(0.0, b.began_at - end_of(a)) for a, b in pairwise(counted)) / HOUR_S,
        failures=failures,
        share=_share(effective_h, measured_h),
    )


def _overlap_s(began_at: float, ended_at: float, since: float, until: float) -> float:
    return min(ended_at, until) - max(began_at, since)


def _add(to: dict[str, float], more: Mapping[str, float]) -> None:
    for cause, amount in more.items():
        to[cause] += amount


def _largest(hours: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(hours.items(), key=lambda item: (-round(item[1], 6), item[0])))
