"""Whether the controller tests a node now, beside which other nodes, and what a test that passed is worth. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from slurm_watchdog.ledger.counted import strength_of
from slurm_watchdog.model.node_events import GPU_PLACE, LINK_PLACE, MOUNT_PLACE, NodeEvent, NodeEventKind
from slurm_watchdog.model.node_test import Ending, NodeResult, NodeTest
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import ABSENT, USED, is_lost, node_words, starts_jobs

LEAST_PEERS: Final = 4
"""As knowledge/node_figures.py: with fewer no figure is compared with peers."""
PATIENCE_S: Final = 6 * 3600.0
"""So long a test waits for idle peers; then it is made without: figures that a site accepts, earlier tests of the node
itself, and what does not work at all need none."""
ABORTED_PAUSE_S: Final = 600.0
"""After a test whose controller died, before the next one of the node: a controller that dies in every test shall not
start one a minute."""
MOST_ABORTED: Final = 3
"""Within `policy.quarantine_test_again`: as many tries as policy.attempts gives a job."""


def is_free(node: SlurmNode | None) -> bool:
    """Whether no job runs on the node, and Slurm reaches it: only then it is tested."""
    return node is not None and not node_words(node.state) & USED and not is_lost(node.state)


TAKEN: Final = ABSENT | {"RESERVED", "RESV", "PLANNED", "PLND"}
"""Words of nodes that are idle and not to be had: switched off, another's reservation, or kept for a job that is to
start."""


def is_idle(node: SlurmNode) -> bool:
    """Whether Slurm would start any job there at once, and none runs there."""
    words = node_words(node.state)
    return starts_jobs(node.state) and "IDLE" in words and not words & TAKEN


def peers_for(nodes: Sequence[SlurmNode], known: Sequence[SlurmNode], most: int, but: Collection[str]) -> list[str]:
    """Idle nodes of the same partitions to compare with, `most` so many, in Slurm's order; none of those in `but`."""
    names = {each.name for each in nodes} | set(but)
    partitions = {name for each in nodes for name in each.partitions}
    fit = (each for each in known if each.name not in names and is_idle(each) and partitions & set(each.partitions))
    return [each.name for each in fit][:most]


def enough_peers(found: int, most: int, waited_s: float) -> bool:
    """Whether a test beside so many peers is worth its while now."""
    return found >= min(most, LEAST_PEERS) or waited_s >= PATIENCE_S


def objection_to_testing(node: str, tests: Iterable[NodeTest], now: float, again_s: float) -> str | None:
    """Why a node is not tested (again) now, after these earlier tests; None if it may be.

    `again_s`: after a test that has named it, or could not judge it.
    """
    aborted = 0
    for each in sorted((each for each in tests if node in each.nodes), key=lambda each: each.at, reverse=True):
        if each.ended_at is None:
            return f"{node} is being tested"
        age_s = now - each.ended_at
        if age_s >= again_s:
            break
        if each.ending is not Ending.ABORTED:
            return f"{node} was tested {age_s:.0f} s ago"
        aborted += 1
        if age_s < ABORTED_PAUSE_S:
            return f"a test of {node} was aborted {age_s:.0f} s ago"
    return f"{aborted} tests of {node} were aborted" if aborted >= MOST_ABORTED else None


def not_covered(result: NodeResult, events: Iterable[NodeEvent]) -> tuple[str, ...]:
    """Parts of the node that are suspect, and that the test did not measure: that it passed says nothing of them."""
    standing = {each.place for each in events if strength_of(each.kind) > 0 and not each.withdrawn_why}
    return tuple(sorted(place for place in standing if not _covers(place, result.measured)))


def _covers(place: str, measured: Collection[str]) -> bool:
    if place.startswith((GPU_PLACE, "gpu")):
        return "gpu" in measured or "site_check" in measured
    if place.startswith((MOUNT_PLACE, "disk:")):
        return place in measured
    if place.startswith(LINK_PLACE) or place in ("link", "pair"):
        return "network" in measured
    return place in measured or place not in PARTS


PARTS: Final = frozenset({"cpu", "memory", "site_check"})
"""Parts that a test measures under their own name; a place that is none of these, or is empty, is the whole node."""


def events_of_results(
    test: NodeTest, results: Iterable[NodeResult], at: float, suspicious: Mapping[str, Sequence[NodeEvent]]
) -> list[NodeEvent]:
    """What the nodes' histories get: a failed test for each part that is bad, of every node; a passed one of a node
    that was to be judged, if the test covers what it is suspect for (`suspicious`: its events); else only a line."""
    found: list[NodeEvent] = []
    for each in results:
        by_place: dict[str, list[str]] = {}
        for place, what in each.faults:
            by_place.setdefault(place, []).append(what)
        found += [
            _event(test, each.node, NodeEventKind.TEST_FAILED, at, "; ".join(what), place)
            for place, what in by_place.items()
        ]
        if each.node not in test.nodes or by_place:
            continue
        left = not_covered(each, suspicious.get(each.node, ()))
        figures = f": {each.figures}" if each.figures else ""
        if each.unsure:
            found.append(_event(test, each.node, NodeEventKind.TESTED, at, f"not judged: {each.unsure}"))
        elif left:
            what = f"well, beside {each.peers} peers{figures}; not measured: {', '.join(left)}"
            found.append(_event(test, each.node, NodeEventKind.TESTED, at, what))
        else:
            what = f"well, beside {each.peers} peers{figures}"
            found.append(_event(test, each.node, NodeEventKind.TEST_PASSED, at, what))
    return found


def _event(test: NodeTest, node: str, kind: NodeEventKind, at: float, what: str, place: str = "") -> NodeEvent:
    key = f"{kind}:slurm-watchdog:{test.name}:{node}:{place}"
    return NodeEvent(key=key, node=node, kind=kind, at=at, what=f"test by slurm-watchdog: {what}", place=place)
