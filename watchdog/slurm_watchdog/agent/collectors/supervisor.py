"""Supervisors (`slurm-watchdog run` in a batch script) of the jobs whose batch host this node is.

Sees: that a job has one, the step and nodes of its command, its spare nodes, what became of the last order
From: the file `supervisor` beside the kill switch of the run, in a directory of ours
How often: every tick in the first minute and once there is one, else every 15 s
Never: believes more of it than what concerns the job of its writer
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from slurm_watchdog.agent.collectors.collector import (
    Collector,
    CollectorContext,
    CollectorSpec,
    Problem,
)
from slurm_watchdog.agent.workers.answer_types import SupervisorFile
from slurm_watchdog.agent.workers.request_types import ReadSupervisors
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from slurm_watchdog.model.report import SupervisorSection
from slurm_watchdog.model.supervisor import JobSupervisor, SupervisorStatus, run_directory

ABSENT_EVERY_S = 15.0  # Most jobs have none: it is looked for this often, after the first BEGINNING_S of a run.
BEGINNING_S = 60.0
ANSWERS_S = 0.02  # So long the answers are waited for.


@dataclass
class _Known:
    """One run, and what was last read of its file."""

    restarts: int
    since: float
    due: float
    status: SupervisorStatus | None = None
    written: float = 0.0  # When it was written, monotonic.
    read: float = 0.0  # When it was found so.
    error: str = ""


class SupervisorCollector(Collector):
    """The newest status of each supervisor."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self._known: dict[str, _Known] = {}

    def collect(self, now: float) -> SupervisorSection:
        """Of every run that has one."""
        here = {job_id: watch for job_id, watch in self.context.jobs.watch.items() if watch.log_paths}
        for job_id in [job_id for job_id in self._known if job_id not in here]:
            del self._known[job_id]
        for job_id, watch in here.items():
            known = self._known.get(job_id)
            if known is None or known.restarts != watch.restarts:
                known = self._known[job_id] = _Known(watch.restarts, now, now)
        self._ask({job_id: known for job_id, known in self._known.items() if now >= known.due}, now)
        return SupervisorSection(
            supervisors=tuple(
                JobSupervisor(
                    job_id=job_id,
                    restarts=known.restarts,
                    age_s=max(0.0, now - known.written),
                    read_age_s=max(0.0, now - known.read),
                    status=known.status,
                )
                for job_id, known in self._known.items()
                if known.status is not None
            )
        )

    def problems(self, now: float) -> Iterable[Problem]:
        """Files that are there and cannot be used."""
        for job_id, known in self._known.items():
            if known.error:
                yield Problem(f"supervisor of job {job_id}: {known.error}", failed=False)

    def _ask(self, due: dict[str, _Known], now: float) -> None:
        """All jobs of one user have one child."""
        groups: dict[tuple[str, int], dict[str, _Known]] = {}
        for job_id, known in due.items():
            directory, uid = run_directory(job_id, known.restarts), self.context.logs.owner_of(job_id)
            key = self.context.logs.key_of(directory, uid)
            groups.setdefault((key, uid), {})[os.path.basename(directory)] = known
        asked = []
        for (key, uid), runs in groups.items():
            request, then = ReadSupervisors(base=KILL_SWITCH_BASE, names=list(runs)), partial(self._apply, runs, now)
            number = self.context.workers.ask(key, request, self.deadline_s, now, then, uid)
            if number is not None:
                asked.append(number)
                for known in runs.values():
                    often = known.status is not None or now - known.since < BEGINNING_S
                    known.due = now if often else now + ABSENT_EVERY_S
        self.context.workers.settle(ANSWERS_S, asked)

    def _apply(self, runs: dict[str, _Known], asked_at: float, answer: Answer[dict[str, SupervisorFile]]) -> None:
        """A file that does not answer, or cannot be read, leaves what was known, which gets old."""
        for name, known in runs.items():
            found = (answer.value or {}).get(name, SupervisorFile())
            known.error = found.error if answer.error is None else str(answer.error)
            if not known.error:
                known.status, known.read, known.written = found.status, asked_at, asked_at - found.age_s


SPEC = CollectorSpec("supervisor", SupervisorSection, SupervisorCollector)
