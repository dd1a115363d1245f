"""What agents see: processes, logs, GPUs, mounts, checkpoints, kernel events, links, and use of what has a limit."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct

# Process and Gpu are what reports are made of: they travel as lists, so a new field of theirs, or of what they extend,
# is one more at the end of Process or Gpu, with a default.


class Role(StrEnum):
    """What a process is to its job."""

    RANK = "rank"  # Holds a rank: the process that runs the training loop.
    WORKER = "worker"  # Descends from a rank (a DataLoader worker, a compiler); carries the rank of its ancestor.
    HELPER = "helper"  # Anything else of the job: batch shell, srun, torchrun, tee.


class CallTarget(Struct, kw_only=False):
    """What a system call concerns."""

    path: str | None = None  # The file, as its descriptor names it.
    mount: str | None = None  # The mount point that the path lies on, in the process's own mount namespace.
    fs_type: str | None = None  # Type of that filesystem: ext4, nfs4, lustre, fuse.sshfs.
    device: str | None = None  # Source of that mount as /proc/PID/mountinfo names it: /dev/loop0, server:/export.
    candidates: tuple[str, ...] = ()
    """Where `mount` cannot be told: the mount points of which it is one, as a page fault names no file."""


class Blocked(CallTarget):
    """One thread that has been in the same system call, consuming nothing, for a while."""

    thread_id: int
    seconds: float  # How long, continuously, in the same call with the same arguments (a lower bound: seen so long).
    state: str  # The letter of /proc/PID/stat: D, or S behind network and FUSE clients.
    wchan: str | None = None
    syscall: str | None = None  # Name of the system call (`write`), or its number where the name is not known.


BY_SLURM, BY_CLAIM = "slurm", "claim"
"""How a process is known to be of a job: it is in a control group of the job, or below its slurmstepd; or by
its environment alone, as the user whose job Slurm says that it is."""


class Work(Struct, array_like=True):
    """How busy one process was lately, as its node has summed it up from look to look; None: not known."""

    cpu_ratio: float | None = None  # Cores that it used, on average over half a minute.
    io_bytes_s: float | None = None  # Bytes a second that it read and wrote through system calls, over the same time.
    storage_age_s: float | None = None
    """Since it was last seen waiting for a disk or a file for a moment, as one that moves data; None: never."""
    worked_age_s: float | None = None
    """Since a look showed that it had computed or moved data, or the first of it."""
    quiet_s: float | None = None
    """Since it, having used most of a core, was last seen to use more than next to nothing."""


class Process(Work):
    """One process of a Slurm job on one node, at one moment."""

    pid: int
    start_ticks: int  # Start in clock ticks after boot (field 22 of stat): with the pid unique until a reboot.
    job_id: str
    role: Role
    comm: str
    state: str  # One letter of /proc/PID/stat: R S D T t Z X I.
    state_age_s: float | None = None
    """How long every look has found it in this state; None on the first look and while it runs or sleeps."""
    uid: int  # Its real user.
    member_by: str = ""
    """How it is known that it is of the job: `slurm` (in its control group, or below its slurmstepd), `claim`
    (its environment says so, and it is the job's owner's); empty: an earlier release does not say."""
    step_id: str | None = None  # Slurm step ("0", "batch"), where known.
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    cpu_s: float = 0.0  # User and system time of all its threads.
    io_bytes: int | None = None  # Bytes read and written through system calls so far; None: not readable.
    threads: int | None = None  # Number of its threads.
    context_switches: int | None = None  # Of its main thread so far, both kinds; None: not looked at now.
    container_pid: int | None = None
    """Its number in its own, innermost PID namespace, if not the node's: what its logs call it."""
    blocked: Blocked | None = None  # Its longest blocked thread, None when none is.
    collective_timeout_s: float | None = None
    """Of a rank: after so long its library gives a collective up, as it was told; None: not known."""
    collective_timeout_assumed: bool = False  # Nothing says so: it is torch's own default.
    runnable_s: float | None = None
    """Of a rank: so long its main thread has run, or was ready to run; the rest of its life it slept."""
    runnable_age_s: float | None = None  # Since that was read, about once a minute; None: just now.


class LogFile(Struct):
    """One file of a job that the agent follows."""

    job_id: str
    path: str
    growth_age_s: float | None = None  # Since the file last grew (or was first opened); None: it was never read.
    error: str | None = None  # Why it cannot be read now: missing, permission, its mount does not answer.
    offset: int | None = None  # Bytes of it that were read: where the next run of the job continues, on any node.
    lag_bytes: int = 0  # What stands in the file and is not read yet: a flood is read in several looks.
    skipped_bytes: int = 0  # What was passed over so far, for reading could not keep up: no one knows what was in it.
    framework: str | None = None
    """Which one wrote it (a name of `slurm_watchdog.knowledge.frameworks`): what to do where nothing counts."""


