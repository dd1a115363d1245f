"""How the controller's values look in JSON, for the commands and for people's scripts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from slurm_watchdog.base.capped import CAPS, Shortage
from slurm_watchdog.base.text import duration
from slurm_watchdog.controller.health.cluster import Health, health_json, is_announced, job_health_json
from slurm_watchdog.controller.policy.access import public_sentence
from slurm_watchdog.model.actions import ActionRun, Decision
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Severity

DETAILS_FOR = "the owner of its jobs, root and those named in security.operators"


def public_incident_json(incident: Incident, decisions: Sequence[Decision]) -> dict[str, Any]:
    """The same keys for somebody who may not see its evidence: what, when, where and what was done, no word
    of a user's.

    Nothing is copied and then taken out: a field that is added to an incident is not in here.
    """
    return {
        "id": incident.id,
        "kind": incident.kind,
        "state": incident.state,
        "severity": incident.severity,
        "job_id": incident.job_ids[0] if incident.job_ids else None,
        "job_ids": list(incident.job_ids),
        "opened_at": incident.opened_at,
        "fired_at": incident.fired_at,
        "resolved_at": incident.resolved_at,
        "detected_after_s": incident.detected_after_s,
        "culprits": [
            {
                "node": each.node, "rank": each.rank, "pid": None, "gpu_uuid": each.gpu_uuid,
                "mount": None, "path": None, "reason": "",
            }
            for each in incident.culprits
        ],
        "summary": public_sentence(incident),
        "evidence": [],
        "inhibited_by": incident.inhibited_by,
        "resolution": "",
        "decisions": [
            {
                "action": each.action, "verdict": each.verdict, "by": each.by, "reason": "",
                "exclude": list(each.exclude), "rule": "",
                "ladder": list(each.ladder), "outcome": None,
            }
            for each in decisions
        ],
        "details_for": DETAILS_FOR,
    }  # fmt: skip


def incident_json(incident: Incident, decisions: Sequence[Decision], actions: Sequence[ActionRun]) -> dict[str, Any]:
    """One incident as `incidents --json` promises it; further keys may be added, none is taken away."""
    ends = {run.decision.id: run.end for run in actions}
    return {
        "id": incident.id,
        "kind": incident.kind,
        "state": incident.state,
        "severity": incident.severity,
        "job_id": incident.job_ids[0] if incident.job_ids else None,
        "job_ids": list(incident.job_ids),
        "opened_at": incident.opened_at,
        "fired_at": incident.fired_at,
        "resolved_at": incident.resolved_at,
        "detected_after_s": incident.detected_after_s,
        "culprits": [
            {
                "node": c.node,
                "rank": c.rank,
                "pid": c.pid,
                "gpu_uuid": c.gpu_uuid,
                "mount": c.mount,
                "path": c.path,
                "reason": c.reason,
            }
            for c in incident.culprits
        ],
        "summary": incident.summary,
        "evidence": list(incident.facts),
        "inhibited_by": incident.inhibited_by,
        "resolution": incident.resolution,
        "owner_uids": [uid for uid in incident.owners if uid >= 0],
        "decisions": [
            {
                "action": d.action,
                "verdict": d.verdict,
                "by": d.by,
                "reason": d.reason,
                "exclude": list(d.exclude),
                "rule": d.rule,
                "ladder": list(d.ladder),
                "outcome": _outcome(d, ends),
            }
            for d in decisions
        ],
    }


def taken(incident: Incident, at: float) -> str:
    """When a piece of evidence of this date was taken, seen from the beginning of the incident."""
    after_s = at - incident.opened_at
    side = "after" if after_s >= 0 else "before"
    return f"taken {duration(abs(after_s))} {side} the incident began"


def _outcome(decision: Decision, ends: dict[str, Any]) -> str | None:
    end = ends.get(decision.id)
    return None if end is None else end.detail


def action_json(run: ActionRun, waiting: tuple[str, float | None] | None = None) -> dict[str, Any]:
    """One action with every operation that was climbed, and what it waits for and until when (wall clock),
    where it waits."""
    decision = run.decision
    return {
        "decision_id": decision.id,
        "action": decision.action,
        "verdict": decision.verdict,
        "by": decision.by,
        "reason": decision.reason,
        "rule": decision.rule,
        "ladder": list(decision.ladder),
        "operations": [
            {
                "operation": r.operation,
                "attempt": r.attempt,
                "outcome": r.outcome,
                "detail": r.detail,
                "intent_at": r.intent_at,
                "outcome_at": r.outcome_at,
            }
            for r in run.records
        ],
        "waiting": None if waiting is None else {"for": waiting[0], "until": waiting[1]},
        "end": None if run.end is None else msgspec.to_builtins(run.end),
    }


Sees = Callable[[Incident], bool]
"""Whether the person for whom JSON is made may see an incident's evidence, which its summary is made of."""


