"""Keeps in the journal which runs jobs had: what `report` and `story` count from.

One event loop owns it. A run is written when it begins, when its facts change and at most every WRITE_EVERY_S, and once
more when it is over. What a controller before this one wrote of it is kept (slurm_watchdog.model.run_record.merged).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from slurm_watchdog.base.structs import picked
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.past_runs import PastRun
from slurm_watchdog.model.run_record import RunRecord, merged
from slurm_watchdog.model.slurm import SlurmJob

WRITE_EVERY_S = 600.0
LOOK_EVERY_S = 30.0
LATE_S = 120.0  # A run that began so long before it was seen first was not watched from its beginning.
KEPT_S = 400 * 86400.0  # A year and the weeks in which someone asks about it: 10,000 runs are 5 MB.
REMEMBERED_S = 2 * 86400.0  # A run that has not been seen for so long is not written any more.
Key = tuple[str, int]


class RunRecords:
    """See the module."""

    def __init__(self, journal: Journal, writer: JournalWriter, now: float, wall: float):
        """`now` is the monotonic clock, `wall` the date. Raises JournalError."""
        self._journal, self._writer = journal, writer
        journal.run_records.prune(wall - KEPT_S, "seen_at")
        known = journal.run_records.find(journal.run_records.c.seen_at >= wall - REMEMBERED_S)
        self._known: dict[Key, RunRecord] = {(each.job_id, each.restarts): each for each in known}
        self._written_at: dict[Key, float] = {}
        self._looked_at = now - LOOK_EVERY_S

    def update(self, view: ClusterView, wall: float, *, at_end: bool = False) -> None:
        """After a judgement of `view`; `at_end`: it is the last one."""
        if view.now - self._looked_at < LOOK_EVERY_S and not at_end:
            return
        self._looked_at = view.now
        for found in records_of(view, wall):
            key = (found.job_id, found.restarts)
            before = self._known.get(key)
            if before is not None and before.ended_at is not None and found.ended_at is not None:
                continue
            if before is None:  # of a run that was under way the first look is no first step
                at = wall if found.ended_at is None else found.watched_from
                found = replace(found, watched_from=None if at is None or at - found.began_at <= LATE_S else at)
            record = found if before is None else merged(before, found)
            self._known[key] = record
            is_due = view.now - self._written_at.get(key, float("-inf")) >= WRITE_EVERY_S
            if is_due or record.ended_at is not None or before is None:
                self._written_at[key] = view.now
                self._writer.write_or_queue(partial(self._journal.run_records.save, record))
        for key in [key for key, each in self._known.items() if each.seen_at < wall - REMEMBERED_S]:
            self._known.pop(key)
            self._written_at.pop(key, None)


def records_of(view: ClusterView, wall: float) -> Iterator[RunRecord]:
    """The runs that `view` shows, those that are over included. `wall` is the date of `view.now`."""
    for job in view.jobs:
        yield _running(job, view.now, wall)
    for job in (*view.jobs, *view.waiting):
        for run in job.past:
            yield _over(job.job, run, view.now, wall)
    for ended in view.ended:
        for run in (*ended.past, *(() if ended.run is None else (ended.run,))):
            yield _over(ended.job, run, view.now, wall)


def _running(job: JobView, now: float, wall: float) -> RunRecord:
    progress, slurm_job = job.progress, job.job
    record = _of_job(slurm_job, began_at=slurm_job.start_at or wall - job.run_age_s, seen_at=wall)
    gpus = {each.view.gpu.uuid for each in job.gpus}
    record = replace(record, state=slurm_job.state, nodes=max(1, len(slurm_job.nodes)), gpus=len(gpus) or None)
    if progress is None or not progress.step_known:
        return record
    rose_at = None if progress.last_increase_age_s is None else wall - progress.last_increase_age_s
    return replace(
        record,
        first_step=progress.first_step,
        last_step=progress.step,
        stride=progress.widest_stride,
        first_rise_at=rose_at,
        last_rise_at=rose_at,
        step_s=progress.step_s,
    )


def _over(job: SlurmJob, run: PastRun, now: float, wall: float) -> RunRecord:
    ended_at = wall - (now - run.ended_at)
    own = job.restarts == run.restarts and job.start_at is not None and job.start_at <= ended_at
    began_at = job.start_at if own and job.start_at is not None else wall - (now - run.began_at)
    record = _of_job(job, began_at=began_at, seen_at=ended_at)
    return replace(
        record,
        restarts=run.restarts,
        state=run.state,
        ended_at=ended_at,
        watched_from=wall - (now - run.began_at),
        nodes=max(1, len(run.nodes)),
        first_step=run.first_step if run.steps_seen > 0 else None,
        last_step=run.last_step if run.steps_seen > 0 else None,
        stride=run.stride,
        first_rise_at=None if run.start_s is None else began_at + run.start_s,
        last_rise_at=None if run.rose_at is None else wall - (now - run.rose_at),
        step_s=run.step_s,
    )


def _of_job(job: SlurmJob, *, began_at: float, seen_at: float) -> RunRecord:
    same = ("job_id", "restarts", "uid", "user", "account", "partition", "name")
    return picked(RunRecord, job, *same, began_at=began_at, seen_at=seen_at)
