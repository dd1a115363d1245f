"""What Slurm says of its jobs and nodes, our words in a job's `--comment`, and whether a node may be set DOWN. Pure.

#SBATCH --comment="watchdog: max_restarts=5,spares=1"
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.observations import BY_SLURM, Process
from slurm_watchdog.model.slurm_states import WAITING, is_drained, is_lost, may_hold_nodes

ELEMENTS = re.compile(r"(\d{1,10})_\[(\d{1,10}(?:-\d{1,10})?(?:,\d{1,10}(?:-\d{1,10})?)*)\]", re.ASCII)
"""The elements of an array that have not started, `6_[2,4-9]`: what scontrol takes for a hold and a release. With a
step or an end that is left out it is not taken."""


MAX_ELEMENTS = 100_000  # Of one array, written out: a user may submit millions (MaxArraySize of slurm.conf).


def can_be_named(job_id: str) -> bool:
    """Whether scontrol takes it, and it is not too much to be written out: not the rest of an array with many gaps."""
    return "[" not in job_id or _spans(job_id) is not None


def elements_of(job_id: str) -> frozenset[str]:
    """The elements of `6_[2,4-9]`, each as `6_4`; of any other id that one job."""
    spans, array = _spans(job_id), job_id.partition("_")[0]
    if spans is None:
        return frozenset({job_id})
    return frozenset(f"{array}_{index}" for span in spans for index in span)


def _spans(job_id: str) -> list[range] | None:
    match = ELEMENTS.fullmatch(job_id)
    if match is None:
        return None
    ends = (span.partition("-") for span in match[2].split(","))
    spans = [range(int(first), int(last or first) + 1) for first, _, last in ends]
    return spans if sum(map(len, spans)) <= MAX_ELEMENTS else None


class SlurmJob(Struct):
    """One job as Slurm lists it. `None` means that Slurm did not say."""

    job_id: str
    """As Slurm's commands want it: `123`, or `123_4` for an array element. `scontrol requeue 123` on the number that an
    element shares with its array would hit every element."""
    state: str  # Slurm's own word in capitals: PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, REQUEUE_HOLD, …
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
    raw_id: str = ""  # The processes' SLURM_JOB_ID, a number also for an array element; empty = `job_id`.
    required_nodes: tuple[str, ...] = ()
    node_count: int | None = None  # Nodes that it has or, pending, is to get: of `-N2-4` releases say 2, or 4.
    time_limit_s: float | None = None  # None: without a limit, or its partition's.
    qos: str = ""
    reservation: str = ""
    dependency: str = ""  # What it still waits for, in Slurm's words: `afterok:12(unfulfilled)`.
    submit_at: float | None = None  # When it was submitted or last requeued.
    eligible_at: float | None = None
    array_job_id: str = ""  # The whole array's id, empty for a job that is no element.
    array_tasks: str = ""  # Its index in the array; of `6_[4-9]`, all elements that have not started, `4-9`.
    het_job_id: str = ""  # The first component's id, for every component of a heterogeneous job.
    het_offset: int | None = None
    component_ids: tuple[str, ...] = ()  # Of a heterogeneous job: the other components' numbers, as `raw_id`.
    not_requeueable: str = ""  # Why a requeue would not do what it should in this release; empty if it would.
    starts_again: str = ""
    """It has ended, and what runs it starts it again by itself within a moment, as `slurm-watchdog run` does: a clause
    that says how it ended, and which restart that is."""
    counted_at_once: bool = False  # A restart is known before the next run prints anything: no line is mistaken.
    ended_with: str = ""  # How it ended, where more is known than its state: `exit code 7`.
    unreadable: tuple[str, ...] = ()  # Fields that Slurm answered unreadably: their values here mean nothing.

    @property
    def unsure(self) -> str:
        """Why nothing may be done to this job: owner, run or state could not be read; or nothing."""
        missing = [name for name in self.unreadable if name in NEEDED]
        return f"Slurm's answer about the job cannot be read: {', '.join(missing)}" if missing else ""

    @property
    def kept_from_queue(self) -> str:
        """Why the job is not to start again after the run that it is in, a sentence: someone holds it (`scontrol
        hold`), which takes effect at its next requeue; or nothing."""
        if self.state in WAITING or not self.reason.startswith("JobHeld"):
            return ""
        return f"the job is held by a user ({self.reason}), so that it does not start again after this run"

    @property
    def process_id(self) -> str:
        """The job's id in its processes' environment, in cgroup names, and so in everything that agents say."""
        return self.raw_id or self.job_id


NEEDED = ("state", "restarts", "start_at", "uid", "nodes", "is_batch")
"""What has to be known of a job before anything is done to it."""


class SlurmNode(Struct):
    name: str
    address: str
    state: str
    reason: str = ""
    reason_at: float | None = None  # When that reason was given: a drain is ours only if all three are as we left them.
    reason_user: str = ""
    partitions: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()  # As in `SlurmJob`.


class Reservation(Struct):
    """Nodes that Slurm keeps for something from a date on."""

    name: str
    start_at: float
    end_at: float
    nodes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def is_maintenance(self) -> bool:
        """Whether nodes are taken away for work on them."""
        return "MAINT" in self.flags


class SlurmPerson(Struct):
    """A user who is more than that in Slurm's accounting."""

    user: str
    is_operator: bool = False  # Operator or Administrator.
    coordinates: tuple[str, ...] = ()  # Accounts that he is a coordinator of.


