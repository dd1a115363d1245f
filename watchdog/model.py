"""Every value that crosses an arrow of the design: frozen, typed, without behaviour.

Ages and durations are seconds (`_s`), sizes are bytes, dates are seconds since the epoch (`_at`).
Agents send ages, never dates: windows are measured on the receiver's clock.
All structs tolerate unknown fields, so that an agent and a controller one version apart understand
each other; new fields always carry a default.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Common settings of every value: immutable, by keyword only, defaults left off the wire.

    Values are trees, made once and never changed, so none can be part of a cycle: the collector of cycles need not walk over the
    millions of them that a large cluster has.
    """


# ---------------------------------------------------------------------------------------- what agents see


class Role(StrEnum):
    """What a process is to its job."""

    RANK = "rank"
    """Holds a rank: the process that runs the training loop."""
    WORKER = "worker"
    """Descends from a rank (a DataLoader worker, a compiler); carries the rank of its ancestor."""
    HELPER = "helper"
    """Anything else of the job: batch shell, srun, torchrun, tee."""


class Blocked(Value, frozen=True, kw_only=True):
    """One thread that has been in the same system call, consuming nothing, for a while."""

    thread_id: int
    seconds: float
    """How long, continuously, in the same call with the same arguments (a lower bound: seen so long)."""
    state: str
    """The letter of /proc/PID/stat: D, or S behind network and FUSE clients."""
    wchan: str | None = None
    syscall: str | None = None
    """Name of the system call (`write`), or its number in decimal where the name is not known."""
    path: str | None = None
    """The file, as its descriptor names it."""
    mount: str | None = None
    """The mount point that the path lies on, in the process's own mount namespace."""
    fs_type: str | None = None
    """Type of that filesystem: ext4, nfs4, lustre, fuse.sshfs."""
    device: str | None = None
    """Source of that mount as /proc/PID/mountinfo names it: /dev/loop0, server:/export."""


class Process(Value, frozen=True, kw_only=True):
    """One process of a Slurm job on one node, at one moment."""

    pid: int
    start_ticks: int
    """Start time in clock ticks after boot (field 22 of stat): pid + start_ticks is unique until a reboot."""
    job_id: str
    role: Role
    comm: str
    state: str
    """One letter of /proc/PID/stat: R S D T t Z X I."""
    state_age_s: float | None = None
    """For how long every look has found it in this state (a lower bound); None on the first look and while it runs or sleeps."""
    uid: int
    step_id: str | None = None
    """Slurm step ("0", "batch"), where known."""
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    cpu_s: float = 0.0
    """User and system time of all its threads."""
    io_bytes: int | None = None
    """Bytes read and written through system calls so far (rchar + wchar), None where not readable."""
    threads: int | None = None
    """Number of its threads."""
    context_switches: int | None = None
    """Of its main thread, voluntary and involuntary, so far; None where not looked at in this tick."""
    container_pid: int | None = None
    """Its number in its own, innermost PID namespace, where that is not the node's: what its logs and py-spy inside call it."""
    blocked: Blocked | None = None
    """Its longest blocked thread, None when none is."""
    collective_timeout_s: float | None = None
    """Of a rank: after so long its library gives a collective up, as its command line or environment says; None: not known."""
    collective_timeout_assumed: bool = False
    """Nothing says so: it is torch's own default."""


class LogFile(Value, frozen=True, kw_only=True):
    """One file of a job that the agent follows."""

    job_id: str
    path: str
    growth_age_s: float | None = None
    """Seconds since the file last grew (or was first opened), None when it was never read."""
    error: str | None = None
    """Why it cannot be read now: missing, permission, its mount does not answer."""
    offset: int | None = None
    """Bytes of the file that were read: where the next run of the job goes on, on whatever node."""
    lag_bytes: int = 0
    """What stands in the file and is not read yet: a flood is read in several looks."""
    skipped_bytes: int = 0
    """What was passed over so far, for reading could not keep up: nobody knows what was in it."""


class EventKind(StrEnum):
    PROGRESS = "progress"
    """A count of steps, iterations, samples or tokens was logged."""
    PHASE = "phase"
    """The log says that evaluation, a checkpoint, … began or ended."""
    CHECKPOINT = "checkpoint"
    """A complete checkpoint was announced, or found by its tracker file."""
    ERROR = "error"
    """A line that looks like an error."""


