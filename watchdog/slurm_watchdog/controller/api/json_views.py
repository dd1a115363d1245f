"""How the controller's values look in JSON, for the commands and for people's scripts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.capped import CAPS, Shortage
from slurm_watchdog.base.text import duration, plural
from slurm_watchdog.controller.health.cluster import ORDER, Health, health_json, is_announced, job_health_json
from slurm_watchdog.controller.health.job import RESTARTING, Level
from slurm_watchdog.controller.policy.access import public_sentence
from slurm_watchdog.model.actions import ActionRun, Decision
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.slurm_states import is_lost

DETAILS_FOR = "the owner of its jobs, root and those named in security.operators"


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """These attributes by their names, as JSON has them."""
    found = {name: getattr(value, name) for name in names}
    return {name: list(each) if isinstance(each, tuple) else each for name, each in found.items()}


CULPRIT = ("node", "rank", "pid", "gpu_uuid", "mount", "path", "reason")
DECISION = ("action", "verdict", "by", "reason", "exclude", "rule", "ladder")


def head_json(incident: Incident) -> dict[str, Any]:
    """What anybody may see of an incident: no word of a user's."""
    return fields_of(incident, "id", "kind", "state", "severity", "job_ids", "opened_at", "inhibited_by") | {
        "job_id": incident.job_ids[0] if incident.job_ids else None
    }


def public_incident_json(incident: Incident, decisions: Sequence[Decision]) -> dict[str, Any]:
    """The keys of `incident_json` for somebody who may not see its evidence: what, when, where and what was done.

    Nothing is copied and then taken out: a field that is added to an incident is not in here.
    """
    hidden = {"pid": None, "mount": None, "path": None, "reason": ""}
    return {
        **head_json(incident),
        **fields_of(incident, "fired_at", "resolved_at", "detected_after_s"),
        "culprits": [fields_of(each, "node", "rank", "gpu_uuid") | hidden for each in incident.culprits],
        "summary": public_sentence(incident),
        "evidence": [],
        "resolution": "",
        "decisions": [
            fields_of(each, "action", "verdict", "by", "exclude", "ladder")
            | {"reason": "", "rule": "", "outcome": None}
            for each in decisions
        ],
        "details_for": DETAILS_FOR,
    }


def incident_json(incident: Incident, decisions: Sequence[Decision], actions: Sequence[ActionRun]) -> dict[str, Any]:
    """One incident as `incidents --json` promises it; further keys may be added, none is taken away."""
    outcomes = {run.decision.id: run.end.detail for run in actions if run.end is not None}
    return {
        **head_json(incident),
        **fields_of(incident, "fired_at", "resolved_at", "detected_after_s", "summary", "resolution"),
        "culprits": [fields_of(each, *CULPRIT) for each in incident.culprits],
        "evidence": list(incident.facts),
        "owner_uids": [uid for uid in incident.owners if uid >= 0],
        "decisions": [fields_of(each, *DECISION) | {"outcome": outcomes.get(each.id)} for each in decisions],
    }


def taken(incident: Incident, at: float) -> str:
    """When a piece of evidence of this date was taken, seen from the beginning of the incident."""
    after_s = at - incident.opened_at
    side = "after" if after_s >= 0 else "before"
    return f"taken {duration(abs(after_s))} {side} the incident began"


