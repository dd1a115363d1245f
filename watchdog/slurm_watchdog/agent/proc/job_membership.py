"""Which processes belong to which job, step and rank. Pure: a table of processes goes in, memberships come out.

Job and step come from the control group's path, else from the slurmstepd above a process, else from what was
learnt about it before its ancestors died, else from its environment: a user writes there what he likes, so
that counts for the job's owner alone, as Slurm has named him, and for a job that Slurm has here. The job id
is Slurm's plain number (SLURM_JOB_ID), also for elements of arrays. Ranks come from the environment: see
`ranks_of_step`. A program that forks its ranks itself and gives them no variables
(torch.multiprocessing.spawn) is one rank with workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from slurm_watchdog.agent.proc.process_facts import (
    JobMember,
    JobStep,
    Key,
    ProcessFacts,
    restarts_of,
)
from slurm_watchdog.agent.proc.ranks import MAX_DEPTH, ranks_of_ray, ranks_of_step
from slurm_watchdog.knowledge.launchers import NEVER_A_RANK, RANK_VARIABLES
from slurm_watchdog.knowledge.ray_train import WorkerRank
from slurm_watchdog.model.observations import BY_CLAIM, BY_SLURM, Role


def assign(
    table: Mapping[int, ProcessFacts],
    before: Mapping[Key, JobMember],
    owners: Mapping[str, int],
    seats: Mapping[str, Mapping[int, WorkerRank]] = MappingProxyType({}),
) -> dict[int, JobMember]:
    """Membership by pid of every process that belongs to a job. `before` is the last result, by pid and start.

    `owners`: the jobs that Slurm has here, and whose they are; an environment counts for no other job, and
    for no other user.
    `seats`: of a job, which of its processes is which rank, by the pid that the process itself has, as its log says.
    """
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
    table: Mapping[int, ProcessFacts],
    places: Mapping[int, JobStep],
    certain: set[int],
    before: Mapping[Key, JobMember],
) -> set[int]:
    """Those who outlived their run, which shows when its job runs here again.

    The new run is one whose slurmstepd, or control group, is there and whose environment counts more
    restarts. Only who is neither below that slurmstepd nor in a group of Slurm's can be of the old one; and
    who was of it once remains so.
    """
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
    """Job and step of every process that has one; who of them stands in a control group of it, or below its
    slurmstepd; how it is known."""
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
