"""Slow pairs name a node only where another pair tells which of the two it is."""

from __future__ import annotations

import pytest

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.conduct import with_links
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.pairs import culprits, judge_pairs, pair_of, ring
from slurm_watchdog.nodetest.results import Measured
from tests.builders.measured_nodes import link, nodes, problem

NAMES = [f"n{at}" for at in range(1, 9)]


def ring_with(*slow: str, **figures: float) -> list[Measured]:
    """The ring, in which pairs with one of `slow` have `figures`."""
    return [link(pair, **(figures if set(pair) & set(slow) else {})) for pair in ring(NAMES)]


def test_the_ring_has_two_pairs_for_each_node_and_a_round_has_each_node_once() -> None:
    around = ring(NAMES)
    assert all(sum(name in pair for pair in around) == 2 for name in NAMES)
    assert len({name for pair in around[:4] for name in pair}) == 8
    assert ring(["a", "b"]) == [("a", "b")]
    assert ring(["a"]) == []


@pytest.mark.parametrize("figures", [{"pair_latency": 4000.0}, {"pair_out": 1.0}, {"pair_in": 1.0}])
def test_a_node_that_makes_both_of_its_pairs_slow_is_named(figures: dict[str, float]) -> None:
    found = culprits(judge_pairs(ring_with("n4", **figures), {}))
    assert set(found) == {"n4"}
    assert len(found["n4"]) == 2


def test_a_single_slow_pair_names_neither_of_its_nodes() -> None:
    pairs = [link(pair, **({"pair_out": 1.0} if pair == ("n3", "n4") else {})) for pair in ring(NAMES)]
    (slow,) = judge_pairs(pairs, {})
    assert (slow.nodes, slow.culprit) == (("n3", "n4"), "")
    found = with_links(judge_nodes(nodes(8), {}, {}), [slow], pairs, ring(NAMES))
    assert {each.node: each.truth for each in found if each.truth is not Truth.OK} == {
        "n3": Truth.UNKNOWN, "n4": Truth.UNKNOWN,
    }  # fmt: skip


def test_a_healthy_node_between_two_bad_ones_is_not_named() -> None:
    assert set(culprits(judge_pairs(ring_with("n2", "n4", pair_latency=4000.0), {}))) == {"n2", "n4"}


def test_two_bad_neighbours_are_both_named() -> None:
    assert set(culprits(judge_pairs(ring_with("n2", "n3", pair_out=1.0), {}))) == {"n2", "n3"}


def test_all_pairs_equally_slow_convict_nobody_and_a_floor_names_the_node() -> None:
    assert judge_pairs(ring_with(*NAMES, pair_out=1.0), {}) == []
    assert set(culprits(judge_pairs(ring_with("n4", pair_out=80.0), {"pair_out": 85.0}))) == {"n4"}


def test_a_node_that_nobody_can_connect_to_is_named_by_its_two_pairs() -> None:
    refused = (problem("pair", "failed", said="no connection"),)
    pairs = [Measured(name=" ".join(pair), problems=refused) if "n4" in pair else link(pair) for pair in ring(NAMES)]
    assert set(culprits(judge_pairs(pairs, {}))) == {"n4"}


def test_a_clock_that_is_off_is_named_by_its_two_pairs_and_not_within_the_exchange_itself() -> None:
    def skewed(pair: tuple[str, str], within_s: float) -> Measured:
        ahead_s = 30.0 if "n4" in pair else 0.001
        return Measured(
            name=" ".join(pair), figures=link(pair).figures,
            facts={"pair": {"clock_ahead_s": ahead_s, "clock_within_s": within_s}},
        )  # fmt: skip

    assert set(culprits(judge_pairs([skewed(pair, 0.001) for pair in ring(NAMES)], {}))) == {"n4"}
    assert judge_pairs([skewed(pair, 31.0) for pair in ring(NAMES)], {}) == []


def test_a_node_of_which_no_pair_was_measured_is_unknown() -> None:
    pairs = [Measured(name=" ".join(pair), missing="not free") if "n4" in pair else link(pair) for pair in ring(NAMES)]
    found = with_links(judge_nodes(nodes(8), {}, {}), [], pairs, [pair_of(each) for each in pairs])
    assert {each.node for each in found if each.truth is not Truth.OK} == {"n4"}
