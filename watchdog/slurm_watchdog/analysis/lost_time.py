"""Where the time of jobs went: what a report counts, from the runs of each job and what was reported of them. Pure.

Effective training time is the time of those steps that were kept: the steps that a run made, less those that the next
run made again, times the usual time of a step of that run. Its share of the time for which nodes were allocated is
what Meta calls the effective training time ratio (A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters", 2024), without the time in the queue, which costs no one a GPU and is counted beside it.

A run is divided in this order; each takes what is left of its time:
  start       from its beginning to its first new step: `first start`, or `restart` where a run came before;
  waiting     from its last new step to its end, under the kind of the incident that was open then, else `ended STATE`;
              what of it came before the incident was reported is beside that its time `to be noticed`;
  recomputed  steps that the next run made again, which are its last ones, and those before an incident that a restart
              in its allocation made again;
  effective   the steps that were kept: it is known how many, not when; they are spread over what is left;
  incidents   in between, for as long as they were open, divided in the same way;
  other       what remains: evaluations, checkpoints, steps slower than usual.
One whose steps could not be read is `not measured`, and in no share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from math import sqrt

from msgspec.structs import replace

from slurm_watchdog.base.averages import median
from slurm_watchdog.base.structs import Struct, picked
from slurm_watchdog.model.run_record import JobTime, Report, RunRecord, Savings, Spell
from slurm_watchdog.model.slurm_states import ALIVE, FAILED

FIRST_START, RESTART, RECOMPUTED, OTHER = "first start", "restart", "recomputed steps", "other"
KEPT = "kept"
SLACK_S = 60.0
"""An incident that began so long after a run's end, or ended so long before it, is still about it: judgements come with
ticks."""
PROMPT_STEPS = 3.0  # An end within so many steps (and PROMPT_S) of the last, without an incident, is no wait.
PROMPT_S = 30.0
LEAST_S = 1e-5  # Less than this is an error of rounding: dates are exact to some tenths of a microsecond.
Piece = tuple[float, float]  # From one date to another.


class Part(Struct):
    """What some time of a run went to."""

    cause: str  # KEPT, or what it was lost to.
    pieces: tuple[Piece, ...]
    share: float = 1.0  # Of these pieces; the rest of them is in another part.


class Division(Struct):
    """All of a run's time, and what of it waited to be noticed."""

    parts: tuple[Part, ...]
    to_be_noticed: tuple[Part, ...] = ()


def seconds_within(parts: Iterable[Part], since: float, until: float) -> dict[str, float]:
    """Cause -> seconds between two dates."""
    found: dict[str, float] = defaultdict(float)
    for part in parts:
        found[part.cause] += part.share * sum(max(0.0, min(high, until) - max(low, since)) for low, high in part.pieces)
    return {cause: seconds for cause, seconds in found.items() if seconds >= LEAST_S}


def divide(run: RunRecord, following: RunRecord | None, spells: Iterable[Spell], *, is_first: bool) -> Division | None:
    """What a run's time went to; None if its steps are not known. `spells`: the incidents of this run; `is_first`: no
    run of the job came before it."""
    ordered = sorted(spells, key=lambda each: each.began_at)
    if run.first_rise_at is None or run.last_rise_at is None or run.first_step is None or run.last_step is None:
        return _stepless(run, ordered)
    parts: list[Part] = []
    unseen: list[Part] = []

    def wait(cause: str, pieces: Sequence[Piece], about: Iterable[Spell], share: float = 1.0) -> None:
        parts.append(Part(cause=cause, pieces=tuple(pieces), share=share))
        reported = [each.fired_at for each in about if each.fired_at is not None]
        if reported:
            before, _ = _split(pieces, float("-inf"), min(reported))
            unseen.append(Part(cause=cause, pieces=tuple(before), share=share))

    ended_at = end_of(run)
    started, free = _split([(run.began_at, ended_at)], run.began_at, run.first_rise_at)
    parts.append(Part(cause=FIRST_START if is_first else RESTART, pieces=tuple(started)))
    about = _about(run, ordered)
    is_prompt = ended_at - run.last_rise_at <= max(PROMPT_S, PROMPT_STEPS * (run.step_s or 0.0) * run.stride)
    if run.ended_at is not None and (about or not is_prompt):
        waited, free = _split(free, run.last_rise_at, ended_at)
        wait(_why_it_waited(run, about), waited, about)

    made = max(0, run.last_step - run.first_step)
    again = 0
    if following is not None and following.first_step is not None:
        again = min(made, max(0, run.last_step - following.first_step))
    step_s = run.step_s or max(0.0, run.last_rise_at - run.first_rise_at) / max(1, made)
    recomputed, free = _split_last(free, again * step_s, ended_at)
    for each in (each for each in ordered if each.recomputed_s > 0):
        near, free = _split_last(free, each.recomputed_s, each.began_at)
        more, free = _split_last(free, each.recomputed_s - _length(near), ended_at)
        recomputed += near + more
    parts.append(Part(cause=RECOMPUTED, pieces=tuple(recomputed)))

    kept_s = min(_length(free), (made - again) * step_s)
    left_s, rest = _length(free) - kept_s, list[Part]()
    for each in ordered:
        if run.first_rise_at <= each.began_at < run.last_rise_at:
            open_, free = _split(free, each.began_at, min(each.ended_at, run.last_rise_at))
            open_s = _length(open_)
            share = min(max(0.0, left_s), open_s) / open_s if open_s > 0 else 0.0
            left_s -= share * open_s
            wait(each.kind, open_, [each], share)
            rest.append(Part(cause=OTHER, pieces=tuple(open_), share=1.0 - share))
    rest.append(Part(cause=OTHER, pieces=tuple(free)))
    rest_s = sum(each.share * _length(each.pieces) for each in rest)
    kept = kept_s / rest_s if rest_s > 0 else 0.0
    for part in rest:
        parts.append(Part(cause=KEPT, pieces=part.pieces, share=part.share * kept))
        parts.append(Part(cause=OTHER, pieces=part.pieces, share=part.share * (1.0 - kept)))
    return Division(parts=tuple(parts), to_be_noticed=tuple(unseen))


