"""Deadlines of coroutines, which end in the builtin TimeoutError on every Python.

Python 3.10 has no `asyncio.timeout`, and what its `asyncio.wait_for` raises is another class.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class _Timeout:
    """`asyncio.timeout` for Python 3.10. One limit: a task that is cancelled from outside in the moment in which its
    time is over gets a TimeoutError, and not both."""

    def __init__(self, limit_s: float | None):
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._limit_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self._limit_s), self._expire, task)

    def _expire(self, task: asyncio.Task[object]) -> None:
        self._over = True
        task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._over and kind is asyncio.CancelledError:
            raise TimeoutError from error


def timeout(limit_s: float | None) -> AbstractAsyncContextManager[object]:
    """Ends what is inside after `limit_s`, with TimeoutError; None: never."""
    if sys.version_info >= (3, 11):
        return asyncio.timeout(limit_s)  # novm
    return _Timeout(limit_s)


async def wait_for(awaited: Awaitable[T], limit_s: float | None) -> T:
    """What `awaited` gives. Raises TimeoutError after `limit_s`."""
    async with timeout(limit_s):
        return await awaited
