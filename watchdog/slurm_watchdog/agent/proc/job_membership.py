"""Which processes belong to which job, step and rank. Pure: a table of processes goes in, memberships come out.

Job and step come from the control group's path, else from the slurmstepd above a process, else from what was learnt about it
before its ancestors died, else from its environment: a user writes there what he likes, so that counts for the job's owner alone, as
Slurm has named him, and for a job that Slurm has here. The job id is
Slurm's plain number (SLURM_JOB_ID), also for elements of arrays. Ranks come from the environment: see `_ranks_of_step`.
A program that forks its ranks itself and gives them no variables (torch.multiprocessing.spawn) is one rank with workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from slurm_watchdog.knowledge.ray_train import WORKER_NAMES, Seat
from slurm_watchdog.model.observations import BY_CLAIM, BY_SLURM, Role

RANK_SOURCES: tuple[tuple[str, str, str], ...] = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_SIZE"),
    ("ALPS_APP_PE", "ALPS_LOCAL_RANKID", "ALPS_APP_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"),
    ("SLURM_WATCHDOG_RANK", "SLURM_WATCHDOG_LOCAL_RANK", "SLURM_WATCHDOG_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)
"""Rank, local rank, world size, as set by: torchrun, accelerate and DeepSpeed's launcher; Open MPI; MVAPICH2; PMIx; MPICH's and
Intel's Hydra (PMI 1 and 2); Cray's PMI; Cray PALS; ALPS; Flux; our own `run`, for a program that is alone; srun. What is set closest to the trainer comes first. Ray
gives its workers no rank in their environment: its log says which is which, see `_ranks_of_ray`; until then, and where it spans
several nodes, the process that srun started is the rank, with workers."""
RANK_VARIABLES = tuple(dict.fromkeys(rank for rank, _, _ in RANK_SOURCES))
LOCAL_RANK_VARIABLES = tuple(dict.fromkeys(local for _, local, _ in RANK_SOURCES))
WORLD_SIZE_VARIABLES = tuple(dict.fromkeys(size for _, _, size in RANK_SOURCES))
WISH_VARIABLES = (
    "SLURM_WATCHDOG", "SLURM_WATCHDOG_KILL_SWITCH", "SLURM_WATCHDOG_CHECKPOINT_DIR", "SLURM_WATCHDOG_LADDER",
)  # fmt: skip
"""With which a job's owner says what he wants of the watchdog."""
ENVIRONMENT = (
    *RANK_VARIABLES, *LOCAL_RANK_VARIABLES, *WORLD_SIZE_VARIABLES,
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_RESTART_COUNT", "SLURM_JOB_USER",
    "SLURM_SUBMIT_DIR", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_RUN_ID",
    "SLURM_WATCHDOG_JOB_ID", "SLURM_WATCHDOG_RESTARTS",
    *WISH_VARIABLES,
)  # fmt: skip
"""All that is ever kept of a process's environment."""

NEVER_A_RANK = frozenset(
    """
    bash sh dash busybox zsh ksh tcsh csh fish
    srun sbatch salloc slurmstepd sattach sstat scontrol squeue
    torchrun accelerate deepspeed composer colossalai torchx wandb
    mpirun mpiexec mpiexec.hydra mpirun.real hydra_pmi_proxy hydra_bstrap_pr pmi_proxy mpispawn orterun orted prterun prted prun
    horovodrun jsrun aprun palsd flux flux-broker flux-shell ibrun
    numactl taskset env time timeout nohup nice ionice setsid stdbuf unbuffer script sudo su runuser setpriv prlimit chrt
    unshare nsenter chroot bwrap apptainer singularity starter starter-suid appinit sinit enroot enroot-nsenter enroot-mksquash
    pyxis ch-run sarus shifter podman podman-hpc docker conmon crun runc tini dumb-init catatonit squashfuse squashfuse_ll
    fuse-overlayfs fuse2fs gocryptfs slirp4netns pasta
    conda mamba micromamba uv pixi poetry pdm hatch pipenv make
    nsys nsys-launcher ncu rocprof rocprofv3 vtune perf strace ltrace gdb gdbserver valgrind py-spy
    tee cat grep awk gawk mawk sed sleep tail head sort tr cut wc ts logger rotatelogs multilog xargs parallel
    ssh sshd sshd-session pdsh clush rsync nvidia-smi dcgmi
    """.split()  # noqa: SIM905  a table of words
)
"""Names of shells, launchers, containers and pipes that run in a task and never train."""
BATCH_STEPS = frozenset({"batch", "interactive"})
MAX_DEPTH = 100
"""Ancestors that are followed upwards."""