class Event(Value, frozen=True, kw_only=True):
    """Something that happened once, most often a line of a log."""

    kind: EventKind
    job_id: str
    age_s: float
    """Seconds before the report was made."""
    source: str
    """Path of the file it was read from."""
    line: str = ""
    """The line, bounded, without its control characters."""
    step: int | None = None
    count: float | None = None
    """Where no step was logged: a number that rises and is none (epochs, tokens, samples), for the progress clock alone."""
    total_steps: int | None = None
    step_s: float | None = None
    """Seconds a step took, as the log says."""
    loss: float | None = None
    loss_is_no_number: bool = False
    """It was NaN or infinite, which JSON cannot say: `loss` is None then."""
    phase: str | None = None
    pattern: str | None = None
    """Which entry of the knowledge matched."""
    rank: int | None = None
    """The rank that the line's prefix names."""
    backlog: bool = False
    """It stood in the file already when the agent first opened it: nobody knows when it was written."""


class MountProbe(Value, frozen=True, kw_only=True):
    """What a disposable child found out about one mount."""

    mount: str
    responding: bool
    seconds: float
    """How long the probe took; while it is out, how long it has been waiting."""
    error: str | None = None
    """An error is an answer: permission denied, read-only."""
    device: str | None = None
    fs_type: str | None = None
    wrote: bool = False
    """Whether it wrote and read back: a frozen filesystem still answers a mere reader."""


class HungProbe(Value, frozen=True, kw_only=True):
    """A child of the agent that did not come back."""

    probe: str
    """Kind of the probe and its resource: `files:/shared`, `stacks`."""
    seconds: float


class MigInstance(Value, frozen=True, kw_only=True):
    """One slice of a GPU in MIG mode: a job sees it as a GPU of its own."""

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU of a node at one moment, as NVML sees it. None: it did not say.

    Four names that are never the same thing: the UUID is the GPU's own; the PCI address is its slot; the minor is the
    number in /dev/nvidiaN; the index is its place in NVML's list, which may change when another GPU goes away.
    """

    uuid: str
    """Empty for a GPU that has not answered since the agent started."""
    index: int
    pci_bus_id: str | None = None
    """As the kernel writes it: 0000:c1:00.0."""
    minor: int | None = None
    name: str = ""
    utilization_ratio: float | None = None
    """1.0 also while it spins in a collective: no proof of work."""
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    throttle: tuple[str, ...] | None = None
    """Why its clocks are lower than they could be; empty: nothing holds them back."""
    pids: tuple[int, ...] | None = None
    """Processes that compute on it, by the host's numbers; the list is at most about a minute old."""
    error: str | None = None
    """Why something, or everything, is not known: NVML_ERROR_GPU_IS_LOST: GPU is lost."""
    process_memory_bytes: tuple[int | None, ...] | None = None
    """What each of `pids` holds, in their order."""
    # What follows changes slowly or costs the driver time: it is read about once a minute and said again in between.
    ecc_corrected: int | None = None
    """Memory errors since the driver was loaded that ECC put right (volatile, all locations)."""
    ecc_uncorrected: int | None = None
    """Those that it could not."""
    remapped_rows_corrected: int | None = None
    """Rows of memory replaced because of corrected errors (Ampere and newer)."""
    remapped_rows_uncorrected: int | None = None
    remap_pending: bool | None = None
    """A row will be replaced at the next reset: the GPU should be drained."""
    remap_failed: bool | None = None
    """There was no spare row left: the GPU should be exchanged."""
    retired_pages: int | None = None
    """Pages retired for single- and double-bit errors (before Ampere)."""
    retired_pages_pending: bool | None = None
    pcie_link_width: int | None = None
    """Lanes in use now."""
    pcie_link_width_max: int | None = None
    pcie_link_generation: int | None = None
    """May fall while the GPU idles: that is power saving."""
    pcie_link_generation_max: int | None = None
    pcie_replays: int | None = None
    """Retransmissions since the driver was loaded."""
    nvlinks_active: int | None = None
    nvlinks_down: int | None = None
    """Links that the GPU has and that are not active."""
    nvlink_errors: int | None = None
    """CRC, replay and recovery errors of all its links so far."""
    mig: tuple[MigInstance, ...] | None = None
    """None: MIG is off or unknown; its utilisation is then the whole GPU's."""


