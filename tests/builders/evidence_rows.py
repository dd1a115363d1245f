"""Evidence in a journal, as documents."""

from __future__ import annotations

import json
from typing import Any

from slurm_watchdog.journal.database import encode
from slurm_watchdog.journal.evidence import pack
from slurm_watchdog.journal.journal import Journal


def add_evidence(journal: Journal, incident_id: str, at: float, kind: str, document: dict[str, Any]) -> None:
    journal.evidence.add(incident_id, at, kind, pack(encode(document).encode()))


def evidence_of(journal: Journal, incident_id: str) -> list[tuple[float, str, dict[str, Any]]]:
    """(date, kind, document) of what is stored with the incident, in the order it was added."""
    stored = (each for each in journal.evidence.pieces(incident_id) if each.stored_with == incident_id)
    return [
        (each.at, each.kind, json.loads(journal.evidence.document(incident_id, each.number) or b"null"))
        for each in stored
    ]
