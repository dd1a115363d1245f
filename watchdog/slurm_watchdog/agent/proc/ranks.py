"""Which processes of a job step are its ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_watchdog.agent.proc.process_facts import (
    JobMember,
    JobStep,
    Key,
    ProcessFacts,
    number_of,
    restarts_of,
)
from slurm_watchdog.knowledge.launchers import NEVER_A_RANK, RANK_SOURCES, RANK_VARIABLES
from slurm_watchdog.knowledge.ray_train import WORKER_NAMES, WorkerRank
from slurm_watchdog.model.observations import Role

BATCH_STEPS = frozenset({"batch", "interactive"})
MAX_DEPTH = 100  # Ancestors that are followed upwards.


def ranks_of_step(
    place: JobStep,
    group: list[ProcessFacts],
    other_steps: list[JobStep],
    table: Mapping[int, ProcessFacts],
    before: Mapping[Key, JobMember],
) -> dict[int, JobMember]:
    """Roles in one step.

    The variable of ranks is the first of RANK_VARIABLES that appears somewhere in the step's tree without
    having been in the parent's environment. A rank is the topmost process with a value of it that is no shell
    and no launcher (a process that gives its children other values than its own is a launcher, too). What descends
    from a rank is its worker; all else is a helper. In the batch script SLURM_PROCID is 0 for everything, so
    it counts there only if the job has no other step and no srun.
    """
    kinds: Iterable[str] = RANK_VARIABLES
    if place.step_id == "extern":
        # Sessions by ssh that pam_slurm_adopt puts there: pdsh and mpirun start ranks that way, a shell of
        # the user's has none.
        kinds = [kind for kind in RANK_VARIABLES if kind != "SLURM_PROCID"]
    elif place.step_id in BATCH_STEPS or place.step_id is None:
        has_steps = any(step.step_id not in ("extern", "batch", None) for step in other_steps)
        if has_steps or any(process.comm == "srun" for process in group):
            kinds = [kind for kind in RANK_VARIABLES if kind != "SLURM_PROCID"]
    inside = {process.pid: process for process in group}
    kind = next((kind for kind in kinds if _is_given_here(kind, group, table)), None)
    chosen = _choose(kind, inside, before) if kind else {}
    above_ranks = {above for pid in chosen for above in _ancestors(inside[pid], inside)}
    members = {}
    for process in group:
        old = before.get((process.pid, process.start_ticks))
        if old is not None and (old.job_id, old.step_id) != (place.job_id, place.step_id):
            old = None
        above = next((chosen[pid] for pid in _ancestors(process, inside) if pid in chosen), None)
        if process.pid in chosen:
            role, rank = Role.RANK, chosen[process.pid]
        elif above is not None:
            role, rank = Role.WORKER, above
        elif old is not None and old.rank is not None and (old.role is Role.WORKER or not process.environ):
            role, rank = old.role, old.rank
        else:
            launched = process.pid in above_ranks or (old is not None and old.launcher)
            members[process.pid] = JobMember(place.job_id, place.step_id, Role.HELPER, launcher=launched)
            continue
        if process.environ or old is None:
            local_rank, world_size = (_first_of(process.environ, kind, column) for column in (1, 2))
        else:
            local_rank, world_size = old.local_rank, old.world_size
        members[process.pid] = JobMember(place.job_id, place.step_id, role, rank, local_rank, world_size)
    return members


def ranks_of_ray(
    place: JobStep,
    group: list[ProcessFacts],
    seats: Mapping[int, WorkerRank],
    before: Mapping[Key, JobMember],
) -> dict[int, JobMember]:
    """Roles in one step of a job whose log says which of Ray's workers is which rank.

    A worker of which it is not said (yet) is a rank without a number. No other process is one: the driver and Ray's own
    daemons have the variables of the task that started them.
    """
    inside = {process.pid: process for process in group}
    ranks: dict[int, JobMember] = {}
    for process in group:
        if process.comm in WORKER_NAMES and not process.foreign:
            seat = seats.get(process.own_pid or process.pid)
            numbers = (None, None, None) if seat is None else (seat.rank, seat.local_rank, seat.world_size)
            ranks[process.pid] = JobMember(place.job_id, place.step_id, Role.RANK, *numbers)
    above_ranks = {above for pid in ranks for above in _ancestors(inside[pid], inside)}
    members = dict(ranks)
    for process in group:
        if process.pid in ranks:
            continue
        old = before.get((process.pid, process.start_ticks))
        above = next((ranks[pid] for pid in _ancestors(process, inside) if pid in ranks), None)
        orphaned = old is not None and old.role is Role.WORKER and process.ppid not in inside
        owner = above or (old if orphaned else None)
        members[process.pid] = (
            JobMember(place.job_id, place.step_id, Role.HELPER, launcher=process.pid in above_ranks)
            if owner is None
            else JobMember(place.job_id, place.step_id, Role.WORKER, owner.rank, owner.local_rank, owner.world_size)
        )
    return members


def _is_given_here(kind: str, group: list[ProcessFacts], table: Mapping[int, ProcessFacts]) -> bool:
    """Whether `kind` was put into the environment within this step, with a value a task, not inherited by all
    from above."""
    having = [process for process in group if number_of(process.environ, kind) is not None]
    tasks = {number_of(process.environ, "SLURM_PROCID") for process in having}
    if len({number_of(process.environ, kind) for process in having}) < len(tasks):
        return False
    for process in having:
        parent = table.get(process.ppid)
        if parent is None or parent.environ is None:
            return True
        own = number_of(process.environ, kind)
        if number_of(parent.environ, kind) != own and not _hands_on_its_own(kind, parent, process, having):
            return True
    return False


def _hands_on_its_own(kind: str, parent: ProcessFacts, child: ProcessFacts, having: list[ProcessFacts]) -> bool:
    """Whether a rank set `kind` to its own rank for whatever it starts (a compiler, a spawned worker), as no
    launcher does."""
    if _is_helper(parent) or "TORCHELASTIC_RUN_ID" in (child.environ or {}):
        return False
    lower = RANK_VARIABLES[RANK_VARIABLES.index(kind) + 1 :]
    rank = next((number for name in lower if (number := number_of(parent.environ, name)) is not None), None)
    given = {number_of(process.environ, kind) for process in having if process.ppid == parent.pid}
    return rank is not None and given == {rank}


def _choose(kind: str, inside: Mapping[int, ProcessFacts], before: Mapping[Key, JobMember]) -> dict[int, int]:
    """Pid to rank: the one process of each rank."""
    launchers = {
        process.ppid
        for process in inside.values()
        if process.ppid in inside
        and (own := number_of(inside[process.ppid].environ, kind)) is not None
        and (theirs := number_of(process.environ, kind)) is not None
        and own != theirs
    }
    candidates: dict[int, int] = {}
    for process in inside.values():
        value = number_of(process.environ, kind)
        old = before.get((process.pid, process.start_ticks))
        was_other = old is not None and (old.role is Role.WORKER or old.launcher)
        if value is not None and process.pid not in launchers and not _is_helper(process) and not was_other:
            candidates[process.pid] = value
    by_rank: dict[int, list[ProcessFacts]] = {}
    for pid, value in candidates.items():
        if not any(candidates.get(above) == value for above in _ancestors(inside[pid], inside)):
            by_rank.setdefault(value, []).append(inside[pid])

    def preference(process: ProcessFacts) -> tuple[int, bool, bool, int, int]:
        old = before.get((process.pid, process.start_ticks))
        was_rank = old is not None and old.role is Role.RANK
        return (
            -(restarts_of(process) or 0),  # a rank of an earlier run, which no one can kill, holds no seat of this one
            not was_rank,
            not process.comm.startswith(("python", "pt_")),
            process.start_ticks,
            process.pid,
        )

    return {min(group, key=preference).pid: value for value, group in by_rank.items()}


def _is_helper(process: ProcessFacts) -> bool:
    return process.foreign or process.comm in NEVER_A_RANK or process.exe in NEVER_A_RANK


def _ancestors(process: ProcessFacts, inside: Mapping[int, ProcessFacts]) -> Iterable[int]:
    seen = {process.pid}
    parent = inside.get(process.ppid)
    while parent is not None and parent.pid not in seen:
        seen.add(parent.pid)
        yield parent.pid
        parent = inside.get(parent.ppid)


def _first_of(environ: Mapping[str, str] | None, kind: str | None, column: int) -> int | None:
    """The number in `column` of RANK_SOURCES: from a row of the rank's own variable if there is one, else from any."""
    rows = sorted(RANK_SOURCES, key=lambda row: row[0] != kind)
    found = (number_of(environ, row[column]) for row in rows)
    return next((number for number in found if number is not None), None)
