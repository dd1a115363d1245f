"""A node speaks only for jobs that it has, or has had. Pure.

Whoever owns a node could else have anybody's job restarted, or hide that it hangs, by what he says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from watchdog.model.messages import Report
from watchdog.model.slurm import SlurmJob


class JobNodes:
    """Which nodes each listed job has been seen to have. Of a job that never had any, everybody may speak: Slurm's listing may be late."""

    def __init__(self) -> None:
        self._had: dict[str, set[str]] = {}

    def note(self, jobs: Iterable[SlurmJob]) -> None:
        """One listing; jobs that are in it no more are forgotten."""
        found = {}
        for job in jobs:
            had = self._had.get(job.process_id) or set()
            had.update(job.nodes)
            found[job.process_id] = had
        self._had = found

    def stranger(self, node: str, process_job_id: str) -> bool:
        """Whether this node has nothing to do with that job, as far as is known."""
        had = self._had.get(process_job_id, set())
        return bool(had) and node not in had


def of_own_jobs(report: Report, stranger: Callable[[str, str], bool]) -> tuple[Report, int]:
    """The report without what it says of jobs that are none of its node's business, and how much that was."""
    node, known = report.node, {}

    def own(job_id: str) -> bool:
        if job_id not in known:
            known[job_id] = not stranger(node, job_id)
        return known[job_id]

    kept = {
        "processes": tuple(row for row in report.processes if own(row.job_id)),
        "logs": tuple(row for row in report.logs if own(row.job_id)),
        "events": tuple(row for row in report.events if own(row.job_id)),
        "checkpoints": tuple(row for row in report.checkpoints if own(row.job_id)),
        "wishes": tuple(row for row in report.wishes if own(row.job_id)),
    }
    if all(known.values()):
        return report, 0
    dropped = sum(len(getattr(report, name)) - len(rows) for name, rows in kept.items())
    return replace(report, **kept), dropped
