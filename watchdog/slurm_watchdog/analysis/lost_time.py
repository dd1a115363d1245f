"""Where the time of jobs went: what a report counts, from the runs of each job and what was reported of them. Pure.

Effective training time is the time of those steps that were kept: the steps that a run made, less those that the next
run made again, times the usual time of a step of that run. Its share of the time for which nodes were allocated is
what Meta calls the effective training time ratio (A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters", 2024), without the time in the queue, which costs nobody a GPU and is counted beside it.

A run is divided in this order, each part bounded by what is left:
  start       from its beginning to its first new step: `first start`, or `restart` where a run came before;
  waiting     from its last new step to its end, under the kind of the incident that was open then, else `ended STATE`;
              what of it came before the incident was reported is beside that its time `to be noticed`;
  recomputed  steps that the next run made again, and those that a restart in its allocation made again;
  effective   the steps that were kept;
  incidents   in between, for as long as they were open, divided in the same way;
  other       what remains: evaluations, checkpoints, steps slower than usual.
A run whose steps could not be read is `not measured`, and in no share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from math import ceil

from msgspec.structs import replace

from slurm_watchdog.analysis.saved_time import Savings, savings
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.run_record import RunRecord, Spell
from slurm_watchdog.model.slurm_states import ALIVE, FAILED

FIRST_START, RESTART, RECOMPUTED, OTHER = "first start", "restart", "recomputed steps", "other"
NOT_MEASURED = "not measured"
SLACK_S = 60.0
"""An incident that began so long after a run's end is still about it."""
PROMPT_STEPS = 3.0
"""The end of a run is no wait if it came within so many steps (and PROMPT_S) of the last, without an incident."""
PROMPT_S = 30.0
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
MOST_DAYS = 31
"""Of a trend by day; above it is one by week."""
MOST_WEEKS = 60
"""Of a trend by single weeks: runs are kept for 57."""


class JobTime(Struct, frozen=True, kw_only=True):
    """Of one job. Hours are node-hours."""

    job_id: str
    name: str
    user: str
    account: str
    partition: str
    nodes: int
    runs: int
    began_at: float
    ended_at: float
    allocated_h: float
    measured_h: float
    effective_h: float
    lost_h: tuple[tuple[str, float], ...]
    """(cause, node-hours), the largest first."""
    to_be_noticed_h: tuple[tuple[str, float], ...] = ()
    """What of `lost_h` came before the incident was reported, by its kind."""
    queued_h: float
    """Hours, not node-hours, in the queue between its runs."""
    failures: int
    """Runs that ended by themselves with an error, or by an action for an incident; not those that ended for
    maintenance, at a time limit, or since a person asked."""

    @property
    def share(self) -> float | None:
        """Effective share of what was measured; None: nothing was."""
        return self.effective_h / self.measured_h if self.measured_h > 0 else None


class Report(Struct, frozen=True, kw_only=True):
    """Of all jobs together."""

    since: float
    until: float
    jobs: tuple[JobTime, ...]
    """Those that lost most first."""
    allocated_h: float
    measured_h: float
    effective_h: float
    lost_h: tuple[tuple[str, float], ...]
    to_be_noticed_h: tuple[tuple[str, float], ...]
    """As of a job."""
    failures: int
    node_hours_between_failures: float | None
    incidents: tuple[tuple[str, int], ...]
    """(kind, how many), the most first."""
    nodes: tuple[tuple[str, int], ...]
    """(node, incidents that name it), the most first; maintenance of a node is no incident of its own."""
    savings: Savings
    trend: tuple[tuple[float, float, float, float], ...] = ()
    """(date, node-hours, those measured, those effective), where it was asked for."""

    @property
    def share(self) -> float | None:
        """As of a job."""
        return self.effective_h / self.measured_h if self.measured_h > 0 else None


