"""Which of a job's Slurm steps are its training. Pure."""

from __future__ import annotations

from collections.abc import Mapping

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
    all_steps = frozenset({each[0].step_id for each in processes.values() if each[0].role is Role.RANK})
    if len(all_steps) < 2:
        return next(iter(all_steps), None), all_steps
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
