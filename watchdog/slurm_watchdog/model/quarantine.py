"""Nodes that were taken out of service because they are suspect, until somebody has tested or mended them."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct


class QuarantineState(StrEnum):
    INTENDED = "intended"
    """Written down; Slurm may have been asked or not."""
    DRAINED = "drained"
    """Slurm has our drain, or our reservation."""
    RETURNED = "returned"
    """Given back: it was tested or mended."""
    LEFT = "left"
    """Somebody else has the node in hand, or it came to no drain."""


RESERVED_MARK = "slurm-watchdog-suspect-"
"""Begins the name of every reservation that keeps a suspect node."""
TESTED_MARK = "slurm-watchdog-test-"
"""Begins the name of every reservation in which `test-nodes --drained-by-us` tests nodes whose drain it has lifted."""


class Quarantine(Struct, frozen=True, kw_only=True):
    """One node, from the intent to take it out of service to its end. Times are dates."""

    id: int
    node: str
    incident_id: str
    """Which called it suspect."""
    reason: str
    """Of the drain, as Slurm gets it."""
    at: float
    state: QuarantineState
    reservation: str | None = None
    """Its name, of a node that is reserved and not drained."""
    reason_at: float | None = None
    """The time that Slurm gave to our drain."""
    ended_at: float | None = None
    ended_why: str = ""
