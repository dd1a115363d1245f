"""What Slurm says of its jobs and nodes."""

from __future__ import annotations

import re

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.slurm_states import WAITING

ELEMENTS = re.compile(r"(\d{1,10})_\[(\d{1,10}(?:-\d{1,10})?(?:,\d{1,10}(?:-\d{1,10})?)*)\]", re.ASCII)
"""The elements of an array that have not started, `6_[2,4-9]`: what scontrol takes for a hold and a release. With a
step or an end that is left out it is not taken."""


MAX_ELEMENTS = 100_000
"""Of one array, written out: a user may submit millions (MaxArraySize of slurm.conf, at most 4,000,001)."""


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
    raw_id: str = ""
    """The number that the job's processes have as SLURM_JOB_ID, also for an array element; empty = `job_id`."""
    required_nodes: tuple[str, ...] = ()
    node_count: int | None = None
    """How many nodes it has or, pending, is expected to get: of `-N2-4` some releases say 2, some 4."""
    time_limit_s: float | None = None  # None: without a limit, or its partition's.
    qos: str = ""
    reservation: str = ""
    dependency: str = ""  # What it still waits for, in Slurm's words: `afterok:12(unfulfilled)`.
    submit_at: float | None = None  # When it was submitted or last requeued.
    eligible_at: float | None = None
    array_job_id: str = ""  # The whole array's id, empty for a job that is no element.
    array_tasks: str = ""
    """Its index in the array; of the job `6_[4-9]` that stands for all elements that have not started yet `4-9`."""
    het_job_id: str = ""  # The first component's id, for every component of a heterogeneous job.
    het_offset: int | None = None
    component_ids: tuple[str, ...] = ()
    """Of a heterogeneous job that was folded into its first component: the other components' numbers, as `raw_id`."""
    not_requeueable: str = ""
    """Why a requeue would not do what it should under this release of Slurm, a sentence; empty if it would."""
    starts_again: str = ""
    """It has ended, and what runs it starts it again by itself within a moment, as `slurm-watchdog run` does: a clause
    that says how it ended, and which restart that is."""
    counted_at_once: bool = False
    """A restart is known here before the next run prints anything: none of its lines is taken for the run before."""
    ended_with: str = ""  # How it ended, where more is known than its state: `exit code 7`.
    unreadable: tuple[str, ...] = ()
    """Names of the fields that Slurm answered in a form that cannot be read: their values here mean nothing."""

    @property
    def unsure(self) -> str:
        """Why nothing may be done to this job, a sentence: who owns it, which run it is or how it stands
        could not be read; or nothing."""
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
    reason_at: float | None = None
    """When that reason was given, and who gave it: a drain is ours only if all three are as we left them."""
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
    dropped: tuple[str, ...] = ()
    """Why rows of the answer are in neither, a sentence each: their ids could not be read."""
    partial: str = ""
    """Why a job that is not in this answer may exist all the same, a sentence; empty if the answer is whole."""
