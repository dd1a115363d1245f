"""What Slurm says of its jobs and nodes."""

from __future__ import annotations

from watchdog.model.value import Value


class SlurmJob(Value, frozen=True, kw_only=True):
    """One job as Slurm lists it. `None` means that Slurm did not say."""

    job_id: str
    """As Slurm's commands want it: `123`, or `123_4` for an array element. `scontrol requeue 123` on the number that an
    element shares with its array would hit every element."""
    state: str
    """Slurm's own word in capitals: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, REQUEUE_HOLD, …"""
    reason: str = ""
    name: str = ""
    user: str = ""
    uid: int = -1
    account: str = ""
    partition: str = ""
    nodes: tuple[str, ...] = ()
    batch_host: str | None = None
    restarts: int = 0
    start_at: float | None = None
    excluded_nodes: tuple[str, ...] = ()
    is_batch: bool = True
    requeueable: bool | None = None
    held: bool = False
    stdout: str | None = None
    stderr: str | None = None
    workdir: str | None = None
    comment: str = ""
    raw_id: str = ""
    """The number that the job's processes have as SLURM_JOB_ID, also for an array element; empty = `job_id`."""
    required_nodes: tuple[str, ...] = ()
    node_count: int | None = None
    """How many nodes it has or, pending, is expected to get: of `-N2-4` some releases say 2, some 4."""
    time_limit_s: float | None = None
    """None: without a limit, or its partition's."""
    qos: str = ""
    reservation: str = ""
    dependency: str = ""
    """What it still waits for, in Slurm's words: `afterok:12(unfulfilled)`."""
    submit_at: float | None = None
    """When it was submitted or last requeued."""
    eligible_at: float | None = None
    array_job_id: str = ""
    """The whole array's id, empty for a job that is no element."""
    array_tasks: str = ""
    """Its index in the array; of the job `6_[4-9]` that stands for all elements that have not started yet `4-9`."""
    het_job_id: str = ""
    """The first component's id, for every component of a heterogeneous job."""
    het_offset: int | None = None
    script_path: str = ""
    """What was given to sbatch; empty for a script that came by standard input."""

    @property
    def process_id(self) -> str:
        """The job's id in its processes' environment, in cgroup names, and so in everything that agents say."""
        return self.raw_id or self.job_id


class SlurmNode(Value, frozen=True, kw_only=True):
    name: str
    address: str
    state: str
    reason: str = ""
    reason_at: float | None = None
    """When that reason was given, by whom: a drain is ours only if all three are as we left them."""
    reason_user: str = ""
    partitions: tuple[str, ...] = ()


class SlurmView(Value, frozen=True, kw_only=True):
    """One complete answer of Slurm: all jobs, all nodes."""

    jobs: tuple[SlurmJob, ...]
    nodes: tuple[SlurmNode, ...]