def _stepless(run: RunRecord, spells: Sequence[Spell]) -> Division | None:
    """A run that failed before its first step has done nothing that counts, if its job is one whose steps are read."""
    if run.ended_at is None or not has_failed(run, spells):
        return None
    whole = ((run.began_at, end_of(run)),)
    return Division(parts=(Part(cause=_why_it_waited(run, _about(run, spells)), pieces=whole),))


def _about(run: RunRecord, spells: Iterable[Spell]) -> list[Spell]:
    """The incidents that were open from its last new step on, the first of them first."""
    last_at = run.last_rise_at or run.began_at
    about = (each for each in spells if last_at - SLACK_S <= each.began_at <= end_of(run) + SLACK_S)
    return sorted(about, key=lambda each: each.began_at)


def _why_it_waited(run: RunRecord, about: Sequence[Spell]) -> str:
    if about:
        return about[0].kind
    return f"ended {run.state}" if run.state and run.state not in ALIVE else "waiting"


def has_failed(run: RunRecord, spells: Iterable[Spell]) -> bool:
    """Whether it ended by itself with an error, or by an action for an incident."""
    if run.ended_at is None:
        return False
    about = [each for each in spells if run.began_at <= each.began_at <= end_of(run) + SLACK_S]
    if any(each.acted and not each.planned for each in about):
        return True
    as_planned = any(each.planned and each.ended_at >= end_of(run) - SLACK_S for each in about)
    return run.state in FAILED and not as_planned


def end_of(run: RunRecord) -> float:
    """When it ended, or was seen last (a date)."""
    return run.seen_at if run.ended_at is None else run.ended_at


def _length(pieces: Iterable[Piece]) -> float:
    return sum(high - low for low, high in pieces)


def _split(pieces: Iterable[Piece], begin: float, end: float) -> tuple[list[Piece], list[Piece]]:
    """What of the pieces lies between two dates, and the rest, both in order of time."""
    inside, outside = list[Piece](), list[Piece]()
    for low, high in pieces:
        cut = max(low, begin), min(high, end)
        if cut[0] < cut[1]:
            inside.append(cut)
            outside += [each for each in ((low, cut[0]), (cut[1], high)) if each[0] < each[1]]
        elif low < high:
            outside.append((low, high))
    return inside, outside


def _split_last(pieces: Sequence[Piece], seconds: float, before: float) -> tuple[list[Piece], list[Piece]]:
    """The last so many seconds of the pieces before a date, and the rest."""
    if seconds <= 0:
        return [], list(pieces)
    begin = before
    for low, high in reversed(pieces):
        if seconds > 0 and low < (end := min(high, before)):
            begin = max(low, end - seconds)
            seconds -= end - begin
    return _split(pieces, begin, before)


# What restarts saved, and what those would have saved that were only observed.
# For every incident that an action of ours ended, its wait (from its beginning to its end, or to the end of its run)
# is compared with the median wait of the LAST incidents before it of the same kind, of the same user's jobs of the
# same name (else of any name), that no action of ours ended and that did not pass: they were open when their run
# ended. The difference times the nodes of the run is what was saved; it is negative where people were quicker.
# Without such an incident what was saved is unknown, and counted as that.
# Maintenance, time limits and what people asked for are left out: nothing was wrong that could have waited.
# Assumptions: no one would have been quicker or slower than before, and what a restart itself costs is the same for
# both. Messages of ours shorten the waits that are compared with, so the figure is rather too low.
# What would have been saved in mode act is a replay of what happened: from the decision that was made, and not
# carried out, to the end of the run that stood still until then. A restart follows that end, too, so what it costs is
# the same for both. A run that trained again by itself would have been restarted for nothing, and is counted as that.

