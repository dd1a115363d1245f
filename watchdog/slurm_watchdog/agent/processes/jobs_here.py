"""Jobs on this node as the controller knows them from Slurm: whose they are, what is to be followed, and
which run here now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slurm_watchdog.model.protocol import JobWatch

RUNNING_LIFETIME_S = 60.0  # What the controller said about which jobs run here is valid for so long.


class JobsHere(msgspec.Struct):
    """The newest word of the controller. Collectors and commands read this object; `hear` alone changes it."""

    watch: Mapping[str, JobWatch] = {}  # By job.
    owners: dict[str, int] = {}  # Job -> the user whose it is; one object for as long as this one lives.
    awaiting_checkpoints: set[str] = set()  # Jobs with a kill switch, whose next checkpoint is waited for.
    _running: tuple[frozenset[str], float] | None = None

    def hear(self, watch: Iterable[JobWatch], running: Iterable[str] | None = None, now: float = 0.0) -> None:
        """Takes over one reply: all jobs to watch, and the ids of those that Slurm has here (None: not known)."""
        self.watch = {each.job_id: each for each in watch}
        self.owners.clear()
        self.owners.update((each.job_id, each.uid) for each in self.watch.values())
        if running is not None:
            self._running = (frozenset(running), now)

    def running(self, now: float) -> frozenset[str] | None:
        """The ids of all jobs that Slurm has on this node; None while that is not known."""
        if self._running is None or now - self._running[1] > RUNNING_LIFETIME_S:
            return None
        return self._running[0]
