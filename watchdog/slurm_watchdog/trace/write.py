"""From reports and listings to lines of a trace, such that replaying them gives what was judged. Pure.

A line has the fields of trace v1 that say what it is about; `more` is the row of the report or listing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.trace.records import MAX_LINE_BYTES, Own
from slurm_watchdog.trace.to_report import KEPT_OF_REPORT

GONE_STATE = "NOT_LISTED"  # Of a job that Slurm's list does not have any more.
Names = dict[str, str]  # Name of a field of trace v1 -> ours.

PROBE: Names = {"mount": "mount", "responding": "responding"}
SECTIONS: tuple[tuple[str, str, Names], ...] = (
    ("proc", "processes", {"job_id": "job_id", "pid": "pid"}),
    ("gpu", "gpus", {"gpu": "index", "uuid": "uuid"}),
    ("log", "events", {"job_id": "job_id", "stream": "source", "line": "line"}),
    ("log", "logs", {"job_id": "job_id", "stream": "path"}),
    ("kmsg", "node_events", {"line": "line"}),
    ("mount", "mounts", PROBE),
    ("checkpoint", "checkpoints", {"job_id": "job_id"}),
)  # Kind of line, the report's rows that are written so, and their fields beside `more`.


def line_of(t: float, kind: str, fields: dict[str, Any]) -> bytes | None:
    """One line with its end; None if it would be longer than any reader takes."""
    given = {name: value for name, value in fields.items() if value is not None}
    line = msgspec.json.encode({"t": round(t, 3), "kind": kind, **given}) + b"\n"
    return line if len(line) <= MAX_LINE_BYTES else None


def _row(value: msgspec.Struct, names: Names, **fields: Any) -> dict[str, Any]:
    return fields | {name: getattr(value, ours) for name, ours in names.items()} | {"more": msgspec.to_builtins(value)}


def report_lines(report: Report, t: float) -> Iterator[bytes | None]:
    """Everything that one report says, received at `t`. None stands for a line that is too long."""
    built, node = msgspec.to_builtins(report), report.node  # defaults are left out
    more = {"listed": len(report.processes), "boot_id": report.boot_id}
    more |= {name: built[name] for name in KEPT_OF_REPORT if name in built}
    yield line_of(t, "report", {"node": node, "more": more})
    for kind, rows, names in SECTIONS:
        for row in getattr(report, rows):
            yield line_of(t, kind, _row(row, names, node=node))
    for result in report.results:
        if result.probe is not None:
            yield line_of(t, "mount", _row(result.probe, PROBE, node=node))
        for stack in result.stacks:
            fields = {"node": node, "job_id": stack.job_id, "dump": result.command_id, "of": len(result.stacks)}
            yield line_of(t, "stack", fields | {"stack": msgspec.to_builtins(stack)})


def listing_lines(jobs: Iterable[SlurmJob], nodes: Iterable[SlurmNode], t: float) -> Iterator[bytes | None]:
    """Slurm's word about these jobs and nodes."""
    for job in jobs:
        yield line_of(t, "job", _row(job, {"job_id": "job_id", "state": "state"}))
    for node in nodes:
        yield line_of(t, "node", _row(node, {"node": "name", "state": "state"}))


def own_line(record: Own, t: float) -> bytes | None:
    """What the controller says of itself."""
    fields = msgspec.to_builtins(record)
    return line_of(t, fields.pop("kind"), {name: fields[name] for name in fields if name != "t"})


def gone_line(job_id: str, t: float) -> bytes | None:
    """Slurm does not list this job any more."""
    return line_of(t, "job", {"job_id": job_id, "state": GONE_STATE})
