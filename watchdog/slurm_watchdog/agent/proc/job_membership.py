"""Which processes belong to which job, step and rank. Pure: a table of processes goes in, memberships come out.

Job and step come from the control group's path, else from the slurmstepd above a process, else from what was learnt
about it before its ancestors died, else from its environment: a user writes there what he likes, so that counts for the
job's owner alone, as Slurm has named him, and for a job that Slurm has here. The job id is Slurm's plain number
(SLURM_JOB_ID), also for elements of arrays. Ranks come from the environment: see `ranks_of_step`. A program that forks
its ranks itself and gives them no variables (torch.multiprocessing.spawn) is one rank with workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from slurm_watchdog.agent.proc.entry import JobMember, JobStep, Key, ProcessFacts, number_of, restarts_of
from slurm_watchdog.knowledge.launchers import NEVER_A_RANK, RANK_SOURCES, RANK_VARIABLES
from slurm_watchdog.knowledge.ray_train import WORKER_NAMES, WorkerRank
from slurm_watchdog.model.observations import BY_CLAIM, BY_SLURM, Role


def assign(
    table: Mapping[int, ProcessFacts],
    before: Mapping[Key, JobMember],
    owners: Mapping[str, int],
    seats: Mapping[str, Mapping[int, WorkerRank]] = MappingProxyType({}),
) -> dict[int, JobMember]:
    """Membership by pid of every process that belongs to a job. `before` is the last result, by pid and start.
    `owners`: the jobs that Slurm has here, and whose they are; an environment counts for no other job, and for no other
    user. `seats`: of a job, which of its processes is which rank, by the pid that the process itself has, as its log
    says."""
    table = _with_inherited(table)
    places, certain, how = _places(table, before, owners)
    left_over = _left_over(table, places, certain, before)
    groups: dict[JobStep, list[ProcessFacts]] = {}
    members: dict[int, JobMember] = {}
    for pid, place in places.items():
        if pid in left_over:
            members[pid] = JobMember(place.job_id, place.step_id, Role.HELPER, left_over=True)
        else:
            groups.setdefault(place, []).append(table[pid])
    for place, group in groups.items():
        others = [each for each in groups if each.job_id == place.job_id and each != place]
        if place.job_id in seats:
            members |= ranks_of_ray(place, group, seats[place.job_id], before)
        else:
            members |= ranks_of_step(place, group, others, table, before)
    return {pid: replace(member, by=how[pid]) for pid, member in members.items()}


def may_hold_a_rank(comm: str, exe: str, environ: Mapping[str, str]) -> bool:
    """Whether a process of this name, with this program and environment, could be the one that trains."""
    given = any(name in environ for name in RANK_VARIABLES)
    return given and comm not in NEVER_A_RANK and exe not in NEVER_A_RANK


def _with_inherited(table: Mapping[int, ProcessFacts]) -> Mapping[int, ProcessFacts]:
    """`table`, where those who may not be read have the environment of their nearest ancestor who could be."""
    denied = [process for process in table.values() if process.denied and process.environ is None]
    if not denied:
        return table
    whole = dict(table)
    for process in denied:
        above, depth = table.get(process.ppid), 0
        while above is not None and above.environ is None and depth < MAX_DEPTH:
            above, depth = table.get(above.ppid), depth + 1
        environ = above.environ if above is not None else None
        if environ and "SLURM_JOB_ID" in environ:
            whole[process.pid] = replace(process, environ=environ)
    return whole


def _left_over(
    table: Mapping[int, ProcessFacts], places: Mapping[int, JobStep], certain: set[int], before: Mapping[Key, JobMember]
) -> set[int]:
    """Those who outlived their run, which shows when its job runs here again. The new run is one whose slurmstepd, or
    control group, is there and whose environment counts more restarts. Only who is neither below that slurmstepd nor in
    a group of Slurm's can be of the old one; and who was of it once remains so."""
    newest: dict[str, int] = {}
    for pid in certain:
        if (restarts := restarts_of(table[pid])) is not None:
            job_id = places[pid].job_id
            newest[job_id] = max(restarts, newest.get(job_id, 0))
    found = set()
    for pid, place in places.items():
        if pid in certain:
            continue
        process, restarts = table[pid], restarts_of(table[pid])
        old = before.get((pid, process.start_ticks))
        same_job = old is not None and old.left_over and old.job_id == place.job_id
        if same_job or (restarts is not None and restarts < newest.get(place.job_id, 0)):
            found.add(pid)
    return found


def _places(
    table: Mapping[int, ProcessFacts], before: Mapping[Key, JobMember], owners: Mapping[str, int]
) -> tuple[dict[int, JobStep], set[int], dict[int, str]]:
    """Job and step of every process that has one; whose is certain; how it is known."""
    sure: set[int] = set()
    how: dict[int, str] = {}
    found: dict[int, JobStep | None] = {}

    def certain(pid: int, depth: int = 0) -> JobStep | None:
        """By control group, by an ancestor, by what was known: in this order."""
        if pid in found:
            return found[pid]
        process = table.get(pid)
        if process is None or depth > MAX_DEPTH:
            return None
        place = process.cgroup or process.stepd
        if place is None or place.step_id is None:
            above = certain(process.ppid, depth + 1) if process.ppid > 1 else None
            place = above or place
            if above is not None and process.ppid in sure:
                sure.add(pid)
        if process.cgroup is not None or process.stepd is not None:
            sure.add(pid)
        how[pid] = BY_SLURM
        if place is None and (old := before.get((pid, process.start_ticks))):
            place, how[pid] = JobStep(old.job_id, old.step_id), old.by
        found[pid] = place
        return place

    for pid in table:
        certain(pid)
    for pid, process in table.items():
        if found.get(pid) is not None or process.foreign or (claimed := _claimed(process)) is None:
            continue
        if owners.get(claimed.job_id) == process.uid:
            found[pid], how[pid] = claimed, BY_CLAIM
    places = {pid: place for pid, place in found.items() if place is not None and table[pid].comm != "slurmstepd"}
    return places, sure & places.keys(), how


def _claimed(process: ProcessFacts) -> JobStep | None:
    """What the environment says: a user may write there what he likes."""
    environ = process.environ or {}
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    if not job_id.isdecimal():
        return None
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return JobStep(job_id, step if step.isdecimal() and int(step) < 0xFFFFFFF0 else "batch")


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
    place: JobStep, group: list[ProcessFacts], seats: Mapping[int, WorkerRank], before: Mapping[Key, JobMember]
) -> dict[int, JobMember]:
    """Roles in one step of a job whose log says which of Ray's workers is which rank. A worker of which it is not said
    (yet) is a rank without a number. No other process is one: the driver and Ray's own daemons have the variables of
    the task that started them."""
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
    """Whether `kind` was put into the environment within this step, a value a task, and not inherited by all."""
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
    """Whether a rank set `kind` to its own rank for whatever it starts, as no launcher does."""
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
