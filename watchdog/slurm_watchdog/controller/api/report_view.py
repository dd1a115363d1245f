"""What a journal says was lost and what was kept, as JSON for `slurm-watchdog report` and `story`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from slurm_watchdog.analysis.lost_time import report
from slurm_watchdog.base import clock
from slurm_watchdog.journal.reports import read_report
from slurm_watchdog.model.run_record import RunRecord, Spell

SHOWN_JOBS: Final = 500
"""Those that lost most."""
LATEST: Final = 1e11


class Unfit(ValueError):
    """A report that cannot be made: a sentence."""


def report_asked(url: str, asked: Mapping[str, str], uid: int | None) -> dict[str, Any]:
    """The report of the journal at `url`. `asked`: `from` and `to` (dates in seconds since 1970), `user`, `account`,
    `partition` and `job`, names with commas. `uid`: whose jobs count; None: everybody's.

    Raises Unfit and JournalError."""
    since, until = _date(asked, "from", 0.0), _date(asked, "to", clock.wall())
    if since >= until:
        raise Unfit("the report has to end after it begins")
    everything, spells = read_report(url, since, until)
    runs = [run for run in everything if uid in (None, run.uid) and _is_wanted(run, asked)]
    whole = uid is None and len(runs) == len(everything)
    found = report(runs, _about(spells, runs, whole=whole), since, until)
    document: dict[str, Any] = msgspec.to_builtins(found)
    shares = [job.share for job in found.jobs[:SHOWN_JOBS]]
    document["jobs"] = [job | {"share": share} for job, share in zip(document["jobs"], shares, strict=False)]
    document |= {"share": found.share, "known_jobs": len(found.jobs)}
    if len(found.jobs) == 1:
        document["runs"] = msgspec.to_builtins(runs)
    return document


def _is_wanted(run: RunRecord, asked: Mapping[str, str]) -> bool:
    known = {"user": run.user, "account": run.account, "partition": run.partition, "job": run.job_id}
    return all(value in asked[name].split(",") for name, value in known.items() if asked.get(name))


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
        raise Unfit(f"{name} has to be a date in seconds since 1970, not {asked[name][:40]!r}")
    return found
