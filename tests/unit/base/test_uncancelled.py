"""Cleaning up that nothing interrupts."""

from __future__ import annotations

import asyncio

import pytest

from slurm_watchdog.nodetest.conduct import to_its_end


def test_what_is_cancelled_again_and_again_is_done_and_the_cancellation_comes_afterwards() -> None:
    done: list[str] = []

    async def clean_up() -> str:
        await asyncio.sleep(0.05)
        done.append("cleaned up")
        return "all"

    async def interrupted() -> None:
        task = asyncio.ensure_future(to_its_end(clean_up()))
        for _ in range(5):
            await asyncio.sleep(0.005)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert done == ["cleaned up"]
    assert asyncio.run(to_its_end(clean_up())) == "all"


def test_what_it_raises_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(to_its_end(fails()))
