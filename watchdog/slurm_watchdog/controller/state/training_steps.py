"""Which of a job's Slurm steps are its training; how busy one process is, from counters in two of its reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_watchdog.base.averages import median
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey
from slurm_watchdog.model.observations import Process, Role

Processes = Mapping[ProcessKey, tuple[Process, float, float | None]]
"""Key -> the process, when it was seen last, and when it was found to be gone."""

TRAINS_CPU_S = 1.0  # A rank has used as much once it has imported its framework: PyTorch takes more than a second.
IDLE_SHARE, IDLE_CPU_S = 0.25, 60.0
"""A step whose ranks have used less than this share of what those of another have, and less than this, reads counters
or prints: srun gives a monitor that is started beside the training as many tasks as the job has (SLURM_NTASKS)."""


def living_steps(processes: Processes) -> set[str | None]:
    """The Slurm steps with a rank that lives."""
    return {p.step_id for p, _, gone_at in processes.values() if p.role is Role.RANK and gone_at is None}


def idle_steps(processes: Processes) -> frozenset[str | None]:
    """The steps that are known to do next to nothing beside another one of the same job, which has half as many ranks
    at least: what one process of one node says hides no one."""
    used: dict[str | None, list[float]] = {}
    for process, _, gone_at in processes.values():
        if process.role is Role.RANK and gone_at is None:
            used.setdefault(process.step_id, []).append(process.cpu_s)
    each_s = {step: median(seconds) for step, seconds in used.items()}

    def is_idle(step: str | None) -> bool:
        others = (each_s[other] for other in used if 2 * len(used[other]) >= len(used[step]))
        most_s = max(others)
        return most_s >= TRAINS_CPU_S and each_s[step] < min(IDLE_SHARE * most_s, IDLE_CPU_S)

    return frozenset(filter(is_idle, used))


def training_steps(processes: Processes, known: frozenset[str | None]) -> tuple[str | None, frozenset[str | None]]:
    """The Slurm step with the most ranks, of those that live and are not idle, and all steps whose ranks are of its
    world: side steps of the same job (a shell, a profiler) have few, and one that is over may have had more. Of two
    with as many the newer one, which has the higher number. `known`: the steps of the world so far, of which one may
    have lost all ranks. mpirun in a batch script starts the ranks of its own node there and the others in a step; so do
    launchers that use ssh, and Ray has a step for its head. Such steps have one world size, and no rank twice."""
    living = living_steps(processes)
    counts: dict[str | None, int] = {}
    for process, _, gone_at in processes.values():
        if process.role is Role.RANK and (not living or process.step_id in living or process.step_id in known):
            counts[process.step_id] = counts.get(process.step_id, 0) + (2 if gone_at is None else 1)
    idle = idle_steps(processes) if len(counts) > 1 else frozenset()
    order = sorted(counts, key=lambda s: (s in living, s not in idle, counts[s], len(s or ""), s or ""), reverse=True)
    if len(order) < 2:
        return (order[0] if order else None), frozenset(order)
    seats: dict[str | None, set[tuple[int | None, int | None]]] = {step: set() for step in order}
    for process, _, _ in processes.values():
        if process.role is Role.RANK and process.step_id in seats:
            seats[process.step_id].add((process.rank, process.world_size))
    renewed = _is_renewed(processes, living)
    steps, taken = [order[0]], seats[order[0]]
    for step in order[1:]:
        both = taken | seats[step]
        one_world = len({world for _, world in both}) == 1 and not any(None in seat for seat in both)
        disjoint = len(both) == len(taken) + len(seats[step])
        if one_world and disjoint and (step in living or not renewed):
            steps.append(step)
            taken = both
    return next((step for step in steps if (step or "").isdigit()), steps[0]), frozenset(steps)


def _is_renewed(processes: Processes, living: set[str | None]) -> bool:
    """Whether a rank of these steps lives again: what is gone of another step is then of the start before."""
    ranks = [
        (p.rank, gone_at is None) for p, _, gone_at in processes.values() if p.role is Role.RANK and p.step_id in living
    ]
    return len({rank for rank, _ in ranks}) < len(set(ranks))


RATE_S = 20.0  # Counters are compared over this time at least: for processes that work in bursts.


POLLS_CPU, QUIET_CPU = 0.5, 0.2  # Cores: a rank that computes or polls uses more than the one, one that waits less.

ASLEEP_LOOKS, ASLEEP_S = 6, 30.0  # Of a process whose time no one tells: so often asleep, after running, it uses none.

WORKS_CPU, WORKS_BYTES_S = 0.05, 1e5  # Who uses more works: a thread that looks around each second uses a tenth.
LEAST_LOOK_S = 1.5  # Between two such reports: CPU time is counted in hundredths of a second.

MOMENT_S = 15.0  # A call on a file that is over so soon: the process moves data. A longer one may be stuck.


@dataclass(slots=True)
class ProcessRates:
    """How busy one process is, from counters that only rise."""

    at: float
    cpu_s: float
    io_bytes: int | None
    cpu_ratio: float | None = None
    io_bytes_s: float | None = None
    storage_at: float | None = None  # When it was last seen waiting for a disk or a file, for a moment only.
    busy_at: float | None = None  # When it was last seen to use most of a core, or some since; None: never.
    ran: int = 0  # Looks that found it running, of a process whose time is not reported.
    asleep: int = 0  # Looks since, that found it asleep.
    asleep_at: float = 0.0  # When the first of these was.

    worked_at: float | None = None  # When it was last seen to have worked since the report before; None: never.
    _looked_at: float | None = None  # When that report was; None: there was none.
    _looked_cpu_s: float = 0.0
    _looked_io_bytes: int | None = None

    def update(self, process: Process, now: float) -> None:
        self._note_work(process, now)
        if (process.blocked is not None or process.state == "D") and _waits_for_a_moment(process):
            self.storage_at = now
        if process.cpu_s <= 0.0 and process.state in ("S", "I"):
            self.asleep, self.asleep_at = self.asleep + 1, self.asleep_at if self.asleep else now
        elif process.cpu_s <= 0.0:
            self.ran, self.asleep = self.ran + (process.state == "R"), 0
        elapsed_s = now - self.at
        if elapsed_s < RATE_S:
            return
        # No one has trained without using any time: nought is what a trace says that does not tell. A
        # loader's worker may have.
        reported = process.role is Role.WORKER or min(process.cpu_s, self.cpu_s) > 0
        used_s = max(0.0, process.cpu_s - self.cpu_s) if reported else None
        self.cpu_ratio = self._by_state(now) if used_s is None else used_s / elapsed_s
        if self.cpu_ratio is None:
            self.busy_at = None
        elif self.cpu_ratio >= (POLLS_CPU if self.busy_at is None else QUIET_CPU):
            self.busy_at = now
        known = process.io_bytes is not None and self.io_bytes is not None
        self.io_bytes_s = max(0, (process.io_bytes or 0) - (self.io_bytes or 0)) / elapsed_s if known else None
        self.at, self.cpu_s, self.io_bytes = now, process.cpu_s, process.io_bytes

    def _note_work(self, process: Process, now: float) -> None:
        before_at, before_cpu_s, before_bytes = self._looked_at, self._looked_cpu_s, self._looked_io_bytes
        passed_s = LEAST_LOOK_S if before_at is None else now - before_at
        if passed_s < LEAST_LOOK_S:
            return
        self._looked_at, self._looked_cpu_s, self._looked_io_bytes = now, process.cpu_s, process.io_bytes
        if before_at is None:
            self.worked_at = now
            return
        counted = process.io_bytes is not None and before_bytes is not None
        moved_bytes = (process.io_bytes or 0) - (before_bytes or 0) if counted else 0
        if process.cpu_s - before_cpu_s > WORKS_CPU * passed_s or moved_bytes > WORKS_BYTES_S * passed_s:
            self.worked_at = now

    def _by_state(self, now: float) -> float | None:
        """None: no one knows. A process that sleeps at every look anyway says nothing by sleeping."""
        slept = self.asleep >= ASLEEP_LOOKS and now - self.asleep_at >= ASLEEP_S
        return 0.0 if slept and self.ran >= ASLEEP_LOOKS else None


def _waits_for_a_moment(process: Process) -> bool:
    if process.blocked is not None:
        return process.blocked.mount is not None and process.blocked.seconds < MOMENT_S
    return process.state == "D" and (process.state_age_s or 0.0) < MOMENT_S
