"""Tests of nodes in the journal: an intent that is not over is found again; old ones are forgotten."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.node_tests import KEPT_S
from slurm_watchdog.model.node_test import Ending, NodeTest

FIRST = NodeTest(
    name="slurm-watchdog-test-1",
    nodes=("n1",),
    peers=("n2",),
    at=10.0,
    until=99.0,
)


def test_a_test_that_is_not_over_is_there_after_a_restart_and_one_that_is_over_for_a_while(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.sqlite"
    journal = Journal(url)
    journal.node_tests.intend(FIRST)
    journal.close()
    journal = Journal(url)
    assert journal.node_tests.open() == [FIRST]
    over = replace(FIRST, ended_at=20.0, ending=Ending.DONE)
    with journal.together():
        journal.node_tests.save(over)
    assert journal.node_tests.open() == [] and journal.node_tests.since(10.0) == [over]
    assert journal.node_tests.since(11.0) == []
    journal.node_tests.intend(replace(FIRST, name="slurm-watchdog-test-2", at=21.0 + KEPT_S))
    assert [each.name for each in journal.node_tests.since(0.0)] == ["slurm-watchdog-test-2"]
    journal.close()