class SlurmView(Struct):
    """One answer of Slurm: all jobs, all nodes, as far as it shows them to us."""

    jobs: tuple[SlurmJob, ...]
    nodes: tuple[SlurmNode, ...]
    dropped: tuple[str, ...] = ()  # Why rows of the answer are in neither: their ids could not be read.
    partial: str = ""  # Why a job not in this answer may exist all the same, a sentence; empty: it is whole.


GAVE_UP = "Kill task failed"
"""Begins slurmd's reason for a drain when processes outlived UnkillableStepTimeout (22.05 to 26.05)."""


def is_unkillable(processes: Sequence[Process], for_s: float) -> bool:
    """Whether a node's newest report shows a process of the job, in its control group, in D for `for_s`."""
    return any(
        each.member_by == BY_SLURM and each.state == "D" and (each.state_age_s or 0.0) >= for_s for each in processes
    )


def why_not_set_down(
    job: SlurmJob, node: SlurmNode, jobs: Sequence[SlurmJob], partial: str, *, unkillable: bool = False
) -> str:
    """Why a node on which the old run of `job` does not end must not be set DOWN; empty if it may.

    Either Slurm itself has given the node up, or no one has drained it and its agent shows a process that
    cannot be killed (`unkillable`): Slurm 26.05 was seen to keep the job COMPLETING beyond
    UnkillableStepTimeout without draining the node.
    """
    if is_lost(node.state):
        return f"Slurm has it as {node.state} already"
    if not is_drained(node.state):
        if not unkillable:
            return (
                "neither has Slurm given up on it (it drains the node with `Kill task failed` after "
                "UnkillableStepTimeout) nor "
                "does its agent report a process of the job that has been in state D for long enough"
            )
    elif not node.reason.startswith(GAVE_UP):
        return f"it is drained for another reason ({node.reason or 'none given'})"
    named = {job.process_id, *job.component_ids}
    if "JobId=" in node.reason and not any(f"JobId={name} " in f"{node.reason} ".replace(")", " ") for name in named):
        return f"Slurm drained it for another job ({node.reason})"
    if partial:
        return f"whether other jobs run there is not known: {partial}"
    for other in jobs:
        if other.job_id == job.job_id or not may_hold_nodes(other.state):
            continue
        if node.name in other.nodes or "nodes" in other.unreadable:
            return f"job {other.job_id} runs there, too, or may"
    return ""


RUN_LIMITS = ("max_restarts", "spares")  # Of `slurm-watchdog run`, as its options are named.
MOST = 1000
_BEGIN = re.compile(r"(?:^|[\s,;|])watchdog\s*[:=]\s*", re.IGNORECASE)
_END = re.compile(r"[;|\n\r]")  # Where the wish ends and something else that the comment holds begins.


def words_in(comment: str) -> str | None:
    """What stands after `watchdog:` or `watchdog=`, up to a semicolon, a bar or the end of the line; None: nothing."""
    begin = _BEGIN.search(comment)
    return None if begin is None else _END.split(comment[begin.end() :], maxsplit=1)[0]


def limit_of(key: str, value: str) -> int:
    """The number that `value` is. Raises ValueError, with a sentence, where it is none."""
    if not (value.isascii() and value.isdecimal() and int(value[:9]) <= MOST and len(value) <= 9):
        raise ValueError(f"{key}: {value[:40]!r} is not a number from 0 to {MOST}")
    return int(value)


def run_limits(comment: str) -> dict[str, int]:
    """Limits of `run` by name, those that the comment has. Raises ValueError, with a sentence, for one that is none."""
    found = {}
    for word in (words_in(comment) or "").split(","):
        key, _, value = word.strip().strip("\"'").partition("=")
        key = key.strip().lower().replace("-", "_")
        if key in RUN_LIMITS:
            found[key] = limit_of(key, value.strip())
    return found
