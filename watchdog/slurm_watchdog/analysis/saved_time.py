"""What restarts saved, and what those would have saved that were only observed. Pure.

For every incident that an action of ours ended, its wait (from its beginning to its end, or to the end of its run) is
compared with the median wait of the LAST incidents before it of the same kind, of the same user's jobs of the same name
(else of any name), that no action of ours ended and that did not pass: they were open when their run ended. The
difference times the nodes of the run is what was saved; it is negative where people were quicker. Without such an
incident what was saved is unknown, and counted as that.

Maintenance, time limits and what people asked for are left out: nothing was wrong that could have waited.

Assumptions: nobody would have been quicker or slower than before, and what a restart itself costs is the same for both.
Messages of ours shorten the waits that are compared with, so the figure is rather too low.

What would have been saved in mode act is a replay of what happened: from the decision that was made, and not carried
out, to the end of the run that stood still until then. A restart follows that end, too, so what it costs is the same
for both. A run that trained again by itself would have been restarted for nothing, and is counted as that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from slurm_watchdog.model.lost_time import Savings
from slurm_watchdog.model.run_record import RunRecord, Spell

LAST = 20
"""Older waits are of other people and other habits."""
SLACK_S = 60.0
"""An incident that ended so long before its run was open at the run's end: the judgement comes with the next tick."""
Of = tuple[str, str, str]
"""User, name of the job (empty: any), kind."""


def savings(runs: Iterable[RunRecord], spells: Iterable[Spell], since: float, until: float) -> Savings:
    """Of the incidents that ended from `since` to `until` (dates); `runs` and `spells` are those of before, too."""
    run_of = {(run.job_id, run.restarts): run for run in runs}
    spells = list(spells)
    ours: list[tuple[RunRecord, Spell]] = []
    waits: dict[Of, list[tuple[float, float]]] = defaultdict(list)
    for spell in sorted(spells, key=_end):
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


def _keys(run: RunRecord, spell: Spell) -> Iterator[Of]:
    """The closest first."""
    yield run.user, run.name, spell.kind
    yield run.user, "", spell.kind


def _before(waits: list[tuple[float, float]], at: float) -> list[float]:
    end = bisect_left(waits, (at, 0.0))
    return [wait_s for _, wait_s in waits[max(0, end - LAST) : end]]


def _wait_s(run: RunRecord, spell: Spell) -> float:
    ended_at = spell.ended_at if run.ended_at is None else min(spell.ended_at, run.ended_at)
    return ended_at - spell.began_at


def _end(spell: Spell) -> float:
    return spell.ended_at
