"""What is remembered of nodes, GPUs, links and mounts: one event each, with its date and its reason; and what the
controller answers about nodes."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.documents import Answer

GPU_PLACE, MOUNT_PLACE, LINK_PLACE = "GPU-", "mount:", "link:"  # Beginnings of places (nvmlDeviceGetUUID).
OUR_DRAIN = "slurm-watchdog:"  # Begins the reason of every drain of ours.
TESTED_MARK = "slurm-watchdog-test-"  # Begins names of reservations for tests, while a drain is lifted.


class NodeEventKind(StrEnum):
    """Kinds of events that no detector declares; all others have the kind of their incident. How strongly each speaks
    against a node, from 0, nothing, to 1, the node itself is proven broken; and what anybody may read of it: no word
    comes from a user. A job that was slow in each run with the node and fast in each without it is proof by several
    runs, and nearly makes a suspect by itself: but a job's log is its owner's word, and so it takes one thing more."""

    strength: float
    words: str

    def __new__(cls, value: str, strength: float = 0.0, words: str = "") -> NodeEventKind:
        kind = str.__new__(cls, value)
        kind._value_, kind.strength, kind.words = value, strength, words
        return kind

    TEST_FAILED = "test_failed", 1.0, "a test of it failed"
    TEST_PASSED = "test_passed", 0.0, "a test of it passed"
    TESTED = "tested", 0.0, "a test of it was not enough to judge it"
    USER_TEST_FAILED = "user_test_failed", 0.0, "a user's own test of it failed"
    USER_TEST_PASSED = "user_test_passed", 0.0, "a user's own test of it passed"
    DRAINED = "drained", 0.9, "it was drained"
    LINK_DOWN = "link_down", 0.9, "a network link of it was down"
    RESTART_HELPED = "restart_helped", 1.0, "a job ran well again without it"
    SLOWED_JOB = "slowed_job", 2.2, "a job is slow with it and fast without it"
    SLOWED_ONCE = "slowed_once", 0.9, "a job was slow with it and is fast without it, which is not confirmed"
    QUARANTINED = "quarantined", 0.0, "its quarantine began or ended"
    BY_OPERATOR = "by_operator", 0.0, "an operator drained it or returned it to service"
    GPU_MOVED = "gpu_moved", 0.0, "a GPU with a history came or went"  # These two are of earlier releases.
    MENDED = "mended", 0.0, "it was repaired"


class NodeEvent(Struct):
    """One thing that happened to a node or a part of it."""

    key: str  # Names the event: however often it is reported, it is one.
    node: str
    kind: str  # Of an incident, or a `NodeEventKind`.
    at: float  # When it happened, a date.
    what: str  # A sentence; it may hold words of a user's program.
    place: str = ""
    """The part of the node: a GPU's UUID, `mount:/scratch`, `link:mlx5_0`, a word of a test; empty: not known."""
    job_id: str = ""
    chain: str = ""  # Whose job, and its name (`1000/train`): the same for each link of a chain; empty: no job's.
    incident_id: str = ""
    withdrawn_at: float | None = None
    withdrawn_why: str = ""  # Why it is held against no one after all, a sentence; empty: it stands.


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
