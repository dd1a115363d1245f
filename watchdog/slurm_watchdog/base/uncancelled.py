"""Cleaning up that nothing interrupts: neither a second signal nor a time limit that is reached meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """What `work` returns or raises, once it has ended, however often this is cancelled meanwhile. If it was, raises
    CancelledError then.

    `asyncio.shield` alone is not enough: a second cancellation lets go of what it shields, and the end of the event
    loop cancels that. For what the main task waits for: the loop cancels all others at once.
    """
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()
