"""Variables by which launchers tell a process its rank, names of programs that never are one, and where Slurm puts the
processes of a job among the kernel's control groups."""

from __future__ import annotations

from slurm_watchdog.base.late_regex import late_regex

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
"""Rank, local rank, world size, as set by: torchrun, accelerate and DeepSpeed's launcher; Open MPI; MVAPICH2;
PMIx; MPICH's and Intel's Hydra (PMI 1 and 2); Cray's PMI; Cray PALS; ALPS; Flux; our own `run`, for a program
that is alone; srun. What is set closest to the trainer comes first. Ray gives its workers no rank in their
environment: its log says which is which, see `_ranks_of_ray`; until then, and where it spans several nodes,
the process that srun started is the rank, with workers."""
RANK_VARIABLES = tuple(dict.fromkeys(rank for rank, _, _ in RANK_SOURCES))
LOCAL_RANK_VARIABLES = tuple(dict.fromkeys(local for _, local, _ in RANK_SOURCES))
WORLD_SIZE_VARIABLES = tuple(dict.fromkeys(size for _, _, size in RANK_SOURCES))
WISH_VARIABLES = (
    "SLURM_WATCHDOG", "SLURM_WATCHDOG_KILL_SWITCH", "SLURM_WATCHDOG_CHECKPOINT_DIR", "SLURM_WATCHDOG_LADDER",
    "SLURM_WATCHDOG_STALL_AFTER",
)  # fmt: skip
"""With which a job's owner says what he wants of the watchdog."""
KILL_SWITCH_OPTION = "--kill-switch-path"
"""Beside the variables: what the rank's own command line says, which no variable can be called."""
HEARTBEAT_VARIABLE = "SLURM_WATCHDOG_HEARTBEAT"  # Where `slurm_watchdog_hooks` says how far the training is.
ENVIRONMENT = (
    *RANK_VARIABLES, *LOCAL_RANK_VARIABLES, *WORLD_SIZE_VARIABLES,
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_RESTART_COUNT", "SLURM_JOB_USER",
    "SLURM_SUBMIT_DIR", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_RUN_ID",
    "SLURM_WATCHDOG_JOB_ID", "SLURM_WATCHDOG_RESTARTS",
    HEARTBEAT_VARIABLE, *WISH_VARIABLES,
)  # fmt: skip
"""All that is ever kept of a process's environment."""
NEVER_A_RANK = frozenset(
    """
    bash sh dash busybox zsh ksh tcsh csh fish
    srun sbatch salloc slurmstepd sattach sstat scontrol squeue slurm-watchdog
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
_PLACE = late_regex(
    r"/(?:slurm(?:_[^/]+)?/uid_\d+|[^/]+\.slice/(?:[^/]+_)?slurmstepd\.scope)/job_(\d+)"
    r"(?:/step_([0-9a-z]+)(?:\+\d+)?)?(?=[/ ]|$)"
)
"""Slurm's own places: `/slurm/uid_U/job_N` (version 1; `slurm_NODE` where a host has several slurmd) and
`slurmstepd.scope/job_N` in a slice (version 2; `NODE_slurmstepd.scope` likewise, any slice since
CgroupSlice). A step of several components has a group for each, `step_4+1`. Source: cgroup.conf(5), cgroup_v2.html."""
_USERS_OWN = late_regex(r"/user(?:\.slice|-\d+\.slice|@\d+\.service)(?:/|$)")
"""What systemd hands to a user, who may make groups of any name below it."""


def step_of_group(path: str) -> tuple[str, str | None] | None:
    """Job and step ("0", "batch"; None: the job's own) of a control group; None outside of jobs.

    Only a group in Slurm's own place counts, within a container's group, too: a user may make a `job_N` in what was
    delegated to him. The outermost one counts, for what a job makes is below its own group.
    """
    match = _PLACE.search(path)
    if match is None or _USERS_OWN.search(path, 0, match.start() + 1):
        return None
    return match[1], match[2]
