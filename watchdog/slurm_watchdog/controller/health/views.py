"""Documents of incidents, jobs, nodes and the status, as far as a person may see them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from msgspec import structs
from msgspec.structs import replace

from slurm_watchdog.analysis.lateness import is_late, rank_lateness
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import plural
from slurm_watchdog.controller.health.cluster import ORDER, Health, is_announced
from slurm_watchdog.controller.health.job import RESTARTING
from slurm_watchdog.controller.policy.access import public_sentence
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model import documents
from slurm_watchdog.model.actions import Action, ActionRun, Decision, Verdict
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.documents import DecisionSummary, IncidentCounts, Job, Level, Nodes, OpenIncident, Status
from slurm_watchdog.model.headline import headline, response
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.page_documents import MapNode, Rank, Todo
from slurm_watchdog.model.slurm_states import is_lost, is_out

Sees = Callable[[Incident], bool]
"""Whether the person who asks may see an incident's evidence, of which its summary is made."""
SHOWN_OPEN = 20
"""Of the open incidents, in a status: it has to stay short while thousands are open. `incidents` lists them all."""
SHOWN_STEP_TIMES = 24
SHOWN_TODO = 20
HEAD = ("id", "kind", "state", "severity", "job_ids", "opened_at", "inhibited_by")
"""What anybody may see of an incident: no text that a user wrote."""
TIMES = ("fired_at", "resolved_at", "detected_after_s")
DETAILS_FOR = "the owner of its jobs, root and those named in security.operators"
BUSY_RATIO = 0.05
"""A GPU that is busier than this works; nvidia-smi shows whole per cents, and a desktop's clock costs one or two."""
SLOWED_BY = ("hw_", "sw_thermal", "thermal", "power_brake")
"""Beginnings of the reasons for a low clock that are no part of a healthy day (idle and power capping are)."""


def first_job(incident: Incident) -> str | None:
    """Also for scripts that ask for one job."""
    return incident.job_ids[0] if incident.job_ids else None


def open_incident(incident: Incident, sees: Sees, quiet: str, done: str) -> OpenIncident:
    """An open incident in one line: with its sentence, or the one that everybody may read; `done` about it."""
    summary = incident.summary if sees(incident) else public_sentence(incident)
    return picked(
        OpenIncident, incident, *HEAD, "summary_at", job_id=first_job(incident), summary=summary, quiet=quiet,
        headline=headline(replace(incident, summary=summary), done),
    )  # fmt: skip


def status_of(
    view: ClusterView,
    limits_s: Mapping[str, float],
    open_incidents: Collection[Incident],
    resolved: int,
    sees: Sees,
    found: Health,
    quiet: Callable[[Incident], str] = lambda incident: "",
    done: Callable[[Incident], str] = response,
) -> Status:
    """How everything is, nodes, jobs and counts of incidents, for a person who `sees` some of them. `quiet`: who has
    silenced an incident; `done`: what is done about it."""
    how = {each.job_id: each for each in found.jobs}
    lost = frozenset(node.name for node in view.slurm_nodes if is_lost(node.state))
    return picked(
        Status, found, "level", "headline", "reasons",
        nodes=Nodes(reporting=view.reporting_nodes, silent=view.silent_nodes),
        jobs=tuple(
            replace(job_row(job, limits_s.get(job.job.job_id), lost), health=how.get(job.job.job_id))
            for job in view.jobs
        ),
        incidents=IncidentCounts(
            firing=sum(map(is_announced, open_incidents)),
            pending=sum(each.state is IncidentState.PENDING for each in open_incidents),
            resolved=resolved,
        ),
        open=tuple(open_incident(each, sees, quiet(each), done(each)) for each in _most_urgent(open_incidents)),
    )  # fmt: skip


def _most_urgent(incidents: Collection[Incident]) -> list[Incident]:
    """Those that are announced, what fires and is critical first, at most SHOWN_OPEN."""
    shown = [i for i in incidents if i.inhibited_by is None and i.kind != IncidentKind.OPERATOR_RESTART]
    shown.sort(key=lambda i: (i.state is not IncidentState.FIRING, i.severity is not Severity.CRITICAL, i.opened_at))
    return shown[:SHOWN_OPEN]


