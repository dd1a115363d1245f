"""Which incidents `slurm-watchdog incidents` lists."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from slurm_watchdog.cli.ask import incidents
from slurm_watchdog.model.documents import Incident
from slurm_watchdog.report.story import wanted

NOW = 10_000.0
ROWS = [
    Incident(id="a", kind="gpu_fault", state="firing", opened_at=NOW - 60, owner_uids=(1000, 1001)),
    Incident(id="b", kind="log_error", state="resolved", opened_at=NOW - 7200),
    Incident(id="c", kind="log_error", state="firing", opened_at=NOW - 600, inhibited_by="a"),
    Incident(id="d", kind="slow_job", state="pending", opened_at=None),
]


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({}, "abcd"),
        ({"kind": ("log_error",)}, "bc"),
        ({"kind": ("log_error", "slow_job")}, "bcd"),
        ({"state": ("firing",)}, "a"),
        ({"state": ("explained", "pending")}, "cd"),
        ({"since": 3600.0}, "ac"),
        ({"owner_uid": 1001}, "a"),
        ({"owner_uid": 1002}, ""),
        ({"limit": 2}, "ac"),
        ({"kind": ("log_error",), "limit": 1}, "c"),
    ],
)
def test_incidents_with_filters_lists_those_that_pass_all_in_their_order(filters: dict[str, Any], ids: str) -> None:
    found = wanted(ROWS, NOW, **filters)
    assert "".join(each.id for each in found) == ids


def test_incidents_of_a_user_that_this_machine_does_not_know_asks_for_the_uid() -> None:
    result = CliRunner().invoke(incidents, ["--user", "no-such-user-here"])
    assert result.exit_code == 2 and "--user 1000" in result.output
