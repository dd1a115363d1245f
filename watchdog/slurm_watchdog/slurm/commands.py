"""Runs one command of Slurm to its end: the caller bounds its time, this module its output, and none of its
children is left.

No shell. Formats that hold the marks of the parser go by environment (SQUEUE_FORMAT2), for every user can
read a process's arguments, and only its own user its environment. Variables that would narrow a listing
(SQUEUE_STATES, SLURM_CLUSTERS, …) are not handed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.slurm.client import SlurmUnavailable

LOG = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")

OUTPUT_LIMIT = 256 * 2**20  # Bytes of one answer: 100,000 jobs with long paths are less than half of it.
CHUNK = 2**16
TOKEN_LIMIT = 65_536  # Characters of a token.
KEPT_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
DROPPED_PREFIXES = ("SLURM_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_", "SBATCH_")


@dataclass(frozen=True)
class Answer:
    """What one command printed."""

    code: int
    output: bytes
    stderr: str

    @property
    def stdout(self) -> str:
        return self.output.decode(errors="replace")


NOT_ACTIVE = "not asked: another controller may be the active one by now"


@dataclass(frozen=True)
class Right:
    """False while another controller is, or may be, the active one."""

    to_ask: Callable[[], bool]  # Asked before each command is started.
    to_change: Callable[[], bool] | None = None  # Asked in a thread before each change; None: as `to_ask` says.


ALWAYS = Right(lambda: True)  # The one controller on SQLite.


class Commands:
    """Slurm's commands in `bin_directory` (empty: PATH), started from the environment `environ`."""

    def __init__(
        self,
        bin_directory: str,
        environ: Mapping[str, str],
        token_file: str = "",
        right: Right = ALWAYS,
    ) -> None:
        self._right = right
        self._bin_directory = bin_directory
        self._environ = clean_environment(environ)
        self._token_file = token_file

    def path(self, command: str) -> str:
        """Where a command is."""
        return os.path.join(self._bin_directory, command) if self._bin_directory else command

    @property
    def environ(self) -> Mapping[str, str]:
        """What every command gets."""
        return self._environ

    async def run(self, command: str, *arguments: str, **environ: str) -> Answer:
        """Run one command to its end. Raises SlurmUnavailable if it cannot be started or prints too much.

        However this ends, cancelled by the deadline included, nothing of the command's process group is left.
        """
        if self._token_file:
            self._environ["SLURM_JWT"] = await asyncio.to_thread(read_token, self._token_file)
        if not self._right.to_ask():
            raise SlurmUnavailable(NOT_ACTIVE)
        return await run([self.path(command), *arguments], {**self._environ, **environ})

    async def change(self, command: str, *arguments: str) -> Answer:
        """As `run`, for a command that changes something."""
        await self.require_right()
        return await self.run(command, *arguments)

    async def require_right(self) -> None:
        """Raises SlurmUnavailable unless a command that changes something may be started now."""
        to_change = self._right.to_change
        if not self._right.to_ask() or (to_change is not None and not await asyncio.to_thread(to_change)):
            raise SlurmUnavailable(NOT_ACTIVE)

    @property
    def token(self) -> str:
        """SLURM_JWT as it was given to the last command; empty if there is none."""
        return self._environ.get("SLURM_JWT", "")


def read_token(path: str) -> str:
    """The token in a file. Raises SlurmUnavailable."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read(TOKEN_LIMIT).strip()
    except (OSError, ValueError) as error:
        raise SlurmUnavailable(f"the token for Slurm cannot be read (slurm.token_file): {error}") from error
    return text.removeprefix("SLURM_JWT=")


async def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    given: bytes | None = None,
    limit: int = OUTPUT_LIMIT,
    setting: str = "slurm.bin_directory",
) -> Answer:
    """As `Commands.run`, for any command; `given` is its standard input, which it need not read; `limit` in bytes;
    `setting` is the option that says where it is."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environ),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SlurmUnavailable(f"{argv[0]} cannot be started: {error.strerror}; see {setting}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    feeding = asyncio.ensure_future(feed(process.stdin, given or b""))
    try:
        output, errors = await gather(bounded(process.stdout, argv[0], limit), bounded(process.stderr, argv[0], limit))
        code = await process.wait()
    finally:
        feeding.cancel()
        if process.returncode is None:
            await kill(process)
        await asyncio.gather(feeding, return_exceptions=True)
    text = errors.decode(errors="replace")
    if text:
        LOG.debug("%s printed: %s", argv[0], first_line(text))
    return Answer(code, output, text)


async def feed(stream: asyncio.StreamWriter | None, given: bytes) -> None:
    """Write all of `given` to a command that may have stopped listening."""
    if stream is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(given)
        await stream.drain()
    stream.close()


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what would narrow or reformat Slurm's answers; English messages, times since the epoch."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in KEPT_VARIABLES or not name.startswith(DROPPED_PREFIXES)
    }
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def first_line(text: str) -> str:
    """The first line of a message, bounded and masked: Slurm repeats options and paths of users."""
    return next((mask_cut(line.strip(), 300) for line in text.splitlines() if line.strip()), "it printed nothing")


async def kill(process: asyncio.subprocess.Process) -> None:
    """End the process group and wait for it, a second long: one that can't even be killed is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with timeout(1):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(CHUNK):
                    pass  # only read to their end do the pipes close
            await process.wait()
    except TimeoutError:
        LOG.warning("process %d does not end although it was killed; it is left behind", process.pid)


async def bounded(stream: asyncio.StreamReader, path: str, limit: int) -> bytes:
    """All that a command prints; raises SlurmUnavailable above the limit."""
    chunks, size = [], 0
    while chunk := await stream.read(CHUNK):
        size += len(chunk)
        if size > limit:
            raise SlurmUnavailable(f"{path} printed more than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def gather(first: Awaitable[T], second: Awaitable[U]) -> tuple[T, U]:
    """Both results, awaited side by side; nothing of either is left when this returns or raises."""
    tasks = (asyncio.ensure_future(first), asyncio.ensure_future(second))
    try:
        return await tasks[0], await tasks[1]
    except BaseException as error:
        for task in tasks:
            task.cancel()
        if not isinstance(error, GeneratorExit):
            await asyncio.gather(*tasks, return_exceptions=True)
        raise
