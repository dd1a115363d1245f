"""Runs test jobs through Slurm: by sbatch, with the output in a shared directory, or by salloc and srun, by their pipe.

A job that does not start, does not end, or whose Slurm does not answer costs its time and nothing else. Cancelled, it
cancels what it has submitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.process_setup import die_with_parent
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.uncancelled import to_its_end
from slurm_watchdog.model.slurm_states import OVER
from slurm_watchdog.nodetest.plan import JOB_NAME, NodeJob, Placement, job_options
from slurm_watchdog.nodetest.program import command
from slurm_watchdog.nodetest.results import Line, parse_line
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.commands import Commands, first_line, run

STEP_OPTIONS = ("--whole", "--kill-on-bad-exit=0")
"""All CPUs of the nodes for the one task there; the task itself undoes what binds it to some of them."""
ALLOCATION = re.compile(r"^salloc: .* job allocation (\d+)")
"""salloc's words: "Pending job allocation 7", "Granted …", "Relinquishing …"."""
POLL_S = 0.3
"""Between two looks at an output file."""
ASK_S = 3.0
"""Between two questions to Slurm about a job."""
GRACE_S = 60.0
"""Beyond a job's limit, for Slurm to end it (KillWait, 30 s as shipped)."""
SETTLE_S = 5.0
"""After Slurm's word that a job is over, for the last lines to arrive (a shared directory's cache)."""
SUBMIT_S = 30.0
MOST_OUTPUT = 16 << 20

Heard = Callable[[NodeJob, Line], None]


class Ended(Struct, frozen=True, kw_only=True):
    """What came of a job."""

    nodes: tuple[str, ...]
    job_id: str = ""
    lines: tuple[Line, ...] = ()
    why: str = ""
    """Why it has no or not all results, a part of a sentence."""


class Launcher(Protocol):
    """One way to run a job."""

    async def run(self, job: NodeJob, heard: Heard, wait_s: float | None) -> Ended:
        """To its end; `wait_s`: how long it may wait for its nodes, None: as long as it takes. Cancelled, it cancels
        the job."""
        ...


