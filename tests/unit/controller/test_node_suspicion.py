"""How suspicious nodes are, and what is said of the third event."""

from __future__ import annotations

from slurm_watchdog.controller.node_history.suspicion import (
    SUSPECT_FROM,
    by_node,
    suspicion_of,
    suspicions,
)
from slurm_watchdog.model.node_events import NodeEvent
from tests.builders.node_past import GPU, NOW, event
from tests.simulation.lemons import World, years


def score(*events: NodeEvent) -> float:
    return suspicion_of("n1", by_node(events).get("n1", ()), NOW).score


def test_three_faults_of_one_part_make_a_suspect_and_three_of_three_parts_do_not() -> None:
    assert score(*(event(n, place=GPU) for n in (1, 7, 14))) >= SUSPECT_FROM
    assert score(*(event(n, place=f"GPU-{n}") for n in (1, 7, 14))) < 1.0
    assert score(event(1, place=GPU), event(7, place=GPU)) < SUSPECT_FROM


def test_an_event_whose_part_is_not_known_supports_any_and_accuses_less() -> None:
    two = score(event(1, place=GPU), event(3, place=GPU))
    assert two < score(event(1, place=GPU), event(3, place=GPU), event(2, kind="dead_rank")) < two + 1.0


def test_suspicions_are_the_worst_first_without_those_of_whom_nothing_counts() -> None:
    nodes = by_node([event(1, "n1"), event(1.5, "n2"), event(5, "n2"), event(2, "n3", withdrawn_why="not its fault")])
    assert [each.node for each in suspicions(nodes, NOW)] == ["n2", "n1"]


def test_the_newest_events_are_its_reasons() -> None:
    events = by_node([event(3, place=GPU, incident_id="i1"), event(10, kind="dead_rank", incident_id="i2")])["n1"]
    found = suspicion_of("n1", events, NOW)
    assert "3.0 d ago (incident i1); " in found.reasons and found.reasons.endswith("10.0 d ago (incident i2)")


def test_of_a_synthetic_year_of_1000_nodes_the_three_lemons_are_suspect_at_their_third_event() -> None:
    score = years(60, first=100)
    assert score.lemons >= 175
    assert score.recall >= 0.95 and score.precision >= 0.95, score
    calm = years(10, world=World(rate_per_day=2.34 / 1000))
    assert calm.recall >= 0.95 and calm.precision >= 0.98, calm