def report(runs: Iterable[RunRecord], spells: Iterable[Spell], since: float, until: float) -> Report:
    """What happened from `since` to `until` (dates). What a run did outside of these is left out in proportion to its
    time; what ended before is what savings are compared with."""
    runs, spells = list(runs), list(spells)
    of_job: dict[str, list[Spell]] = defaultdict(list)
    within = [each for each in spells if each.ended_at >= since and each.began_at <= until]
    for each in within:
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
    return Report(
        since=since,
        until=until,
        jobs=tuple(sorted(jobs, key=lambda job: (-sum(hours for _, hours in job.lost_h), job.job_id))),
        allocated_h=allocated_h,
        measured_h=sum(job.measured_h for job in jobs),
        effective_h=sum(job.effective_h for job in jobs),
        lost_h=_largest(lost),
        to_be_noticed_h=_largest(to_be_noticed),
        failures=failures,
        node_hours_between_failures=allocated_h / failures if failures else None,
        incidents=tuple(Counter(each.kind for each in within).most_common()),
        nodes=tuple(Counter(node for each in within if not each.planned for node in each.nodes).most_common(20)),
        savings=savings(runs, spells, since, until),
    )


def with_trend(found: Report, runs: Iterable[RunRecord], spells: Iterable[Spell]) -> Report:
    """The same with what came of each day, or, of more than MOST_DAYS, of each week."""
    of_job: dict[str, list[RunRecord]] = defaultdict(list)
    spells_of: dict[str, list[Spell]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.restarts):
        of_job[run.job_id].append(run)
    for each in spells:
        spells_of[each.job_id].append(each)
    began_at = max(found.since, min((run.began_at for mine in of_job.values() for run in mine), default=found.until))
    weeks = (found.until - began_at) / (7 * DAY_S)
    span_s = DAY_S if 7 * weeks <= MOST_DAYS else 7 * DAY_S * ceil(weeks / MOST_WEEKS)
    trend = []
    for number in range(ceil((found.until - began_at) / span_s)):
        start, end = began_at + number * span_s, min(found.until, began_at + (number + 1) * span_s)
        parts = [
            part
            for job_id, mine in of_job.items()
            if any(_end(run) > start and run.began_at < end for run in mine)
            and (part := _job_time(mine, spells_of[job_id], start, end)) is not None
        ]
        sums = (sum(getattr(part, name) for part in parts) for name in ("allocated_h", "measured_h", "effective_h"))
        trend.append((start, *sums))
    return replace(found, trend=tuple(trend))


def _job_time(runs: Sequence[RunRecord], spells: Sequence[Spell], since: float, until: float) -> JobTime | None:
    """The runs of one job, in their order; None if it did nothing in that time."""
    lost: dict[str, float] = defaultdict(float)
    to_be_noticed: dict[str, float] = defaultdict(float)
    allocated_h = measured_h = effective_h = 0.0
    counted, failures = [], 0
    for number, run in enumerate(runs):
        following = runs[number + 1] if number + 1 < len(runs) else None
        whole_s = _end(run) - run.began_at
        inside_s = min(_end(run), until) - max(run.began_at, since)
        if whole_s <= 0 or inside_s <= 0:
            continue
        mine = [each for each in spells if each.restarts in (None, run.restarts)]
        watched = replace(run, began_at=min(run.watched_from or run.began_at, _end(run)))
        parts = _parts(watched, following, mine, is_first=number == 0 and run.restarts == 0)
        hours = inside_s / whole_s * run.nodes / HOUR_S
        counted.append(run)
        allocated_h += whole_s * hours
        watched_s = _end(run) - watched.began_at
        if watched_s < whole_s:
            lost[NOT_MEASURED] += (whole_s - watched_s) * hours
        if parts is None:
            lost[NOT_MEASURED] += watched_s * hours
        else:
            measured_h += watched_s * hours
            effective_h += parts.kept_s * hours
            _add(lost, {cause: seconds * hours for cause, seconds in parts.lost_s.items()})
            _add(to_be_noticed, {kind: seconds * hours for kind, seconds in parts.to_be_noticed_s.items()})
        failures += _has_failed(run, mine) and since <= _end(run) <= until
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
        ended_at=_end(last),
        allocated_h=allocated_h,
        measured_h=measured_h,
        effective_h=effective_h,
        lost_h=_largest(lost),
        to_be_noticed_h=_largest(to_be_noticed),
        queued_h=sum(max(0.0, b.began_at - _end(a)) for a, b in pairwise(counted)) / HOUR_S,
        failures=failures,
    )


