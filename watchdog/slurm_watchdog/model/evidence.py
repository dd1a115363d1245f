"""What agents fetch when something is wrong: stacks, open files, locks, sockets."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.collective_records import CollectiveRecord, RasAnswer
from slurm_watchdog.model.observations import Blocked, Role


class Frame(Struct):
    function: str
    file: str
    line: int = 0


class ThreadStack(Struct):
    thread_id: int
    name: str
    active: bool
    frames: tuple[Frame, ...]  # Innermost first, as py-spy prints them.
    owns_gil: bool = False  # Whether it held the interpreter's lock at the moment of the dump.


class WaitingThreads(Struct):
    """Threads of one process, without its main one, that are alike."""

    name: str  # As the kernel has it (comm).
    state: str  # One letter of /proc/PID/stat.
    call: str  # The system call that they are in; empty: none, they run.
    threads: int


class SocketBytes(Struct):
    """How much came and went on one TCP connection."""

    socket: str  # As /proc/PID/fd names it: `socket:[INODE]`.
    moved: int  # Bytes that arrived, and those that the other end has acknowledged, since it was made.


class ProcessStack(Struct, gc=True, dict=True):
    """The Python stacks of one process, or why there are none."""

    node: str
    pid: int
    start_ticks: int
    job_id: str
    role: Role
    rank: int | None = None
    local_rank: int | None = None
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None  # Why it could not be dumped: that is evidence too.
    state: str | None = None
    wchan: str | None = None
    syscall: str | None = None
    sleep_s: float | None = None  # After so long its main thread wakes by itself; None: it does not, or not known.
    cpu_s: float = 0.0  # CPU time used so far by the whole process, at the moment of the dump.
    main_cpu_s: float | None = None  # CPU time so far of the thread that trains: the main one, or Ray Train's.
    io_bytes: int | None = None  # Bytes read and written through system calls so far; None: not readable.
    waits_for: tuple[SocketBytes, ...] = ()  # The TCP connections that its threads wait for, as far as that is known.
    resident_bytes: int | None = None  # Of its memory, so much is in RAM.
    others: tuple[WaitingThreads, ...] | None = None  # Its threads without the main one; None: not known of all.


class StackDump(Struct):
    """One of several dumps of one process. Only the first one has every thread."""

    after_s: float  # Since the first dump of this collection was asked for.
    threads: tuple[ThreadStack, ...] = ()  # Those whose frames differ from the dump before.
    unchanged: tuple[int, ...] = ()  # Ids of those that stand where they stood.
    error: str | None = None  # Why there is no dump: that is evidence too.
    state: str | None = None
    cpu_s: float = 0.0
    main_cpu_s: float | None = None


class ThreadState(Struct):
    """One thread as the kernel sees it."""

    thread_id: int
    comm: str = ""
    state: str = ""
    wchan: str | None = None
    syscall: str | None = None
    kernel_stack: tuple[str, ...] = ()  # Innermost function first; empty where it may not be read.


class SocketState(Struct):
    """One TCP connection or listener of a process."""

    state: str  # The kernel's word: ESTABLISHED, SYN_SENT, CLOSE_WAIT, LISTEN.
    local: str
    peer: str
    receive_queue_bytes: int = 0  # Arrived, and not read by the process.
    send_queue_bytes: int = 0  # Sent, and not acknowledged by the peer.
    retransmits: int = 0


class LockWait(Struct):
    """A file lock that a process waits for, as /proc/locks of its node has it."""

    kind: str  # `FLOCK WRITE`, `POSIX READ`.
    file: str  # Device and inode.
    holder_pid: int | None = None
    holder: str | None = None  # Name of the process that holds it; None: not seen on this node.


class ProcessState(Struct):
    """One process as the kernel shows it."""

    pid: int
    error: str | None = None
    problems: tuple[str, ...] = ()  # Parts that could not be read, each with the reason.
    state: str | None = None
    threads: tuple[ThreadState, ...] = ()  # The main thread and those that wait for a disk, a file or a debugger.
    threads_seen: int = 0
    status: tuple[tuple[str, str], ...] = ()  # Lines of /proc/PID/status and limits that matter.
    sockets: tuple[SocketState, ...] = ()
    sockets_seen: int = 0
    lock: LockWait | None = None


class RankEvidence(ProcessState):
    """Everything that was found out about one process of the job: a rank, or one of its workers. `error`: why it could
    not be dumped, of the newest dump."""

    start_ticks: int
    role: Role
    comm: str = ""
    rank: int | None = None
    local_rank: int | None = None
    dumps: tuple[StackDump, ...] = ()  # Oldest first.
    blocked: Blocked | None = None
    environment: tuple[tuple[str, str], ...] = ()  # Variables of an allow-list; what looks like a secret is masked.


class FoundFile(Struct):
    """A file that tells about the end of a process: a core file, a dump of PyTorch's Flight Recorder, an error file."""

    kind: str  # `core`, `flight_recorder` or `own_words`.
    path: str
    size_bytes: int
    age_s: float
    rank: int | None = None
    content: bytes | None = None  # Compressed (zlib); None: too large, or not wanted.
    record: CollectiveRecord | None = None  # What a dump says, read by the agent; None: it could not be read.
    said: str | None = None  # Why its rank ended, as that wrote itself: `ValueError: … (train.py:31 in step)`.
    error: str | None = None


class OwnWords(Struct):
    """What a rank wrote of its own end."""

    node: str
    rank: int
    age_s: float  # Since it wrote it.
    text: str


class NodeEvidence(Struct):
    """What one node answered to CollectEvidence."""

    node: str
    job_id: str
    took_s: float = 0.0
    ranks: tuple[RankEvidence, ...] = ()  # Ranks first, then a few workers of each.
    left_out: int = 0  # Processes of the job that were too many to be looked at.
    files: tuple[FoundFile, ...] = ()
    log_lines: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (path, last lines) of the job's logs followed here.
    kernel_lines: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()  # Kernel, driver and what else may differ between two nodes.
    ras: RasAnswer | None = None  # What NCCL's RAS says of the whole job; None: it was not asked, or there is none.
    problems: tuple[str, ...] = ()  # Parts that did not come, each with the reason.
