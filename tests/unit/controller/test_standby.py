"""slurm_watchdog.controller.standby: a standby that could not take over says so, once."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.ingest.endpoint import watching_app
from slurm_watchdog.controller.standby import Standby
from slurm_watchdog.journal.error import JournalError, NewerRelease
from slurm_watchdog.journal.lease import Held

GONE = JournalError("the database at postgresql://db cannot be reached: connection refused")


class ScriptedLease:
    """A lease whose database answers as `takes` says."""

    name = "mgmt2:9765"
    epoch = 7

    def __init__(self) -> None:
        self.takes: Callable[[], bool] = lambda: False

    def take(self) -> bool:
        return self.takes()

    def read(self) -> Held:
        return Held(6, "mgmt1:9765", 0.4)


def fails(error: JournalError) -> Callable[[], bool]:
    def take() -> bool:
        raise error

    return take


def ask(standby: Standby, path: str) -> tuple[int, str]:
    """What its agents' port answers."""

    async def go() -> tuple[int, str]:
        async with TestClient(TestServer(watching_app(standby._metrics, standby.health))) as client:
            answer = await client.get(path)
            return answer.status, await answer.text()

    return asyncio.run(go())


@pytest.fixture
def lease() -> ScriptedLease:
    return ScriptedLease()


@pytest.fixture
def standby(lease: ScriptedLease) -> Standby:
    found: Any = lease
    return Standby(Config(), found)


def test_a_standby_that_cannot_reach_the_database_is_not_healthy_and_knows_of_no_active_one(
    standby: Standby, lease: ScriptedLease
) -> None:
    assert standby.look() is False
    assert ask(standby, "/healthz")[0] == 200 and "the active one is mgmt1:9765" in standby.sentence()
    lease.takes = fails(GONE)
    assert standby.look() is False
    status, text = ask(standby, "/healthz")
    said = json.loads(text)
    assert (status, said["healthy"]) == (503, False) and "connection refused" in said["detail"]
    assert "mgmt1" not in standby.sentence()
    metrics = ask(standby, "/metrics")[1]
    assert "slurm_watchdog_controller_ready 0.0" in metrics and "lease_age_seconds NaN" in metrics
    lease.takes = lambda: False
    standby.look()
    assert json.loads(ask(standby, "/healthz")[1])["healthy"] is True
    assert "slurm_watchdog_controller_ready 1.0" in ask(standby, "/metrics")[1]


def test_a_standby_of_an_earlier_release_is_not_healthy(standby: Standby, lease: ScriptedLease) -> None:
    lease.takes = fails(NewerRelease("schema version 11, this program knows 10"))
    standby.look()
    status, text = ask(standby, "/healthz")
    assert status == 503 and "schema version 11" in text and "mgmt1:9765" in text


def test_what_a_standby_sees_is_logged_when_it_changes_and_not_at_each_look(
    standby: Standby, lease: ScriptedLease, caplog: pytest.LogCaptureFixture
) -> None:
    standby.look()
    lease.takes = fails(GONE)
    for _ in range(5):
        standby.look()
    lease.takes = lambda: False
    standby.look()
    standby.look()
    assert [(each.levelno, "not known" in each.message) for each in caplog.records] == [
        (logging.WARNING, False), (logging.ERROR, True), (logging.WARNING, False),
    ]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_users_on_other_machines_are_told_which_controller_is_the_active_one(
    lease: ScriptedLease, tmp_path: Path
) -> None:
    """They got "connection refused" from the machine that their variable names."""
    found: Any = lease
    ports = [free_port() for _ in range(3)]
    names = ("listen", "user_listen", "page_listen")
    settings = {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)} | {
        "socket": f"{tmp_path}/s"
    }
    standby = Standby(parse_config(json.dumps({"controller": settings})), found)
    standby.look()

    async def go() -> list[tuple[int, str]]:
        doors: list[Any] = []
        await standby._open(doors, None)
        asked = [(each, "GET", "/v1/status") for each in ports]
        asked += [(ports[1], "POST", "/v1/restart"), (ports[1], "GET", "/metrics"), (ports[2], "GET", "/")]
        said = []
        try:
            async with aiohttp.ClientSession() as client:
                for port, method, path in asked:
                    async with client.request(method, f"http://127.0.0.1:{port}{path}", data=b"{}") as answer:
                        said.append((answer.status, await answer.text()))
            local = aiohttp.ClientSession(connector=aiohttp.UnixConnector(f"{tmp_path}/s"))
            async with local as client, client.post("http://localhost/v1/pause", data=b"{}") as answer:
                return [*said, (answer.status, await answer.text())]
        finally:
            for door in doors:
                await door.cleanup()

    for status, text in asyncio.run(go()):
        assert (status, json.loads(text)["code"]) == (503, "standby")
        assert "the active one is mgmt1:9765: ask it" in json.loads(text)["error"]