def status_json(
    view: ClusterView,
    limits_s: Mapping[str, float],
    open_incidents: Collection[Incident],
    resolved: int,
    sees: Sees,
    found: Health,
) -> dict[str, Any]:
    """How everything is, nodes, jobs and counts of incidents, for a person who `sees` some of them."""
    how = {each.job_id: each for each in found.jobs}
    return health_json(found) | {
        "nodes": {"reporting": list(view.reporting_nodes), "silent": list(view.silent_nodes)},
        "jobs": [
            _job_json(job, limits_s.get(job.job.job_id)) | {"health": job_health_json(how.get(job.job.job_id))}
            for job in view.jobs
        ],
        "incidents": {
            "firing": sum(map(is_announced, open_incidents)),
            "pending": sum(each.state is IncidentState.PENDING for each in open_incidents),
            "resolved": resolved,
        },
        "open": [_open_json(each, sees) for each in _most_urgent(open_incidents)],
    }


SHOWN_LEFT_OUT = 20


def left_out_json(shortages: Sequence[Shortage]) -> list[dict[str, Any]]:
    """Where nodes, users or jobs have more than there is room for, the worst first: what is not known there,
    and whose it is."""
    return [{**msgspec.to_builtins(each), "meaning": CAPS[each.what]} for each in shortages[:SHOWN_LEFT_OUT]]


SHOWN_OPEN = 20
"""Of the open incidents, in a status: it has to stay short while thousands are open. `incidents` lists them all."""
SHOWN_STEP_TIMES = 24


def _most_urgent(incidents: Collection[Incident]) -> list[Incident]:
    """Those that are announced, what fires and is critical first, at most SHOWN_OPEN."""
    told = [i for i in incidents if i.inhibited_by is None and i.kind != IncidentKind.OPERATOR_RESTART]
    told.sort(key=lambda i: (i.state is not IncidentState.FIRING, i.severity is not Severity.CRITICAL, i.opened_at))
    return told[:SHOWN_OPEN]


def summary_for(incident: Incident, sees: Sees) -> str:
    """Its sentence, or the one that everybody may read."""
    return incident.summary if sees(incident) else public_sentence(incident)


def _open_json(incident: Incident, sees: Sees) -> dict[str, Any]:
    return {
        "id": incident.id,
        "kind": incident.kind,
        "state": incident.state,
        "severity": incident.severity,
        "job_id": incident.job_ids[0] if incident.job_ids else None,
        "opened_at": incident.opened_at,
        "summary": summary_for(incident, sees),
        "summary_at": incident.summary_at,
    }


def _job_json(view: JobView, limit_s: float | None) -> dict[str, Any]:
    progress = view.progress
    return {
        "job_id": view.job.job_id,
        "name": view.job.name,
        "user": view.job.user,
        "state": view.job.state,
        "nodes": list(view.job.nodes),
        "restarts": view.job.restarts,
        "step": progress.known_step if progress else None,
        "total_steps": progress.total_steps if progress else None,
        "step_s": progress.step_s if progress else None,
        "step_times_s": [round(each.seconds, 3) for each in view.step_times[-SHOWN_STEP_TIMES:]],
        "progress_age_s": progress.age_s if progress else None,
        "limit_s": limit_s,
        "phase": (progress.phase or "training") if progress else "starting",
        "ranks": len(view.ranks),
        "ranks_alive": sum(rank.alive for rank in view.ranks),
        "checkpoint_step": view.checkpoint.step if view.checkpoint else None,
    }
