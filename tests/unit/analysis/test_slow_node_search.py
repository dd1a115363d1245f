"""The search for the node that makes a job slow, by literals and in small clusters; `make bench ARGS=search` has large
ones."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.slow_node_search import (
    judge,
    leave_out,
    measure,
    restarts_needed,
)
from slurm_watchdog.model.slow_search import SearchRun, SlowSearch
from tests.builders.slow_clusters import confirmed, search_cluster
from tests.builders.step_noise import noisy

JOB = ("n1", "n2", "n3", "n4")


def searched(*runs: tuple[tuple[str, ...], float], hours: float = 0.5, error: float = 0.001) -> SlowSearch:
    """Of a job that became slower by 0.05 (on logarithms), and ran again on these nodes, slower by so much."""
    return SlowSearch(
        suspects=JOB, fast=2.0, slow=2.05, error=0.001, at=0.0,
        runs=tuple(
            SearchRun(nodes=nodes, level=2.0 + height, error=error, at=3600 * hours * number)
            for number, (nodes, height) in enumerate(runs, 1)
        ),
    )  # fmt: skip


def test_judge_before_any_restart_suspects_every_node_and_names_none() -> None:
    verdict = judge(searched())
    assert (verdict.named, verdict.suspects, verdict.over) == ((), (JOB,), False)


def test_judge_a_run_that_is_fast_without_half_suspects_that_half_and_clears_the_other() -> None:
    verdict = judge(searched((("n3", "n4", "s1", "s2"), 0.0)))
    assert verdict.suspects == (("n1", "n2"),)
    assert verdict.uncleared == ("n1", "n2")


def test_judge_a_run_that_stays_slow_without_half_suspects_the_other_half() -> None:
    assert judge(searched((("n3", "n4", "s1", "s2"), 0.05))).suspects[0] == ("n3", "n4")


def test_judge_names_the_node_without_which_alone_the_job_is_fast() -> None:
    verdict = judge(searched((("n3", "n4", "s1", "s2"), 0.0), (("n1", "n3", "n4", "s1"), 0.05), (("n2", "n3", "n4", "s1"), 0.001)))  # fmt: skip
    assert [each.node for each in verdict.named] == ["n1"]
    assert verdict.named[0].percent == pytest.approx(5.1, abs=0.1)
    assert verdict.named[0].confidence > 0.99
    assert verdict.over


def test_judge_names_the_node_also_where_the_slow_steps_are_uneven_and_the_fast_ones_are_not() -> None:
    runs = tuple(
        SearchRun(nodes=nodes, level=2.0 + height, error=error, at=1800.0 * number)
        for number, (nodes, height, error) in enumerate(((("n1", "s1"), 0.24, 0.019), (("n2", "s1"), 0.001, 0.002)), 1)
    )
    search = SlowSearch(suspects=("n1", "n2"), fast=2.0, slow=2.25, error=0.003, slow_error=0.032, at=0.0, runs=runs)
    assert [each.node for each in judge(search).named] == ["n1"]
    assert judge(replace(search, error=0.032)).unclear == 1  # as if nothing could be told of the fast ones either


def test_judge_of_a_job_that_is_slow_on_other_nodes_alone_acquits_everybody() -> None:
    fast = (("n1", "n2", "n3", "n4"), 0.0)
    verdict = judge(searched(fast, (("n1", "n2", "n3", "n4"), 0.05)))
    assert verdict.acquitted and verdict.over and not verdict.named


def test_judge_a_run_that_is_neither_slow_nor_fast_says_nothing() -> None:
    verdict = judge(searched((("n3", "n4", "s1", "s2"), 0.015)))
    assert verdict.unclear == 1 and verdict.suspects == (JOB,)


def test_judge_a_run_that_is_slower_than_ever_says_nothing_of_the_nodes() -> None:
    assert judge(searched((("n3", "n4", "s1", "s2"), 0.5))).unclear == 1


def test_judge_half_a_day_later_a_small_difference_may_be_the_hour_and_says_nothing() -> None:
    assert judge(searched((("n3", "n4", "s1", "s2"), 0.0), hours=12.0)).unclear == 1
    assert judge(searched((("n3", "n4", "s1", "s2"), 0.0), hours=0.5)).unclear == 0


def test_leave_out_takes_half_of_the_suspects_and_never_more_than_can_be_replaced() -> None:
    verdict = judge(searched())
    assert len(leave_out(verdict, 4, random.Random(1))) == 2
    assert len(leave_out(verdict, 1, random.Random(1))) == 1
    assert leave_out(verdict, 0, random.Random(1)) == ()


def test_leave_out_after_a_verdict_leaves_out_the_named_and_gives_the_others_back() -> None:
    verdict = judge(searched((("n3", "n4", "s1", "s2"), 0.0), (("n1", "n3", "n4", "s1"), 0.05)))
    assert [each.node for each in verdict.named] == ["n1"]
    assert leave_out(verdict, 4, random.Random(1)) == ("n1",)


def test_measure_of_few_steps_is_nothing_and_of_a_pause_in_ten_the_level_without_it() -> None:
    assert measure([10.0] * 40) is None
    steps = [v * (3 if n % 10 == 0 else 1) for n, v in enumerate(noisy([10.0] * 200, 1))]
    found = measure(steps)
    assert found is not None
    assert found[0] == pytest.approx(2.3026, abs=0.01) and found[1] < 0.004


@pytest.mark.parametrize(("suspects", "spares", "needed"), [(48, 48, 7), (384, 192, 10), (48, 6, 11), (48, 0, 0)])
def test_restarts_needed_where_few_can_be_left_out_at_once(suspects: int, spares: int, needed: int) -> None:
    assert restarts_needed(suspects, spares) == needed


@pytest.mark.parametrize("slow", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", [0.0, 0.25], ids=["the same in each run", "by its place"])
def test_search_of_a_cluster_names_its_slow_nodes_and_nobody_else(slow: int, seed: int, place: float) -> None:
    found = search_cluster(48, 24, slow, seed, place=place)
    assert found.first_named <= found.slow
    assert {each.node for each in found.verdict.named} <= found.slow
    assert found.first_named_after is not None and found.first_named_after <= 9


@pytest.mark.parametrize("like", ["evaluation", "ramp", "storage", "ramp_not_logged"])
@pytest.mark.parametrize("slow", [0, 1])
def test_search_beside_what_looks_like_a_slow_node_confirms_nobody_else(like: str, slow: int) -> None:
    """More of them in `make bench ARGS=search`: with storage one search in two hundred confirms a wrong name."""
    for seed in range(12):
        found = search_cluster(48, 24, slow, seed, like=like)
        assert confirmed(found) <= found.slow, seed


def test_search_of_a_cluster_with_few_spares_takes_longer_and_names_the_right_one() -> None:
    found = search_cluster(48, 42, 1, 5)
    assert {each.node for each in found.verdict.named} == found.slow


def test_leave_out_after_an_unclear_run_is_everybody_who_was_in_no_fast_run() -> None:
    unclear = judge(searched((("n3", "n4", "s1", "s2"), 0.0), (("n1", "n3", "n4", "s1"), 0.5)))
    assert unclear.unclear_now == 1
    assert leave_out(unclear, 4, random.Random("x")) == unclear.uncleared == ("n1", "n2")


NARROWED = (("n3", "n4", "s1", "s2"), 0.0)
"""A run that is fast without n1 and n2."""


def test_judge_names_the_suspect_that_failed_a_test_while_a_fast_run_did_without_it() -> None:
    verdict = judge(replace(searched(NARROWED), faulty=("n2",)))
    assert [each.node for each in verdict.named] == ["n2"]
    assert leave_out(verdict, 4, random.Random(1)) == ("n2",), "n1 is given back"


def test_judge_of_a_failed_test_names_nobody_where_no_run_was_fast_or_the_node_is_no_suspect_or_two_failed() -> None:
    assert judge(replace(searched(), faulty=("n2",))).named == ()
    assert judge(replace(searched(NARROWED), faulty=("n3",))).named == ()
    both = judge(replace(searched(NARROWED), faulty=("n1", "n2")))
    assert both.named == () and both.suspects == (("n1", "n2"),)


def test_judge_takes_a_name_back_once_a_run_without_that_node_is_slow_too_or_one_with_it_is_fast() -> None:
    slow_without = (("n1", "n3", "n4", "s1"), 0.05)
    assert "n2" not in [each.node for each in judge(replace(searched(NARROWED, slow_without), faulty=("n2",))).named]
    fast_with = (("n2", "n3", "n4", "s1"), 0.0)
    assert [each.node for each in judge(replace(searched(NARROWED, fast_with), faulty=("n2",))).named] == ["n1"]
