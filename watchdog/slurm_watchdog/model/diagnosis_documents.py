"""What the controller answers of a diagnosis, and how far its evidence is: see documents."""

from __future__ import annotations

import msgspec

from slurm_watchdog.model.documents import Answer


class NodeRow(Answer):
    """How far one node is with its evidence."""

    node: str
    state: str = ""  # asked, answered, failed.
    ranks: int = 0
    undumped: int = 0
    error: str | None = None


class Group(Answer):
    """Ranks that stand in the same frames."""

    frames: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    place: str = ""


class Suspect(Answer):
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    reason: str | None = None
    path: str | None = None
    mount: str | None = None
    gpu_uuid: str | None = None


class Difference(Answer):
    line: str = ""


class FilesystemVerdict(Answer):
    mount: str = ""
    summary: str = ""
    scope: str = ""  # `one_node`, `outage`, …


class Hint(Answer):
    """What a fault of this class usually is, and what to try."""

    usually: str = ""
    try_next: str = ""
    documented: str = ""


class Diagnosis(Answer):
    """What is to be said about one job."""

    job_id: str = ""
    taken_at: float | None = None  # When its ranks were asked.
    summary: str = ""
    is_hang: bool | None = None
    kind: str = msgspec.field(default="unknown", name="class")
    incident_kind: str = msgspec.field(default="", name="kind")  # The kind of incident that it comes to.
    ranks: int = 0
    missing: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    culprits: tuple[Suspect, ...] = ()
    undumped: tuple[Suspect, ...] = ()
    differences: tuple[Difference, ...] = ()
    filesystems: tuple[FilesystemVerdict, ...] = ()
    hints: tuple[Hint, ...] = ()
    nodes: tuple[NodeRow, ...] = ()


class DiagnosisProgress(Answer):
    """A diagnosis under way, or over."""

    id: str
    job_id: str = ""
    state: str = "collecting"
    age_s: float = 0.0
    nodes: tuple[NodeRow, ...] = ()
    diagnosis: Diagnosis | None = None
