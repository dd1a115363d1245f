"""Which settings of detectors hold for which jobs: the configuration's, those of `thresholds`, and, where the site
allows it, what the job's owner says.

An owner's `stall_after` makes the watchdog more patient (see Judge). Less patient only where the site has a floor
(`jobs.stall_after_floor`, `thresholds`): then the limits of a job that trains, and of one that stands, are cut to it,
and never below that floor. Limits of a start, an evaluation and a checkpoint stay, for an owner who thinks of steps
thinks of none of these; so does all that the proof of a hang needs beside time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_values
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.config.schema import Config
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.registry import Settings
from slurm_watchdog.detect.stalled_progress import StalledProgress
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.slurm import SlurmJob


class SettingsOfJobs:
    """Finds them. `stall_after_of`: after how long without a step an owner wants the job reported; 0: not said."""

    def __init__(self, config: Config, stall_after_of: Callable[[SlurmJob], float]):
        self._general = (config.detectors.settings(), config.jobs.stall_after_floor)
        self._of_some = tuple(
            (
                each.match,
                each.settings(config.detectors),
                config.jobs.stall_after_floor if each.stall_after_floor is None else each.stall_after_floor,
            )
            for each in config.thresholds
        )
        self._stall_after_of = stall_after_of
        self._may_be_sooner = any(self._of(number)[1] > 0 for number in range(-1, len(self._of_some)))

    def groups(self, view: ClusterView) -> list[tuple[ClusterView, Settings]]:
        """The jobs of a view by the settings that hold for them."""
        if not self._of_some and not self._may_be_sooner:
            return [(view, self._general[0])]
        groups: dict[tuple[int, float], list[JobView]] = {}
        for job in view.jobs:
            own = (n for n, (match, *_) in enumerate(self._of_some) if match.matches(job.job))
            number = next(own, -1)
            groups.setdefault((number, self._within_s(job.job, self._of(number)[1])), []).append(job)
        return [
            (replace(view, jobs=tuple(jobs)), sooner(self._of(number)[0], within_s))
            for (number, within_s), jobs in groups.items()
        ]

    def _of(self, number: int) -> tuple[Settings, float]:
        return self._general if number < 0 else self._of_some[number][1:]

    def _within_s(self, job: SlurmJob, floor_s: float) -> float:
        """What the limits of the job are cut to; 0: they are not."""
        wanted_s = self._stall_after_of(job) if floor_s > 0 else 0.0
        return max(wanted_s, floor_s) if wanted_s > 0 else 0.0


def sooner(settings: Settings, within_s: float) -> Settings:
    """The settings with a job reported as standing after `within_s` at the latest; 0: as they are."""
    if within_s <= 0:
        return settings
    hang, stalled = settings[CollectiveHang], settings[StalledProgress]
    ceiling_s = min(hang.ceiling or within_s, within_s)
    cut = _cut(hang, within_s, "floor", "proven_floor", "busy_limit", "everybody_limit")
    return {
        **settings,
        CollectiveHang: with_values(cut, ceiling=ceiling_s),
        StalledProgress: _cut(stalled, within_s, "busy_limit", "still_limit"),
    }


def _cut(own: Any, within_s: float, *names: str) -> Any:
    return with_values(own, **{name: min(getattr(own, name), within_s) for name in names})
