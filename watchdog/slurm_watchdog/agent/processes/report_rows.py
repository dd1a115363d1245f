"""A report that is small enough to be sent. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.model.observations import Process
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import Report

FEW_EVENTS = 200
LONGEST_NAME = 1024  # Characters of a path in a report that was too large otherwise.


def reduced(report: Report, why: str) -> Report:
    """The report without most of what may be long, for one that was too large to be sent. Every process that
    it names stays, for one that is missing looks dead; of what it waits for only short names stay."""
    return replace(
        report,
        processes=tuple(map(_shortened, report.processes)),
        events=report.events[-FEW_EVENTS:],
        events_dropped=report.events_dropped + max(0, len(report.events) - FEW_EVENTS),
        results=tuple(
            CommandResult(command_id=each.command_id, ok=False, error="the answer was too large to be sent")
            for each in report.results
        ),
        problems=(f"report: {why}", *report.problems),
    )


def _shortened(row: Process) -> Process:
    call = row.blocked
    if call is None:
        return row
    names = {
        name: value if (value := getattr(call, name)) is not None and len(value) <= LONGEST_NAME else None
        for name in ("path", "mount", "device")
    }
    return replace(row, blocked=replace(call, **names))
