"""What the controller answers about nodes, and what is reported to it of them."""

from __future__ import annotations

from slurm_watchdog.model.documents import Answer


class NodeEventRequest(Answer):
    """Something that happened to a node, told to the controller."""

    kind: str  # `test_failed`, `test_passed` or `mended`.
    id: str  # Names the test or the repair: the same id for the same node and place twice is one event.
    what: str  # One sentence, with the figures.
    place: str = ""
    """The part of the node: a GPU's UUID, `mount:/scratch`, `link:eth0`, or a word such as `cpu`; empty: the node."""


class NodeSuspicion(Answer):
    """A node with a past, and how suspicious that makes it."""

    node: str
    score: float = 0.0  # The weights of its events, those of its worst part in full; 0: nothing.
    suspect: bool = False
    place: str = ""  # That part; empty: the node as a whole.
    recent: int = 0  # Events within 14 days that count.
    events: int = 0
    last_at: float | None = None
    reasons: str = ""  # The newest of them, in words; none comes from a user.


class NodeTable(Answer):
    suspect_from: float = 0.0
    suspects: int = 0
    known: int = 0
    nodes: tuple[NodeSuspicion, ...] = ()


class PastEvent(Answer):
    at: float
    kind: str = ""
    what: str = ""
    place: str = ""
    node: str = ""  # Where it happened.
    counts_for: str = ""  # The node that it counts for now: a GPU takes its events along.
    job_id: str = ""
    incident_id: str = ""
    weight: float = 0.0
    why_not: str = ""  # Why it does not count; empty: it does.


class NodeHistory(NodeSuspicion):
    """One node with its events, newest first."""

    suspect_from: float = 0.0
    history: tuple[PastEvent, ...] = ()
