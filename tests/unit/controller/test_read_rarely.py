"""What the controller reads of Slurm once in a while: reservations and people, each by itself."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_watchdog.controller.app import read_rarely
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.slurm.command_line import CommandLineSlurm

GOOD = "ReservationName=maint StartTime=1795500000 EndTime=1795507200 Nodes=n[1-3] Flags=MAINT"
ODD = "ReservationName=odd StartTime=1795500000 EndTime=NONE Nodes=n9"


def looked(tmp_path: Path, reservations: str, times: int = 1) -> Any:
    """The controller's state after so many looks at a Slurm that prints these reservations."""
    for command, script in (("scontrol", reservations), ("sacctmgr", "echo 'ann|Operator|'")):
        (tmp_path / command).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / command).chmod(0o755)
    slurm = CommandLineSlurm(str(tmp_path), 5.0, environ={"PATH": os.environ["PATH"]})
    config = SimpleNamespace(security=SimpleNamespace(asks_slurm=lambda: True))
    controller: Any = SimpleNamespace(
        state=SimpleNamespace(reservations=("before",), people=()), config=config, metrics=ControllerMetrics()
    )

    async def go() -> None:
        for _ in range(times):
            await read_rarely(controller, slurm)

    asyncio.run(go())
    return SimpleNamespace(
        reservations=controller.state.reservations,
        people=[each.user for each in controller.state.people],
        metrics=controller.metrics.text().decode(),
        notes=slurm.notes(),
    )


def test_one_reservation_that_cannot_be_read_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = looked(tmp_path, f"echo '{ODD}'; echo '{GOOD}'", times=3)
    assert [each.name for each in found.reservations] == ["maint"]
    assert 'slurm_watchdog_slurm_unreadable_total{field="reservation"} 3.0' in found.metrics
    assert sum("reservation odd is left out" in each.message for each in caplog.records) == 1
    assert any("reservation odd" in note for note in found.notes)


def test_people_are_read_though_reservations_are_not(tmp_path: Path) -> None:
    found = looked(tmp_path, "echo 'slurm_load_reservations error' >&2; exit 1")
    assert (found.reservations, found.people) == (("before",), ["ann"])
