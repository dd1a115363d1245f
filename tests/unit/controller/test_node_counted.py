"""Which events are held against a node, and which are nobody's."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from slurm_watchdog.controller.node_history.suspicion import HALF_LIFE_S, SUSPECT_FROM, Counted, by_node, suspicion_of
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from tests.builders.node_past import GPU, NOW, event


def counted(events: Iterable[NodeEvent], *known: dict[str, str]) -> list[Counted]:
    return [each for of_node in by_node(events, *known).values() for each in of_node]


def weight(kind: str, days_ago: float) -> float:
    (only,) = counted([event(days_ago, kind=kind)])
    return only.weight(NOW)


def why(*events: NodeEvent, **known: dict[str, str]) -> dict[str, str]:
    """Key -> why it does not count."""
    found = counted(events, known.get("gpu_nodes", {}), known.get("renamed", {}))
    return {each.event.key: each.why_not for each in found}


def test_weight_of_a_proven_fault_is_half_after_a_half_life_and_nothing_of_what_says_nothing() -> None:
    assert weight("gpu_fault", 0.0) == 1.0
    assert weight("gpu_fault", HALF_LIFE_S / 86400) == 0.5
    assert weight("gpu_fault", -0.001) == 1.0, "a clock that was set back"
    assert (
        weight("log_error", 0.0) == weight(NodeEventKind.TEST_PASSED, 0.0) == weight("of another release", 0.0) == 0.0
    )


def test_an_event_that_was_withdrawn_says_why_it_does_not_count() -> None:
    assert list(why(event(withdrawn_at=NOW, withdrawn_why="incident x explains it")).values()) == [
        "incident x explains it"
    ]


def test_what_three_nodes_have_at_once_is_held_against_none_of_them() -> None:
    alike = [event(1 + n / 1000, f"n{n}", "node_down") for n in range(3)]
    assert all("what they share" in each for each in why(*alike).values())
    assert not any(why(*alike[:2]).values()), "two may be bad"
    assert not any(why(*alike[:2], event(1.5, "n2", "node_down")).values()), "half a day later is not at once"


def test_what_one_job_has_on_node_after_node_is_held_against_the_job() -> None:
    chain = {"chain": "1000/train"}
    hangs = [event(n, f"n{n}", "collective_hang", **chain) for n in range(1, 4)]
    assert all("takes it along" in each for each in why(*hangs).values())
    faults = [event(n, f"n{n}", "gpu_fault", **chain) for n in range(1, 4)]
    assert not any(why(*faults).values()), "broken hardware is broken whoever runs there"
    again = [*hangs, event(4.5, "n1", "collective_hang", **chain), event(6, "n1", "collective_hang", **chain)]
    kept = {key for key, reason in why(*again).items() if not reason}
    assert {key.split(":")[1] for key in kept} == {"n1"}, "most of them were on n1"


def test_what_one_fault_sets_off_on_its_node_counts_once_as_the_strongest() -> None:
    dead, fault = event(1.0, kind="dead_rank"), event(0.99, place=GPU)
    drained = event(0.985, kind="drained")
    found = why(dead, fault, drained)
    assert found[fault.key] == ""
    assert found[dead.key].startswith("part of the same fault") and found[drained.key].startswith("part of the same")


def test_a_restart_that_helped_makes_one_event_of_its_incident_stronger() -> None:
    hang = event(2.0, kind="collective_hang", incident_id="i1")
    helped = event(1.0, kind="restart_helped", incident_id="i1")
    (stands,) = [each for each in counted([hang, helped]) if not each.why_not]
    assert stands.strength == 1.0


def test_a_job_that_hangs_again_and_again_within_a_day_counts_once() -> None:
    hangs = [event(1 - n / 10, kind="collective_hang", chain="1000/train", incident_id=f"i{n}") for n in range(4)]
    assert sum(not reason for reason in why(*hangs).values()) == 1
    others = [event(1 - n / 10, kind="collective_hang", chain=f"1000/{n}", incident_id=f"i{n}") for n in range(4)]
    assert sum(not reason for reason in why(*others).values()) == 4, "four jobs are four witnesses"


@pytest.mark.parametrize(("place", "counts"), [("", False), (GPU, False), ("GPU-other", True)])
def test_what_was_before_a_repair_of_the_node_or_of_that_part_does_not_count(place: str, counts: bool) -> None:
    fault = event(3.0, place=GPU)
    found = why(fault, event(2.0, kind="mended", place=place), event(1.0, place=GPU))
    assert (found[fault.key] == "") == counts
    assert list(found.values())[-1] == "", "a fault after it does"


def test_a_gpu_takes_its_events_along_and_a_renamed_node_keeps_its_own() -> None:
    found = counted([event(1.0, "old", place=GPU), event(2.0, "old")], {GPU: "n9"}, {"old": "new"})
    assert [(each.event.kind, each.node) for each in found] == [("gpu_fault", "new"), ("gpu_fault", "n9")]


def test_a_test_that_fails_soon_after_the_search_named_the_node_makes_it_suspect_and_neither_does_alone() -> None:
    slowed, failed = event(0.02, kind="slowed_job"), event(0.01, kind="test_failed", place="link:eth0")
    assert list(why(slowed, failed).values()) == ["", ""]
    both, one = (suspicion_of("n1", counted(each), NOW).score for each in ((slowed, failed), (slowed,)))
    assert one < SUSPECT_FROM <= both