LAST = 20  # Older waits are of other people and other habits.
Of = tuple[str, str, str]  # User, name of the job (empty: any), kind.


def savings(runs: Iterable[RunRecord], spells: Iterable[Spell], since: float, until: float) -> Savings:
    """Of the incidents that ended from `since` to `until` (dates); `runs` and `spells` are those of before, too."""
    run_of = {(run.job_id, run.restarts): run for run in runs}
    spells = list(spells)
    ours: list[tuple[RunRecord, Spell]] = []
    waits: dict[Of, list[tuple[float, float]]] = defaultdict(list)
    for spell in sorted(spells, key=lambda each: each.ended_at):
        run = None if spell.restarts is None else run_of.get((spell.job_id, spell.restarts))
        if run is None or spell.planned or _wait_s(run, spell) <= 0:
            continue
        if spell.acted:
            ours.append((run, spell))
        elif run.ended_at is not None and spell.ended_at >= run.ended_at - SLACK_S:
            for key in _keys(run, spell):
                waits[key].append((min(spell.ended_at, run.ended_at), _wait_s(run, spell)))
    saved_h, unknown, usual = 0.0, 0, []
    for run, spell in ours:
        if not since <= spell.ended_at <= until:
            continue
        before = next((found for key in _keys(run, spell) if (found := _before(waits[key], spell.began_at))), [])
        if not before:
            unknown += 1
            continue
        usual.append(median(before))
        saved_h += (usual[-1] - _wait_s(run, spell)) * run.nodes / 3600.0
    would_save_h, observed, recovered = _observed(run_of, spells, since, until)
    return Savings(
        saved_h=saved_h, compared=len(usual), unknown=unknown, usual_wait_s=median(usual) if usual else None,
        would_save_h=would_save_h, observed=observed, recovered=recovered,
    )  # fmt: skip


def _observed(
    run_of: Mapping[tuple[str, int], RunRecord], spells: Sequence[Spell], since: float, until: float
) -> tuple[float, int, int]:
    """(node-hours, runs, runs that recovered): of each run the earliest decision about an incident that was open at its
    end. One that an action of ours ended after all is not among them."""
    of_run: dict[tuple[str, int], list[Spell]] = defaultdict(list)
    for spell in spells:
        if spell.restarts is not None:
            of_run[spell.job_id, spell.restarts].append(spell)
    would_save_h, observed, recovered = 0.0, 0, 0
    for key, mine in of_run.items():
        run = run_of.get(key)
        decided = [each for each in mine if each.would_act_at is not None and each.stops_steps and not each.planned]
        if run is None or run.ended_at is None or not decided or any(each.acted for each in mine):
            continue
        if not since <= run.ended_at <= until:
            continue
        trained_at = run.last_rise_at or run.began_at
        at_end = [
            each.would_act_at for each in decided if each.ended_at >= run.ended_at - SLACK_S and each.would_act_at
        ]
        if at_end:
            observed += 1
            would_save_h += max(0.0, run.ended_at - max(min(at_end), trained_at)) * run.nodes / 3600.0
        elif any(each.would_act_at is not None and trained_at > each.would_act_at for each in decided):
            recovered += 1
    return would_save_h, observed, recovered


def _keys(run: RunRecord, spell: Spell) -> tuple[Of, ...]:
    return (run.user, run.name, spell.kind), (run.user, "", spell.kind)  # the closest first


def _before(waits: list[tuple[float, float]], at: float) -> list[float]:
    return [wait_s for _, wait_s in waits[: bisect_left(waits, (at, 0.0))][-LAST:]]


def _wait_s(run: RunRecord, spell: Spell) -> float:
    ended_at = spell.ended_at if run.ended_at is None else min(spell.ended_at, run.ended_at)
    return ended_at - spell.began_at


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
    return picked(
        JobTime,
        last,
        *("job_id", "name", "user", "account", "partition"),
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


MUCH_SMALLER = 0.01
"""From this share of the time between two failures on, a checkpoint is not much smaller: the two formulas differ by 5 %
there, and by more above."""


class Interval(Struct):
    """Advice for a job."""

    seconds: float  # Of training between two checkpoints.
    formula: str  # Whose it is, for people: name and year.


def checkpoint_interval(between_failures_s: float, save_s: float) -> Interval:
    """For a job that fails once in `between_failures_s` on average, and that a checkpoint holds up for `save_s`."""
    young_s = sqrt(2.0 * save_s * between_failures_s)
    if save_s < MUCH_SMALLER * between_failures_s:
        return Interval(seconds=young_s, formula="Young 1974")
    half = save_s / (2.0 * between_failures_s)
    daly_s = young_s * (1.0 + sqrt(half) / 3.0 + half / 9.0) - save_s if half < 1.0 else between_failures_s
    return Interval(seconds=daly_s, formula="Daly 2006")