class _Parts(Struct, frozen=True, kw_only=True):
    """Of one run, in seconds."""

    kept_s: float
    lost_s: Mapping[str, float]
    to_be_noticed_s: Mapping[str, float] = {}


def _parts(run: RunRecord, following: RunRecord | None, spells: Sequence[Spell], *, is_first: bool) -> _Parts | None:
    """Seconds of steps that were kept, and what the rest went to; None if its steps are not known."""
    left_s = _end(run) - run.began_at
    lost: dict[str, float] = defaultdict(float)
    to_be_noticed: dict[str, float] = defaultdict(float)
    if run.first_rise_at is None or run.last_rise_at is None or run.first_step is None or run.last_step is None:
        return _stepless(run, spells, left_s)

    def take(cause: str, seconds: float) -> float:
        nonlocal left_s
        taken = min(max(0.0, seconds), left_s)
        left_s -= taken
        if taken > 0:
            lost[cause] += taken
        return taken

    def take_wait(cause: str, began_at: float, ended_at: float, about: Sequence[Spell]) -> None:
        taken = take(cause, ended_at - began_at)
        fired_at = min((each.fired_at for each in about if each.fired_at is not None), default=began_at)
        if (before_s := min(taken, fired_at - began_at)) > 0:
            to_be_noticed[cause] += before_s

    take(FIRST_START if is_first else RESTART, run.first_rise_at - run.began_at)
    tail_s = _end(run) - run.last_rise_at
    is_prompt = tail_s <= max(PROMPT_S, PROMPT_STEPS * (run.step_s or 0.0) * run.stride)
    about = _about(run, spells)
    if run.ended_at is not None and (about or not is_prompt):
        take_wait(_why_it_waited(run, spells), run.last_rise_at, _end(run), about)
    made = max(0, run.last_step - run.first_step)
    again = 0
    if following is not None and following.first_step is not None:
        again = min(made, max(0, run.last_step - following.first_step))
    step_s = run.step_s or (run.last_rise_at - run.first_rise_at) / max(1, made)
    take(RECOMPUTED, again * step_s + sum(each.recomputed_s for each in spells))
    kept_s = min(left_s, (made - again) * step_s)
    left_s -= kept_s
    for each in spells:
        if run.first_rise_at <= each.began_at < run.last_rise_at:
            take_wait(each.kind, each.began_at, min(each.ended_at, run.last_rise_at), [each])
    take(OTHER, left_s)
    return _Parts(kept_s=kept_s, lost_s=lost, to_be_noticed_s=to_be_noticed)


def _stepless(run: RunRecord, spells: Sequence[Spell], seconds: float) -> _Parts | None:
    """A run that failed before its first step has done nothing that counts, if its job is one whose steps are read."""
    if run.ended_at is None or not _has_failed(run, spells):
        return None
    return _Parts(kept_s=0.0, lost_s={_why_it_waited(run, spells): seconds})


def _about(run: RunRecord, spells: Sequence[Spell]) -> list[Spell]:
    """The incidents that were open from its last new step on, the first of them first."""
    last_at = run.last_rise_at or run.began_at
    about = (each for each in spells if last_at - SLACK_S <= each.began_at <= _end(run) + SLACK_S)
    return sorted(about, key=lambda each: each.began_at)


def _why_it_waited(run: RunRecord, spells: Sequence[Spell]) -> str:
    about = _about(run, spells)
    if about:
        return about[0].kind
    return f"ended {run.state}" if run.state and run.state not in ALIVE else "waiting"


def _has_failed(run: RunRecord, spells: Sequence[Spell]) -> bool:
    if run.ended_at is None:
        return False
    about = [each for each in spells if run.began_at <= each.began_at <= _end(run) + SLACK_S]
    if any(each.acted and not each.planned for each in about):
        return True
    as_planned = any(each.planned and each.ended_at >= _end(run) - SLACK_S for each in about)
    return run.state in FAILED and not as_planned


def _end(run: RunRecord) -> float:
    return run.seen_at if run.ended_at is None else run.ended_at


def _add(to: dict[str, float], more: Mapping[str, float]) -> None:
    for cause, amount in more.items():
        to[cause] += amount


def _largest(hours: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(hours.items(), key=lambda item: (-item[1], item[0])))
