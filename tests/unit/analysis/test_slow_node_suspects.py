"""Which node makes a job slow, by literals: what each run on other nodes says, and each failed test."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.slow_node_suspects import judge, search_facts
from slurm_watchdog.model.past_runs import SearchRun, SlowSearch

JOB = ("n1", "n2", "n3", "n4")
FAST_WITHOUT = (("n3", "n4", "s1", "s2"), 0.0)
Run = tuple[tuple[str, ...], float]


def searched(*runs: Run, hours: float = 0.5, error: float = 0.001) -> SlowSearch:
    """Of a job that became slower by 0.05 (on logarithms), and ran again on these nodes, slower by so much."""
    return SlowSearch(
        job_id="7", chain="1000/", incident_id="s1", opened_at=0.0, step=200, alike=(None, True),
        fast=2.0, error=0.001, first=SearchRun(nodes=JOB, level=2.05, error=0.001, at=0.0),
        runs=tuple(
            SearchRun(nodes=nodes, level=2.0 + height, error=error, at=3600 * hours * number, restarts=number)
            for number, (nodes, height) in enumerate(runs, 1)
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "suspects", "named", "confirmed"),
    [
        ((), JOB, "", False),
        ((FAST_WITHOUT,), ("n1", "n2"), "", False),
        (((("n3", "n4", "s1", "s2"), 0.05),), ("n3", "n4"), "", False),
        ((FAST_WITHOUT, (("n1", "n3", "n4", "s1"), 0.05)), ("n1",), "n1", False),
        ((FAST_WITHOUT, (("n1", "n3", "n4", "s1"), 0.05), (("n1", "s1", "s2", "s3"), 0.05)), ("n1",), "n1", True),
        ((FAST_WITHOUT, (("n2", "n3", "n4", "s1"), 0.001)), ("n1",), "n1", False),
        (((("n1", "s1", "s2", "s3"), 0.05),), ("n1",), "", False),  # no run was fast
        ((FAST_WITHOUT, (("n3", "n4", "s1", "s2"), 0.05)), (), "", False),  # of cleared nodes: it is none
        ((FAST_WITHOUT, (("n1", "n3", "n4", "s1"), 0.5)), ("n1", "n2"), "", False),  # slower than ever
        ((FAST_WITHOUT, (("n1", "n3", "n4", "s1"), 0.022)), ("n1", "n2"), "", False),  # neither
    ],
)
def test_judge(runs: tuple[Run, ...], suspects: tuple[str, ...], named: str, confirmed: bool) -> None:
    found = judge(searched(*runs))
    assert (found.suspects, found.named, found.confirmed) == (suspects, named, confirmed)


def test_what_the_hour_of_the_day_may_explain_says_nothing() -> None:
    assert judge(searched((("n3", "n4", "s1", "s2"), 0.03), hours=12.0)).suspects == JOB
    assert judge(searched((("n3", "n4", "s1", "s2"), 0.05), error=0.05)).suspects == JOB


def test_a_failed_test_names_a_suspect_in_full_and_no_cleared_node() -> None:
    found = judge(replace(searched(FAST_WITHOUT), faulty=("n2",)))
    assert (found.named, found.confirmed) == ("n2", True)
    assert judge(replace(searched(FAST_WITHOUT), faulty=("n3",))).named == ""
    assert judge(replace(searched(FAST_WITHOUT), faulty=("n1", "n2"))).named == ""


def test_what_is_known_and_what_comes_next_are_said() -> None:
    (said,) = search_facts(searched(FAST_WITHOUT))
    assert said.startswith("one of 2 nodes may make it slow: n[1-2] (2 runs compared)") and "test-nodes" in said
    (said,) = search_facts(searched(FAST_WITHOUT, (("n1", "n3", "n4", "s1"), 0.05)))
    assert said.startswith("n1 makes a step of job 7 5.1 % longer: 7.768 s in 2 runs with it, 7.389 s in 1 without")
    (said,) = search_facts(searched(FAST_WITHOUT, (*FAST_WITHOUT[:1], 0.05)))
    assert said.startswith("it is not one of the nodes (3 runs compared)")
