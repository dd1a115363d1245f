"""What the page shows beside the overview: what is being done, what a person has to do, a job from its first run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from slurm_watchdog.controller.api.journal_view import Waiting
from slurm_watchdog.controller.api.json_views import Sees, fields_of
from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, ActionRun, Decision, Verdict
from slurm_watchdog.model.incidents import Incident, Severity

SHOWN_TODO: Final = 20
SHOWN_HISTORY: Final = 50
"""Incidents of one job, the newest."""
RUN: Final = ("restarts", "began_at", "ended_at", "state", "first_step", "last_step", "first_rise_at", "last_rise_at")


def doing_json(
    open_actions: Sequence[ActionRun], waiting: Waiting, shows: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Every action under way; with what it waits for where `shows` says so of its incident's id: these words may repeat
    what Slurm or a node answered."""
    found = []
    for run in open_actions:
        decision = run.decision
        waits = waiting(decision.id) if shows(decision.incident_id) else None
        job_id = None if decision.fence is None else decision.fence.job_id
        found.append(
            {"incident": decision.incident_id, "job_id": job_id, "action": decision.action, "at": decision.decided_at,
             "waits_for": None if waits is None else waits[0], "until": None if waits is None else waits[1]}
        )  # fmt: skip
    return found


def todo_json(
    incidents: Collection[Incident], quiet: Collection[str], open_actions: Sequence[ActionRun], journal: Journal,
    sees: Sees,
) -> list[dict[str, Any]]:  # fmt: skip
    """Incidents that wait for a person, the critical ones first: announced, looked after by nobody (`quiet` has the ids
    of the others), and nothing is under way. With why nothing was done, and what usually helps."""
    handled = {run.decision.incident_id for run in open_actions} | set(quiet)
    left = [each for each in incidents if is_announced(each) and each.id not in handled]
    left.sort(key=lambda each: (each.severity is not Severity.CRITICAL, each.opened_at))
    decisions = journal.decisions_about(each.id for each in left[:SHOWN_TODO])
    return [
        {"incident": each.id, "kind": each.kind, "job_ids": list(each.job_ids),
         "why": _why(decisions.get(each.id, []), may_see=sees(each)),
         "try": "" if (hint := spec_of(each.kind).hint) is None else hint.try_next}
        for each in left[:SHOWN_TODO]
    ]  # fmt: skip


def _why(decisions: Sequence[Decision], *, may_see: bool) -> str:
    """Why no action is under way; the reason has words of users."""
    if not decisions:
        return "nothing was decided yet"
    last = decisions[-1]
    reason = f": {last.reason}" if may_see and last.reason else ""
    if last.action is Action.NONE:
        return f"reported only ({last.by}){reason}"
    if last.verdict is Verdict.ALLOWED:
        return f"{last.action} has ended, and it is still wrong"
    word = "would have been done" if last.verdict is Verdict.OBSERVED else "was not done"
    return f"{last.action} {word} ({last.by}){reason}"


def history_json(journal: Journal, job_id: str, sees: Sees) -> dict[str, Any]:
    """A job's runs, those of its incidents that the person may see and that were reported, and what was done. Raises
    JournalError."""
    incidents = [
        each
        for each in journal.incidents(job_id=job_id, limit=SHOWN_HISTORY)
        if each.fired_at is not None and each.inhibited_by is None and sees(each)
    ]
    runs = journal.run_records.of_job(job_id)
    done = [run for each in incidents for run in journal.actions(each.id) if run.decision.action is not Action.NONE]
    return {
        "runs": [fields_of(run, *RUN) for run in sorted(runs, key=lambda run: run.began_at)],
        "incidents": [fields_of(each, "id", "kind", "severity", "opened_at", "resolved_at") for each in incidents],
        "actions": [
            {"action": run.decision.action, "at": run.decision.decided_at,
             "ended_at": None if run.end is None else run.end.ended_at,
             "ok": None if run.end is None else run.end.ok, "said": "" if run.end is None else run.end.detail}
            for run in done
            if run.decision.verdict is Verdict.ALLOWED
        ],
    }  # fmt: skip
