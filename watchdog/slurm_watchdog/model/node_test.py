"""Tests of nodes: what one says of a node, and what is remembered of those that the controller starts by itself."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Truth


class Ending(StrEnum):
    """How a test that the controller started ended."""

    DONE = "done"
    """Its results are events of the nodes."""
    NOT_DONE = "not_done"
    """It ended without results: Slurm refused it, or it did not end in time."""
    ABORTED = "aborted"
    """The controller that had started it died, or was stopped."""


class NodeTest(Struct, frozen=True, kw_only=True):
    """A test that the controller started, from the intent to its end. Times are dates."""

    name: str
    """Of its reservation, and in the comment of its jobs: no other test has it."""
    nodes: tuple[str, ...]
    """That are to be judged."""
    peers: tuple[str, ...] = ()
    """Idle nodes, to compare with."""
    at: float
    until: float
    """It has ended by then, whatever became of who started it."""
    ended_at: float | None = None
    ending: Ending | None = None
    why: str = ""


class NodeVerdict(Struct, frozen=True, kw_only=True):
    """What a test says of one node."""

    node: str
    truth: Truth
    faults: tuple[tuple[str, str], ...] = ()
    """BAD: (part of the node, what is wrong with it, with the figures)."""
    unsure: tuple[str, ...] = ()
    """UNKNOWN: why it was not judged, parts of sentences."""
    peers: int = 0
    """With which its figures were compared."""
    figures: str = ""
    """The most telling ones, in words."""
    measured: tuple[str, ...] = ()
    """Parts that have figures: `cpu`, `memory`, `disk:/tmp`, `mount:/scratch`, `link:eth0`, a GPU's UUID."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not well, in words."""
        return tuple(what for _, what in self.faults) or self.unsure