class EventKind(StrEnum):
    PROGRESS = "progress"  # A count of steps, iterations, samples or tokens was logged.
    PHASE = "phase"  # The log says that evaluation, a checkpoint, … began or ended.
    CHECKPOINT = "checkpoint"  # A complete checkpoint was announced, or found by its tracker file.
    ERROR = "error"  # A line that looks like an error.


class Said(Struct):
    """What a line of a log says."""

    kind: EventKind
    step: int | None = None
    count: float | None = None
    """Where no step was logged: a number that rises and is none (epochs, tokens, samples), for the progress
    clock alone: it is never shown or subtracted as a step."""
    total_steps: int | None = None
    step_s: float | None = None  # Seconds a step took, as the log says.
    loss: float | None = None
    phase: str | None = None
    rank: int | None = None  # The rank that the line's prefix names.
    initial: bool = False  # Where a bar of progress begins (`40/90 [00:00<?`): a position, no step that was made.


class StepLine(Struct, array_like=True, kw_only=False):
    """One line of progress in short."""

    number: float  # Its step, or what it counts instead.
    step_s: float | None = None
    loss: float | None = None
    loss_is_no_number: bool = False
    written_s: float | None = None
    samples: float | None = None


class Event(Said):
    """Something that happened once, most often a line of a log; of progress, all lines of one counter since the event
    before it, of which this is the newest."""

    job_id: str
    age_s: float  # Seconds before the report was made.
    source: str  # Path of the file it was read from.
    line: str = ""  # The line, bounded, without its control characters; none of progress, unless it names a phase.
    lines: int = 1  # How many it stands for.
    earlier: tuple[StepLine, ...] = ()
    """Of those before the newest: the two before it, and of the others the lowest loss, and where NaN began that has
    not ended; a fact of its own for the progress clock, each."""
    batch: int | None = None  # Samples of one step over all ranks, as the line says.
    samples: float | None = None  # Samples that were consumed so far, as the line says.
    loss_is_no_number: bool = False  # It was NaN or infinite, which JSON cannot say: `loss` is None then.
    pattern: str | None = None  # Which entry of the knowledge matched.
    written_s: float | None = None
    """When the line says that it was written, in seconds on the clock of this file's lines."""
    backlog: bool = False  # It stood in the file when the agent first opened it: when it was written is unknown.


class MountProbe(Struct):
    """What a disposable child found out about one mount."""

    mount: str
    responding: bool
    seconds: float  # How long the probe took; while it is out, how long it has been waiting.
    error: str | None = None  # An error is an answer: permission denied, read-only.
    device: str | None = None
    fs_type: str | None = None
    wrote: bool = False  # Whether it wrote and read back: a frozen filesystem still answers a mere reader.
    uid: int | None = None
    """The user that the child ran as: its word counts for that user alone. None: the agent's own."""


class HungProbe(Struct):
    """A child of the agent that did not come back."""

    probe: str  # Kind of the probe and its resource: `files:/shared`, `stacks`.
    seconds: float


class MigInstance(Struct):
    """One slice of a GPU in MIG mode: a job sees it as a GPU of its own."""

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


class GpuHealth(Struct, array_like=True):
    """What changes slowly about a GPU or costs the driver time: read about once a minute and said again in between.

    None: the GPU, its driver or its hypervisor does not say.
    """

    ecc_corrected: int | None = None  # Memory errors since the driver was loaded that ECC corrected (volatile).
    ecc_uncorrected: int | None = None  # Those that it could not.
    remapped_rows_corrected: int | None = None  # Rows of memory replaced for corrected errors (Ampere, newer).
    remapped_rows_uncorrected: int | None = None
    remap_pending: bool | None = None  # A row will be replaced at the next reset: the GPU should be drained.
    remap_failed: bool | None = None  # There was no spare row left: the GPU should be exchanged.
    retired_pages: int | None = None  # Pages retired for single- and double-bit errors (before Ampere).
    retired_pages_pending: bool | None = None
    pcie_link_width: int | None = None  # Lanes in use now.
    pcie_link_width_max: int | None = None
    pcie_link_generation: int | None = None  # May fall while the GPU idles: that is power saving.
    pcie_link_generation_max: int | None = None
    pcie_replays: int | None = None  # Retransmissions since the driver was loaded.
    nvlinks_active: int | None = None
    nvlinks_down: int | None = None  # Links that the GPU has and that are not active.
    nvlink_errors: int | None = None  # CRC, replay and recovery errors of all its links so far.
    sm_active_ratio: float | None = None  # Share of its multiprocessors that had work since the last look (GPM).
    tensor_active_ratio: float | None = None  # Likewise of its tensor cores.
    dram_active_ratio: float | None = None  # Likewise of the bandwidth of its memory.
    nvlink_bytes_s: float | None = None  # Likewise, sent and received by all its links.
    pcie_bytes_s: float | None = None
    mig: tuple[MigInstance, ...] | None = None  # None: MIG is off or unknown; its utilisation is then the whole GPU's.


