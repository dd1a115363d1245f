"""Runs of a job that are over, and the error lines of a run, as detectors see them. Pure."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.slurm import SlurmJob


class LoggedError(Struct):
    """An error line of a run as an agent reported it: who said it is found when the run is judged
    (diagnose/logs/reported_run.py)."""

    at: float  # On the clock of `ClusterView.now`.
    line: str
    pattern: str = ""  # The row of slurm_watchdog.knowledge.log_signatures that matched.
    source: str = ""  # Path of the file it stood in.
    read_on: str = ""
    """The node whose agent read it. A job's common log is read on one node, whichever rank wrote to it."""


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
    checkpoint_step: int | None = None
    """Of the newest complete checkpoint that was seen and is no newer than the last step."""
    saved_at: float | None = None
    """When a checkpoint of it was complete last, of whichever step; None: none was seen to be."""
    state: str = ""  # Slurm's last word about it: FAILED, TIMEOUT, …; RUNNING or PENDING for one that was requeued.
    started_again: str = ""  # See `SlurmJob.starts_again`.
    log_read: bool = False  # Whether an agent could read its logs: otherwise that nothing was logged means nothing.
    unseen: bool = False  # It began and ended between two listings of Slurm: only its number says that it was there.
    nodes: tuple[str, ...] = ()  # Where it ran, as far as Slurm has said.
    touched_at: float | None = None  # When an action of ours first touched it (kill switch, signal, requeue, cancel).
    held_after: bool = False  # It ended by itself, and the job was held before it ran again.
    errors: tuple[LoggedError, ...] = ()  # Bounded: the first and the last ones, in the order of their coming.
    error_ranks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(pattern, ranks) of those that said so since the last step."""
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
    """Jobs of the same user and name that ended before this one began, waited for by this one, and whose
    steps it went on from."""
    run: PastRun | None = None  # Its last run.
    past: tuple[PastRun, ...] = ()  # The runs before that, oldest first.