_CGROUP = re.compile(
    r"/(?:slurm(?:_[^/]+)?/uid_\d+|[^/]+\.slice/(?:[^/]+_)?slurmstepd\.scope)/job_(\d+)(?:/step_([0-9a-z]+))?(?=[/ ]|$)"
)
"""Slurm's own places: `/slurm/uid_U/job_N` (version 1; `slurm_NODE` where a host has several slurmd) and `slurmstepd.scope/job_N`
in a slice (version 2; `NODE_slurmstepd.scope` likewise, any slice since CgroupSlice). Source: cgroup.conf(5), cgroup_v2.html."""
_USERS_OWN = re.compile(r"/user(?:\.slice|-\d+\.slice|@\d+\.service)(?:/|$)")
"""What systemd hands to a user, who may make groups of any name below it."""
_STEPD = re.compile(r"slurmstepd: \[(\d+)(?:\+\d+)?(?:\.([0-9a-z]+))?")


@dataclass(frozen=True)
class JobStep:
    """Job and step ("0", "batch", …), as a control group or slurmstepd names them."""

    job_id: str
    step_id: str | None = None


@dataclass(frozen=True)
class ProcessFacts:
    """What is known of one process for telling where it belongs. `environ` None: not read yet, or not readable."""

    pid: int
    start_ticks: int
    ppid: int
    comm: str
    uid: int
    """Its real user."""
    cgroup: JobStep | None = None
    environ: Mapping[str, str] | None = None
    exe: str = ""
    """File name of its program: `bash` for a script that the kernel lists under the script's own name."""
    stepd: JobStep | None = None
    """Of a slurmstepd only: the step it looks after."""
    denied: bool = False
    """Its environment may not be read (another user's namespace): it counts as having its parent's."""
    own_pid: int | None = None
    """Its number in its own PID namespace, where that is another one than the agent's."""
    cwd: str = ""
    """Working directory of what may hold a rank, when it was identified."""
    checkpoint_directories: tuple[str, ...] = ()
    """Those that its command line names."""
    settings: tuple[tuple[str, str], ...] = ()
    """Of what may hold a rank: the variables that decide how it computes and communicates, for evidence alone, secrets masked."""
    foreign: bool = False
    """Not an ordinary user's through and through (a set-user-id program, root's): nothing of it is read, and it is no rank."""
    collective_timeout: tuple[float, bool] | None = None
    """Seconds after which its collectives are given up, and whether that is only assumed; see knowledge.collective_timeouts."""


@dataclass(frozen=True)
class JobMember:
    """Where a process belongs."""

    job_id: str
    step_id: str | None
    role: Role
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    left_over: bool = False
    """It belongs to an earlier run of the job, which was requeued to this node meanwhile."""
    by: str = ""
    """How that is known: BY_SLURM, or BY_CLAIM."""
    launcher: bool = False
    """It has started ranks: it never is one, also when they are gone and only its own variables are left."""


Key = tuple[int, int]
"""(pid, start ticks): unique until a reboot."""


