"""A node speaks only for jobs that it has, or has had, and for processes and wishes of their owners. Pure.

Root of a node could else have anybody's job restarted, or hide that it hangs, by what he says of it; and a
user with a process on a node could do the same to any other user's job by an environment of his own making.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.node_view import SlurmNodeView
from slurm_watchdog.model.report import JobDirectives, Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmView
from slurm_watchdog.model.slurm_states import OVER, RUNNING, is_away, is_lost, may_hold_nodes

REMEMBERED = ("uid", "nodes", "start_at", "is_batch", "requeueable", "required_nodes")
"""Fields that stay as they were while Slurm's word for them cannot be read: nothing is done to such a job
either way."""


def process_ids(job: SlurmJob) -> tuple[str, ...]:
    """What the job's processes may have as SLURM_JOB_ID: of a heterogeneous job each component's number."""
    return (job.process_id, *job.component_ids)


def jobs_now(before: Mapping[str, SlurmJob], view: SlurmView) -> dict[str, SlurmJob]:
    """The jobs by id: those of the listing and, if it does not show all, those that were not over in the one before."""
    now = {job.job_id: remembered(job, before.get(job.job_id)) for job in view.jobs}
    if not view.partial:
        return now
    missing = {name: job for name, job in before.items() if name not in now and job.state not in OVER}
    return missing | now


def remembered(job: SlurmJob, before: SlurmJob | None) -> SlurmJob:
    """The job, with what could not be read as it was before in the same run."""
    if not job.unreadable or before is None or before.raw_id != job.raw_id:
        return job
    if "restarts" not in job.unreadable and job.restarts != before.restarts:
        return job
    return replace(job, **{name: getattr(before, name) for name in REMEMBERED if name in job.unreadable})


def node_views(view: SlurmView, known: Iterable[SlurmNodeView], now: float) -> tuple[SlurmNodeView, ...]:
    """The nodes of a listing, with what two listings tell: since when a node is back, and in how many it was
    lost. `known`: by the listing before."""
    before = {node.name: node for node in known}
    in_use = {name for job in view.jobs if job.state in RUNNING for name in job.nodes}
    found = []
    for node in view.nodes:
        old, runs_job = before.get(node.name), node.name in in_use
        back_at = old.back_at if old is not None else None
        if old is not None and is_away(old.state, old.runs_job) and not is_away(node.state, runs_job):
            back_at = now
        lost = 1 + (old.lost_listings or 0 if old is not None else 0) if is_lost(node.state) else 0
        found.append(
            picked(
                SlurmNodeView, node, "name", "state", "reason", runs_job=runs_job, back_at=back_at, lost_listings=lost
            )
        )
    return tuple(found)


OF_JOBS = ("processes", "logs", "events", "checkpoints", "wishes", "supervisors", "pressures", "usages")
"""Fields of a report whose rows are about one job, or about none."""
BY_SLURM = "slurm"  # See Process.member_by.
JobOf = Callable[[str], SlurmJob | None]  # What agents call a job -> the job as Slurm listed it.


class JobNodes:
    """Which nodes each listed job has been seen to have. Of a job that never had any no one speaks."""

    def __init__(self) -> None:
        self._had: dict[str, set[str]] = {}

    def update(self, jobs: Iterable[SlurmJob]) -> None:
        """One listing; jobs that are in it no more are forgotten."""
        found: dict[str, set[str]] = {}
        for job in jobs:
            had = self._had.get(job.process_id) or set()
            had.update(job.nodes)
            found |= dict.fromkeys(process_ids(job), had)
        self._had = found

    def remember(self, process_job_id: str, nodes: Iterable[str]) -> None:
        """What an earlier controller has written down: of a job that has ended since, Slurm may list no node
        any more."""
        self._had.setdefault(process_job_id, set()).update(nodes)

    def stranger(self, node: str, process_job_id: str) -> bool:
        """Whether this node has nothing to do with that job, as far as Slurm has said."""
        return node not in self._had.get(process_job_id, ())


def of_own_jobs(report: Report, stranger: Callable[[str, str], bool] | None) -> tuple[Report, int]:
    """The report without what it says of jobs that are none of its node's business, and how much that was; None: a node
    may speak of all."""
    if stranger is None:
        return report, 0
    rows = {name: found for name in OF_JOBS if (found := getattr(report, name))}
    strangers = {
        job_id
        for job_id in {row.job_id for found in rows.values() for row in found}
        if job_id is not None and stranger(report.node, job_id)
    }
    if not strangers:
        return report, 0
    kept = {name: tuple(row for row in found if row.job_id not in strangers) for name, found in rows.items()}
    return replace(report, **kept), sum(len(rows[name]) - len(found) for name, found in kept.items())


def of_owners(report: Report, job_of: JobOf) -> tuple[Report, int]:
    """The report without processes and wishes of users whose job it is not, and how much that was. A process of another
    user counts where Slurm itself has put it into the job. A wish counts from a node that this very run has."""
    whose = {(row.job_id, row.uid, row.member_by) for row in report.processes}
    wrong = {each for each in whose if not _is_of_job(*each[1:], job_of(each[0]))}
    processes = report.processes
    if wrong:
        processes = tuple(row for row in processes if (row.job_id, row.uid, row.member_by) not in wrong)
    wishes = tuple(wish for wish in report.wishes if _is_wish(wish, job_of(wish.job_id), report.node))
    dropped = len(report.processes) - len(processes) + len(report.wishes) - len(wishes)
    return (replace(report, processes=processes, wishes=wishes), dropped) if dropped else (report, 0)


def _is_of_job(uid: int, member_by: str, job: SlurmJob | None) -> bool:
    """Whether a process of this user is one of the job. Where either user is not known nothing is proven, and nothing
    is held against it."""
    return job is None or job.uid < 0 or uid < 0 or uid == job.uid or member_by == BY_SLURM


def _is_wish(wish: JobDirectives, job: SlurmJob | None, node: str) -> bool:
    if job is None or not may_hold_nodes(job.state) or node not in job.nodes or wish.restarts != job.restarts:
        return False
    return wish.uid == job.uid or job.uid < 0
