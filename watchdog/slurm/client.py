"""What the watchdog wants from Slurm, whoever carries it out: six requests and two ways to fail.

A request that fails says which of two things happened, for the next step differs:
`SlurmRefused`, Slurm understood and said no, so asking again is useless; `SlurmUnavailable`, nobody knows
whether it was done, so the world is asked (`read_job`) before anything else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from watchdog.model import SlurmJob, SlurmView


class SlurmUnavailable(Exception):
    """No answer, or none that can be trusted: time-out, controller down, output cut short. The outcome is unknown."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SlurmRefused(Exception):
    """A positive no: no such job, no permission, not a batch job, already finished. Nothing was changed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SlurmClient(Protocol):
    """One Slurm cluster. Each call comes back within the client's deadline, by returning or by raising."""

    async def read_view(self) -> SlurmView:
        """All jobs, finished ones included while Slurm remembers them, and all nodes, in one listing of each.

        `excluded_nodes` of these jobs is empty: only `read_job` knows it.
        Raises SlurmUnavailable rather than return a list with something missing.
        """
        ...

    async def read_job(self, job_id: str) -> SlurmJob | None:
        """One job with its excluded nodes; None only if Slurm answers that there is no such job.

        Raises SlurmUnavailable, or SlurmRefused if `job_id` is not the name of one job (a whole array).
        """
        ...

    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        """Stop the run and put the job back into the queue, held. It may still be completing on return.

        With `only_unfinished` a job that has ended, or is ending by itself, is refused and not run again;
        one that is already requeued and held is left so, without an error.
        Raises SlurmUnavailable, SlurmRefused.
        """
        ...

    async def set_excluded_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        """Replace the whole list of nodes that the pending job must not get: give the existing ones, too.

        Raises SlurmUnavailable, SlurmRefused.
        """
        ...

    async def release(self, job_id: str) -> None:
        """Let a held job run. Without effect on one that is not held. Raises SlurmUnavailable, SlurmRefused."""
        ...

    async def hold(self, job_id: str) -> None:
        """Keep a pending job from starting. Raises SlurmUnavailable, SlurmRefused."""
        ...

    async def cancel(self, job_id: str) -> None:
        """End the job. One that is unknown or has ended is no error. Raises SlurmUnavailable, SlurmRefused."""
        ...
