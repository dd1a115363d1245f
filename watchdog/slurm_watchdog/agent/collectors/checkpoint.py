"""Checkpoints of the jobs on this node: see slurm_watchdog.agent.checkpoints.schedule, which has them looked for.

Sees: the newest complete checkpoint: step, age, size, and whether a newer one is being written (Megatron,
    DeepSpeed, PyTorch DCP, Hugging Face, Lightning, NeMo, Composer, Orbax and plain files)
From: directories that the ranks' command lines or `jobs.checkpoint_directories` name, trackers
How often: every 30 s, every 5 s while one is awaited; 8 directories a job
Never: the tensors: of a file its end or its header
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.agent.checkpoints.schedule import CheckpointSchedule
from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec
from slurm_watchdog.agent.collectors.presentation import Family, job_label
from slurm_watchdog.model.observations import Checkpoint, Role
from slurm_watchdog.model.report import CheckpointSection, ProcessSection, Report


class CheckpointCollector(Collector):
    """The newest complete checkpoint of each job, and whether one is being written."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self.keeper = self._schedule = CheckpointSchedule(
            context.workers, context.logs, context.settings.checkpoint_interval
        )

    def collect(self, now: float) -> CheckpointSection:
        """What the controller names is looked at where it says so; what command lines name, on the node of
        rank 0 alone."""
        directories = {job_id: list(watch.checkpoint_directories) for job_id, watch in self.context.jobs.watch.items()}
        processes = self.sections.of(ProcessSection).processes
        for job_id in {each.job_id for each in processes if each.rank == 0 and each.role is Role.RANK}:
            directories.setdefault(job_id, []).extend(self.context.processes.checkpoint_directories_of(job_id))
        rows, events = self._schedule.collect(now, self.deadline_s, directories, self.context.jobs.awaiting_checkpoints)
        return CheckpointSection(checkpoints=rows, events=events)


def metrics(report: Report) -> Iterable[Family]:
    """The newest of each job, whatever directory it is stored in."""
    newest: dict[str, Checkpoint] = {}
    writing: dict[str, bool] = {}
    for row in report.checkpoints:
        job = job_label(row.job_id)
        writing[job] = writing.get(job, False) or row.writing
        if row.step is not None and (job not in newest or row.step > (newest[job].step or 0)):
            newest[job] = row
    of_job = ("job_id",)
    steps = [((job,), row.step) for job, row in newest.items() if row.step is not None]
    yield Family("checkpoint_step", "Step of the newest complete checkpoint.", of_job, steps)
    ages = [((job,), row.age_s) for job, row in newest.items() if row.age_s is not None]
    yield Family("checkpoint_age_seconds", "Its age.", of_job, ages)
    busy = [((job,), value) for job, value in writing.items()]
    yield Family("checkpoint_writing", "1 while a newer one is being written.", of_job, busy)


SPEC = CollectorSpec("checkpoint", CheckpointSection, CheckpointCollector, metrics)
