"""Which incidents `slurm-watchdog incidents` lists."""

from __future__ import annotations

import pytest

from slurm_watchdog.cli.api_types import Incident
from slurm_watchdog.cli.incidents import Wanted

NOW = 10_000.0
ROWS = [
    (Incident(id="a", kind="gpu_fault", state="firing", opened_at=NOW - 60), {"id": "a"}),
    (Incident(id="b", kind="log_error", state="resolved", opened_at=NOW - 7200), {"id": "b"}),
    (Incident(id="c", kind="log_error", state="firing", opened_at=NOW - 600, inhibited_by="a"), {"id": "c"}),
    (Incident(id="d", kind="slow_job", state="pending", opened_at=None), {"id": "d"}),
]


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (Wanted(), "abcd"),
        (Wanted(kinds=("log_error",)), "bc"),
        (Wanted(kinds=("log_error", "slow_job")), "bcd"),
        (Wanted(states=("firing",)), "a"),
        (Wanted(states=("explained", "pending")), "cd"),
        (Wanted(since_s=3600.0), "ac"),
        (Wanted(limit=2), "ac"),
        (Wanted(kinds=("log_error",), limit=1), "c"),
    ],
)
def test_incidents_with_filters_lists_those_that_pass_all_in_their_order(wanted: Wanted, ids: str) -> None:
    found = wanted.of(list(ROWS), NOW)
    assert "".join(each.id for each, _ in found) == ids
    assert [row["id"] for _, row in found] == list(ids)