def parse_cgroup(text: str) -> JobStep | None:
    """Job and step in the text of /proc/PID/cgroup, version 1 or 2; None outside of jobs.

    Only a group in Slurm's own place counts, within a container's group, too: a user may make a `job_N` in what was delegated
    to him. The outermost one counts, for what a job makes is below its own group.
    """
    if "/job_" not in text:
        return None
    places = [
        place
        for line in text.splitlines()
        if "/job_" in line and (place := _place_of(line.split(":", 2)[-1]))
    ]
    return next((place for place in places if place.step_id), places[0] if places else None)


def _place_of(path: str) -> JobStep | None:
    match = _CGROUP.search(path)
    if match is None or _USERS_OWN.search(path, 0, match.start() + 1):
        return None
    return JobStep(match[1], match[2])


def parse_stepd(cmdline: str) -> JobStep | None:
    """The step that a slurmstepd names in its title: `slurmstepd: [4.0]`, `slurmstepd: [4.batch]`."""
    match = _STEPD.match(cmdline)
    return JobStep(match[1], match[2]) if match else None


def as_slurm_job(environ: dict[str, str]) -> dict[str, str]:
    """What `slurm-watchdog run` has started outside of Slurm is its job, said in Slurm's words. Inside of a Slurm job that one counts."""
    own = environ.get("SLURM_WATCHDOG_JOB_ID", "")
    if own and environ.get("SLURM_JOB_ID", own) == own:
        environ |= {"SLURM_JOB_ID": own, "SLURM_RESTART_COUNT": environ.get("SLURM_WATCHDOG_RESTARTS", "0")}
    return environ


