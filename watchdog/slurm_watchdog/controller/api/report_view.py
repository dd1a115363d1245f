"""What a journal says was lost and what was kept, for `slurm-watchdog report` and `story`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.analysis.lost_time import report
from slurm_watchdog.base import clock
from slurm_watchdog.controller.api.journal_view import RequestRefused
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.journal.reports import read_report
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.lost_time import Report
from slurm_watchdog.model.run_record import RunRecord, Spell

SHOWN_JOBS: Final = 500
"""Those that lost most."""
LATEST: Final = 1e11
HISTORY_S: Final = 90 * 86400.0
"""What restarts saved is compared with so much before."""
NOTHING: Final[Mapping[str, str]] = {}


def report_asked(url: str, asked: Mapping[str, str], uid: int | None) -> Report:
    """The report of the journal at `url`. `asked`: `from` and `to` (dates in seconds since 1970), `user`, `account` and
    `partition`, names or globs with commas, `job`, ids with commas. `uid`: whose jobs count; None: everybody's.

    Raises RequestRefused and JournalError."""
    since, until = _date(asked, "from", 0.0), _date(asked, "to", clock.wall())
    if since >= until:
        raise RequestRefused(400, "the report has to end after it begins")
    found, runs = read(url, since, until, asked, uid)
    of_one = tuple(run for run in runs if run.seen_at >= since) if len(found.jobs) == 1 else ()
    return replace(found, jobs=found.jobs[:SHOWN_JOBS], runs=of_one)


def read(
    url: str, since: float, until: float, asked: Mapping[str, str] = NOTHING, uid: int | None = None
) -> tuple[Report, list[RunRecord]]:
    """The same as values, with the runs that are in it and those before. Raises JournalError."""
    everything, known = read_report(url, max(0.0, since - HISTORY_S), until)
    spells = [
        replace(each, planned=_is_planned(each.kind), stops_steps=spec_of(each.kind).stops_steps) for each in known
    ]
    runs = [run for run in everything if uid in (None, run.uid) and _is_wanted(run, asked)]
    about = _about(spells, runs, whole=uid is None and len(runs) == len(everything))
    return report(runs, about, since, until), runs


def _is_wanted(run: RunRecord, asked: Mapping[str, str]) -> bool:
    if asked.get("job") and run.job_id not in asked["job"].split(","):
        return False
    known = {"user": run.user, "account": run.account, "partition": run.partition}
    given = {name: asked[name].split(",") for name in known if asked.get(name)}
    return all(any(fnmatchcase(known[name], glob) for glob in globs) for name, globs in given.items())


def _is_planned(kind: str) -> bool:
    return kind == IncidentKind.OPERATOR_RESTART or spec_of(kind).planned


def _about(spells: Sequence[Spell], runs: Sequence[RunRecord], *, whole: bool) -> list[Spell]:
    """The incidents of these runs; those of no job in a report of the whole cluster."""
    mine = {run.job_id for run in runs}
    return [each for each in spells if each.job_id in mine or (whole and not each.job_id)]


def _date(asked: Mapping[str, str], name: str, default: float) -> float:
    try:
        found = float(asked.get(name, default))
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= LATEST:
        raise RequestRefused(400, f"{name} has to be a date in seconds since 1970, not {asked[name][:40]!r}")
    return found
