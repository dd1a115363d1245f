"""Judgement: findings of detectors, incidents, what people are not notified of, and where jobs hung."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.observations import ProcessOnGpu


class IncidentKind(StrEnum):
    """What can be wrong, as shipped: names for those who speak of one kind. A kind is the string that its
    detector declares, everywhere the same (module, configuration, metrics, journal); all of them are in
    slurm_watchdog.detect.registry.KINDS."""

    FILESYSTEM_OUTAGE = "filesystem_outage"
    FILESYSTEM_STALL = "filesystem_stall"
    LINGERING_JOB = "lingering_job"
    COLLECTIVE_HANG = "collective_hang"
    DRIVER_STALL = "driver_stall"
    STALLED_PROGRESS = "stalled_progress"
    WEDGED_TEARDOWN = "wedged_teardown"
    DEAD_RANK = "dead_rank"
    RANK_STOPPED = "rank_stopped"
    GPU_FAULT = "gpu_fault"
    HOST_FAULT = "host_fault"
    GPU_IDLE_RANK = "gpu_idle_rank"
    GPU_CLOCK_LOW = "gpu_clock_low"
    ORPHAN_GPU_PROCESS = "orphan_gpu_process"
    SLOW_JOB = "slow_job"
    SLOW_NODE = "slow_node"
    STRAGGLER = "straggler"
    LOSS_SPIKE = "loss_spike"
    LOSS_NAN = "loss_nan"
    LINK_FAULT = "link_fault"
    LOG_ERROR = "log_error"
    MEMORY_KILL = "memory_kill"
    NEAR_LIMIT = "near_limit"
    CRASH_LOOP = "crash_loop"
    CHAIN_BROKEN = "chain_broken"
    ENDS_SOON = "ends_soon"
    CHECKPOINT_OVERDUE = "checkpoint_overdue"
    DISK_FULL = "disk_full"
    AGENT_SILENT = "agent_silent"
    NODE_DOWN = "node_down"
    PARTITION_OR_OUTAGE = "partition_or_outage"
    SLURM_UNREACHABLE = "slurm_unreachable"
    SUSPECT_NODE = "suspect_node"
    OPERATOR_RESTART = "operator_restart"


HARDWARE_FAULTS = frozenset({IncidentKind.GPU_FAULT, IncidentKind.HOST_FAULT})
"""Kinds that prove that hardware of a node is broken, where they have nodes to exclude."""


class Truth(StrEnum):
    BAD = "bad"
    OK = "ok"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Culprit(Struct, omit_defaults=False):
    """Who is named. Fields not known are None, and are there in JSON, for scripts; an empty list names no one."""

    node: str | None = None
    rank: int | None = None
    pid: int | None = None
    gpu_uuid: str | None = None
    path: str | None = None
    mount: str | None = None
    link: str | None = None  # A network link of `node`: `mlx5_0/1`, `eth0`.
    reason: str = ""
    is_worker: bool = False  # `pid` is a worker's (a data loader's) of `rank`, not its own.


class GpuProcess(ProcessOnGpu):
    """One of the processes that a finding or an incident is about, or the one that a decision is about."""

    node: str
    user: str
    gpu_uuids: tuple[str, ...] = ()
    in_job_group: bool = (
        False  # It is in that job's control group: it belongs to that job, also where other jobs run here.
    )


class StackRequest(Struct, tag="stacks"):
    """A detector needs the stacks of every rank of the job before it can say more."""

    job_id: str
    apart_s: float = 10.0  # Time between two dumps, so that they can tell stuck from busy.
    later_s: float | None = None  # Time between two dumps once several are in; None: unchanged.
    early: bool = False  # The step is late by its own measure alone: of the budget of EARLY_DUMPS_AN_HOUR.
    usual: bool = False
    """To see where the ranks of a job that makes steps usually are (JobView.wait_dumps): of the same budget, `apart_s`
    apart, and no evidence of a hang."""


class MountProbeRequest(Struct, tag="probe"):
    """A detector needs to know whether other nodes can write to the mount."""

    mount: str
    directory: str
    uid: int
    nodes: tuple[str, ...]


Wanted = StackRequest | MountProbeRequest


class Judged(Struct):
    """What a finding says, and an incident keeps of the newest one."""

    culprits: tuple[Culprit, ...] = ()
    facts: tuple[str, ...] = ()  # The evidence, a sentence each.
    actionable: bool = False  # The evidence is good enough to act on; without it there is an alert only.
    good_checkpoint: str = ""
    """Path of the newest complete checkpoint from before a bad loss, where it is certain since when the loss is bad;
    the trainer may have deleted it by now."""
    exclude_nodes: tuple[str, ...] = ()  # Nodes that the evidence blames as a place: a restart should avoid them.
    mounts: tuple[str, ...] = ()  # Filesystems that have to answer, or to have room, before a restart makes sense.
    processes: tuple[GpuProcess, ...] = ()  # Of what is about processes without a job: those that may be ended.


class Finding(Judged):
    """What one detector says about one subject at one moment."""

    kind: str
    subject: str  # What it is about, `job:123` or `mount:/shared`: one incident for each kind and subject.
    truth: Truth = Truth.UNKNOWN
    summary: str = ""  # One sentence for a tired reader; why it is well; empty with UNKNOWN.
    job_ids: tuple[str, ...] = ()
    severity: Severity = Severity.CRITICAL
    clears: bool = False  # Who was named before is not to blame: an incident forgets them.
    duration_s: float = 0.0  # For how long the condition has held already.
    began_mono: float | None = None  # Where it still holds: since when, by the judge's monotonic clock.
    wanted: tuple[Wanted, ...] = ()

    def lasts_s(self, mono: float) -> float:
        """For how long the condition holds at a moment of the judge's monotonic clock."""
        return self.duration_s if self.began_mono is None else mono - self.began_mono

    def bad(self, summary: str, **changes: Any) -> Finding:
        """The same subject, with something wrong, and other fields as `changes` has them."""
        return replace(self, truth=Truth.BAD, summary=summary, **changes)

    def ok(self, summary: str, **changes: Any) -> Finding:
        """The same subject, with nothing wrong."""
        return replace(self, truth=Truth.OK, summary=summary, **changes)

    def unknown(self) -> Finding:
        """The same subject, of which nothing is said."""
        return replace(self, truth=Truth.UNKNOWN, summary="")


