"""One long-lived child process that is asked by frames: started when needed, killed when late, restarted with
growing pauses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.slurm.backoff import Backoff
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.commands import OUTPUT_LIMIT, first_line, kill

LOG = logging.getLogger(__name__)

START_S = 15.0
"""For an interpreter to start and import, on a busy machine."""
MAX_REQUESTS = 5000
"""After so many requests it is replaced: what a C library may leak stays bounded."""
STDERR_LIMIT = 2000
"""Bytes that are remembered of what it wrote to its standard error."""


class WorkerGone(SlurmUnavailable):
    """There is no such process: it can't be started, or it ends by itself before it answers."""


class PyslurmProcess:
    """The process `argv`, one request at a time. A request that is cancelled ends the process."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._argv, self._environ = list(argv), dict(environ)
        self._process: asyncio.subprocess.Process | None = None
        self._stderr_reader: asyncio.Task[None] | None = None
        self._stderr = b""
        self._asked = 0
        self._lock = asyncio.Lock()
        self._backoff = Backoff(first_s=2.0, most_s=300.0)

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises WorkerGone, SlurmUnavailable."""
        async with self._lock:
            if self._process is None or self._process.returncode is not None or self._asked >= self._max_requests:
                await self._start()
            assert self._process is not None
            whole = False
            try:
                self._asked += 1
                answer = await self._exchange(request)
                whole = True
                return answer
            except (OSError, EOFError, ValueError) as error:
                raise SlurmUnavailable(
                    f"pyslurm's process ended while it was asked: {self._last_stderr_line()}"
                ) from error
            finally:
                if not whole:
                    await self._end()

    async def close(self) -> None:
        """Ends the process."""
        async with self._lock:
            await self._end()

    async def _start(self) -> None:
        now = clock.monotonic()
        if (wait_s := self._backoff.wait_s(now)) > 0:
            raise WorkerGone(
                f"pyslurm's process failed {self._backoff.failures} times in a row ({self._last_stderr_line()}); "
                f"the next try is in {wait_s:.0f} s"
            )
        await self._end()
        begun = False
        try:
            async with timeout(START_S):
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=self._environ,
                    cwd="/",
                    start_new_session=True,
                )
                self._stderr, self._asked = b"", 0
                self._stderr_reader = asyncio.ensure_future(self._read_stderr(self._process.stderr))
                hello = await self._read()
            if "pyslurm" not in hello:
                raise WorkerGone(str(hello.get("failed", "it says nothing"))[:300])
            begun = True
            LOG.info("pyslurm %s is asked by process %d", hello["pyslurm"], self._process.pid)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            if self._stderr_reader is not None and isinstance(error, EOFError):
                await asyncio.wait({self._stderr_reader}, timeout=1)
            raise WorkerGone(
                f"pyslurm's process can't be started: {self._last_stderr_line() or type(error).__name__}"
            ) from error
        finally:
            if begun:
                self._backoff.succeeded()
            else:
                self._backoff.failed(clock.monotonic())
                await self._end()

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        data = msgspec.json.encode(request)
        self._process.stdin.write(b"%d\n" % len(data) + data)
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        """One frame. Raises EOFError, ValueError."""
        assert self._process is not None
        assert self._process.stdout is not None
        size = int(await self._process.stdout.readline() or b"-1")
        if size < 0:
            raise EOFError
        if size > OUTPUT_LIMIT:
            raise ValueError(f"an answer of {size} bytes")
        data = await self._process.stdout.readexactly(size)
        return await asyncio.to_thread(msgspec.json.decode, data, type=dict[str, Any])

    async def _read_stderr(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (chunk := await stream.read(STDERR_LIMIT)):
            self._stderr = (self._stderr + chunk)[-STDERR_LIMIT:]

    def _last_stderr_line(self) -> str:
        text = self._stderr.decode(errors="replace").strip()
        return first_line(text.splitlines()[-1]) if text else "it printed nothing"

    async def _end(self) -> None:
        process, self._process = self._process, None
        hearing, self._stderr_reader = self._stderr_reader, None
        if hearing is not None:
            hearing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hearing
        if process is not None and process.returncode is None:
            await kill(process)