class FaultSeverity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class NodeEvent(Value, frozen=True, kw_only=True):
    """Something that the kernel's log or NVML said about the node itself, once. It accuses nobody: detectors judge."""

    source: str
    """`kernel_log` or `nvml`."""
    name: str
    """Which entry of the knowledge matched: xid, nfs_server_silent, oom_kill, …"""
    severity: FaultSeverity
    age_s: float
    """Seconds before the report was made, by the kernel's own time stamp."""
    line: str = ""
    """Bounded, without control characters."""
    sequence: int | None = None
    """The kernel's number of the record: unique within a boot."""
    repeats: int = 0
    """So many more of the same name and resource were folded into this one."""
    xid: int | None = None
    """NVIDIA's number of the fault."""
    gpu_uuid: str | None = None
    pci_bus_id: str | None = None
    """As the kernel writes it: 0000:c1:00.0."""
    pid: int | None = None
    process: str | None = None
    """The name of that process, as the line gives it."""
    mount: str | None = None
    server: str | None = None
    """The file server that it is about."""
    device: str | None = None
    """A disk, a network port, a filesystem's device."""
    may_exclude_node: bool = False
    """By itself reason enough to keep jobs off this node: the hardware said so. Never for a filesystem's or a program's fault."""
    backlog: bool = False
    """It stood in the log before the agent was started."""


class Checkpoint(Value, frozen=True, kw_only=True):
    """The checkpoints of one job in one directory, as they lie on disk."""

    job_id: str
    directory: str
    layout: str | None = None
    """megatron, deepspeed, dcp, huggingface, lightning, nemo, composer, orbax, plain; None while there is nothing known there."""
    step: int | None = None
    """Of the newest complete one; None: there is none."""
    path: str | None = None
    """Where that lies."""
    age_s: float | None = None
    """Since its newest file was written, by the clock of the filesystem's server against ours: for people, not for windows."""
    size_bytes: int | None = None
    """Sum of its files, None if there are too many to add up."""
    writing_step: int | None = None
    """Step of one that is newer and not complete."""
    writing: bool = False
    """A newer one is incomplete and grew since the look before."""
    writing_bytes: int | None = None
    error: str | None = None
    """Why it cannot be read now."""


class GpuHolder(Value, frozen=True, kw_only=True):
    """A process that holds a GPU and is not, as far as this node knows, part of a running job."""

    pid: int
    start_ticks: int
    """Checked again before anything is done to it: a pid is used again, pid and start time are not."""
    uid: int
    user: str
    """Its name, or its number where there is none."""
    comm: str
    state: str
    job_id: str | None = None
    """The job it came from, where it shows."""
    gpu_uuids: tuple[str, ...] = ()
    minors: tuple[int, ...] = ()
    """/dev/nvidiaN that it has open."""
    memory_bytes: int | None = None
    """On all its GPUs, as NVML says; None for those that NVML does not list."""
    listed_by_nvml: bool = False
    age_s: float = 0.0
    """Since the process was started."""
    orphan_for_s: float | None = None
    """For how long it has belonged to no job that runs on this node; None while that is not known (no word from the controller)."""


class Frame(Value, frozen=True, kw_only=True):
    function: str
    file: str
    line: int = 0


class ThreadStack(Value, frozen=True, kw_only=True):
    thread_id: int
    name: str
    active: bool
    frames: tuple[Frame, ...]
    """Innermost first, as py-spy prints them."""
    owns_gil: bool = False
    """Whether it held the interpreter's lock at the moment of the dump."""


class ProcessStack(Value, frozen=True, kw_only=True):
    """The Python stacks of one process, or why there are none."""

    node: str
    pid: int
    start_ticks: int
    job_id: str
    role: Role
    rank: int | None = None
    local_rank: int | None = None
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None
    """Why it could not be dumped: that is evidence too."""
    state: str | None = None
    wchan: str | None = None
    syscall: str | None = None
    cpu_s: float = 0.0
    """CPU time used so far by the whole process, at the moment of the dump."""
    main_cpu_s: float | None = None
    """CPU time used so far by its main thread alone."""


