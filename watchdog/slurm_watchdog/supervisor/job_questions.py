"""What Slurm is asked of the job that this process is in, each question with a deadline: a command that
does not end by then is killed and left behind, never waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.slurm.node_names import ParseError, expand_nodes

ANSWER_S = 3.0  # For slurmctld to answer: one that is asked in vain holds nothing up.
MAX_BYTES = 4 << 20


class Answer(NamedTuple):
    """What came of a command."""

    code: int | None  # None: it did not start, or did not end in time.
    output: str  # Its standard output as far as it was read.


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
        self.starting = 0  # Children that are being started, and are not known yet: meanwhile no end is taken.
        self.helpers: set[int] = set()
        """Children of this process that are no part of the command: those that run now, and what others add."""

    async def spawn(self, *argv: str, helps: bool = True, **more: Any) -> asyncio.subprocess.Process:
        """Starts a child, in a session of its own, which is no part of the command if it `helps`. Raises OSError."""
        self.starting += 1
        try:
            process = await asyncio.create_subprocess_exec(*argv, start_new_session=True, **more)
            if helps:
                self.helpers.add(process.pid)
            return process
        finally:
            self.starting -= 1

    async def run(self, *argv: str, deadline_s: float = ANSWER_S, environ: Mapping[str, str] | None = None) -> Answer:
        """Runs `argv`; its standard error goes nowhere."""
        try:
            process = await self.spawn(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL, env=environ or self._environ,
            )  # fmt: skip
        except OSError:
            return Answer(None, "")
        output, code = bytearray(), None
        with contextlib.suppress(TimeoutError):
            async with timeout(deadline_s):
                assert process.stdout is not None
                while (data := await process.stdout.read(65_536)) and len(output) < MAX_BYTES:
                    output += data
                code = await process.wait()
                self.helpers.discard(process.pid)
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # by which an srun ends its tasks, too
        return Answer(code, output.decode(errors="replace"))

    async def _row(self, field: str) -> str:
        """What squeue says; empty: nothing."""
        answer = await self.run("squeue", "--noheader", f"--jobs={self._queue_id}", f"--format={field}")
        return answer.output.strip() if answer.code == 0 else ""

    async def end_at(self) -> float | None:
        """When the job's time is over, since the epoch, as Slurm says it now; None: never, or not known."""
        with contextlib.suppress(ValueError):  # N/A, NONE; a date is of this host's time zone
            return datetime.fromisoformat(await self._row("%e")).timestamp()
        return None

    async def comment(self) -> str:
        """The job's --comment."""
        return await self._row("%k")

    async def nodes(self) -> frozenset[str]:
        """The nodes that the job has now; empty: Slurm does not say."""
        with contextlib.suppress(ParseError):
            return frozenset(expand_nodes(await self._row("%N")))
        return frozenset()

    async def requeue(self) -> int | None:
        """What scontrol ends with; None: Slurm does not answer. Slurm ends this process itself then."""
        return (await self.run("scontrol", "requeue", self._queue_id, deadline_s=2 * ANSWER_S)).code
