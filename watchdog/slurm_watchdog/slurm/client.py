"""The Protocol of a Slurm client, and the three ways in which a request can end.

*Done*: the call returns. *Refused*: `SlurmRefused`, Slurm understood and said no, nothing was changed; its
`kind` says why and `terminal` whether asking again can help. *Unknown*: `SlurmUnavailable`, it may or may not
have been done, so Slurm is asked (`read_job`, `read_view`) before anything else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode, SlurmView


class Refusal(StrEnum):
    """Why Slurm said no."""

    NO_SUCH_JOB = "no_such_job"
    NO_SUCH_NODE = "no_such_node"
    NO_PERMISSION = "no_permission"
    NOT_BATCH = "not_batch"  # salloc and srun jobs can be cancelled, never requeued; they have no script either.
    NOT_REQUEUEABLE = "not_requeueable"  # Submitted with --no-requeue, or JobRequeue=0.
    FINISHED = "finished"
    NOT_PENDING = "not_pending"  # What may be done to a pending job only.
    NOT_RUNNING = "not_running"
    CHANGED = "changed"  # It is not as the caller last saw it, so nothing was done.
    UNSATISFIABLE = "unsatisfiable"  # No node could run the job, an account or limit forbids it, an option is invalid.
    NOT_NOW = "not_now"  # In between two states, or too busy: the same request may be taken in a moment.
    NOT_ASKED = "not_asked"  # We did not even send it: no name of one job or one node.
    OTHER = "other"


MAY_CHANGE = frozenset({Refusal.NOT_PENDING, Refusal.NOT_RUNNING, Refusal.NOT_NOW})
"""Refusals that the job's next state may lift. After all others asking again is useless."""


_REFUSALS = """
no_such_job: Invalid job id specified
no_such_node: Invalid node name specified
no_permission: Invalid user id; Access/permission denied
not_batch: Only batch jobs are accepted or processed
not_requeueable: Requested operation is presently disabled
other: Requested operation not supported; Cannot modify/cancel; unrecognized option; is not a valid
other: Batch script is empty; This does not look like a batch script; Batch script contains DOS line breaks
finished: Job/step already completing or completed; Job has already finished; Job is not pending nor running
not_pending: Job is no longer pending execution
not_running: Job is pending execution
not_now: Job can not be altered now, try again later; Job update not available right now; Requested nodes are busy
unsatisfiable: Requested node configuration is not available; Node count specification invalid
unsatisfiable: More processors requested than permitted; Invalid partition name specified
unsatisfiable: Invalid account or account/partition combination specified; Invalid qos specification
unsatisfiable: Invalid feature specification; Invalid generic resource (gres) specification
unsatisfiable: Job violates accounting/QOS policy; Job dependency problem; Requested time limit is invalid
unsatisfiable: Requested reservation is invalid; Required partition not available
changed: Invalid node state specified
"""
REFUSALS = tuple(
    (phrase, Refusal(kind))
    for kind, _, phrases in (row.partition(": ") for row in _REFUSALS.split("\n") if row)
    for phrase in phrases.split("; ")
)
"""Part of the message, and what it means: the texts of slurm_strerror, in Slurm 22.05 to 26.05, and sbatch's
own, before it has sent anything.

Not here, and so unknown: `Unable to contact slurm controller`, `Socket timed out on send/recv operation`, `Slurm
backup controller in standby mode`, `Unexpected message received`, and all that we never saw.
"""
OPERATOR = "; the controller's user has to be a Slurm operator, see docs/install.md, Rights"


def parse_refusal(text: str) -> tuple[str, Refusal] | None:
    """Slurm's line that says no for good, bounded, and why it says so; None if the outcome is open."""
    for line in text.splitlines():
        for phrase, kind in REFUSALS:
            if phrase in line:
                said = line.strip()[:300]
                return (said + OPERATOR if kind is Refusal.NO_PERMISSION else said), kind
    return None


