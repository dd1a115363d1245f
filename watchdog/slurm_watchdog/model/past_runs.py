"""Runs of a job that are over, and what is remembered of one from look to look: error lines, ranks that loop or wait,
how fast it was on which nodes. Pure."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.evidence import Frame
from slurm_watchdog.model.slurm import SlurmJob


class LoggedError(Struct):
    """An error line of a run as reported; who said it is found at judging (diagnose/logs/reported_run.py)."""

    at: float  # On the clock of `ClusterView.now`.
    line: str
    pattern: str = ""  # The row of slurm_watchdog.knowledge.log_signatures that matched.
    source: str = ""  # Path of the file it stood in.
    read_on: str = ""  # The node whose agent read it, whichever rank wrote to a job's common log.


class RankLocation(Struct, kw_only=False):
    """Where a rank runs."""

    rank: int
    node: str
    pid: int
    gone_at: float | None = None  # Since when it was seen to be gone; None: it was not.


class PastRun(Struct):
    """A run of a job that is over. `*_at` are on the clock of `ClusterView.now`."""

    restarts: int
    began_at: float
    ended_at: float
    steps_seen: int  # How many times its step rose; 0: it never got to a new step.
    first_step: int | None = None
    last_step: int | None = None
    start_s: float | None = None  # From its beginning to the first rise of its step; None: it was seen to make none.
    stride: int = 1  # Steps between two of its log lines: its last line may be so many steps old.
    total_steps: int | None = None
    rose_at: float | None = None  # When a step was last seen to rise.
    step_log: str = ""  # The log that said so; empty: not known.
    step_s: float | None = None  # Of one step, the median of the recent ones.
    checkpoint_step: int | None = None  # Of the newest complete checkpoint, no newer than the last step.
    saved_at: float | None = None  # When a checkpoint of it was last complete; None: none was seen to be.
    state: str = ""  # Slurm's last word about it: FAILED, TIMEOUT, …; RUNNING or PENDING for one that was requeued.
    started_again: str = ""  # See `SlurmJob.starts_again`.
    log_read: bool = False  # Whether an agent could read its logs: otherwise that nothing was logged means nothing.
    unseen: bool = False  # It began and ended between two listings of Slurm: only its number says that it was there.
    nodes: tuple[str, ...] = ()  # Where it ran, as far as Slurm has said.
    touched_at: float | None = None  # When an action of ours first touched it (kill switch, signal, requeue, cancel).
    held_after: bool = False  # It ended by itself, and the job was held before it ran again.
    errors: tuple[LoggedError, ...] = ()  # Bounded: the first and the last ones, in the order of their coming.
    error_ranks: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (pattern, ranks) that said so since the last step.
    ranks: int = 0  # How many ranks there were: as many as were seen, or as their world size says.
    seats: tuple[RankLocation, ...] = ()  # Of the ranks that were seen, in their order.
    batch_host: str | None = None


class EndedJob(Struct):
    """A job that was seen running and is over. Slurm keeps it in its list for some minutes (MinJobAge)."""

    job: SlurmJob
    ended_at: float
    last_step: int | None = None
    total_steps: int | None = None
    succeeded_by: tuple[str, ...] = ()  # Jobs of the same user and name, or of the same array, that wait or run.
    preceded_by: tuple[str, ...] = ()
    """Jobs of the same user and name that ended before this one, which waited for them and goes on from their steps."""
    run: PastRun | None = None  # Its last run.
    past: tuple[PastRun, ...] = ()  # The runs before that, oldest first.


class Steady(Struct):
    """A rank that runs Python in one small loop, as dump after dump since the last step had it; see
    slurm_watchdog.diagnose.stacks.spinning. `*_at` are on the clock of `ClusterView.now`."""

    node: str
    pid: int
    rank: int
    first_at: float
    last_at: float
    dumps: int
    with_gil: int  # Dumps in which its main thread held the interpreter's lock.
    stacks: tuple[tuple[Frame, ...], ...]  # The different ones, innermost frame first.
    io_bytes: int  # Read and written by the first of these dumps; hardly more since.
    resident_bytes: tuple[int, int]  # The least and the most.
    cpu_s: tuple[float, float]  # Of the whole process, at the first and at the last dump.


class Motion(Struct):
    """What the dumps of one run say of a loop whose steps cannot be read; see
    slurm_watchdog.analysis.rank_motion. `*_at` are on the clock of `ClusterView.now`."""

    last_at: float  # Of the newest dump.
    trained: int = 0  # Dumps since whose predecessor it had moved, with a rank in the code of a training.
    still_from_at: float | None = None
    """The first dump of the unbroken row in which no one was seen to move; None: someone has, or not known."""
    still_looks: int = 0  # Dumps of that row.
    pauses_s: tuple[float, ...] = ()  # How long earlier such rows lasted, until someone moved again; oldest first.


WHOLE = 255  # Of the shares in a WaitBlock.


class RankKey(Struct, kw_only=False):
    """One process that holds a rank."""

    rank: int
    node: str
    pid: int
    start_ticks: int


class WaitBlock(Struct):
    """A minute or so. One byte a rank, in the order of `ranks`: thousands of ranks for hours."""

    begin_at: float
    end_at: float  # On the clock of `ClusterView.now`.
    ranks: tuple[RankKey, ...]
    seconds: bytes  # For which it is known how long its main thread slept.
    asleep: bytes  # The share of these in which it did, in 255ths.
    gpu_looks: bytes  # At the utilisation of its GPU.
    gpu_idle: bytes  # The share of that time in which its GPU did nothing, in 255ths.


class DumpedRank(Struct):
    """Where one rank stood in one dump."""

    key: RankKey
    asleep: bool  # Its main thread slept.
    with_peers: bool  # It stood in a call that waits for other ranks.
    in_backward: bool = False  # In a backward pass, where DistributedDataParallel waits without a frame.
    call: str  # `function (file:line)` of the innermost frame that is its own program's; empty: not known.


class WaitDump(Struct):
    """One dump of all ranks, taken to see where they usually are."""

    at: float
    ranks: tuple[DumpedRank, ...]


class SearchRun(Struct):
    """One run of the job: which nodes it used and how fast it was."""

    nodes: tuple[str, ...] = ()
    level: float  # Logarithm of the seconds of a step.
    error: float  # Standard error of `level`.
    at: float  # When the newest of these steps was made.
    batches: int = 0  # Batches of steps that were measured.
    restarts: int = 0
    step_id: str | None = None  # With `restarts`: another one in the same allocation is another run.


class SlowSearch(Struct):
    """Of one job. Dates are the controller's."""

    job_id: str
    chain: str  # Whose job it is, and its name: see NodeEvent.
    incident_id: str  # The `slow_job` with which it began.
    opened_at: float
    step: int  # Since which it is slow.
    alike: tuple[float | None, bool]  # Samples a step, and whether the log says its time: only such are compared.
    fast: float
    error: float  # As `level` and `error` of a run, before that step.
    first: SearchRun  # The run in which it became slow; all others are compared with it.
    runs: tuple[SearchRun, ...] = ()  # On other nodes, oldest first.
    faulty: tuple[str, ...] = ()  # Nodes that failed a test since.
    named: tuple[tuple[str, bool], ...] = ()  # The node that the history has by this search, and whether in full.
