"""When the time of the job that this process is in is over. Its end moves: by `scontrol update TimeLimit=`, and by a
suspension."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Final

from slurm_watchdog.supervisor.bounded import answer_of
from slurm_watchdog.supervisor.last_minute import LAST_S, late_words

ANSWER_S: Final = 3.0
"""For slurmctld to answer: one that is asked in vain holds nothing up."""


def parse_end(text: str) -> float | None:
    """Seconds since the epoch, of what squeue prints for %e in this host's time zone; None: never, or not known."""
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return None


def queue_id(job_id: str, environ: Mapping[str, str]) -> str:
    """What squeue takes for this job alone: the number of an array's last element is the whole array's, too."""
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element and environ.get("SLURM_JOB_ID") == job_id else job_id


def asking(environ: Mapping[str, str]) -> dict[str, str]:
    """For commands that ask Slurm, or signal: without the variables by which a person's own calls of them are shaped
    (squeue(1), scancel(1): ENVIRONMENT VARIABLES)."""
    return {
        name: value for name, value in environ.items()
        if not name.startswith(("SCANCEL_", "SQUEUE_", "SCONTROL_")) and name != "SLURM_TIME_FORMAT"
    }  # fmt: skip


async def read_end(job_id: str, environ: Mapping[str, str], helpers: set[int]) -> float | None:
    """As Slurm says it now, within ANSWER_S; None: never, or not known. `helpers`: see `bounded`."""
    argv = ("squeue", "--noheader", f"--jobs={queue_id(job_id, environ)}", "--format=%e")
    return parse_end((await answer_of(argv, ANSWER_S, asking(environ), helpers)).output)


async def read_comment(job_id: str, environ: Mapping[str, str]) -> str:
    """The job's --comment, within ANSWER_S; empty: it has none, or Slurm does not say."""
    argv = ("squeue", "--noheader", f"--jobs={queue_id(job_id, environ)}", "--format=%k")
    answer = await answer_of(argv, ANSWER_S, asking(environ))
    return answer.output.strip() if answer.code == 0 else ""


class JobTime:
    """How long a job may still run: Slurm is asked again only where its time seems to be over."""

    def __init__(self, end_at: float | None, ask: Callable[[], Awaitable[float | None]]):
        """`end_at`: since the epoch, as it was at the start; None: not known. `ask`: what Slurm says now."""
        self._end_at, self._ask = end_at, ask

    async def seconds_left(self, wall: float) -> float:
        """At `wall`, since the epoch; infinite where no end is known."""
        if self._end_at is None:
            self._end_at = await self._ask()
        elif self._end_at - wall < LAST_S:
            self._end_at = await self._ask() or self._end_at
        return float("inf") if self._end_at is None else self._end_at - wall

    async def lateness(self, wall: float) -> str:
        """A part of a sentence, why nothing is started at `wall` any more; empty if it may be."""
        left_s = await self.seconds_left(wall)
        return late_words(left_s) if left_s < LAST_S else ""
