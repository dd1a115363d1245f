"""SlurmClient by way of squeue, sinfo, scontrol and scancel.

It has to run as root, SlurmUser or an operator, or Slurm hides jobs (PrivateData) and refuses to change them.
No shell; arguments are checked first. Formats that hold the marks of the parser go by environment (SQUEUE_FORMAT2), for
every user can read the arguments of a process while it runs, and nobody else its environment. Variables that would narrow
a listing (SQUEUE_STATES, SLURM_CLUSTERS, …) are not handed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from watchdog.model import SlurmJob, SlurmView
from watchdog.slurm import parse
from watchdog.slurm.client import SlurmRefused, SlurmUnavailable

LOG = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")

OUTPUT_LIMIT = 256 * 2**20
"""Bytes of one answer: 100,000 jobs with long paths are less than half of it."""
CHUNK = 2**16
LISTING = ("--local", "--all", "--states=all")
"""This cluster only, hidden partitions too, whatever the state."""
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
DROPPED = ("SLURM_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_")


@dataclass(frozen=True)
class Answer:
    """What one command printed."""

    code: int
    stdout: str
    stderr: str


class CommandLineSlurm:
    """Slurm's commands, each request within `deadline_s`.

    `bin_directory`: where they are, empty for PATH. `environ`: the environment to start from (SLURM_CONF, PATH);
    None for our own. `observe(call, outcome)` is told how each request ended: ok, refused or unavailable.
    """

    def __init__(
        self,
        bin_directory: str = "",
        deadline_s: float = 20.0,
        environ: Mapping[str, str] | None = None,
        observe: Callable[[str, str], None] = lambda call, outcome: None,
    ) -> None:
        self._bin_directory = bin_directory
        self._deadline_s = deadline_s
        self._environ = clean_environment(os.environ if environ is None else environ)
        self._observe = observe

    async def read_view(self) -> SlurmView:
        """All jobs and all nodes. Raises SlurmUnavailable."""
        return await self._request("read_view", self._read_view)

    async def read_job(self, job_id: str) -> SlurmJob | None:
        """One job with its excluded nodes; None if Slurm knows no such job. Raises SlurmUnavailable, SlurmRefused."""
        return await self._request("read_job", lambda: self._read_job(checked_job_id(job_id)))

    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        """Requeue held; see SlurmClient. Raises SlurmUnavailable, SlurmRefused."""
        await self._request(
            "requeue_hold", lambda: self._requeue_hold(checked_job_id(job_id), only_unfinished)
        )

    async def set_excluded_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        """Replace the excluded nodes of a pending job. Raises SlurmUnavailable, SlurmRefused."""

        async def change() -> None:
            for node in nodes:
                if not parse.NODE_NAME.fullmatch(node):
                    raise SlurmRefused(f"not asked: {node[:80]!r} is no name of a node")
            await self._change(
                "scontrol", "update", f"JobId={checked_job_id(job_id)}", f"ExcNodeList={','.join(nodes)}"
            )

        await self._request("set_excluded_nodes", change)

    async def release(self, job_id: str) -> None:
        """Let a held job run. Raises SlurmUnavailable, SlurmRefused."""
        await self._request("release", lambda: self._change("scontrol", "release", checked_job_id(job_id)))

    async def hold(self, job_id: str) -> None:
        """Hold a pending job. Raises SlurmUnavailable, SlurmRefused."""
        await self._request("hold", lambda: self._change("scontrol", "hold", checked_job_id(job_id)))

    async def cancel(self, job_id: str) -> None:
        """End a job. scancel exits with 0 for jobs that are unknown or have ended. Raises as the others do."""
        await self._request("cancel", lambda: self._change("scancel", checked_job_id(job_id)))

    # -- requests

    async def _read_view(self) -> SlurmView:
        marks = new_marks()
        jobs, nodes = await gather(
            self._run("squeue", *LISTING, SQUEUE_FORMAT2=parse.long_format(parse.JOB_FIELDS, marks)),
            # What a user writes is in no field of a node, so this format may be an argument.
            self._run(
                "sinfo", "--local", "--all", "--Node", "-O", parse.long_format(parse.NODE_FIELDS, marks)
            ),
        )
        return SlurmView(
            jobs=await asyncio.to_thread(parse.parse_jobs, whole(jobs, "squeue"), marks),
            nodes=await asyncio.to_thread(parse.parse_nodes, whole(nodes, "sinfo"), marks),
        )

    async def _read_job(self, job_id: str) -> SlurmJob | None:
        marks = new_marks()
        one = (*LISTING, "--jobs", job_id)
        long, short = await gather(
            self._run("squeue", *one, SQUEUE_FORMAT2=parse.long_format(parse.JOB_FIELDS, marks)),
            self._run("squeue", *one, SQUEUE_FORMAT=parse.short_format(parse.EXCLUDED_FIELDS, marks)),
        )
        if long.code and parse.says_unknown_job(long.stderr):
            return None
        jobs = parse.parse_jobs(whole(long, "squeue"), marks)
        if not jobs:
            return None
        for job in jobs:
            if job.job_id == job_id:
                excluded = parse.parse_excluded(whole(short, "squeue"), marks, job_id)
                return msgspec.structs.replace(job, excluded_nodes=excluded)
        shown = ", ".join(job.job_id for job in jobs[:5])
        raise SlurmRefused(f"{job_id} does not name one job; Slurm has {shown}")

    async def _requeue_hold(self, job_id: str, only_unfinished: bool) -> None:
        if not only_unfinished:
            await self._change("scontrol", "requeuehold", job_id)
            return
        await self._change("scontrol", "requeuehold", "Incomplete", job_id)
        # Slurm says nothing when it left the job alone: see parse.py.
        done, why = parse.judge_requeue(await self._read_job(job_id))
        if done is False:
            raise SlurmRefused(why)
        if done is None:
            raise SlurmUnavailable(why)

    async def _change(self, command: str, *arguments: str) -> None:
        """Run a command that changes something; raises SlurmRefused, SlurmUnavailable unless it says that it did."""
        answer = await self._run(command, *arguments)
        if answer.code == 0:
            return
        refusal = parse.parse_refusal(answer.stderr)
        if refusal is not None and "permission denied" in refusal.lower():
            raise SlurmRefused(
                f"{refusal}; the controller's user has to be a Slurm operator, see deploy/README.md"
            )
        if refusal is not None:
            raise SlurmRefused(refusal)
        raise SlurmUnavailable(f"{command} ended with exit code {answer.code}: {first_line(answer.stderr)}")

    # -- processes

    async def _request(self, call: str, body: Callable[[], Awaitable[T]]) -> T:
        """Carry out one request within the deadline, and count how it ended."""
        try:
            async with asyncio.timeout(self._deadline_s):
                result = await body()
        except SlurmRefused:
            self._observe(call, "refused")
            raise
        except SlurmUnavailable:
            self._observe(call, "unavailable")
            raise
        except TimeoutError as error:
            self._observe(call, "unavailable")
            raise SlurmUnavailable(f"no answer within {self._deadline_s:g} s ({call})") from error
        except parse.ParseError as error:
            self._observe(call, "unavailable")
            raise SlurmUnavailable(f"the answer can't be read ({call}): {error}") from error
        self._observe(call, "ok")
        return result

    async def _run(self, command: str, *arguments: str, **environ: str) -> Answer:
        """Run one command to its end. Raises SlurmUnavailable if it can't be started or prints too much.

        However this ends, cancelled by the deadline included, nothing of the command's process group is left.
        """
        path = os.path.join(self._bin_directory, command) if self._bin_directory else command
        try:
            process = await asyncio.create_subprocess_exec(
                path,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**self._environ, **environ},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SlurmUnavailable(
                f"{path} can't be started: {error.strerror}; see slurm.bin_directory"
            ) from error
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            output, errors = await gather(bounded(process.stdout, path), bounded(process.stderr, path))
            code = await process.wait()
        finally:
            if process.returncode is None:
                await kill(process)
        if errors:
            LOG.debug("%s printed: %s", command, first_line(errors))
        return Answer(code, output, errors)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what would narrow or reformat Slurm's answers; English messages, times since the epoch."""
    kept = {name: value for name, value in environ.items() if name in KEPT or not name.startswith(DROPPED)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def new_marks() -> parse.Marks:
    """Marks for one call, of 64 random bits each."""
    return parse.Marks(field=f"x{secrets.token_hex(8)}f", record=f"x{secrets.token_hex(8)}r")


def checked_job_id(job_id: str) -> str:
    """`job_id` if it names one job; raises SlurmRefused."""
    if not parse.JOB_ID.fullmatch(job_id):
        raise SlurmRefused(f"not asked: {job_id[:80]!r} does not name one job (like 123 or 123_4)")
    return job_id


def whole(answer: Answer, command: str) -> str:
    """The text of a listing; raises SlurmUnavailable if the command failed."""
    if answer.code:
        raise SlurmUnavailable(f"{command} ended with exit code {answer.code}: {first_line(answer.stderr)}")
    return answer.stdout


def first_line(text: str) -> str:
    """The first line of a message, bounded."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "it printed nothing")


async def kill(process: asyncio.subprocess.Process) -> None:
    """End the process group and wait for it, a second long: one that can't even be killed is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(1):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(CHUNK):
                    pass  # only read to their end do the pipes close
            await process.wait()
    except TimeoutError:
        LOG.warning("process %d does not end although it was killed; it is left behind", process.pid)


async def bounded(stream: asyncio.StreamReader, path: str) -> str:
    """All that a command prints; raises SlurmUnavailable above the limit."""
    chunks, size = [], 0
    while chunk := await stream.read(CHUNK):
        size += len(chunk)
        if size > OUTPUT_LIMIT:
            raise SlurmUnavailable(f"{path} printed more than {OUTPUT_LIMIT} bytes")
        chunks.append(chunk)
    return b"".join(chunks).decode(errors="replace")


async def gather(first: Awaitable[T], second: Awaitable[U]) -> tuple[T, U]:
    """Both results, awaited side by side; nothing of either is left when this returns or raises."""
    tasks = (asyncio.ensure_future(first), asyncio.ensure_future(second))
    try:
        return await tasks[0], await tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
