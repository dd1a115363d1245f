"""Whether the controller tests a node now, beside which other nodes, and what a test that passed is worth. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from slurm_watchdog.ledger.counted import strength_of
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import GPU_PLACE, LINK_PLACE, MOUNT_PLACE, NodeEvent, NodeEventKind
from slurm_watchdog.model.node_test import Ending, NodeTest, NodeVerdict
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import ABSENT, USED, is_lost, node_words, starts_jobs

MOST_PEERS, LEAST_PEERS = 5, 4
"""Idle nodes that are tested with one in quarantine; with fewer than LEAST_PEERS no figure is compared with them."""
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


def peers_for(node: SlurmNode, known: Sequence[SlurmNode], but: Collection[str]) -> list[str]:
    """Idle nodes of the same partitions to compare with, in Slurm's order; none of those in `but`."""
    others = [each for each in known if each.name not in (node.name, *but) and is_idle(each)]
    return [each.name for each in others if set(node.partitions) & set(each.partitions)][:MOST_PEERS]


def enough_peers(found: int, waited_s: float, *, floors: bool) -> bool:
    """Whether a test beside so many peers is worth its while now; `floors`: the site has said what it accepts."""
    return floors or found >= LEAST_PEERS or waited_s >= PATIENCE_S


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


def not_covered(found: NodeVerdict, events: Iterable[NodeEvent]) -> tuple[str, ...]:
    """Parts of the node that are suspect, and that the test did not measure: that it passed says nothing of them."""
    standing = {each.place for each in events if strength_of(each.kind) > 0 and not each.withdrawn_why}
    return tuple(sorted(place for place in standing if not _covers(place, found.measured)))


def _covers(place: str, measured: Collection[str]) -> bool:
    """A place that no test measures under its name is the node as a whole."""
    if place.startswith((GPU_PLACE, "gpu")):
        return place in measured or "gpu" in measured
    if place.startswith(LINK_PLACE) or place == "link":
        return any(each.startswith("link") for each in measured)
    return place in measured or not place.startswith((MOUNT_PLACE, "disk:", "cpu", "memory"))


def events_of_results(
    test: NodeTest, results: Iterable[NodeVerdict], at: float, suspicious: Mapping[str, Sequence[NodeEvent]], why: str
) -> list[NodeEvent]:
    """What the nodes' histories get: a failed test for each part that is bad, of every node; a passed one of a node
    that was to be judged, if the test covers what it is suspect for (`suspicious`: its events); else only a line.
    `why`: it has no result."""
    found, judged = list[NodeEvent](), {each.node: each for each in results}
    for each in judged.values():
        for place in dict.fromkeys(place for place, _ in each.faults):
            what = "; ".join(said for where, said in each.faults if where == place)
            found.append(_event(test, each.node, NodeEventKind.TEST_FAILED, at, what, place))
    for node in test.nodes:
        said = judged.get(node) or NodeVerdict(node=node, truth=Truth.UNKNOWN, unsure=(why or "it has no result",))
        if said.truth is Truth.UNKNOWN:
            found.append(_event(test, node, NodeEventKind.TESTED, at, f"not judged: {'; '.join(said.unsure)}"))
        elif said.truth is Truth.OK:
            left = ", ".join(not_covered(said, suspicious.get(node, ())))
            what = f"well, beside {said.peers} peers{f': {said.figures}' if said.figures else ''}"
            kind, what = (
                (NodeEventKind.TESTED, f"{what}; not measured: {left}") if left else (NodeEventKind.TEST_PASSED, what)
            )
            found.append(_event(test, node, kind, at, what))
    return found


def _event(test: NodeTest, node: str, kind: NodeEventKind, at: float, what: str, place: str = "") -> NodeEvent:
    key = f"{kind}:slurm-watchdog:{test.name}:{node}:{place}"
    return NodeEvent(key=key, node=node, kind=kind, at=at, what=f"test by slurm-watchdog: {what}", place=place)
