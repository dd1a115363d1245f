"""Where the time of jobs went: the report of a journal, by user and job."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from msgspec.structs import replace

from slurm_watchdog.analysis.lost_time import report as counted
from slurm_watchdog.base import clock
from slurm_watchdog.base.failure import Failure
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.journal.reports import read_report
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.run_record import Report, RunRecord

SHOWN_JOBS = 500  # Those that lost most.
LATEST = 1e11
HISTORY_S = 90 * 86400.0  # What restarts saved is compared with so much before.


def report_asked(url: str, asked: Mapping[str, str], uid: int | None = None) -> Report:
    """The report of the journal at `url`. `asked`: `from` and `to` (dates in seconds since 1970), `user`, `account` and
    `partition`, names or globs with commas, `job`, ids with commas. `uid`: whose jobs count; None: everybody's.

    Raises Failure for what is asked, and JournalError."""
    since, until = _date(asked, "from", 0.0), _date(asked, "to", clock.wall())
    if since >= until:
        raise Failure("the report has to end after it begins")
    everything, known = read_report(url, max(0.0, since - HISTORY_S), until)
    runs = [run for run in everything if uid in (None, run.uid) and _is_wanted(run, asked)]
    jobs, whole = {run.job_id for run in runs}, uid is None and len(runs) == len(everything)
    spells = [
        replace(
            each,
            planned=each.kind == IncidentKind.OPERATOR_RESTART or spec_of(each.kind).planned,
            stops_steps=spec_of(each.kind).stops_steps,
        )
        for each in known
        if each.job_id in jobs or (whole and not each.job_id)  # of no job: in a report of the whole cluster
    ]
    found = counted(runs, spells, since, until)
    of_one = tuple(run for run in runs if run.seen_at >= since) if len(found.jobs) == 1 else ()
    return replace(found, jobs=found.jobs[:SHOWN_JOBS], runs=of_one)


def _is_wanted(run: RunRecord, asked: Mapping[str, str]) -> bool:
    if asked.get("job") and run.job_id not in asked["job"].split(","):
        return False
    known = {"user": run.user, "account": run.account, "partition": run.partition}
    given = {name: asked[name].split(",") for name in known if asked.get(name)}
    return all(any(fnmatchcase(known[name], glob) for glob in globs) for name, globs in given.items())


def _date(asked: Mapping[str, str], name: str, default: float) -> float:
    try:
        found = float(asked.get(name, default))
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= LATEST:
        raise Failure(f"{name} has to be a date in seconds since 1970, not {asked[name][:40]!r}")
    return found
