"""What a journal holds of incidents, as the commands read it: of a controller that runs, and of one that has ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from slurm_watchdog.controller.api.json_views import (
    Sees,
    action_json,
    incident_json,
    is_own,
    public_incident_json,
    taken,
)
from slurm_watchdog.journal.evidence import Piece
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import ActionRun
from slurm_watchdog.model.incidents import Incident

LARGE_KINDS: Final = frozenset({"node", "job"})
"""Evidence that is fetched piece by piece."""
Waiting = Callable[[str], tuple[str, float | None] | None]
"""For an action: what it waits for and until when."""
Follows = Callable[[Incident, Sequence[ActionRun]], bool]
"""Whether somebody who may not see the evidence of an incident may see how far its actions are."""


class NotFound(Exception):
    """No incident, or no single one, has this id: a sentence, and the status of the answer."""

    def __init__(self, status: int, sentence: str):
        self.status = status
        super().__init__(sentence)


def find(journal: Journal, given: str, now_open: Collection[Incident] = (), owner: int | None = None) -> Incident:
    """The incident with this id, or the only one whose id begins so; with an `owner` of those about jobs of that user
    alone: the others are as if they were not there. Raises NotFound and JournalError."""
    exact = journal.incident(given)
    if exact is not None and _is_meant(exact, owner):
        return exact
    there = (*now_open, *journal.incidents(owner=owner, beginning=given))
    known = {each.id: each for each in there if each.id.startswith(given) and _is_meant(each, owner)}
    if len(known) > 1:
        raise NotFound(400, f"{len(known)} incidents begin with {given[:40]!r}; give more of the id")
    if not known:
        raise NotFound(404, f"there is no incident {given[:40]!r}; `slurm-watchdog incidents` lists them")
    return next(iter(known.values()))


def _is_meant(incident: Incident, owner: int | None) -> bool:
    return owner is None or is_own(incident, owner)


def listed(
    journal: Journal, job_id: str | None, sees: Sees, now_open: Collection[Incident] = (), owner: int | None = None
) -> list[dict[str, Any]]:
    """Every incident, or those of one job, or about jobs of one `owner` alone; of `now_open` as they are there."""
    stored = journal.incidents(job_id=job_id, owner=owner)
    known = {incident.id for incident in stored}
    current = {each.id: each for each in now_open}
    pending = [i for i in now_open if i.id not in known and (job_id is None or job_id in i.job_ids)]
    found = [current.get(i.id, i) for i in (*pending, *stored)]
    return [shown(journal, each, sees) for each in found if _is_meant(each, owner)]


def shown(journal: Journal, incident: Incident, sees: Sees) -> dict[str, Any]:
    """One incident, with the decisions about it."""
    decisions = journal.decisions(incident.id)
    if not sees(incident):
        return public_incident_json(incident, decisions)
    return incident_json(incident, decisions, journal.actions(incident.id))


def explained(
    journal: Journal, incident: Incident, current: Incident, sees: Sees, waiting: Waiting,
    follows: Follows = lambda incident, runs: False,
) -> dict[str, Any]:  # fmt: skip
    """All that is known of an incident; `current` is how it is now."""
    head, runs = shown(journal, current, sees), journal.actions(incident.id)
    actions = [action_json(run, waiting(run.decision.id)) for run in runs]
    if not sees(incident):
        seen = actions if follows(incident, runs) else []
        return {"incident": head, "timeline": [], "evidence": [], "actions": seen}
    return {
        "incident": head,
        "timeline": [{"at": at, "text": text} for at, text in journal.timeline(incident.id)],
        "evidence": [_evidence(journal, incident, piece) for piece in _pieces(journal, incident, sees)],
        "actions": actions,
    }


def _pieces(journal: Journal, incident: Incident, sees: Sees) -> list[Piece]:
    """The evidence of an incident; of what is stored with another one, that which the same person may see there."""
    pieces = journal.evidence.pieces(incident.id)
    others = {each.stored_with for each in pieces} - {incident.id}
    hidden = {each for each in others if (found := journal.incident(each)) is None or not sees(found)}
    return [each for each in pieces if each.stored_with not in hidden]


def _evidence(journal: Journal, incident: Incident, piece: Piece) -> Mapping[str, Any]:
    """One piece; what a whole node said is fetched by its number, for there may be hundreds of megabytes of it."""
    found: dict[str, Any] = {
        "at": piece.at, "kind": piece.kind, "number": piece.number, "incident": piece.stored_with,
    }  # fmt: skip
    taken_at = piece.at
    if piece.kind not in LARGE_KINDS:
        document = json.loads(journal.evidence.document(piece.stored_with, piece.number) or b"null")
        found["document"] = document
        taken_at = document.get("taken_at", taken_at) if isinstance(document, dict) else taken_at
    return found | {"taken": taken(incident, taken_at)}
