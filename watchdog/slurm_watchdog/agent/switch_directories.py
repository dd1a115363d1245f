"""Directories of kill switches on this node: made ready for each run before it is needed, and removed when
the run is over."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import EmptyDirectory, PrepareDirectory, RemoveDirectory
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.supervisor import run_directory

log = logging.getLogger(__name__)


@dataclass
class SwitchDirectories:
    """Which there are, and which a worker is busy with."""

    probes: WorkerPool
    logs: JobLogs
    deadline_s: float
    _problems: dict[str, str | None] = field(default_factory=dict)
    """Directory to why it could not be made; None when it is ready."""
    _busy: set[str] = field(default_factory=set)
    _owner_of: dict[str, int] = field(default_factory=dict)  # Whose each directory is.

    def is_busy(self, directory: str) -> bool:
        """Whether a worker is at it now."""
        return directory in self._busy

    def problem_of(self, directory: str) -> str | None:
        """Why it could not be made; None if it is ready, or none of ours."""
        return self._problems.get(directory)

    def update(self, watch: Iterable[JobWatch], now: float, running: frozenset[str] | None) -> None:
        """Makes the directory of each run's kill switch ready, and removes those of runs that are over, with
        all in them.

        `running`: the jobs that Slurm has here. While that is not known nothing is removed: a switch that a
        job has not seen yet would be lost.
        """
        watch = tuple(watch)
        wanted = {}
        for each in watch:
            directory, name = os.path.split(each.kill_switch)
            base, run = os.path.split(directory)
            if base == KILL_SWITCH_BASE and name and run == f"{each.job_id}.{each.restarts}":
                wanted[directory] = each.uid
            elif each.log_paths:  # the batch host, where a supervisor would be
                wanted[run_directory(each.job_id, each.restarts)] = each.uid
        for directory, uid in wanted.items():
            if directory not in self._problems and directory not in self._busy:
                self._prepare(directory, uid, now)
        if running is None:
            return
        runs = {each.job_id: each.restarts for each in watch}
        for directory in [directory for directory in self._problems if directory not in wanted]:
            job_id, _, run = os.path.basename(directory).partition(".")
            if job_id not in running or runs.get(job_id, int(run)) != int(run):
                self._clear(directory, now)

    def _prepare(self, directory: str, uid: int, now: float) -> None:
        key = self.logs.key_of(KILL_SWITCH_BASE, 0)
        request = PrepareDirectory(KILL_SWITCH_BASE, os.path.basename(directory), uid)
        then = partial(self._apply_prepared, directory, uid)
        if self.probes.ask(key, request, self.deadline_s, now, then) is not None:
            self._busy.add(directory)
            self.probes.settle(0.05, [])

    def _apply_prepared(self, directory: str, uid: int, answer: Answer[None]) -> None:
        self._busy.discard(directory)
        self._owner_of[directory] = uid
        self._problems[directory] = answer.error
        if answer.error:
            log.error("the kill switch's directory %s could not be made: %s", directory, answer.error)

    def _clear(self, directory: str, now: float) -> None:
        """Two requests, one after the other: its owner empties the directory, and the user who made it removes it."""
        base, name = os.path.split(directory)

        def remove(answer: Answer[None]) -> None:
            if answer.error is not None:
                log.warning("%s could not be emptied: %s", directory, answer.error)
            request = RemoveDirectory(base, name)
            maker = self.logs.key_of(base, 0)
            if self.probes.ask(maker, request, self.deadline_s, now, lambda answer: None) is not None:
                self._problems.pop(directory, None)
                self._owner_of.pop(directory, None)
            self._busy.discard(directory)

        uid = self._owner_of.get(directory)
        if directory in self._busy or uid is None:
            return
        key = f"switch:{directory}:{uid}"
        if self.probes.ask(key, EmptyDirectory(base, name), self.deadline_s, now, remove, uid) is not None:
            self._busy.add(directory)
