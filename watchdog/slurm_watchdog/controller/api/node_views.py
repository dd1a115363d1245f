"""What is remembered of nodes, as JSON for the commands and the page; and what people may add to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from slurm_watchdog.base.text import one_line
from slurm_watchdog.controller.policy.access import Operators, Person
from slurm_watchdog.controller.ports.commands import NodePast
from slurm_watchdog.ledger.counted import DAY_S, Counted
from slurm_watchdog.ledger.from_incident import MAX_WHAT
from slurm_watchdog.ledger.suspicion import SUSPECT_FROM, Suspicion, suspicion_of
from slurm_watchdog.ledger.words import kind_words, reasons
from slurm_watchdog.model.node_events import MOUNT_PLACE, NodeEvent, NodeEventKind

SHOWN_NODES: Final = 200
"""Of a cluster's suspicious nodes, the worst first."""
SHOWN_EVENTS: Final = 500
MAX_ADDED_A_DAY: Final = 2000
"""Events that people and their tests may add in a day: a test of 1,000 nodes twice."""
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/+-]{0,127}")
ADDED: Final = frozenset({NodeEventKind.TEST_FAILED, NodeEventKind.TEST_PASSED, NodeEventKind.MENDED})
USERS_OWN: Final = {
    NodeEventKind.TEST_FAILED: NodeEventKind.USER_TEST_FAILED,
    NodeEventKind.TEST_PASSED: NodeEventKind.USER_TEST_PASSED,
}
"""What becomes of the result of a test that no operator has run."""


def suspicion_json(found: Suspicion, now: float, *, sees: bool) -> dict[str, Any]:
    """One node in one line; no word of it comes from a user, unless he who asks `sees` them."""
    return {
        "node": found.node,
        "score": round(found.score, 3),
        "suspect": found.score >= SUSPECT_FROM,
        "place": found.place if sees else _public_place(found.place),
        "recent": found.recent,
        "events": len(found.counted),
        "last_at": found.last_at,
        "reasons": reasons(found.counted, now),
    }


def nodes_json(found: Sequence[Suspicion], now: float, *, sees: bool) -> dict[str, Any]:
    """Every node that anything is to be said against, the worst first; paths of mounts only for those who `sees`."""
    return {
        "suspect_from": SUSPECT_FROM,
        "suspects": sum(each.score >= SUSPECT_FROM for each in found),
        "known": len(found),
        "nodes": [suspicion_json(each, now, sees=sees) for each in found[:SHOWN_NODES]],
    }


def node_json(node: str, events: Sequence[Counted], now: float, person: Person, operators: Operators) -> dict[str, Any]:
    """One node with its history, newest first: whole sentences for those who may see them."""
    here = [each for each in events if each.node == node]
    shown = list(reversed(events))[:SHOWN_EVENTS]
    found = suspicion_of(node, here, now)
    return suspicion_json(found, now, sees=operators.include(person)) | {
        "suspect_from": SUSPECT_FROM,
        "history": [_event_json(each, node, now, _sees(each.event, person, operators)) for each in shown],
    }


def _event_json(each: Counted, node: str, now: float, sees: bool) -> dict[str, Any]:
    event = each.event
    return {
        "at": event.at,
        "kind": event.kind,
        "what": event.what if sees else f"{kind_words(event.kind)}.",
        "place": event.place if sees else _public_place(event.place),
        "node": event.node,
        "counts_for": each.node,
        "job_id": event.job_id,
        "incident_id": event.incident_id,
        "weight": round(each.weight(now), 3) if each.node == node else 0.0,
        "why_not": _public(each.why_not) if not sees else each.why_not,
    }


def _public_place(place: str) -> str:
    """A mount is a path, which a user may have named."""
    return MOUNT_PLACE.rstrip(":") if place.startswith(MOUNT_PLACE) else place


def _public(why_not: str) -> str:
    return why_not.partition(":")[0]


def _sees(event: NodeEvent, person: Person, operators: Operators) -> bool:
    return operators.include(person) or (person.uid is not None and event.chain.startswith(f"{person.uid}/"))


class Unfit(ValueError):
    """What somebody wants to add cannot be taken: a sentence."""


def event_of(node: str, body: dict[str, Any], now: float, by: str, *, is_operator: bool) -> NodeEvent:
    """The event that a person or a test adds to a node. A user's own test is kept to be read, and counts for
    nothing: anybody could say so of anything. Raises Unfit."""
    kind = body.get("kind")
    if kind not in ADDED:
        raise Unfit(f"kind has to be one of {', '.join(sorted(ADDED))}")
    if not is_operator and kind == NodeEventKind.MENDED:
        raise Unfit("only operators may say that a node is mended")
    name, place, what = body.get("id", ""), body.get("place", ""), body.get("what", "")
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise Unfit("id has to be a word that names this test, or this repair, and no other")
    if not isinstance(place, str) or (place and not _WORD.fullmatch(place)):
        raise Unfit("place has to be the part of the node that it is about: a GPU's UUID, mount:/path, or a word")
    if not isinstance(what, str) or not what.strip():
        raise Unfit("what has to be a sentence")
    kept = NodeEventKind(kind)
    return NodeEvent(
        key=f"{kind}:{by}:{name}:{node}:{place}",
        node=node,
        kind=kept if is_operator else USERS_OWN[kept],
        at=now,
        what=f"{one_line(what, MAX_WHAT - 60)} (by {by[:40]})",
        place=place,
    )


def has_room(past: NodePast, now: float, *, is_operator: bool) -> bool:
    """Whether one more may be added today; users leave half of it to operators."""
    return _added(past.events(), now) < (MAX_ADDED_A_DAY if is_operator else MAX_ADDED_A_DAY // 2)


def _added(events: Iterable[NodeEvent], now: float) -> int:
    kinds = {*ADDED, *USERS_OWN.values()}
    return sum(each.kind in kinds and now - each.at < DAY_S for each in events)
