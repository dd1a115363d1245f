"""Which jobs have a /dev/shm of their own, and how full it is: of one process of each step, in a child of its own.

One look shows whether there is one. Where there is none, the next looks come more and more rarely: a program may enter
a container after its start, and no child is started every minute for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import ReadSharedMemory
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.usage import Resource, Usage

KEY = "shared-memory"
EVERY_S = 120.0
"""Between two looks at one that a job has for itself: the child started for it takes 2 ms, 0.002 % of a core."""
SELDOM_S = 1920.0  # Between two looks where there is none: 30 s, doubled up to this.
FIRST_S = 30.0
MAX_STEPS = 64  # Of a node that are looked at.
OLD_S = 3 * EVERY_S  # What was read so long ago is not reported any more.

Place = tuple[str, str | None]  # Job and step.


@dataclass
class _Look:
    pid: int
    start_ticks: int
    due: float
    wait_s: float = FIRST_S
    found: tuple[float, int, int] | None = None  # When, bytes in use, and size.


@dataclass
class SharedMemories:
    """What is known of each step here. One loop owns it."""

    workers: WorkerPool
    _looks: dict[Place, _Look] = field(default_factory=dict)
    _asking: bool = False

    def collect(self, processes: Iterable[Process], now: float, deadline_s: float) -> tuple[Usage, ...]:
        """A row for each step that has one; requests what is due, and takes the answer in a later call. Never waits."""
        self._choose(processes, now)
        due = [(place, look) for place, look in self._looks.items() if now >= look.due]
        if due and not self._asking:
            self._ask(due, now, deadline_s)
        return tuple(
            Usage(resource=Resource.SHARED_MEMORY, used=look.found[1], limit=look.found[2], job_id=job, step_id=step)
            for (job, step), look in self._looks.items()
            if look.found is not None and now - look.found[0] <= OLD_S
        )

    def _choose(self, processes: Iterable[Process], now: float) -> None:
        """The rank of each step with the smallest pid, so that the same one is asked again."""
        first: dict[Place, Process] = {}
        for each in sorted(processes, key=lambda each: each.pid):
            if each.role is Role.RANK and each.state not in ("Z", "X"):
                first.setdefault((each.job_id, each.step_id), each)
        chosen = {}
        for place, each in list(first.items())[:MAX_STEPS]:
            old = self._looks.get(place)
            same = old is not None and (old.pid, old.start_ticks) == (each.pid, each.start_ticks)
            chosen[place] = old if old is not None and same else _Look(each.pid, each.start_ticks, now)
        self._looks = chosen

    def _ask(self, due: list[tuple[Place, _Look]], now: float, deadline_s: float) -> None:
        def apply(answer: Answer[list[tuple[int, int] | None]]) -> None:
            self._asking = False
            for (_, look), found in zip(due, answer.value or (), strict=False):
                look.found = None if found is None else (now, *found)
                look.wait_s = min(2 * look.wait_s, SELDOM_S) if found is None else EVERY_S
                look.due = now + look.wait_s

        request = ReadSharedMemory([look.pid for _, look in due])
        if self.workers.ask(KEY, request, deadline_s, now, apply, idle_s=0.0) is None:
            return
        self._asking = True
        for _, look in due:
            look.due = now + EVERY_S  # also where no answer comes
