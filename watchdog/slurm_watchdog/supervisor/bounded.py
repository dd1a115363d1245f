"""Commands with a deadline: one that does not end by then is killed and left behind, never waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slurm_watchdog.base.deadline import timeout

MAX_BYTES = 4 << 20


class Answer(NamedTuple):
    """What came of a command."""

    code: int | None
    """None: it did not start, or did not end in time."""
    output: str
    """Its standard output as far as it was read."""


async def answer_of(
    argv: Sequence[str], deadline_s: float, environ: Mapping[str, str] | None = None, helpers: set[int] | None = None
) -> Answer:
    """Runs `argv`; its standard error goes nowhere. `helpers` holds its process id for as long as it runs."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, env=environ, start_new_session=True,
        )  # fmt: skip
    except OSError:
        return Answer(None, "")
    helpers = set() if helpers is None else helpers
    helpers.add(process.pid)
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
        helpers.discard(process.pid)
    return Answer(code, output.decode(errors="replace"))
