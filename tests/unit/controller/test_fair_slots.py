"""Places shared among users: whose turn it is, and that none is lost when work ends early."""

from __future__ import annotations

import asyncio

import pytest

from slurm_watchdog.controller.evidence.requests import FairSlots

MALLORY, VICTIM = 1500, 1501


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def hold(slots: FairSlots, uid: int, inside: list[int], leave: asyncio.Event) -> None:
    async with slots.of(uid):
        inside.append(uid)
        await leave.wait()


@pytest.mark.parametrize("crowd", [3, 100])
def test_one_user_with_a_crowd_leaves_a_place_for_another(crowd: int) -> None:
    async def run() -> list[int]:
        slots, inside, leave = FairSlots(4, 3), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(hold(slots, MALLORY, inside, leave)) for _ in range(crowd)]
        await settle()
        tasks.append(asyncio.create_task(hold(slots, VICTIM, inside, leave)))
        await settle()
        began = list(inside)
        leave.set()
        await asyncio.gather(*tasks)
        assert len(inside) == crowd + 1
        return began

    assert asyncio.run(run()) == [MALLORY] * 3 + [VICTIM]


def test_users_who_wait_take_turns() -> None:
    async def run() -> list[int]:
        slots, inside, leave = FairSlots(1, 1), list[int](), asyncio.Event()
        order = [MALLORY, MALLORY, MALLORY, VICTIM, VICTIM]
        tasks = [asyncio.create_task(hold(slots, uid, inside, leave)) for uid in order]
        await settle()
        leave.set()
        await asyncio.gather(*tasks)
        return inside

    assert asyncio.run(run()) == [MALLORY, VICTIM, MALLORY, VICTIM, MALLORY]


def test_places_of_cancelled_work_are_given_back() -> None:
    async def run() -> list[int]:
        slots, inside, leave = FairSlots(2, 2), list[int](), asyncio.Event()
        tasks = [asyncio.create_task(hold(slots, MALLORY, inside, leave)) for _ in range(5)]
        await settle()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        inside.clear()
        later = [asyncio.create_task(hold(slots, VICTIM, inside, leave)) for _ in range(2)]
        await settle()
        leave.set()
        await asyncio.gather(*later)
        return inside

    assert asyncio.run(run()) == [VICTIM, VICTIM]
