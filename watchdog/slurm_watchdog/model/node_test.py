"""Tests of nodes that the controller starts by itself: what is remembered of each, and what came of it."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Truth


class Purpose(StrEnum):
    """Why the controller tests nodes."""

    QUARANTINE = "quarantine"
    """A node that we took out of service: whether it may be given back."""
    SLOW_SEARCH = "slow_search"
    """Nodes of which one makes a job slow, while the job runs without them."""


class Ending(StrEnum):
    """How a test ended."""

    DONE = "done"
    """Its results are events of the nodes, and in the search that asked for it."""
    NOT_DONE = "not_done"
    """It ended without results: Slurm refused it, or it did not end in time."""
    ABORTED = "aborted"
    """The controller that had started it died, or was stopped."""


class NodeTest(Struct, frozen=True, kw_only=True):
    """One test, from the intent to its end. Times are dates."""

    name: str
    """Of its reservation, and in the comment of its jobs: no other test has it."""
    purpose: Purpose
    about: str
    """The id of the quarantine, or the job of the search."""
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


class NodeResult(Struct, frozen=True, kw_only=True):
    """What a test says of one node."""

    node: str
    truth: Truth
    faults: tuple[tuple[str, str], ...] = ()
    """BAD: (part of the node, what is wrong with it, with the figures)."""
    unsure: str = ""
    """UNKNOWN: why it was not judged."""
    peers: int = 0
    """With which its figures were compared."""
    figures: str = ""
    """The most telling ones, in words."""
    measured: tuple[str, ...] = ()
    """Which parts have figures: `cpu`, `memory`, `disk:/tmp`, `mount:/scratch`, `network`, `gpu`, `site_check`."""
