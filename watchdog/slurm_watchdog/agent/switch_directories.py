"""Directories of kill switches on this node: made ready for each run before it is needed, and removed when
the run is over."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import partial

import msgspec

from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import EmptyDirectory, PrepareDirectory, RemoveDirectory
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.supervisor import run_directory

log = logging.getLogger(__name__)


class SwitchDirectories(msgspec.Struct):
    """Which there are, and which a worker is busy with."""

    probes: WorkerPool
    logs: JobLogs
    deadline_s: float
    problems: dict[str, str | None] = {}
    """Directory to why it could not be made; None when it is ready."""
    busy: set[str] = set()  # Where a worker is now.
    _owner_of: dict[str, int] = {}  # Whose each directory is.

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
            if directory not in self.problems and directory not in self.busy:
                self._prepare(directory, uid, now)
        if running is None:
            return
        runs = {each.job_id: each.restarts for each in watch}
        for directory in [directory for directory in self.problems if directory not in wanted]:
            job_id, _, run = os.path.basename(directory).partition(".")
            if job_id not in running or runs.get(job_id, int(run)) != int(run):
                self._clear(directory, now)

    def _prepare(self, directory: str, uid: int, now: float) -> None:
        key = self.logs.key_of(KILL_SWITCH_BASE, 0)
        request = PrepareDirectory(KILL_SWITCH_BASE, os.path.basename(directory), uid)
        then = partial(self._apply_prepared, directory, uid)
        if self.probes.ask(key, request, self.deadline_s, now, then) is not None:
            self.busy.add(directory)
            self.probes.settle(0.05, [])

    def _apply_prepared(self, directory: str, uid: int, answer: Answer[None]) -> None:
        self.busy.discard(directory)
        self._owner_of[directory] = uid
        self.problems[directory] = answer.error
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
                self.problems.pop(directory, None)
                self._owner_of.pop(directory, None)
            self.busy.discard(directory)

        uid = self._owner_of.get(directory)
        if directory in self.busy or uid is None:
            return
        key = f"switch:{directory}:{uid}"
        if self.probes.ask(key, EmptyDirectory(base, name), self.deadline_s, now, remove, uid) is not None:
            self.busy.add(directory)