class StackDump(Value, frozen=True, kw_only=True):
    """One of several dumps of one process. Only the first one has every thread."""

    after_s: float
    """Since the first dump of this collection was asked for."""
    threads: tuple[ThreadStack, ...] = ()
    """Those whose frames differ from the dump before."""
    unchanged: tuple[int, ...] = ()
    """Ids of those that stand where they stood."""
    error: str | None = None
    """Why there is no dump: that is evidence too."""
    state: str | None = None
    cpu_s: float = 0.0
    main_cpu_s: float | None = None


class ThreadState(Value, frozen=True, kw_only=True):
    """One thread as the kernel sees it."""

    thread_id: int
    comm: str = ""
    state: str = ""
    wchan: str | None = None
    syscall: str | None = None
    kernel_stack: tuple[str, ...] = ()
    """Innermost function first; empty where it may not be read."""


class SocketState(Value, frozen=True, kw_only=True):
    """One TCP connection or listener of a process."""

    state: str
    """The kernel's word: ESTABLISHED, SYN_SENT, CLOSE_WAIT, LISTEN."""
    local: str
    peer: str
    receive_queue_bytes: int = 0
    """Arrived, and not read by the process."""
    send_queue_bytes: int = 0
    """Sent, and not acknowledged by the peer."""
    retransmits: int = 0


class LockWait(Value, frozen=True, kw_only=True):
    """A file lock that a process waits for, as /proc/locks of its node has it."""

    kind: str
    """`FLOCK WRITE`, `POSIX READ`."""
    file: str
    """Device and inode."""
    holder_pid: int | None = None
    holder: str | None = None
    """Name of the process that holds it; None for one that this node does not see, on another node."""


class RankEvidence(Value, frozen=True, kw_only=True):
    """Everything that was found out about one process of the job: a rank, or one of its workers."""

    pid: int
    start_ticks: int
    role: Role
    comm: str = ""
    rank: int | None = None
    local_rank: int | None = None
    state: str | None = None
    error: str | None = None
    """Why it could not be dumped: of the newest dump."""
    dumps: tuple[StackDump, ...] = ()
    """Oldest first."""
    threads: tuple[ThreadState, ...] = ()
    """The main thread and those that wait for a disk, a file or a debugger."""
    threads_seen: int = 0
    blocked: Blocked | None = None
    lock: LockWait | None = None
    silent_files: tuple[str, ...] = ()
    """Open files on mounts that do not answer."""
    sockets: tuple[SocketState, ...] = ()
    sockets_seen: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of an allow-list; what looks like a secret is masked."""
    status: tuple[tuple[str, str], ...] = ()
    """Lines of /proc/PID/status and limits that matter."""
    problems: tuple[str, ...] = ()
    """What else could not be read of it, and why."""


class FoundFile(Value, frozen=True, kw_only=True):
    """A file that tells about the end of a process: a core file, or a dump of PyTorch's Flight Recorder."""

    kind: str
    """`core` or `flight_recorder`."""
    path: str
    size_bytes: int
    age_s: float
    rank: int | None = None
    frames: tuple[str, ...] = ()
    """Of a core file: what a debugger says of each thread."""
    content: bytes | None = None
    """Compressed (zlib); None: too large, or not wanted."""
    error: str | None = None


class NodeEvidence(Value, frozen=True, kw_only=True):
    """What one node answered to CollectEvidence."""

    node: str
    job_id: str
    took_s: float = 0.0
    ranks: tuple[RankEvidence, ...] = ()
    """Ranks first, then a few workers of each."""
    left_out: int = 0
    """Processes of the job that were too many to be looked at."""
    files: tuple[FoundFile, ...] = ()
    log_lines: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(path, last lines) of the job's logs that this node follows."""
    kernel_lines: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    """Kernel, driver and what else may differ between two nodes."""
    problems: tuple[str, ...] = ()
    """Parts that did not come, each with the reason."""


# ---------------------------------------------------------------------------------------- the wire


