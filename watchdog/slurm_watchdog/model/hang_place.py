"""Where a job hung: kept, so that the next hang in the same place is known for one."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct


class HangPlace(Struct):
    """The place of one hang."""

    incident_id: str
    at: float  # When the incident fired, a date.
    job_id: str
    chain: str  # Whose job, and its name, as in NodeEvent.
    fingerprint: str
    """Of the frames of who keeps the others waiting, or of all where no one does: without lines, and without what
    differs between machines and runs."""
    where: str  # The innermost of these frames, for people.
    node: str = ""  # Of who keeps the others waiting; empty: all wait in one collective.
    rank: int | None = None
    step: int | None = None  # The last step that was made; None: not known.