class SlurmUnavailable(Exception):
    """No answer, or none that can be trusted: time-out, controller down, output cut short. The outcome is unknown.

    `answered`: Slurm did answer, and the answer is of no use (it cannot be read, or shows too little).
    """

    def __init__(self, reason: str, *, answered: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.answered = answered


class SlurmRefused(Exception):
    """A positive no: no such job, no permission, not a batch job, already finished. Nothing was changed."""

    def __init__(self, reason: str, kind: Refusal = Refusal.OTHER) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind

    @property
    def terminal(self) -> bool:
        """Whether the same request will be refused again, whatever the job does next."""
        return self.kind not in MAY_CHANGE


class SignalTo(StrEnum):
    """Which of a job's processes a signal goes to."""

    STEPS = "steps"  # What srun started, and not the batch script, whose srun sees the tasks end.
    BATCH = "batch"  # The batch script's shell alone: what `sbatch --signal=B:USR1` does.
    FULL = "full"  # The batch script, all its children and the steps.


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A job script to be submitted."""

    script: bytes
    options: tuple[str, ...] = ()  # Long options of sbatch, `--exclude=n1`: they win over #SBATCH lines.
    like: str = ""
    """A job: what it was given on sbatch's command line is taken over as far as Slurm still lists it (tasks,
    CPUs, memory, GPUs, constraints, output files, its index in an array); `options` win over that."""
    uid: int  # Whose job it shall be. For another's than our own user we have to be root.
    workdir: str  # The environment is what the user has after a login on the node.


class SlurmClient(Protocol):
    """One Slurm cluster. Each call returns or raises SlurmUnavailable within the client's deadline; also SlurmRefused,
    but for the view and the reservations."""

    def notes(self) -> tuple[str, ...]:
        """What is wrong with how Slurm is asked, a sentence each: another client than wanted, a token that ends."""

    async def read_view(self) -> SlurmView:
        """All jobs, finished ones included while Slurm remembers them, and all nodes, in one listing of each.

        `excluded_nodes` of these jobs may be empty: only `read_job` is sure to know it. Raises
        SlurmUnavailable rather than return a list with something missing.
        """

    async def read_job(self, job_id: str) -> SlurmJob | None:
        """One job with its excluded nodes; None only if Slurm answers that there is no such job.

        Raises SlurmRefused if `job_id` is not the name of one job (a whole array).
        """

    async def read_node(self, node: str) -> SlurmNode | None:
        """One node with the reason of its state, when and by which user that was given; None if none has that name."""

    async def read_reservations(self) -> tuple[Reservation, ...]:
        """Every reservation that can be read."""

    async def read_script(self, job_id: str) -> bytes:
        """The batch script as it was submitted, of a job that Slurm still remembers. Raises SlurmRefused
        (NO_SUCH_JOB, NO_PERMISSION, NOT_BATCH)."""

    # -- one job

    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        """Stop the run and put the job back into the queue, held. It may still be completing on return.

        With `only_unfinished` a job that has ended, or is ending by itself, is refused and not run again;
        one that is already requeued and held is left so, without an error.
        """

    async def set_excluded_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        """Replace the whole list of nodes that the pending job must not get: give the existing ones, too."""

    async def release(self, job_id: str) -> None:
        """Let a held job run. Without effect on one that is not held."""

    async def hold(self, job_id: str) -> None:
        """Keep a pending job from starting."""

    async def cancel(self, job_id: str) -> None:
        """End the job. One that is unknown or has ended is no error."""

    async def send_signal(self, job_id: str, signal: str, to: SignalTo) -> None:
        """Send a signal (`USR1`, `TERM`, …) to processes of a running job, which continues if they handle it.

        Returning means that Slurm accepted it, not that a process has received it.
        """

    async def submit(self, submission: Submission) -> str:
        """Submit a new job; returns its id. After SlurmUnavailable there may or may not be one: look for it first."""

    # -- one node; it takes an administrator

    async def drain_node(self, node: str, reason: str) -> None:
        """No new job on this node; those that run there continue. Replaces the reason of an earlier drain."""

    async def undrain_node(self, node: str, reason: str, reason_at: float | None) -> None:
        """Take a drain back, if its reason and time are still these, as they were read after it.

        Only the drain goes: a node that is down stays down, and in some releases (24.11) the reason's words stay, too.
        Refused (CHANGED) if it was changed since.
        """

    async def reserve_nodes(self, name: str, nodes: Sequence[str]) -> None:
        """A reservation `name` of these nodes for our own user and a day, for maintenance: no job of others starts
        there, those that run there continue. Slurm refuses a name that is there already."""

    async def delete_reservation(self, name: str) -> None:
        """Give the nodes of a reservation back."""

    async def set_node_down(self, node: str, reason: str) -> None:
        """The node counts as lost: every job there ends at once, also one whose processes cannot be killed."""