class DumpStacks(Value, frozen=True, kw_only=True, tag="dump_stacks"):
    """Dump the Python stacks of every rank (and worker) of the job on this node, stopping nothing."""

    id: str
    job_id: str
    restarts: int
    expires_s: float = 60.0


class ProbeMount(Value, frozen=True, kw_only=True, tag="probe_mount"):
    """Write and read back on a mount, in `directory`, as `uid`; leaves nothing behind when it answers."""

    id: str
    mount: str
    directory: str
    uid: int
    expires_s: float = 60.0


class WriteKillSwitch(Value, frozen=True, kw_only=True, tag="write_kill_switch"):
    """Create the kill switch of one run of one job, as the job's owner."""

    id: str
    job_id: str
    restarts: int
    path: str
    uid: int
    content: str
    """One JSON line: who, why, which incident."""
    expires_s: float = 60.0


class RemoveKillSwitch(Value, frozen=True, kw_only=True, tag="remove_kill_switch"):
    """Remove a kill switch if, and only if, it holds exactly `content`: we wrote it."""

    id: str
    job_id: str
    path: str
    uid: int
    content: str
    expires_s: float = 300.0


class CollectEvidence(Value, frozen=True, kw_only=True, tag="collect_evidence"):
    """Gather everything about the job on this node that dies with it, stopping nothing. Answered with a NodeEvidence."""

    id: str
    job_id: str
    restarts: int
    expires_s: float = 90.0
    dumps: int = 3
    """So many dumps of every rank's stacks tell stuck from busy."""
    apart_s: float = 10.0
    """Time between two of them."""


Command = DumpStacks | ProbeMount | WriteKillSwitch | RemoveKillSwitch | CollectEvidence


class CommandResult(Value, frozen=True, kw_only=True):
    """What became of one command. Every command is answered once, refusals included."""

    command_id: str
    ok: bool
    error: str | None = None
    stacks: tuple[ProcessStack, ...] = ()
    probe: MountProbe | None = None
    evidence: NodeEvidence | None = None


class ProcessNumbers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What moves about a process from look to look. A short list on the wire; new fields go to its end, with a default."""

    at: int
    """Place of the process in the report before."""
    state: str
    cpu_s: float
    io_bytes: int | None
    threads: int | None
    context_switches: int | None


class GpuNumbers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What moves about a GPU."""

    at: int
    utilization_ratio: float | None
    sm_clock_hz: float | None
    memory_clock_hz: float | None
    power_w: float | None
    temperature_c: float | None
    memory_used_bytes: int | None


class Changes(Value, frozen=True, kw_only=True):
    """Makes a report one of changes: processes and GPUs that it does not name are as they were. See watchdog.report_changes."""

    since: int
    """Sequence of the report that it builds on, of the same agent."""
    process_rows: tuple[ProcessNumbers, ...] = ()
    gpu_rows: tuple[GpuNumbers, ...] = ()
    gone: tuple[tuple[int, int], ...] = ()
    """(pid, start ticks) of processes that are not there any more."""
    whole: tuple[str, ...] = ()
    """Lists of the report that are complete in it."""


class JobWish(Value, frozen=True, kw_only=True):
    """What the processes of one run of a job have in their environment for the watchdog; see watchdog.controller.wishes."""

    job_id: str
    restarts: int
    variables: tuple[tuple[str, str], ...]
    """SLURM_WATCHDOG and those that begin with it, bounded."""


