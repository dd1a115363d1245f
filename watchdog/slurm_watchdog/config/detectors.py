"""The configuration of the detectors: one block each, named like its module, its kind of incident and its metric label."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slurm_watchdog.config.types import Count, Mode, Percent, Seconds, Section, Span


class Detector(Section):
    """What every detector has."""

    mode: Mode | None = Field(None, description="Overrides the top-level mode for this detector.")
    hold: Seconds = Field(0.0, description="Time the verdict has to stand before it fires.")


class FilesystemStall(Detector):
    """A process of a job waits in one system call on one file; other nodes reach the filesystem."""

    blocked_for: Span = Field(60.0, description="Time in the same call on the same file.")


class FilesystemOutage(Detector):
    """A filesystem answers on no node that was asked, or blocks processes on two nodes or more. Never acted on."""


class CollectiveHang(Detector):
    """Ranks are alive, the training loop does not turn."""

    floor: Span = Field(60.0, description="No job counts as hanging sooner than this after its last step.")
    factor: float = Field(
        3.0, ge=1.5, description="Limit = this x the slowest of the recent steps, never below `floor`."
    )
    startup_grace: Span = Field(3600.0, description="Limit until enough steps of this run were seen.")
    warmup_steps: Count = Field(5, description="Steps of a run to see before its own speed counts.")
    evaluation_floor: Span = Field(1800.0, description="Floor while the log says that an evaluation runs.")
    checkpoint_floor: Span = Field(
        1800.0,
        description="Floor while the log says that a checkpoint is written, or stacks show that one is written, read or uploaded.",
    )
    stepless_limit: Span = Field(
        600.0,
        description="Limit for a run whose steps cannot be read: time that no rank has moved in its stacks, or 3 x (`factor`) its longest pause.",
    )
    busy_limit: Span = Field(
        1800.0,
        description="Limit while stacks move or a rank outside the collective computes, and where no stack can be read. "
        "Ranks that all wait in one collective are reported at once, and requeued only after this time.",
    )


class StalledProgress(Detector):
    """No step beyond the limit of `collective_hang`, and no better name for it. Acted on only where `policy.kinds` has a ladder for it, as
    `slurm-watchdog run` does, and the stacks of all ranks are known to stand still."""

    busy_limit: Span = Field(
        1800.0,
        description="Limit while a rank works, or that is not known; a loop in which no rank is known to do anything is reported "
        "at its own limit.",
    )
    still_limit: Span = Field(
        600.0,
        description="Limit where stacks and processes show that no rank does anything and none waits in a collective.",
    )
    start_limit: Span = Field(
        5400.0,
        description="Time to the first step of a run, of a training whose log can be read; reported only if it is known that its ranks do "
        "nothing, or few of them nothing while the others wait on their GPUs.",
    )


class WedgedTeardown(Detector):
    """The last step is made, or an error was printed, and the ranks stay. Acted on only where `policy.kinds` has a ladder for it."""

    grace: Span = Field(600.0, description="Time that a job gets to end when it has made its last step.")
    busy_limit: Span = Field(
        1800.0,
        description="The same while a rank works (a last checkpoint, an evaluation), or that is not known.",
    )
    teardown_limit: Span = Field(
        120.0,
        description="Time that all ranks may sit motionless in the teardown of their process group.",
    )


class CheckpointOverdue(Detector):
    """The job makes steps and has not saved for much longer than it used to. Never acted on."""

    factor: float = Field(3.0, ge=1.5, description="So many times the usual time between its checkpoints, …")
    floor: Span = Field(1800.0, description="… and never sooner than this after the last one.")


class LingeringJob(Detector):
    """A rank is dead, the others wait for it, Slurm says RUNNING."""

    grace: Span = Field(
        30.0,
        description="Time Slurm and the launcher get to end the job by themselves (`--kill-on-bad-exit`).",
    )


class AgentSilent(Detector):
    """An agent does not report any more (after `controller.agent_silent_after`), and Slurm has the node as well. Never acted on."""


class NodeDown(Detector):
    """Slurm has lost a node that had an agent. Never acted on: Slurm ends and requeues its jobs by itself."""


class PartitionOrOutage(Detector):
    """Many agents fell silent at once: the network or the power. Never acted on, and it keeps everything else from acting."""

    nodes: Count = Field(3, description="So many silent nodes at least, …")
    percent: Percent = Field(20.0, description="… and more than this share of those that have reported.")


class SlurmUnreachable(Detector):
    """Slurm does not answer. Never acted on: nothing is done while nobody knows what runs."""

    silent_for: Span = Field(60.0, description="Time without an answer to a listing.")


class GpuFault(Detector):
    """The kernel, the driver or the GPU itself says that something is broken, and it is not the program.

    Nothing is done about it by itself, unless `policy.kinds.gpu_fault` has a ladder. A restart for what follows from it (a dead rank, a
    hang) avoids the node where the evidence proves that hardware is broken."""

    driver_silent_for: Span = Field(60.0, description="Time without an answer of the GPU driver on a node.")
    recent: Span = Field(600.0, description="A line of the kernel or the driver counts for so long.")


class GpuClockLow(Detector):
    """A GPU under load is slower than its peers in the job and than it used to be. Never acted on."""

    percent: Percent = Field(
        10.0, description="Slower than the median of the job's busy GPUs by more than this, …"
    )
    own_percent: Percent = Field(
        7.0, description="… and than its own past by more than this, unless the card says what holds it back."
    )
    peers: Count = Field(3, description="Busy GPUs of the same model to compare with, at least.")
    hold: Seconds = Field(60.0, description="Time the verdict has to stand before it fires.")


class OrphanGpuProcess(Detector):
    """A process holds a GPU and belongs to no job that runs (grace: `agent.orphan_grace`). Only told, unless policy.kinds has a ladder."""


class RankStopped(Detector):
    """A rank was stopped by a signal or is held by a debugger. Acted on only if it was a signal and the job is beyond its limit."""

    stopped_for: Span = Field(15.0, description="Time it has to be stopped.")


class DeadRank(Detector):
    """A rank is gone while most of its peers are there. Told at once; `lingering_job` acts if Slurm does not end the job."""

    gone_for: Span = Field(3.0, description="Time since the first report without it.")


class GpuIdleRank(Detector):
    """The GPU of one rank does nothing while those of its peers are busy. Never acted on."""

    idle_for: Span = Field(
        60.0, description="Time it has to be idle while the job makes no step beyond its limit."
    )
    idle_for_while_steps: Span = Field(900.0, description="Time it has to be idle while the job makes steps.")


class SlowJob(Detector):
    """The steps of a job take longer than they did. Never acted on: the times alone name no node."""

    percent: Annotated[float, Field(ge=2, le=1000)] = Field(
        5.0,
        description="Change of the step time that is looked for; in a noisier log only larger ones are reported.",
    )


class SlowNode(Detector):
    """The node that makes a slow job slow, where its hardware tells it from the others (limits: `slow_job`). Acted on only where
    `policy.kinds` has a ladder for it."""


class LossSpike(Detector):
    """The loss jumps far above where it was. Never acted on: most spikes recover."""

    deviations: float = Field(8.0, ge=3, description="Standard deviations above the recent losses, …")
    percent: float = Field(10.0, ge=1, description="… and more than this above their median.")


class LossNan(Detector):
    """The loss is NaN or infinite. Never acted on."""

    steps: Annotated[int, Field(ge=1)] = Field(
        3, description="So many times in a row: mixed precision skips single ones."
    )


class LogError(Detector):
    """A rank logged an error that ended its run, or after which the job makes no step. Never acted on: names the first cause."""

    gone_for: Span = Field(
        3.0,
        description="Time since the rank that logged it is gone; while all ranks live the limits of `collective_hang` hold.",
    )
    recent: Span = Field(600.0, description="A run that has ended is reported for so long.")


class DiskFull(Detector):
    """No space is left on a filesystem, or a quota is used up: a probe, a kernel or a job's log says so. Never acted on."""

    recent: Span = Field(600.0, description="A line of a log or of the kernel counts for so long.")


