"""Users are looked up in threads, within a deadline, and are known for a minute: a directory may hang."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slurm_watchdog.controller.api.asking import KEPT_S, UserLookup, person_of
from slurm_watchdog.controller.api.doors import make_app
from slurm_watchdog.controller.policy.access import Person
from tests.builders.open_doors import OWNER, Controller


def test_what_was_found_is_known_for_a_minute() -> None:
    asked, now = list[int](), [0.0]

    def look_up(uid: int) -> Person:
        asked.append(uid)
        return Person(uid, name="ann")

    async def go() -> None:
        users = UserLookup(look_up, now=lambda: now[0])
        for now[0] in (0.0, KEPT_S, KEPT_S + 1.0):
            assert (await users.find(5)).name == "ann"

    asyncio.run(go())
    assert asked == [5, 5]


def test_a_directory_that_hangs_costs_those_whom_it_is_asked_for_and_nobody_else() -> None:
    answers = threading.Event()

    def look_up(uid: int) -> Person:
        if uid == 5:
            answers.wait(20.0)
        return Person(uid, name="ann")

    async def go() -> None:
        users = UserLookup(look_up, deadline_s=0.2)
        try:
            hanging = asyncio.create_task(users.named(Person(5)))
            assert (await asyncio.wait_for(users.find(6), 2.0)).name == "ann"
            assert (await hanging).name == "uid 5", "proven by the kernel, whatever he is called"
            with pytest.raises(TimeoutError):
                await users.find(5)
        finally:
            answers.set()

    asyncio.run(go())


def test_the_controllers_loop_runs_on_while_a_name_is_looked_up(tmp_path: Path) -> None:
    controller: Any = Controller(tmp_path)
    answers = threading.Event()

    def look_up(uid: int) -> Person:
        answers.wait(20.0)
        return Person(uid, name="ann")

    async def go() -> None:
        app = make_app(controller, lambda _: Person(OWNER), UserLookup(look_up))
        async with TestClient(TestServer(app)) as client:
            asking = asyncio.create_task(client.post("/v1/silences", json={"jobs": ["7"], "for_s": 60}))
            began = time.monotonic()
            assert (await client.get("/v1/status")).status == 200
            assert time.monotonic() - began < 2.0
            assert not asking.done()
            answers.set()
            told = await (await asking).json()
            assert [each["by"] for each in told["silences"]] == ["ann"]

    asyncio.run(go())


def test_a_user_is_found_by_his_number() -> None:
    root = person_of(0)
    assert (root.uid, root.name, 0 in root.groups) == (0, "root", True) and person_of("root") == root
    with pytest.raises(KeyError):
        person_of(os.getpid() + 3_000_000_000)