def job_row(view: JobView, limit_s: float | None, lost: Set[str] = frozenset()) -> Job:
    """One running job in one line, as everybody may see it. Ranks on a node that is `lost`, or silent, do not count as
    alive."""
    progress, unseen = view.progress, lost | frozenset(view.silent_nodes)
    on_disk = (each.age_s for each in view.checkpoints_on_disk if each.path is not None)
    return picked(
        Job, view.job, "job_id", "name", "user", "state", "nodes", "restarts",
        restarts_in_place=0 if view.supervisor is None else max(0, view.supervisor.starts - 1),
        step=progress.known_step if progress else None,
        total_steps=progress.total_steps if progress else None,
        step_s=progress.step_s if progress else None,
        step_times_s=tuple(round(each.seconds, 3) for each in view.step_times[-SHOWN_STEP_TIMES:]),
        progress_age_s=progress.age_s if progress else None,
        limit_s=limit_s,
        phase=(progress.phase or "training") if progress else "starting",
        phase_age_s=view.announced.age_s if view.announced else None,
        ranks=len(view.ranks),
        ranks_alive=sum(rank.node not in unseen for rank in view.living_ranks),
        checkpoint_step=view.checkpoint.step if view.checkpoint else None,
        saved_age_s=min((each for each in (view.saved_age_s, *on_disk) if each is not None), default=None),
    )  # fmt: skip


def is_of(incident: Incident, uid: int | None) -> bool:
    """Whether it is about jobs of this user, and of no one else; None: of all users."""
    return uid is None or set(incident.owners) == {uid}


def own(
    view: ClusterView, incidents: Iterable[Incident], found: Health, uid: int
) -> tuple[ClusterView, list[Incident], Health]:
    """The same of one user's jobs alone."""
    jobs = tuple(job for job in view.jobs if job.job.uid == uid)
    nodes, ids = {node for job in jobs for node in job.job.nodes}, {job.job.job_id for job in jobs}
    mine = [each for each in incidents if is_of(each, uid)]
    health = tuple(each for each in found.jobs if each.job_id in ids)
    again = {each.job_id for each in health if each.state == RESTARTING}
    in_hand = {each.id for each in mine if each.job_ids and again.issuperset(each.jobs_now or each.job_ids)}
    firing = sum(is_announced(each) and each.id not in in_hand for each in mine)
    levels = [each.level for each in health] + [Level.CRITICAL] * bool(firing)
    wrong = f"{plural(firing, 'incident')} firing; " if firing else ""
    small = replace(
        view,
        jobs=jobs,
        reporting_nodes=tuple(node for node in view.reporting_nodes if node in nodes),
        silent_nodes=tuple(node for node in view.silent_nodes if node in nodes),
    )
    said = f"{wrong}{plural(len(jobs), 'job')} of yours watched."
    level = min(levels, key=ORDER.index, default=Level.OK)
    return small, mine, Health(level=level, headline=said, reasons=(), jobs=health)


def done_about(incident: Incident, decisions: Sequence[Decision], actions: Sequence[ActionRun]) -> str:
    """What is done about an incident, in a few words."""
    last = decisions[-1] if decisions else None
    return response(incident, last, next((run.end for run in actions if run.decision == last), None))


def shown(
    incident: Incident, sees: Sees, decisions: Sequence[Decision], actions: Sequence[ActionRun]
) -> documents.Incident:
    """One incident, with the decisions about it. For a person who may not see its evidence: what, when, where and what
    was done. Fields are named one by one there, so that no new one is shown to all."""
    head = structs.asdict(open_incident(incident, sees, "", done_about(incident, decisions, actions)))
    head |= {name: getattr(incident, name) for name in TIMES}
    if not sees(incident):
        return documents.Incident(
            **head,
            culprits=tuple(picked(Culprit, each, "node", "rank", "gpu_uuid") for each in incident.culprits),
            decisions=tuple(
                picked(DecisionSummary, each, "action", "verdict", "by", "exclude", "ladder") for each in decisions
            ),
            details_for=DETAILS_FOR,
        )
    outcomes = {run.decision.id: run.end.detail for run in actions if run.end is not None}
    return documents.Incident(
        **head,
        resolution=incident.resolution,
        culprits=incident.culprits,
        evidence=incident.facts,
        owner_uids=tuple(uid for uid in incident.owners if uid >= 0),
        decisions=tuple(picked(DecisionSummary, each, outcome=outcomes.get(each.id)) for each in decisions),
    )