class GpuPast(GpuHealth):
    """What the recent past of a GPU tells, as its node has summed it up from look to look."""

    idle_age_s: float | None = None  # So long every look has found it doing (almost) nothing; None: it is not so.
    busy_age_s: float | None = None  # So long every look has found it busy.
    recent_sm_clock_hz: float | None = None  # Under load, over a minute; None: not busy for long enough.
    usual_sm_clock_hz: float | None = None  # Under load: average over about the last two hours.
    recent_power_w: float | None = None  # Likewise: one that spins in a collective is busy and draws much less.
    usual_power_w: float | None = None  # The most that its average over a minute came to; forgotten over hours.
    usual_work_ratio: float | None = None  # Likewise, of the share of its tensor cores or memory that worked.
    throttled: tuple[tuple[str, float], ...] = ()
    """Reason why its clocks were held down -> share of the last five minutes under load; what was rarer is left out."""
    idle_ratio: float | None = None  # In which share of the time since the last whole report it did nothing.
    looks: int = 0  # So many looks that is the mean of.


class Gpu(GpuPast):
    """One GPU of a node at one moment, as NVML sees it. None: it did not say.

    Four names that are never the same thing: the UUID is the GPU's own; the PCI address is its slot; the minor is the
    number in /dev/nvidiaN; the index is its place in NVML's list, which may change when another GPU goes away.
    """

    uuid: str  # Empty for a GPU that has not answered since the agent started.
    index: int
    pci_bus_id: str | None = None  # As the kernel writes it: 0000:c1:00.0.
    minor: int | None = None
    name: str = ""
    utilization_ratio: float | None = None  # 1.0 also while it spins in a collective: no proof of work.
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    throttle: tuple[str, ...] | None = None  # Why its clocks are lower than they could be; empty: nothing does it.
    pids: tuple[int, ...] | None = None  # Processes that compute on it, by the host's numbers, of the last minute.
    error: str | None = None  # Why something, or everything, is not known: NVML_ERROR_GPU_IS_LOST: GPU is lost.
    process_memory_bytes: tuple[int | None, ...] | None = None  # What each of `pids` holds, in their order.


class FaultSeverity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class Fault(Struct):
    """Which fault was reported, and of what. It accuses no one: detectors judge."""

    name: str  # Which entry of the knowledge matched: xid, nfs_server_silent, oom_kill, …
    severity: FaultSeverity
    xid: int | None = None  # NVIDIA's number of the fault.
    pci_bus_id: str | None = None  # As the kernel writes it: 0000:c1:00.0.
    pid: int | None = None
    process: str | None = None  # The name of that process, as the line gives it.
    mount: str | None = None
    server: str | None = None  # The file server that it is about.
    device: str | None = None  # A disk, a network port, a filesystem's device.
    may_exclude_node: bool = False
    """By itself reason enough to keep jobs off this node: its hardware said so, no filesystem or program."""
    part: str = "none"  # The part of the machine: memory, cpu, pcie, nic, disk, filesystem, heat, gpu, link, none.


class NodeEvent(Fault):
    """Something that the kernel's log or NVML said about the node itself, once."""

    source: str  # `kernel_log` or `nvml`.
    age_s: float  # Seconds before the report was made, by the kernel's own time stamp.
    line: str = ""  # Bounded, without control characters.
    sequence: int | None = None  # The kernel's number of the record: unique within a boot.
    repeats: int = 0  # So many more of the same name and resource were folded into this one.
    gpu_uuid: str | None = None
    backlog: bool = False  # It stood in the log before the agent was started.


class Checkpoint(Struct):
    """The checkpoints of one job in one directory, as they lie on disk."""

    job_id: str
    directory: str
    layout: str | None = None  # megatron, deepspeed, dcp, huggingface, nemo, plain, …; None: nothing known is there.
    step: int | None = None  # Of the newest complete one; None: there is none.
    path: str | None = None  # Where that lies.
    foreign: bool = False  # That is not the job's owner's.
    age_s: float | None = None  # Since its newest file was written, by the server's clock: not for windows.
    size_bytes: int | None = None  # Sum of its files, None if there are too many to add up.
    writing_step: int | None = None  # Step of one that is newer and not complete.
    writing: bool = False  # A newer one is incomplete and grew since the look before.
    looked_age_s: float = 0.0  # Since the look that showed this.
    error: str | None = None  # Why it cannot be read now.


