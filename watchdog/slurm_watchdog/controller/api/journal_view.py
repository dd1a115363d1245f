"""What a journal holds of incidents, as the commands read it: of a controller that runs, and of one that has ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec import structs

from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import duration
from slurm_watchdog.controller.api.status_view import HEAD, Sees, first_job, is_own
from slurm_watchdog.controller.policy.access import public_sentence
from slurm_watchdog.journal.evidence import Piece
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model import documents
from slurm_watchdog.model.actions import ActionRun, Decision
from slurm_watchdog.model.documents import DecisionSummary, Evidence, Explanation, Moment
from slurm_watchdog.model.headline import headline, response
from slurm_watchdog.model.incidents import Culprit, Incident

DETAILS_FOR = "the owner of its jobs, root and those named in security.operators"
TIMES = ("fired_at", "resolved_at", "detected_after_s")
LARGE_KINDS = frozenset({"node", "job"})  # Evidence that is fetched piece by piece.
Waiting = Callable[[str], tuple[str, float | None] | None]  # For an action: what it waits for and until when.
Follows = Callable[[Incident, Sequence[ActionRun]], bool]
"""Whether a person who may not see the evidence of an incident may see how far its actions are."""


class RequestRefused(Exception):
    """A request that cannot be served: status and a sentence, and a word for programs where there is more to
    do than to read it."""

    def __init__(self, status: int, sentence: str, code: str = ""):
        self.status, self.code = status, code
        super().__init__(sentence)


def find(journal: Journal, given: str, now_open: Collection[Incident] = (), owner: int | None = None) -> Incident:
    """The incident with this id, or the only one whose id begins so; with an `owner` of those about jobs of that user
    alone: the others are as if they were not there. Raises RequestRefused and JournalError."""
    exact = journal.incident(given)
    if exact is not None and _is_meant(exact, owner):
        return exact
    there = (*now_open, *journal.incidents(owner=owner, beginning=given))
    known = {each.id: each for each in there if each.id.startswith(given) and _is_meant(each, owner)}
    if len(known) > 1:
        raise RequestRefused(400, f"{len(known)} incidents begin with {given[:40]!r}; give more of the id")
    if not known:
        raise RequestRefused(404, f"there is no incident {given[:40]!r}; `slurm-watchdog incidents` lists them")
    return next(iter(known.values()))


def _is_meant(incident: Incident, owner: int | None) -> bool:
    return owner is None or is_own(incident, owner)


def listed(
    journal: Journal, job_id: str | None, sees: Sees, now_open: Collection[Incident] = (), owner: int | None = None
) -> list[documents.Incident]:
    """Every incident, or those of one job, or about jobs of one `owner` alone; of `now_open` as they are there."""
    stored = journal.incidents(job_id=job_id, owner=owner)
    known = {incident.id for incident in stored}
    current = {each.id: each for each in now_open}
    pending = [i for i in now_open if i.id not in known and (job_id is None or job_id in i.job_ids)]
    found = [current.get(i.id, i) for i in (*pending, *stored)]
    return [
        shown(each, sees, journal.decisions(each.id), journal.actions(each.id))
        for each in found
        if _is_meant(each, owner)
    ]


def done(incident: Incident, decisions: Sequence[Decision], actions: Sequence[ActionRun]) -> str:
    """What is done about an incident, in a few words."""
    last = decisions[-1] if decisions else None
    return response(incident, last, next((run.end for run in actions if run.decision == last), None))


def shown(
    incident: Incident, sees: Sees, decisions: Sequence[Decision], actions: Sequence[ActionRun]
) -> documents.Incident:
    """One incident, with the decisions about it. For a person who may not see its evidence: what, when, where and what
    was done. Fields are named one by one there, so that no new one is shown to all."""
    about = done(incident, decisions, actions)
    if not sees(incident):
        summary = public_sentence(incident)
        return picked(
            documents.Incident, incident, *HEAD, *TIMES, job_id=first_job(incident), summary=summary,
            headline=headline(structs.replace(incident, summary=summary), about),
            culprits=tuple(picked(Culprit, each, "node", "rank", "gpu_uuid") for each in incident.culprits),
            decisions=tuple(
                picked(DecisionSummary, each, "action", "verdict", "by", "exclude", "ladder") for each in decisions
            ),
            details_for=DETAILS_FOR,
        )  # fmt: skip
    outcomes = {run.decision.id: run.end.detail for run in actions if run.end is not None}
    return picked(
        documents.Incident, incident, *HEAD, *TIMES, "summary", "resolution", "culprits", job_id=first_job(incident),
        headline=headline(incident, about),
        evidence=incident.facts,
        owner_uids=tuple(uid for uid in incident.owners if uid >= 0),
        decisions=tuple(picked(DecisionSummary, each, outcome=outcomes.get(each.id)) for each in decisions),
    )  # fmt: skip


def action_of(run: ActionRun, waiting: tuple[str, float | None] | None = None) -> documents.ActionRun:
    """One action with every operation that was climbed, and what it waits for and until when (wall clock), where it
    waits."""
    return picked(
        documents.ActionRun, run.decision, decision_id=run.decision.id, end=run.end,
        operations=tuple(picked(documents.Operation, each) for each in run.records),
        waiting=waits(waiting),
    )  # fmt: skip


def waits(given: tuple[str, float | None] | None) -> documents.Waiting | None:
    """What an action waits for, and until when."""
    return None if given is None else documents.Waiting(what=given[0], until=given[1])


def explained(
    journal: Journal, incident: Incident, current: Incident, sees: Sees, waiting: Waiting,
    follows: Follows = lambda incident, runs: False,
) -> Explanation:  # fmt: skip
    """All that is known of an incident; `current` is how it is now."""
    runs = journal.actions(incident.id)
    head = shown(current, sees, journal.decisions(incident.id), runs)
    actions = tuple(action_of(run, waiting(run.decision.id)) for run in runs)
    if not sees(incident):
        return Explanation(incident=head, actions=actions if follows(incident, runs) else ())
    return Explanation(
        incident=head,
        timeline=tuple(Moment(at=at, text=text) for at, text in journal.timeline(incident.id)),
        evidence=tuple(_evidence(journal, incident, piece) for piece in _pieces(journal, incident, sees)),
        actions=actions,
    )


def _pieces(journal: Journal, incident: Incident, sees: Sees) -> list[Piece]:
    """The evidence of an incident; of what is stored with another one, that which the same person may see there."""
    pieces = journal.evidence.pieces(incident.id)
    others = {each.stored_with for each in pieces} - {incident.id}
    hidden = {each for each in others if (found := journal.incident(each)) is None or not sees(found)}
    return [each for each in pieces if each.stored_with not in hidden]


def _evidence(journal: Journal, incident: Incident, piece: Piece) -> Evidence:
    """One piece; what a whole node said is fetched by its number, for there may be hundreds of megabytes of it."""
    document: Any = None
    if piece.kind not in LARGE_KINDS:
        document = json.loads(journal.evidence.document(piece.stored_with, piece.number) or b"null")
    taken_at = document.get("taken_at", piece.at) if isinstance(document, dict) else piece.at
    after_s = taken_at - incident.opened_at
    side = "after" if after_s >= 0 else "before"
    return Evidence(
        at=piece.at, kind=piece.kind, number=piece.number, incident=piece.stored_with, document=document,
        taken=f"taken {duration(abs(after_s))} {side} the incident began",
    )  # fmt: skip
