"""What Slurm is asked of the job that this process is in, each question with a deadline: what does not end by then is
killed and left behind, never waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import NamedTuple

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.slurm.node_names import ParseError, expand_nodes
from slurm_watchdog.supervisor.endings import LAST_S, late_words

ANSWER_S = 3.0  # For slurmctld to answer: one that is asked in vain holds nothing up.
MAX_BYTES = 4 << 20


class Answer(NamedTuple):
    """What came of a command."""

    code: int | None  # None: it did not start, or did not end in time.
    output: str  # Its standard output as far as it was read.


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


class JobQuestions:
    """Commands about one job, and beside it."""

    def __init__(self, job_id: str, environ: Mapping[str, str]):
        self._queue_id, self._environ = queue_id(job_id, environ), asking(environ)
        self.helpers: set[int] = set()
        """Children of this process that are no part of the command: those that run now, and what others add."""

    async def run(self, *argv: str, deadline_s: float = ANSWER_S) -> Answer:
        """Runs `argv`; its standard error goes nowhere."""
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL, env=self._environ, start_new_session=True,
            )  # fmt: skip
        except OSError:
            return Answer(None, "")
        self.helpers.add(process.pid)
        output = bytearray()
        try:
            async with timeout(deadline_s):
                assert process.stdout is not None
                while (data := await process.stdout.read(65_536)) and len(output) < MAX_BYTES:
                    output += data
                code: int | None = await process.wait()
        except TimeoutError:
            code = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if code is not None:
            self.helpers.discard(process.pid)
        return Answer(code, output.decode(errors="replace"))

    async def _row(self, fields: str) -> Answer:
        return await self.run("squeue", "--noheader", f"--jobs={self._queue_id}", f"--format={fields}")

    async def end_at(self) -> float | None:
        """When the job's time is over, since the epoch, as Slurm says it now; None: never, or not known."""
        return parse_end((await self._row("%e")).output)

    async def comment(self) -> str:
        """The job's --comment; empty: it has none, or Slurm does not say."""
        answer = await self._row("%k")
        return answer.output.strip() if answer.code == 0 else ""

    async def nodes(self) -> frozenset[str]:
        """The nodes that the job has now; empty: Slurm does not say."""
        answer = await self._row("%N")
        try:
            return frozenset(expand_nodes(answer.output.strip())) if answer.code == 0 else frozenset()
        except ParseError:
            return frozenset()

    async def requeue(self) -> int | None:
        """What scontrol ends with; None: Slurm does not answer. Slurm ends this process itself then."""
        return (await self.run("scontrol", "requeue", self._queue_id, deadline_s=2 * ANSWER_S)).code


class JobTime:
    """How long a job may still run: Slurm is asked again only where its time seems to be over. Its end moves: by
    `scontrol update TimeLimit=`, and by a suspension."""

    def __init__(self, end_at: float | None, ask: Callable[[], Awaitable[float | None]]):
        """`end_at`: since the epoch, as it was at the start; None: not known. `ask`: what Slurm says now."""
        self._end_at, self._ask = end_at, ask

    async def lateness(self, wall: float) -> str:
        """A part of a sentence, why nothing is started at `wall` any more; empty if it may be, or no end is known."""
        if self._end_at is None or self._end_at - wall < LAST_S:
            self._end_at = await self._ask() or self._end_at
        if self._end_at is None or self._end_at - wall >= LAST_S:
            return ""
        return late_words(self._end_at - wall)
