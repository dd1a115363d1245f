"""What restarts saved, against what the same incidents took without one: the run's own history, no estimate. Pure.

For every incident that an action of ours ended, its wait (from its beginning to its end, or to the end of its run) is
compared with the median wait of the LAST incidents before it of the same kind, of the same user's jobs of the same name
(else of any name), that no action of ours ended and that did not pass: they were open when their run ended. The
difference times the nodes of the run is what was saved; it is negative where people were quicker. Without such an
incident what was saved is unknown, and counted as that.

Maintenance, time limits and what people asked for are left out: nothing was wrong that could have waited.

Assumptions: nobody would have been quicker or slower than before, and what a restart itself costs is the same for both.
Messages of ours shorten the waits that are compared with, so the figure is rather too low.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.run_record import RunRecord, Spell

LAST = 20
"""Older waits are of other people and other habits."""
SLACK_S = 60.0
"""An incident that ended so long before its run was open at the run's end: the judgement comes with the next tick."""
Of = tuple[str, str, str]
"""User, name of the job (empty: any), kind."""


class Savings(Struct, frozen=True, kw_only=True):
    """Of the incidents that an action of ours ended."""

    saved_h: float = 0.0
    """Node-hours, of those that could be compared."""
    compared: int = 0
    unknown: int = 0
    """Those without a comparable one before."""
    usual_wait_s: float | None = None
    """The median wait that they were compared with; None: there is none."""


def savings(runs: Iterable[RunRecord], spells: Iterable[Spell], since: float, until: float) -> Savings:
    """Of the incidents that ended from `since` to `until` (dates); `runs` and `spells` are those of before, too."""
    run_of = {(run.job_id, run.restarts): run for run in runs}
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
    return Savings(saved_h=saved_h, compared=len(usual), unknown=unknown, usual_wait_s=median(usual) if usual else None)


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
