"""slurm_watchdog.controller.standby: a standby that could not take over says so, once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.standby import Standby
from slurm_watchdog.journal.error import JournalError, NewerRelease
from slurm_watchdog.journal.lease import Held
from slurm_watchdog.wire.http_messages import Request

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
    answer = standby.answer(Request(method="GET", path=path, authorization="", body=b"", remote="127.0.0.1"))
    return answer.status, bytes(answer.body).decode()


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
