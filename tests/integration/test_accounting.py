"""A real slurmdbd: what `story` learns of jobs that ended in every way, of requeues, elements, parts, and of last spring.

Minutes, and MariaDB: `.venv/bin/python -m pytest tests/integration/test_accounting.py`, as root.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from slurm_watchdog.model.run_record import RunRecord
from slurm_watchdog.slurm.accounting import NoAccounting, read_accounting
from slurm_watchdog.slurm.command_line import CommandLineSlurm
from slurm_watchdog.slurm.commands import Commands
from tests.captures.slurm.record_accounting import MONTHS_S, PREEMPTION, tell_story
from tests.rig import accounting
from tests.rig.cluster import Cluster

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(accounting.why_impossible() is not None, reason=f"{accounting.why_impossible()}"),
]
Told = tuple[Cluster, dict[str, str]]


@pytest.fixture(scope="module")
def told(cluster_possible: None) -> Iterator[Told]:
    with Cluster(nodes=3, accounting=True, options=PREEMPTION) as cluster:
        yield cluster, tell_story(cluster)


def runs(told: Told, what: str) -> list[RunRecord]:
    return asyncio.run(read_accounting(Commands("", told[0].env), told[1][what]))


@pytest.mark.parametrize(
    ("what", "ends"),
    [
        ("completes", [("COMPLETED", "0:0")]),
        ("killed", [("FAILED", "0:11")]),
        ("held", []),
        ("never", []),
        ("het", [("COMPLETED", "0:0")]),
        ("odd name", [("COMPLETED", "0:0")]),
        ("cancelled", [("CANCELLED", "0:0")]),
        ("requeued", [("REQUEUED", "0:0"), ("REQUEUED", "0:0"), ("CANCELLED", "0:0")]),
        ("requeued element", [("REQUEUED", "0:0"), ("CANCELLED", "0:0")]),
        ("preempted", [("PREEMPTED", "0:0"), ("RUNNING", "")]),
        ("preempted for good", [("PREEMPTED", "0:0")]),
        ("node fails", [("NODE_FAIL", "0:0")]),
        ("runs", [("RUNNING", "")]),
    ],
)
def test_every_run_of_a_job_is_known_with_its_end(told: Told, what: str, ends: list[tuple[str, str]]) -> None:
    found = runs(told, what)
    if what == "node fails":  # 25.11 says 1:0
        ends = [(state, found[-1].exit_code if found[-1].exit_code == "1:0" else code) for state, code in ends]
    assert [(each.state, each.exit_code) for each in found] == ends
    assert all(each.ended_at is None or each.ended_at >= each.began_at for each in found)


def test_a_job_of_months_ago_is_found_by_its_id_alone(told: Told) -> None:
    (found,) = runs(told, "fails")
    (other,) = runs(told, "completes")
    assert (found.state, found.exit_code) == ("FAILED", "3:0")
    assert abs(other.began_at - MONTHS_S - found.began_at) < 60
    assert re.fullmatch(r"\d+:\d+", found.steps_exit_code), "sacct knows the field"


def test_an_array_names_its_elements_and_each_has_its_own_end(told: Told) -> None:
    cluster, jobs = told
    with pytest.raises(NoAccounting, match="is an array: ask for one of its elements"):
        runs(told, "array")
    commands = Commands("", cluster.env)
    (good,), (bad,) = (asyncio.run(read_accounting(commands, f"{jobs['array']}_{number}")) for number in (0, 1))
    assert [(each.state, each.exit_code) for each in (good, bad)] == [("COMPLETED", "0:0"), ("FAILED", "1:0")]


def test_people_of_a_real_database_are_read(told: Told) -> None:
    found = asyncio.run(CommandLineSlurm(environ=told[0].env).read_people())
    assert [each.user for each in found if each.is_operator] == ["root"]