def assign(
    table: Mapping[int, ProcessFacts],
    before: Mapping[Key, JobMember],
    owners: Mapping[str, int],
    seats: Mapping[str, Mapping[int, Seat]] = MappingProxyType({}),
) -> dict[int, JobMember]:
    """Membership by pid of every process that belongs to a job. `before` is the last result, by pid and start.

    `owners`: the jobs that Slurm has here, and whose they are; an environment counts for no other job, and for no other user.
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
            members |= _ranks_of_ray(place, group, seats[place.job_id], before)
        else:
            members |= _ranks_of_step(place, group, others, table, before)
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


def _restarts(process: ProcessFacts) -> int | None:
    """The run that its environment was made for; None where there is none."""
    environ = process.environ or {}
    return (_number(environ, "SLURM_RESTART_COUNT") or 0) if "SLURM_JOB_ID" in environ else None


def _left_over(
    table: Mapping[int, ProcessFacts],
    places: Mapping[int, JobStep],
    certain: set[int],
    before: Mapping[Key, JobMember],
) -> set[int]:
    """Those who outlived their run, which shows when its job runs here again.

    The new run is one whose slurmstepd, or control group, is there and whose environment counts more restarts. Only who is
    neither below that slurmstepd nor in a group of Slurm's can be of the old one; and who was of it once remains so.
    """
    newest: dict[str, int] = {}
    for pid in certain:
        if (restarts := _restarts(table[pid])) is not None:
            job_id = places[pid].job_id
            newest[job_id] = max(restarts, newest.get(job_id, 0))
    found = set()
    for pid, place in places.items():
        if pid in certain:
            continue
        process, restarts = table[pid], _restarts(table[pid])
        old = before.get((pid, process.start_ticks))
        same_job = old is not None and old.left_over and old.job_id == place.job_id
        if same_job or (restarts is not None and restarts < newest.get(place.job_id, 0)):
            found.add(pid)
    return found


def _places(
    table: Mapping[int, ProcessFacts], before: Mapping[Key, JobMember], owners: Mapping[str, int]
) -> tuple[dict[int, JobStep], set[int], dict[int, str]]:
    """Job and step of every process that has one; who of them stands in a control group of it, or below its slurmstepd; how it is known."""
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
    places = {
        pid: place for pid, place in found.items() if place is not None and table[pid].comm != "slurmstepd"
    }
    return places, sure & places.keys(), how


def _claimed(process: ProcessFacts) -> JobStep | None:
    """What the environment says: a user may write there what he likes."""
    environ = process.environ or {}
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    if not job_id.isdecimal():
        return None
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return JobStep(job_id, step if step.isdecimal() and int(step) < 0xFFFFFFF0 else "batch")


def _ranks_of_step(
    place: JobStep,
    group: list[ProcessFacts],
    other_steps: list[JobStep],
    table: Mapping[int, ProcessFacts],
    before: Mapping[Key, JobMember],
) -> dict[int, JobMember]:
    """Roles in one step.

    The variable of ranks is the first of RANK_VARIABLES that appears somewhere in the step's tree without having been in the
    parent's environment. A rank is the topmost process with a value of it that is no shell and no launcher (a launcher is also
    whoever gives its children other values than its own). What descends from a rank is its worker; all else is a helper. In
    the batch script SLURM_PROCID is 0 for everything, so it counts there only if the job has no other step and no srun.
    """
    kinds: Iterable[str] = RANK_VARIABLES
    if place.step_id == "extern":
        # Sessions by ssh that pam_slurm_adopt puts there: pdsh and mpirun start ranks that way, a shell of the user's has none.
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


def _ranks_of_ray(
    place: JobStep, group: list[ProcessFacts], seats: Mapping[int, Seat], before: Mapping[Key, JobMember]
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
            else JobMember(
                place.job_id, place.step_id, Role.WORKER, owner.rank, owner.local_rank, owner.world_size
            )
        )
    return members


def _is_given_here(kind: str, group: list[ProcessFacts], table: Mapping[int, ProcessFacts]) -> bool:
    """Whether `kind` was put into the environment within this step, with a value a task, not inherited by all from above."""
    having = [process for process in group if _number(process.environ, kind) is not None]
    tasks = {_number(process.environ, "SLURM_PROCID") for process in having}
    if len({_number(process.environ, kind) for process in having}) < len(tasks):
        return False
    for process in having:
        parent = table.get(process.ppid)
        if parent is None or parent.environ is None:
            return True
        own = _number(process.environ, kind)
        if _number(parent.environ, kind) != own and not _hands_on_its_own(kind, parent, process, having):
            return True
    return False


def _hands_on_its_own(
    kind: str, parent: ProcessFacts, child: ProcessFacts, having: list[ProcessFacts]
) -> bool:
    """Whether a rank set `kind` to its own rank for whatever it starts (a compiler, a spawned worker), as no launcher does."""
    if _is_helper(parent) or "TORCHELASTIC_RUN_ID" in (child.environ or {}):
        return False
    lower = RANK_VARIABLES[RANK_VARIABLES.index(kind) + 1 :]
    rank = next((number for name in lower if (number := _number(parent.environ, name)) is not None), None)
    given = {_number(process.environ, kind) for process in having if process.ppid == parent.pid}
    return rank is not None and given == {rank}


def _choose(kind: str, inside: Mapping[int, ProcessFacts], before: Mapping[Key, JobMember]) -> dict[int, int]:
    """Pid to rank: the one process of each rank."""
    launchers = {
        process.ppid
        for process in inside.values()
        if process.ppid in inside
        and (own := _number(inside[process.ppid].environ, kind)) is not None
        and (theirs := _number(process.environ, kind)) is not None
        and own != theirs
    }
    candidates: dict[int, int] = {}
    for process in inside.values():
        value = _number(process.environ, kind)
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
            -(
                _restarts(process) or 0
            ),  # a rank of an earlier run, which nobody can kill, holds no seat of this one
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


def _number(environ: Mapping[str, str] | None, name: str) -> int | None:
    text = (environ or {}).get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _first_of(environ: Mapping[str, str] | None, kind: str | None, column: int) -> int | None:
    """The number in `column` of RANK_SOURCES: from a row of the rank's own variable if there is one, else from any."""
    rows = sorted(RANK_SOURCES, key=lambda row: row[0] != kind)
    found = (_number(environ, row[column]) for row in rows)
    return next((number for number in found if number is not None), None)