def action_json(run: ActionRun, waiting: tuple[str, float | None] | None = None) -> dict[str, Any]:
    """One action with every operation that was climbed, and what it waits for and until when (wall clock),
    where it waits."""
    operation = ("operation", "attempt", "outcome", "detail", "intent_at", "outcome_at")
    return {
        "decision_id": run.decision.id,
        **fields_of(run.decision, "action", "verdict", "by", "reason", "rule", "ladder"),
        "operations": [fields_of(record, *operation) for record in run.records],
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
    lost = frozenset(node.name for node in view.slurm_nodes if is_lost(node.state))
    return health_json(found) | {
        "nodes": {"reporting": list(view.reporting_nodes), "silent": list(view.silent_nodes)},
        "jobs": [
            job_json(job, limits_s.get(job.job.job_id), lost) | {"health": job_health_json(how.get(job.job.job_id))}
            for job in view.jobs
        ],
        "incidents": {
            "firing": sum(map(is_announced, open_incidents)),
            "pending": sum(each.state is IncidentState.PENDING for each in open_incidents),
            "resolved": resolved,
        },
        "open": [open_json(each, sees) for each in _most_urgent(open_incidents)],
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
    shown = [i for i in incidents if i.inhibited_by is None and i.kind != IncidentKind.OPERATOR_RESTART]
    shown.sort(key=lambda i: (i.state is not IncidentState.FIRING, i.severity is not Severity.CRITICAL, i.opened_at))
    return shown[:SHOWN_OPEN]


def open_json(incident: Incident, sees: Sees) -> dict[str, Any]:
    """An open incident in one line: with its sentence, or the one that everybody may read."""
    summary = incident.summary if sees(incident) else public_sentence(incident)
    return head_json(incident) | {"summary": summary, "summary_at": incident.summary_at}


def job_json(view: JobView, limit_s: float | None, lost: Set[str] = frozenset()) -> dict[str, Any]:
    """One running job in one line, as everybody may see it. Ranks on a node that is `lost`, or silent, do not count as
    alive."""
    progress, unseen = view.progress, lost | frozenset(view.silent_nodes)
    return {
        **fields_of(view.job, "job_id", "name", "user", "state", "nodes", "restarts"),
        "restarts_in_place": 0 if view.supervisor is None else max(0, view.supervisor.starts - 1),
        "step": progress.known_step if progress else None,
        "total_steps": progress.total_steps if progress else None,
        "step_s": progress.step_s if progress else None,
        "step_times_s": [round(each.seconds, 3) for each in view.step_times[-SHOWN_STEP_TIMES:]],
        "progress_age_s": progress.age_s if progress else None,
        "limit_s": limit_s,
        "phase": (progress.phase or "training") if progress else "starting",
        "ranks": len(view.ranks),
        "ranks_alive": sum(rank.node not in unseen for rank in view.living_ranks),
        "checkpoint_step": view.checkpoint.step if view.checkpoint else None,
        "saved_age_s": _saved_age_s(view),
        "phase_age_s": view.announced.age_s if view.announced else None,
    }


def _saved_age_s(view: JobView) -> float | None:
    """Since its newest checkpoint was complete, of this run or of one before."""
    on_disk = (each.age_s for each in view.checkpoints_on_disk if each.path is not None)
    return min((age_s for age_s in (view.saved_age_s, *on_disk) if age_s is not None), default=None)


def is_own(incident: Incident, uid: int) -> bool:
    """Whether it is about jobs of this user, and of nobody else."""
    return set(incident.owners) == {uid}


def own_status(
    view: ClusterView, limits_s: Mapping[str, float], open_incidents: Collection[Incident], resolved: int,
    found: Health, uid: int,
) -> dict[str, Any]:  # fmt: skip
    """The status of a user's own jobs; `found` is that of all, `resolved` the number of his incidents that are over."""
    jobs = tuple(job for job in view.jobs if job.job.uid == uid)
    nodes = {node for job in jobs for node in job.job.nodes}
    ids = {job.job.job_id for job in jobs}
    incidents = [each for each in open_incidents if is_own(each, uid)]
    small = replace(
        view,
        jobs=jobs,
        reporting_nodes=tuple(node for node in view.reporting_nodes if node in nodes),
        silent_nodes=tuple(node for node in view.silent_nodes if node in nodes),
    )
    of_jobs = tuple(each for each in found.jobs if each.job_id in ids)
    again = {each.job_id for each in of_jobs if each.state == RESTARTING}
    in_hand = {each.id for each in incidents if each.job_ids and again.issuperset(each.jobs_now or each.job_ids)}
    firing = sum(is_announced(each) and each.id not in in_hand for each in incidents)
    levels = [each.level for each in of_jobs] + [Level.CRITICAL] * bool(firing)
    level = min(levels, key=ORDER.index, default=Level.OK)
    wrong = f"{plural(firing, 'incident')} firing; " if firing else ""
    headline = f"{wrong}{plural(len(jobs), 'job')} of yours watched."
    own = Health(level=level, headline=headline, reasons=(), jobs=of_jobs)
    return status_json(small, limits_s, incidents, resolved, lambda incident: True, own)
