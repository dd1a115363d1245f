"""Jobs on this node as the controller knows them from Slurm: whose they are, what is to be followed, and
which run here now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slurm_watchdog.model.protocol import JobWatch

RUNNING_LIFETIME_S = 60.0  # What the controller said about which jobs run here is valid for so long.


class JobsMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller has said, for the agent that this process becomes."""

    watch: tuple[JobWatch, ...] = ()
    running: tuple[tuple[str, ...], float] | None = None


class JobsHere(msgspec.Struct):
    """The newest word of the controller. Collectors and commands hold this object and read it; `hear` alone
    changes it."""

    watch: Mapping[str, JobWatch] = {}  # By job.
    owners: dict[str, int] = {}
    """Job -> the user whose it is; one object for as long as this one lives."""
    awaiting_checkpoints: set[str] = set()
    """Jobs with a kill switch, whose next checkpoint is waited for."""
    _running: tuple[frozenset[str], float] | None = None

    def hear(self, watch: Iterable[JobWatch], running: Iterable[str] | None = None, now: float = 0.0) -> None:
        """Takes over one reply: the jobs to watch, all of them, and the ids of those that Slurm has here
        (None: not known)."""
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

    def memory(self) -> JobsMemory:
        """What `remember` of the next agent takes."""
        running = None if self._running is None else (tuple(sorted(self._running[0])), self._running[1])
        return JobsMemory(watch=tuple(self.watch.values()), running=running)

    def remember(self, memory: JobsMemory) -> None:
        """What the agent before this one had heard."""
        ids, at = memory.running or (None, 0.0)
        self.hear(memory.watch, ids, at)