class _Lines:
    """Lines of one job as they come, and whether every node has said its last."""

    def __init__(self, job: NodeJob, heard: Heard) -> None:
        self.job, self._heard = job, heard
        self.lines: list[Line] = []
        self.job_id = self.other = ""
        self._rest = b""

    def add(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for raw in whole:
            text = raw.decode(errors="replace")
            line = parse_line(text)
            if line is not None and line.node in self.job.nodes:
                self.lines.append(line)
                self._heard(self.job, line)
            elif line is None and text.strip():
                granted = ALLOCATION.search(text)
                self.job_id = granted[1] if granted else self.job_id
                self.other = self.other if granted else first_line(text)

    @property
    def complete(self) -> bool:
        return {line.node for line in self.lines if line.phase == "end"} == set(self.job.nodes)

    def ended(self, job_id: str, why: str) -> Ended:
        known = why and self.other and not self.lines
        said = f"{why} ({self.other})" if known else why
        return Ended(nodes=self.job.nodes, job_id=job_id, lines=tuple(self.lines), why="" if self.complete else said)


class Salloc:
    """Each job is a salloc with an srun in it: no directory is needed that all nodes share. (An srun alone takes
    --exclusive for --exact, too, and gives a task one CPU.)"""

    def __init__(self, client: SlurmClient, commands: Commands, placement: Placement) -> None:
        self._client, self._commands, self._placement = client, commands, placement

    async def run(self, job: NodeJob, heard: Heard, wait_s: float | None) -> Ended:
        words = [*STEP_OPTIONS, *command(sys.executable, job.question)]
        argv = [self._commands.path("salloc"), "--no-bell", *job_options(job, self._placement)]
        argv += [self._commands.path("srun"), *words]
        lines = _Lines(job, heard)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, env=dict(self._commands.environ), cwd="/", start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        except OSError as error:
            return lines.ended("", f"salloc cannot be started: {error.strerror}")
        why = "it ended without a result"
        try:
            why = await self._read(process, lines, wait_s) or why
        finally:
            if process.returncode is None:
                await to_its_end(_end(process))
            if not lines.complete and lines.job_id:
                await _cancel(self._client, lines.job_id)
        return lines.ended(lines.job_id, why)

    async def _read(self, process: asyncio.subprocess.Process, lines: _Lines, wait_s: float | None) -> str:
        """Until its end, or until it is late: then why."""
        assert process.stdout is not None
        until = None if wait_s is None else clock.monotonic() + wait_s
        started = False
        while True:
            left = None if until is None else max(0.0, until - clock.monotonic())
            try:
                async with timeout(left):
                    data = await process.stdout.read(65_536)
            except TimeoutError:
                return "it did not end in time" if started else f"its nodes were not free within {wait_s:g} s"
            if not data:
                await process.wait()
                return ""
            lines.add(data)
            if lines.lines and not started:
                started, until = True, clock.monotonic() + 60.0 * lines.job.minutes + GRACE_S
            if lines.complete:
                with contextlib.suppress(TimeoutError):
                    async with timeout(SETTLE_S):
                        await process.wait()
                return ""


class Sbatch:
    """Each job is a batch job that writes into `directory`, which all nodes share."""

    def __init__(self, client: SlurmClient, commands: Commands, placement: Placement, directory: Path) -> None:
        self._client, self._commands, self._placement, self._directory = client, commands, placement, directory

    async def run(self, job: NodeJob, heard: Heard, wait_s: float | None) -> Ended:
        lines = _Lines(job, heard)
        try:
            async with timeout(SUBMIT_S):
                job_id = await self._submit(job)
        except SlurmUnavailable as error:
            return lines.ended("", f"it could not be submitted: {error}")
        except TimeoutError:
            return lines.ended("", f"sbatch does not answer within {SUBMIT_S:g} s")
        why = ""
        try:
            why = await self._follow(job, job_id, lines, wait_s)
        finally:
            if not lines.complete:
                await _cancel(self._client, job_id)
        return lines.ended(job_id, why)

    async def _submit(self, job: NodeJob) -> str:
        words = command(sys.executable, job.question)
        if len(job.nodes) > 1:
            words = [self._commands.path("srun"), "--ntasks-per-node=1", *STEP_OPTIONS, *words]
        script = f"#!/bin/sh\nexec {shlex.join(words)}\n"
        output = self._directory / f"{JOB_NAME}-%j.out"
        options = [*job_options(job, self._placement), "--parsable", "--no-requeue", f"--output={output}"]
        options += ["--open-mode=truncate", f"--chdir={self._directory}"]
        answer = await run([self._commands.path("sbatch"), *options], self._commands.environ, script.encode())
        if answer.code:
            raise SlurmUnavailable(first_line(answer.stderr), answered=True)
        return answer.stdout.strip().partition(";")[0]

    async def _follow(self, job: NodeJob, job_id: str, lines: _Lines, wait_s: float | None) -> str:
        """Until all is there or nothing more will come; why not all is there."""
        path, at, asked = self._directory / f"{JOB_NAME}-{job_id}.out", 0, 0.0
        until = None if wait_s is None else clock.monotonic() + wait_s
        over_at: float | None = None
        while not lines.complete:
            data = await asyncio.to_thread(_read_from, path, at)
            at += len(data)
            started = bool(lines.lines)
            lines.add(data)
            now = clock.monotonic()
            if lines.lines and not started:
                until = now + 60.0 * job.minutes + GRACE_S
            if over_at is not None and now > over_at + SETTLE_S:
                return "it ended without a result"
            if until is not None and now > until:
                return "it did not end in time" if started else f"its nodes were not free within {wait_s:g} s"
            if now - asked > ASK_S and over_at is None:
                asked = now
                over_at = now if await _is_over(self._client, job_id) else None
            await asyncio.sleep(POLL_S)
        return ""


def _read_from(path: Path, at: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(MOST_OUTPUT)
    except OSError:
        return b""


async def _is_over(client: SlurmClient, job_id: str) -> bool:
    """Whether Slurm says so; no answer is no."""
    try:
        job = await client.read_job(job_id)
    except (SlurmUnavailable, SlurmRefused):
        return False
    return job is None or job.state in OVER


async def _cancel(client: SlurmClient, job_id: str) -> None:
    """What cannot be cancelled ends by its limit."""
    with contextlib.suppress(SlurmUnavailable, SlurmRefused):
        await to_its_end(client.cancel(job_id))


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, which makes srun give its job up, and then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 1.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with timeout(wait_s):
                await process.wait()
                return


async def run_jobs(
    jobs: Sequence[NodeJob], launcher: Launcher, at_once: int, heard: Heard, wait_s: float | None
) -> AsyncIterator[Ended]:
    """The ends of all jobs as they come, `at_once` of them running. No two that run share a node."""
    todo, busy = list(jobs), dict[asyncio.Task[Ended], NodeJob]()
    try:
        while todo or busy:
            taken = {node for job in busy.values() for node in job.nodes}
            while len(busy) < at_once and (job := next((j for j in todo if taken.isdisjoint(j.nodes)), None)):
                todo.remove(job)
                taken |= set(job.nodes)
                run = launcher.run(job, heard, wait_s if job.wait_s is None else job.wait_s)
                busy[asyncio.ensure_future(run)] = job
            done, _ = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                del busy[task]
                yield task.result()
    finally:
        for task in busy:
            task.cancel()
        await to_its_end(asyncio.gather(*busy, return_exceptions=True))