class ProcessOnGpu(Struct):
    """A process whose job is over: pid, start and boot together are never given out again."""

    boot_id: str
    pid: int
    start_ticks: int
    uid: int
    comm: str
    job_id: str  # The job that it came from and that is over, as agents know it (SLURM_JOB_ID).
    minors: tuple[int, ...]  # /dev/nvidiaN that it holds.


class GpuHolder(Struct):
    """A process that holds a GPU and is not, as far as this node knows, part of a running job."""

    pid: int
    start_ticks: int  # Checked again before anything is done to it: a pid is used again, pid and start time are not.
    uid: int
    user: str  # Its name, or its number where there is none.
    comm: str
    state: str
    job_id: str | None = None  # The job it came from, where it shows.
    rank: int | None = None  # Its rank in that job, if it was one.
    gpu_uuids: tuple[str, ...] = ()
    minors: tuple[int, ...] = ()  # /dev/nvidiaN that it has open.
    memory_bytes: int | None = None  # On all its GPUs, as NVML says; None for those that NVML does not list.
    listed_by_nvml: bool = False
    age_s: float = 0.0  # Since the process was started.
    orphan_for_s: float | None = None
    """How long it has belonged to no job that runs on this node; None: no word from the controller."""
    in_job_group: bool = False
    """The kernel says its job, by the control group; else it was seen there, or its environment says so."""
    was_in_job: bool = False  # This agent saw that job run here, or the control group says it.


class Link(Struct):
    """One link, as the kernel showed it at the newest look. None: it did not say."""

    name: str  # `mlx5_0/1` of a port, else the interface: `ens1f0np0`.
    kind: str  # `infiniband`, `roce` or `ethernet`.
    up: bool | None = None
    rate_bits_s: int | None = None  # At which it runs now.
    downs: int | None = None  # How often it went down since its driver was loaded.
    errors: int | None = None  # Symbols and packets that arrived broken or had to be sent again so far.
    received_bytes_s: float | None = None  # Between the last two looks.
    sent_bytes_s: float | None = None
    waits_s: float | None = None
    """Ticks in each second of that time in which it had something to send and no credit to do so: congestion. How long
    a tick is the adapter knows (PortXmitWait)."""
    marked_s: float | None = None  # Of RoCE: packets in each second of it that arrived with a mark of congestion (ECN).
    slowed_s: float | None = None  # Of RoCE: notifications of congestion a second for which it slowed down (CNP).
    resent_s: float | None = None  # Packets a second of it that were missing, out of order, or not acknowledged.

    @property
    def moved_bytes_s(self) -> float | None:
        """What went through it, both ways."""
        sent, received = self.sent_bytes_s, self.received_bytes_s
        return None if sent is None or received is None else sent + received


class Resource(StrEnum):
    """What has a limit."""

    MEMORY = "memory"  # Bytes: of a job's or step's control group, else of the node.
    PIDS = "pids"  # Processes and threads, likewise.
    FILES = "files"  # Open files: of a process, else of the node.
    SHARED_MEMORY = "shared_memory"  # Bytes in /dev/shm.


class Usage(Struct):
    """How much of something is in use. Without `job_id`: of the whole node."""

    resource: Resource
    used: int
    limit: int | None = None  # None: there is none, or it is not known.
    peak: int | None = None
    refused: int | None = None
    """How often someone went without so far: of memory, processes that the kernel killed in the group; of pids,
    processes and threads that were refused."""
    by_limit: bool | None = None
    """Of memory: whether the limit of this group, or of one in it, ever left it with nothing. The kernel counts kills
    in a group also where its node, or a group above it, had none left. None: not known."""
    job_id: str | None = None
    step_id: str | None = None  # None: the job's own group.
    pid: int | None = None  # Of a process's own limit.
    rank: int | None = None

    @property
    def ratio(self) -> float:
        """Share of the limit that is in use; 0 where there is none."""
        return self.used / self.limit if self.limit else 0.0


class Pressure(Struct):
    """How much of the last minute was spent waiting (the kernel's pressure stall information, Linux 4.20), of a job
    or of the node. Without it, no row."""

    resource: str  # `cpu`, `memory` or `io`.
    some_ratio: float  # At least one waited.
    full_ratio: float  # All who had something to do waited.
    job_id: str | None = None
