"""The past of a node in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from slurm_watchdog.base.text import duration
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.ledger.counted import DAY_S, OWN_KINDS, WINDOW_S, Counted
from slurm_watchdog.ledger.suspicion import SAY_FROM
from slurm_watchdog.model.node_events import MOUNT_PLACE, NodeEventKind

MAX_SAID: Final = 4
"""Earlier events in one sentence."""
KIND_WORDS: Final = {
    NodeEventKind.TEST_FAILED: "a test of it failed",
    NodeEventKind.TEST_PASSED: "a test of it passed",
    NodeEventKind.TESTED: "a test of it was not enough to judge it",
    NodeEventKind.USER_TEST_FAILED: "a user's own test of it failed",
    NodeEventKind.USER_TEST_PASSED: "a user's own test of it passed",
    NodeEventKind.DRAINED: "it was drained",
    NodeEventKind.LINK_DOWN: "a network link of it was down",
    NodeEventKind.RESTART_HELPED: "a job ran well again without it",
    NodeEventKind.SLOWED_JOB: "a job is slow with it and fast without it",
    NodeEventKind.SLOWED_ONCE: "a job was slow with it and is fast without it, which is not confirmed",
    NodeEventKind.QUARANTINED: "its quarantine began or ended",
    NodeEventKind.BY_OPERATOR: "an operator had it drained or given back",
    NodeEventKind.GPU_MOVED: "a GPU with a history came or went",
    NodeEventKind.MENDED: "it was mended",
}
"""What anybody may read of an event: no word of it comes from a user."""


def kind_words(kind: str) -> str:
    """An event of this kind, for everybody."""
    return KIND_WORDS[NodeEventKind(kind)] if kind in OWN_KINDS else spec_of(kind).sentence


def ago(age_s: float) -> str:
    """`3 days ago`, `5 h 10 min ago`."""
    return f"{age_s / DAY_S:.0f} days ago" if age_s >= 2 * DAY_S else f"{duration(age_s)} ago"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def repeated(node: str, events: Iterable[Counted], now: float, but: str | None, place: str = "") -> str | None:
    """The sentence for an incident that is held against `node`, if it is the third event or a later one within
    WINDOW_S; None: it is not. `but`: the incident itself, which may be among `events` already. `place`: its part."""
    earlier = [
        each
        for each in events
        if not each.why_not and 0 <= now - each.event.at <= WINDOW_S and (each.event.incident_id != but or not but)
    ]
    if len(earlier) + 1 < SAY_FROM:
        return None
    earlier.sort(key=lambda each: -each.event.at)
    said = [_short(each, node, now) for each in earlier[:MAX_SAID]]
    more = f"; and {len(earlier) - MAX_SAID} more" if len(earlier) > MAX_SAID else ""
    same = sum(bool(place) and each.event.place == place for each in earlier)
    of_part = f" ({same + 1} of them of {place})" if same else ""
    return (
        f"{node}: this is the {ordinal(len(earlier) + 1)} event within {WINDOW_S / DAY_S:.0f} days{of_part}; before: "
        f"{'; '.join(said)}{more}. All: slurm-watchdog nodes {node}"
    )


def _short(each: Counted, node: str, now: float) -> str:
    event = each.event
    incident = f" (incident {event.incident_id})" if event.incident_id else ""
    where = f", in {event.node}" if event.node != node else ""
    return f"{kind_words(event.kind)} {ago(now - event.at)}{where}{incident}"


def event_words(each: Counted, now: float) -> str:
    """An event in a sentence, for everybody."""
    event = each.event
    incident = f" (incident {event.incident_id})" if event.incident_id else ""
    part = f" of {event.place}" if event.place and not event.place.startswith(MOUNT_PLACE) else ""
    return f"{ago(now - event.at)}: {kind_words(event.kind)}{part}{incident}"


def reasons(events: Sequence[Counted], now: float) -> str:
    """Why a node is suspicious, in a line: its newest events, for everybody."""
    said = [f"{kind_words(each.event.kind)} {ago(now - each.event.at)}" for each in events[:MAX_SAID]]
    return "; ".join(said) + (f"; and {len(events) - MAX_SAID} more" if len(events) > MAX_SAID else "")
