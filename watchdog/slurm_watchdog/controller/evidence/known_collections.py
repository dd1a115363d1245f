"""The collections of evidence that run, or were over lately, by their id and by their run."""

from __future__ import annotations

from collections import deque

from slurm_watchdog.controller.state.evidence_collection import Collected
from slurm_watchdog.model.slurm import SlurmJob


class KnownCollections:
    """Knows every one that runs, and the newest of those that are over. One event loop owns it."""

    def __init__(self, finished_kept: int):
        """`finished_kept`: so many of those that are over are remembered."""
        self._finished_kept = finished_kept
        self._by_id: dict[str, Collected] = {}
        self._of_run: dict[tuple[str, int], list[Collected]] = {}
        """(job, restarts) -> those of this run, the newest last."""
        self._over: deque[Collected] = deque()
        """Those that are over, the newest last."""

    def add(self, found: Collected) -> None:
        """One that begins."""
        self._by_id[found.id] = found
        self._of_run.setdefault(found.key, []).append(found)

    def get(self, collection_id: str) -> Collected | None:
        """The one with this id, if it is known still."""
        return self._by_id.get(collection_id)

    def of(self, job: SlurmJob) -> list[Collected]:
        """Those of this run of the job, the newest first."""
        return self._of_run.get((job.job_id, job.restarts), [])[::-1]

    def is_over(self, found: Collected) -> None:
        """Forgets the oldest of those that are over; one that runs is somebody's answer."""
        self._over.append(found)
        while len(self._over) > self._finished_kept:
            oldest = self._over.popleft()
            del self._by_id[oldest.id]
            left = [each for each in self._of_run[oldest.key] if each is not oldest]
            if left:
                self._of_run[oldest.key] = left
            else:
                del self._of_run[oldest.key]