class CrashLoop(Detector):
    """A job restarts and dies each time before its first new step. Acted on only where `policy.kinds` has a ladder for it: [hold]."""

    runs: Annotated[int, Field(ge=2, le=10)] = Field(
        3, description="So many runs one after the other have to die, …"
    )
    within: Span = Field(1800.0, description="… each of them within this time.")


class ChainBroken(Detector):
    """A training that goes on from job to job has ended early, and nothing is queued behind it. Never acted on."""

    grace: Span = Field(120.0, description="Time for the next job to be submitted.")


class Detectors(Section):
    """One block a detector."""

    filesystem_stall: FilesystemStall = FilesystemStall()
    filesystem_outage: FilesystemOutage = FilesystemOutage()
    collective_hang: CollectiveHang = CollectiveHang()
    stalled_progress: StalledProgress = StalledProgress()
    wedged_teardown: WedgedTeardown = WedgedTeardown()
    checkpoint_overdue: CheckpointOverdue = CheckpointOverdue()
    lingering_job: LingeringJob = LingeringJob()
    partition_or_outage: PartitionOrOutage = PartitionOrOutage()
    node_down: NodeDown = NodeDown()
    agent_silent: AgentSilent = AgentSilent()
    slurm_unreachable: SlurmUnreachable = SlurmUnreachable()
    gpu_fault: GpuFault = GpuFault()
    gpu_clock_low: GpuClockLow = GpuClockLow()
    orphan_gpu_process: OrphanGpuProcess = OrphanGpuProcess()
    rank_stopped: RankStopped = RankStopped()
    dead_rank: DeadRank = DeadRank()
    gpu_idle_rank: GpuIdleRank = GpuIdleRank()
    slow_job: SlowJob = SlowJob()
    slow_node: SlowNode = SlowNode()
    loss_spike: LossSpike = LossSpike()
    loss_nan: LossNan = LossNan()
    log_error: LogError = LogError()
    disk_full: DiskFull = DiskFull()
    crash_loop: CrashLoop = CrashLoop()
    chain_broken: ChainBroken = ChainBroken()