NOBODY = -1  # Owner of a job of which Slurm has not said whose it is (SlurmJob.uid): no process has this uid.


class IncidentState(StrEnum):
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class Incident(Judged):
    """A finding that lasted. Times are the controller's wall clock, for people; windows use `*_mono`."""

    id: str
    kind: str
    subject: str
    state: IncidentState
    severity: Severity
    job_ids: tuple[str, ...]
    opened_at: float  # When the condition began, as far as is known.
    pending_mono: float  # Controller's monotonic clock at the first BAD.
    clear_mono: float | None = None  # Since when it has been OK without a break; None while it is BAD.
    heard_mono: float | None = None  # When a detector last said anything about it.
    fired_at: float | None = None
    resolved_at: float | None = None
    detected_after_s: float | None = None  # From the beginning of the condition to firing.
    summary: str = ""
    summary_at: float | None = None  # When a detector said so last; None: an earlier release wrote it.
    runs: tuple[tuple[str, int], ...] = ()  # (job id, restart count) when it fired: what a decision is fenced by.
    jobs_now: tuple[str, ...] = ()  # Those of `job_ids` that the newest finding is about; others got over it.
    inhibited_by: str | None = None  # The incident that explains this one, which is not acted on or announced.
    resolution: str = ""
    owners: tuple[int, ...] = ()  # Uids of the owners of all jobs that it was ever about, -1: not known.

    @property
    def named_nodes(self) -> frozenset[str]:
        """The nodes that it names: its culprits', those to exclude, and the one that it is about."""
        named = {each.node for each in self.culprits if each.node} | set(self.exclude_nodes)
        if self.subject.startswith(("node:", "host:")):
            named.add(self.subject[5:].partition("/")[0])
        return frozenset(named)


class HangPlace(Struct):
    """The place of one hang."""

    incident_id: str
    at: float  # When the incident fired, a date.
    job_id: str
    chain: str  # Whose job, and its name, as in NodeEvent.
    fingerprint: str
    """Of the frames of who keeps the others waiting, or of all where no one does: without lines, and without what
    differs between machines and runs."""
    where: str  # The innermost of these frames, for people.
    node: str = ""  # Of who keeps the others waiting; empty: all wait in one collective.
    rank: int | None = None
    step: int | None = None  # The last step that was made; None: not known.


OF_JOBS = ("job:", "run:", "loop:", "chain:")
"""Subjects that are a job, its runs (log_error, memory_kill), its restarts (crash_loop) or the jobs that it begins
(chain_broken). Whatever else an incident is about concerns others, too: a node, a GPU, a filesystem."""


class Silence(Struct):
    """Of the selectors each that is given has to match; none of them matches a part of an incident."""

    id: str
    by: str
    at: float  # Date.
    reason: str = ""
    until: float  # Date of its end.
    kinds: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    owner: int | None = None  # Job owner who made it with no other right: it covers that owner's jobs alone.
    ended_at: float | None = None
    ended_why: str = ""

    @property
    def words(self) -> str:
        """What it is about: `kind gpu_fault, node n1,n2`."""
        named = (("kind", self.kinds), ("job", self.jobs), ("node", self.nodes))
        return ", ".join(f"{name} {','.join(values)}" for name, values in named if values)

    def is_over(self, now: float) -> bool:
        """Whether its time is over, also where the clock was set back so far that it would be for longer than it was
        made for: it was made by a clock that was ahead."""
        return not 2 * self.at - self.until <= now < self.until

    def covers(self, incident: Incident) -> bool:
        """Whether all that the incident is about is within the selectors: of two jobs the silence of one hides
        nothing. An array's id stands for its elements."""
        alone = incident.subject.startswith(OF_JOBS) and set(incident.owners) == {self.owner}
        if self.owner is not None and not alone:
            return False
        if self.kinds and incident.kind not in self.kinds:
            return False
        jobs = {job if job in self.jobs else job.partition("_")[0] for job in incident.job_ids}
        if self.jobs and not (jobs and jobs.issubset(self.jobs)):
            return False
        named = incident.named_nodes
        return not self.nodes or bool(named and named.issubset(self.nodes))