def action_of(run: ActionRun, waiting: documents.Waiting | None = None, *, whole: bool = True) -> documents.ActionRun:
    """One action with every operation that was climbed, and what it waits for and until when (wall clock), where it
    waits; `whole`: for a person who may see it, others learn what is done, for what and since when."""
    decision = run.decision
    job_id = None if decision.fence is None else decision.fence.job_id
    if not whole:
        seen = ("incident_id", "action", "decided_at")
        return picked(documents.ActionRun, decision, *seen, decision_id=decision.id, job_id=job_id)
    operations = tuple(picked(documents.Operation, each) for each in run.records)
    return picked(
        documents.ActionRun, decision, decision_id=decision.id, job_id=job_id, operations=operations, waiting=waiting,
        end=run.end,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the page


def node_map(view: ClusterView, incidents: Iterable[Incident]) -> tuple[MapNode, ...]:
    """Every node that Slurm or an agent speaks of, by name."""
    firing = (each for each in incidents if each.state is IncidentState.FIRING and each.inhibited_by is None)
    named = {each for one in firing for culprit in one.culprits for each in (culprit.node, culprit.gpu_uuid) if each}
    said = {node.name: node for node in view.nodes}
    slurm = {node.name: node for node in view.slurm_nodes}
    silent, reporting = set(view.silent_nodes), set(view.reporting_nodes)
    jobs = defaultdict[str, list[str]](list)
    for job in view.jobs:
        for node in job.job.nodes:
            jobs[node].append(job.job.job_id)

    def row(name: str) -> MapNode:
        gpus = sorted(said[name].gpus, key=lambda each: each.gpu.index) if name in said else []
        listed = slurm.get(name)
        if name in named:
            state = "named"
        elif name in silent:
            state = "silent"
        elif listed is not None and is_out(listed.state):
            state = "away"
        else:
            state = "ok" if name in reporting else "unwatched"
        cells = "".join("u" if name in silent else _cell(each.gpu, named) for each in gpus)
        reason = "" if listed is None else listed.reason
        return MapNode(node=name, state=state, gpus=cells, reason=reason, jobs=tuple(jobs[name]))

    return tuple(row(name) for name in sorted({*said, *slurm, *silent, *reporting}, key=_by_number))


def _by_number(name: str) -> tuple[str, int, str]:
    """node9 before node10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1), name


def _cell(gpu: Gpu, named: Set[str]) -> str:
    if gpu.uuid in named:
        return "x"
    if gpu.error and gpu.utilization_ratio is None:
        return "e"
    if any(reason.lower().startswith(SLOWED_BY) for reason in gpu.throttle or ()):
        return "t"
    if (gpu.utilization_ratio or 0.0) > BUSY_RATIO:
        return "b"
    return "i" if gpu.pids else "f"


def ranks_of(view: JobView, named: Collection[int | None]) -> tuple[Rank, ...]:
    """What each rank of a job does, with its GPUs. `named`: ranks that an incident names."""
    gpus = defaultdict[int, list[Gpu]](list)
    for each in view.gpus:
        gpus[each.rank].append(each.view.gpu)
    waits = {} if is_late(view) else rank_lateness(view.waits)  # where the step is late, past waits say nothing of now
    lateness = {(key.node, key.pid, key.rank): each for key, each in waits.items()}

    def row(seen: ProcessView) -> Rank:
        process, rank = seen.process, seen.process.rank or 0
        late, own = lateness.get((seen.node, process.pid, rank)), tuple(gpus[rank])
        busy = own[0].utilization_ratio if len(own) == 1 else None
        if not seen.alive or process.rank in named:
            letter = "x"
        elif process.blocked or process.state == "D":
            letter = "e"
        elif process.state in ("T", "t"):
            letter = "t"
        elif late and late.is_late:
            letter = "L"
        else:
            letter = "f" if busy is None else "b" if busy > BUSY_RATIO else "i"
        return Rank(view=seen, gpus=own, letter=letter, late_ratio=None if late is None else round(late.ratio, 3))

    return tuple(map(row, view.ranks))


def why_left(decisions: Sequence[Decision], *, may_see: bool) -> str:
    """Why no action is under way; the reason has words of users."""
    if not decisions:
        return "no decision yet"
    last = decisions[-1]
    reason = f": {last.reason}" if may_see and last.reason else ""
    if last.action is Action.NONE:
        return f"reported only ({last.by}){reason}"
    if last.verdict is Verdict.ALLOWED:
        return f"{last.action} has ended, and it is still wrong"
    word = "would have been done" if last.verdict is Verdict.OBSERVED else "was not done"
    return f"{last.action} {word} ({last.by}){reason}"


def todo(
    incidents: Iterable[Incident], handled: Collection[str],
    decisions_about: Callable[[Iterable[str]], Mapping[str, Sequence[Decision]]], sees: Sees,
) -> tuple[Todo, ...]:  # fmt: skip
    """Incidents that wait for a person, the critical ones first: announced, looked after by no one, and nothing is
    under way (`handled` has the ids of the others). With why nothing was done, and what usually helps."""
    left = [each for each in incidents if is_announced(each) and each.id not in handled]
    left.sort(key=lambda each: (each.severity is not Severity.CRITICAL, each.opened_at))
    decisions = decisions_about(each.id for each in left[:SHOWN_TODO])
    return tuple(
        picked(
            Todo, each, "kind", "job_ids", incident=each.id,
            why=why_left(decisions.get(each.id, []), may_see=sees(each)),
            hint="" if (hint := spec_of(each.kind).hint) is None else hint.try_next,
        )
        for each in left[:SHOWN_TODO]
    )  # fmt: skip