class Report(Value, frozen=True, kw_only=True):
    """What one agent saw in one tick."""

    node: str
    boot_id: str
    agent_id: str
    """Random, new at every start of the agent."""
    sequence: int
    """Rises by one with every report of this agent_id; a report seen before is dropped."""
    age_s: float = 0.0
    """Seconds between making and sending; not 0 when it waited in the spool."""
    interval_s: float = 5.0
    version: int = 1
    agent_version: str = ""
    processes: tuple[Process, ...] = ()
    logs: tuple[LogFile, ...] = ()
    events: tuple[Event, ...] = ()
    events_dropped: int = 0
    mounts: tuple[MountProbe, ...] = ()
    hung_probes: tuple[HungProbe, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    node_events: tuple[NodeEvent, ...] = ()
    node_events_dropped: int = 0
    """Records of the kernel that were overwritten before they could be read, or were too many for one report."""
    checkpoints: tuple[Checkpoint, ...] = ()
    gpu_holders: tuple[GpuHolder, ...] = ()
    wishes: tuple[JobWish, ...] = ()
    """Of jobs that have any; in every report, also in one of changes."""
    results: tuple[CommandResult, ...] = ()
    problems: tuple[str, ...] = ()
    """Collectors that failed this tick, each with its reason."""
    changes: Changes | None = None
    """None: this is the whole of what there is."""


class JobWatch(Value, frozen=True, kw_only=True):
    """What the controller tells an agent about a job that runs on its node."""

    job_id: str
    restarts: int
    uid: int
    log_paths: tuple[str, ...] = ()
    """Followed by this node: the job's standard output and error on its batch host."""
    checkpoint_trackers: tuple[str, ...] = ()
    """Files that hold the step of the newest complete checkpoint (Megatron's tracker)."""
    checkpoint_directories: tuple[str, ...] = ()
    """Where its checkpoints lie; looked at by its batch host only."""
    progress_files: tuple[str, ...] = ()
    """Files and directories that its loop writes to as it turns; looked at by its batch host only."""
    log_offsets: tuple[tuple[str, int], ...] = ()
    """(path, bytes): where this run's lines begin in files that earlier runs wrote; from 0 if a file is shorter."""
    progress_patterns: tuple[str, ...] = ()
    """Regular expressions of the site for lines that say a step; see watchdog.own_patterns."""
    kill_switch: str = ""
    """Its directory is made ready on this node, owned by the job's owner."""


class Reply(Value, frozen=True, kw_only=True):
    """The controller's answer to a report."""

    commands: tuple[Command, ...] = ()
    watch: tuple[JobWatch, ...] = ()
    running: tuple[str, ...] | None = None
    """SLURM_JOB_ID of every job that Slurm has on this node now, watched or not, ending ones included; None: not known."""
    controller_id: str = ""
    """Random, new at every start of the controller: one that is new to an agent is told the recent past again."""
    takes_changes: bool = False
    """This controller understands reports of changes."""
    want_full: bool = False
    """It lacks the report that this one builds on, and has taken nothing of it: the same is to be told in full."""


# ---------------------------------------------------------------------------------------- what Slurm says


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


# ---------------------------------------------------------------------------------------- judgement


class Kind(StrEnum):
    """What can be wrong. Modules, registry, configuration, metrics and journal use these names."""

    FILESYSTEM_OUTAGE = "filesystem_outage"
    FILESYSTEM_STALL = "filesystem_stall"
    LINGERING_JOB = "lingering_job"
    COLLECTIVE_HANG = "collective_hang"
    STALLED_PROGRESS = "stalled_progress"
    WEDGED_TEARDOWN = "wedged_teardown"
    DEAD_RANK = "dead_rank"
    RANK_STOPPED = "rank_stopped"
    GPU_FAULT = "gpu_fault"
    GPU_IDLE_RANK = "gpu_idle_rank"
    GPU_CLOCK_LOW = "gpu_clock_low"
    ORPHAN_GPU_PROCESS = "orphan_gpu_process"
    SLOW_JOB = "slow_job"
    SLOW_NODE = "slow_node"
    LOSS_SPIKE = "loss_spike"
    LOSS_NAN = "loss_nan"
    LOG_ERROR = "log_error"
    CRASH_LOOP = "crash_loop"
    CHAIN_BROKEN = "chain_broken"
    CHECKPOINT_OVERDUE = "checkpoint_overdue"
    DISK_FULL = "disk_full"
    AGENT_SILENT = "agent_silent"
    NODE_DOWN = "node_down"
    PARTITION_OR_OUTAGE = "partition_or_outage"
    SLURM_UNREACHABLE = "slurm_unreachable"
    OPERATOR_RESTART = "operator_restart"


class Truth(StrEnum):
    BAD = "bad"
    OK = "ok"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Culprit(Value, frozen=True, kw_only=True):
    """Who is named. Fields that are not known stay None; an empty list of culprits names nobody."""

    node: str | None = None
    rank: int | None = None
    pid: int | None = None
    gpu_uuid: str | None = None
    path: str | None = None
    mount: str | None = None
    reason: str = ""


class StacksWanted(Value, frozen=True, kw_only=True, tag="stacks"):
    """A detector needs the stacks of every rank of the job before it can say more."""

    job_id: str
    apart_s: float = 10.0
    """Time between two dumps, so that they can tell stuck from busy."""


class ProbeWanted(Value, frozen=True, kw_only=True, tag="probe"):
    """A detector needs to know whether other nodes can write to the mount."""

    mount: str
    directory: str
    uid: int
    nodes: tuple[str, ...]


Wanted = StacksWanted | ProbeWanted


class Finding(Value, frozen=True, kw_only=True):
    """What one detector says about one subject at one moment."""

    kind: Kind
    subject: str
    """What it is about, `job:123` or `mount:/shared`: one incident for each kind and subject."""
    truth: Truth
    summary: str
    """One sentence for a tired reader; with UNKNOWN, what is not known."""
    job_ids: tuple[str, ...] = ()
    severity: Severity = Severity.CRITICAL
    culprits: tuple[Culprit, ...] = ()
    facts: tuple[str, ...] = ()
    """The evidence, a sentence each."""
    lasted_s: float = 0.0
    """For how long the condition has held already."""
    wanted: tuple[Wanted, ...] = ()
    actionable: bool = False
    """The evidence is good enough to act on; without it there is an alert only."""
    exclude_nodes: tuple[str, ...] = ()
    """Nodes that the evidence blames as a place: a restart should avoid them."""
    mounts: tuple[str, ...] = ()
    """Filesystems that have to answer before a restart makes sense."""


class IncidentState(StrEnum):
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class Incident(Value, frozen=True, kw_only=True):
    """A finding that lasted. Times are the controller's wall clock, for people; windows use `*_mono`."""

    id: str
    kind: Kind
    subject: str
    state: IncidentState
    severity: Severity
    job_ids: tuple[str, ...]
    opened_at: float
    """When the condition began, as far as is known."""
    pending_mono: float
    """Controller's monotonic clock at the first BAD."""
    clear_mono: float | None = None
    """Since when it has been OK without a break; None while it is BAD."""
    heard_mono: float | None = None
    """When a detector last said anything about it."""
    fired_at: float | None = None
    resolved_at: float | None = None
    detected_after_s: float | None = None
    """From the beginning of the condition to firing."""
    culprits: tuple[Culprit, ...] = ()
    summary: str = ""
    facts: tuple[str, ...] = ()
    runs: tuple[tuple[str, int], ...] = ()
    """(job id, restart count) of each job when it fired: what a decision is fenced by."""
    actionable: bool = False
    jobs_now: tuple[str, ...] = ()
    """Those of `job_ids` that the newest finding is about; others had their share in it and have got over it."""
    exclude_nodes: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    inhibited_by: str | None = None
    """Id of the incident that explains this one; it is then not acted on and not announced."""
    resolution: str = ""


# ---------------------------------------------------------------------------------------- decisions and actions


class Action(StrEnum):
    NONE = "none"
    """Evidence and alert only."""
    REQUEUE = "requeue"
    """Requeue held, add exclusions to the existing ones, release, see the first new step."""
    GRACEFUL_RESTART = "graceful_restart"
    """Kill switch, complete checkpoint, then as REQUEUE."""
    RESUBMIT = "resubmit"
    """End the job, submit its stored script again."""
    LEAVE_TO_CHAIN = "leave_to_chain"
    """End the job; the next element of its array, or the job that waits for it, goes on."""
    CANCEL = "cancel"
    """End the job, and run nothing again."""
    ASK_TO_SAVE = "ask_to_save"
    """Kill switch or signal only: what the job does then is its own affair."""
    HOLD = "hold"
    """Keep a job that waits in the queue from starting again."""


class Step(StrEnum):
    """One word of a ladder, as the configuration and a job's owner write it: in this order, each at most once."""

    EVIDENCE = "evidence"
    """Wait until what dies with the job has been kept."""
    KILL_SWITCH = "kill_switch"
    """Write it, wait for a complete checkpoint. Only if the loop turns."""
    SIGUSR1 = "sigusr1"
    SIGTERM = "sigterm"
    REQUEUE = "requeue"
    """Requeue held, exclude, release, see the first new step."""
    RESUBMIT = "resubmit"
    """End the job, submit the script that Slurm has stored."""
    CHAIN = "chain"
    """End the job where another one waits behind it: an array element, a dependency."""
    CANCEL = "cancel"
    """End the job; nothing is run again."""
    HOLD = "hold"
    """Hold a job that waits in the queue."""


class Verdict(StrEnum):
    ALLOWED = "allowed"
    SUPPRESSED = "suppressed"
    OBSERVED = "observed"
    """Would have been done, had the mode been `act`."""


class Fence(Value, frozen=True, kw_only=True):
    """The one run of the one job that a decision is about. Anything else is left alone."""

    job_id: str
    restarts: int
    start_at: float | None


class Decision(Value, frozen=True, kw_only=True):
    id: str
    incident_id: str
    action: Action
    verdict: Verdict
    by: str
    """The guard that took the action away, or the rule that allowed it."""
    reason: str
    decided_at: float
    fence: Fence | None = None
    exclude: tuple[str, ...] = ()
    kill_switch: str | None = None
    kill_switch_uid: int | None = None
    kill_switch_content: str = ""
    nodes: tuple[str, ...] = ()
    """Nodes of the run, where the kill switch is written and removed."""
    step_at_decision: int | None = None
    process_job_id: str | None = None
    """The job's id as agents know it."""
    asked_by: str | None = None
    """The operator, for a restart that a person asked for."""
    wait_until_responding: tuple[str, ...] = ()
    """Mounts that have to answer before the job is released."""
    ladder: tuple[Step, ...] = ()
    """What is tried, in this order; empty in journals of older releases, where the action says it."""
    rule: str = ""
    """Which part of the configuration, or whose wish, gave the ladder."""
    loop_turns: bool | None = None
    """Whether the job made steps when it was decided: a loop that does not turn hears no kill switch. None: not known."""
    lose_work: bool = False
    """The job may be ended although it turns and has not saved."""
    signal_to: str = "steps"
    """Who gets a signal: `steps`, `batch` (the batch shell) or `all`."""
    rung_limits: tuple[tuple[str, float], ...] = ()
    """Limits of this rule in place of the general ones, by name, in seconds."""
    drain: tuple[str, ...] = ()
    """Nodes to drain, for an administrator to look at."""
    step_s: float | None = None
    """Usual time of a step when it was decided."""


class Rung(StrEnum):
    """The steps of an action, each with an intent before and an outcome after in the journal."""

    EVIDENCE = "evidence"
    """Waits until what dies with the job has been kept; it never holds an action up for longer than its limit."""
    WRITE_KILL_SWITCH = "write_kill_switch"
    WAIT_CHECKPOINT = "wait_checkpoint"
    REQUEUE_HOLD = "requeue_hold"
    EXCLUDE = "exclude"
    REMOVE_KILL_SWITCH = "remove_kill_switch"
    RELEASE = "release"
    CONFIRM = "confirm"
    SIGNAL_USR1 = "signal_usr1"
    SIGNAL_TERM = "signal_term"
    CANCEL = "cancel"
    RESUBMIT = "resubmit"
    HOLD = "hold"
    DRAIN = "drain"


class RungOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """Refused for good: the reason is in `detail`."""
    UNKNOWN = "unknown"
    """No answer: the world is asked before anything else."""
    SKIPPED = "skipped"


class RungRecord(Value, frozen=True, kw_only=True):
    """One rung of one action, as the journal keeps it. `outcome` None: the intent only."""

    rung: Rung
    attempt: int
    intent_at: float
    outcome: RungOutcome | None = None
    outcome_at: float | None = None
    detail: str = ""


class ActionEnd(Value, frozen=True, kw_only=True):
    """How an action ended, in writing: nothing is forgotten."""

    ok: bool
    ended_at: float
    detail: str
    resumed_at_step: int | None = None
    steps_lost: int | None = None
    downtime_s: float | None = None
    seconds_lost: float | None = None
    """The steps lost, in the time that they took."""


class ActionRun(Value, frozen=True, kw_only=True):
    """A decision that was allowed, with everything done for it so far."""

    decision: Decision
    records: tuple[RungRecord, ...] = ()
    end: ActionEnd | None = None
