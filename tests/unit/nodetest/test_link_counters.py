"""Errors of network interfaces during a test: named where they rose in both jobs of a node and on hardly any other."""

from __future__ import annotations

import pytest

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.conduct import with_links
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.link_counters import judge_counters
from slurm_watchdog.nodetest.pairs import ring
from slurm_watchdog.nodetest.results import Fact, Measured
from tests.builders.measured_nodes import LINK, nodes

Risen = dict[tuple[str, str], dict[str, int]]
"""(node, with which it was measured) to what rose on it."""


def links(risen: Risen, count: int = 6) -> list[Measured]:
    found = []
    for pair in ring([f"n{at}" for at in range(1, count + 1)]):
        counters: dict[str, Fact] = {
            f"counters {node}": dict(risen.get((node, other), {})) for node, other in (pair, pair[::-1])
        }
        found.append(Measured(name=" ".join(pair), figures=LINK, facts={"pair": counters}))
    return found


def both(node: str, before: str, after: str, **risen: int) -> Risen:
    """The same rise in both of its jobs."""
    named = {f"eth0 {name}": value for name, value in risen.items()}
    return {(node, before): named, (node, after): named}


def test_errors_that_rise_in_both_jobs_of_one_node_are_its_links_fault() -> None:
    (risen,) = judge_counters(links(both("n3", "n2", "n4", rx_errors=1500)))["n3"]
    assert risen.is_certain
    assert risen.fault.place == "link:eth0"
    assert risen.fault.what == (
        "eth0: receive errors: 1,500 while it was measured with n2, 1,500 while it was measured with n4; at most 0 on most "
        "other nodes"
    )


def test_the_verdict_names_that_node_and_no_other() -> None:
    measured = links(both("n3", "n2", "n4", rx_errors=1500))
    found = with_links(judge_nodes(nodes(6), {}, {}), [], measured, ring([f"n{at}" for at in range(1, 7)]))
    assert {each.node: each.truth for each in found if each.truth is not Truth.OK} == {"n3": Truth.BAD}


def test_errors_in_one_of_two_jobs_are_a_doubt_and_no_verdict() -> None:
    measured = links({("n3", "n2"): {"mlx5_0/1 link_downed": 1}})
    found = with_links(judge_nodes(nodes(6), {}, {}), [], measured, ring([f"n{at}" for at in range(1, 7)]))
    (doubt,) = [each for each in found if each.truth is not Truth.OK]
    assert (doubt.node, doubt.truth) == ("n3", Truth.UNKNOWN)
    assert "losses of the link: 1 while it was measured with n2, fewer with n4" in doubt.reasons[0]


@pytest.mark.parametrize(
    "risen",
    [
        both("n3", "n2", "n4", rx_errors=9),  # below the floor
        both("n3", "n2", "n4", rx_drops=10**6, port_xmit_discards=10**6),  # congestion
        both("n3", "n2", "n4", rx_errors=500)
        | both("n4", "n3", "n5", rx_errors=50)
        | both("n5", "n4", "n6", rx_errors=50),
        {},
    ],
)
def test_few_errors_drops_and_what_other_nodes_have_as_well_accuse_nobody(risen: Risen) -> None:
    assert judge_counters(links(risen)) == {}


def test_with_three_other_nodes_nothing_is_judged_and_a_node_without_counters_is_no_peer() -> None:
    assert judge_counters(links(both("n3", "n2", "n4", rx_errors=1500), count=4)) == {}
    silent = [Measured(name=each.name, figures=LINK) for each in links({}, count=6)]
    assert judge_counters(silent) == {}
