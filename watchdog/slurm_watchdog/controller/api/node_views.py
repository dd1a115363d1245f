"""What is remembered of nodes, for the commands and the page; and what people may add to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import one_line
from slurm_watchdog.controller.api.journal_view import RequestRefused
from slurm_watchdog.controller.node_history.ledger import NodeLedger
from slurm_watchdog.controller.node_history.suspicion import (
    DAY_S,
    MAX_WHAT,
    Counted,
    kind_words,
    suspicion_of,
)
from slurm_watchdog.controller.policy.access import Operators, Person
from slurm_watchdog.detect.suspect_node import SUSPECT_FROM
from slurm_watchdog.model.node_documents import NodeEventRequest, NodeHistory, NodeSuspicion, NodeTable, PastEvent
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


def _shown(found: NodeSuspicion, sees: bool) -> NodeSuspicion:
    """No word of it comes from a user, unless he who asks `sees` them."""
    return found if sees else replace(found, place=_public_place(found.place))


def node_table(found: Sequence[NodeSuspicion], *, sees: bool) -> NodeTable:
    """Every node that anything is to be said against, the worst first; paths of mounts only for those who `sees`."""
    return NodeTable(
        suspect_from=SUSPECT_FROM,
        suspects=sum(each.suspect for each in found),
        known=len(found),
        nodes=tuple(_shown(each, sees) for each in found[:SHOWN_NODES]),
    )


def node_history(node: str, events: Sequence[Counted], now: float, person: Person, operators: Operators) -> NodeHistory:
    """One node with its history, newest first: whole sentences for those who may see them."""
    found = suspicion_of(node, [each for each in events if each.node == node], now)
    shown = list(reversed(events))[:SHOWN_EVENTS]
    return picked(
        NodeHistory,
        _shown(found, operators.include(person)),
        *NodeSuspicion.__struct_fields__,
        suspect_from=SUSPECT_FROM,
        history=tuple(_past_event(each, node, now, _sees(each.event, person, operators)) for each in shown),
    )


def _past_event(each: Counted, node: str, now: float, sees: bool) -> PastEvent:
    event = each.event
    return picked(
        PastEvent, event, "at", "kind", "node", "job_id", "incident_id",
        what=event.what if sees else f"{kind_words(event.kind)}.",
        place=event.place if sees else _public_place(event.place),
        counts_for=each.node,
        weight=round(each.weight(now), 3) if each.node == node else 0.0,
        why_not=each.why_not if sees else each.why_not.partition(":")[0],
    )  # fmt: skip


def _public_place(place: str) -> str:
    """A mount is a path, which a user may have named."""
    return MOUNT_PLACE.rstrip(":") if place.startswith(MOUNT_PLACE) else place


def _sees(event: NodeEvent, person: Person, operators: Operators) -> bool:
    return operators.include(person) or (person.uid is not None and event.chain.startswith(f"{person.uid}/"))


def event_of(node: str, given: NodeEventRequest, now: float, by: str, *, is_operator: bool) -> NodeEvent:
    """The event that a person or a test adds to a node. A user's own test is kept to be read, and counts for
    nothing: anybody could say so of anything. Raises RequestRefused."""
    if given.kind not in ADDED:
        raise RequestRefused(400, f"kind has to be one of {', '.join(sorted(ADDED))}")
    if not is_operator and given.kind == NodeEventKind.MENDED:
        raise RequestRefused(400, "only operators may say that a node is mended")
    if not _WORD.fullmatch(given.id):
        raise RequestRefused(400, "id has to be a word that names this test, or this repair, and no other")
    if given.place and not _WORD.fullmatch(given.place):
        raise RequestRefused(
            400, "place has to be the part of the node that it is about: a GPU's UUID, mount:/path, or a word"
        )
    if not given.what.strip():
        raise RequestRefused(400, "what has to be a sentence")
    kind = NodeEventKind(given.kind)
    return NodeEvent(
        key=f"{kind}:{by}:{given.id}:{node}:{given.place}",
        node=node,
        kind=kind if is_operator else USERS_OWN[kind],
        at=now,
        what=f"{one_line(given.what, MAX_WHAT - 60)} (by {by[:40]})",
        place=given.place,
    )


def has_room(past: NodeLedger, now: float, *, is_operator: bool) -> bool:
    """Whether one more may be added today; users leave half of it to operators."""
    kinds = {*ADDED, *USERS_OWN.values()}
    added = sum(each.kind in kinds and now - each.at < DAY_S for each in past.events())
    return added < (MAX_ADDED_A_DAY if is_operator else MAX_ADDED_A_DAY // 2)
