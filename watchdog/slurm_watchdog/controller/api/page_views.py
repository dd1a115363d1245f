"""What the page draws beside a status: the map, ranks, what is being done, what a person has to do, and a job from its
first run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import structs

from slurm_watchdog.analysis.lateness import RankLateness, is_late, rank_lateness
from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import picked
from slurm_watchdog.controller.api.answers import Api
from slurm_watchdog.controller.api.asking import Asked, RequestRefused
from slurm_watchdog.controller.api.views import SHOWN_OPEN, Sees, job_row, open_incident
from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.controller.policy.access import may_see
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model import documents
from slurm_watchdog.model.actions import Action, ActionRun, Decision, Verdict
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.documents import Job
from slurm_watchdog.model.headline import response
from slurm_watchdog.model.incidents import Incident, IncidentState, Severity
from slurm_watchdog.model.node_view import GpuView
from slurm_watchdog.model.page_documents import Act, History, JobPage, MapNode, Overview, Rank, Todo
from slurm_watchdog.model.slurm_states import is_out

BUSY_RATIO = 0.05
"""A GPU that is busier than this works; nvidia-smi shows whole per cents, and a desktop's clock costs one or two."""
SLOWED_BY = ("hw_", "sw_thermal", "thermal", "power_brake")
"""Beginnings of the reasons for a low clock that are no part of a healthy day (idle and power capping are)."""
SHOWN_TODO = 20
SHOWN_HISTORY = 50  # Incidents of one job, the newest.
CURVE_POINTS = 120  # Step times of a chart, the newest: a point every few pixels of a phone's width.


def overview(api: Api, asked: Asked) -> Overview:
    """The status with all open incidents, the map of the nodes, what is being done and what a person has to do."""
    c, sees, under_way = api.controller, api.who.sees(asked), api.controller.journal.open_actions()
    quiet = {each.id: c.silences.words_of(each) for each in c.judge.incidents}

    def waits(run: ActionRun) -> documents.Waiting | None:
        """For those who may see the incident: these words may repeat what Slurm or a node answered."""
        about = run.decision.incident_id
        found = c.judge.incidents.get(about) or c.journal.incident(about)
        return c.actions.waiting(run.decision.id) if found is not None and sees(found) else None

    fields = structs.asdict(api.overall(asked)) | {
        "open": tuple(
            open_incident(each, sees, quiet[each.id], api.done(each) if number < SHOWN_OPEN else response(each))
            for number, each in enumerate(c.judge.incidents)
        )
    }
    return Overview(
        **fields,
        cluster=c.config.cluster_name,
        at=clock.wall(),
        map=node_map(c.judge.view, c.judge.incidents),
        doing=tuple(act(run, waits(run)) for run in under_way),
        todo=todo(c.judge.incidents, [each for each in quiet if quiet[each]], under_way, c.journal, sees),
    )


def job_page(api: Api, asked: Asked) -> JobPage:
    """One job, or what is remembered of one that has ended."""
    c, job_id, sees = api.controller, asked.named["id"], api.who.sees(asked)
    view = next((job for job in c.judge.view.jobs if job.job.job_id == job_id), None)
    if view is None:
        owners = {run.uid for run in c.journal.run_records.of(job_id=[job_id])}
        if not owners or not (api.who.is_operator(asked) or owners == {asked.person.uid}):
            raise RequestRefused(404, f"job {job_id[:40]!r} is not running, or not watched")
        return JobPage(job_id=job_id, ended=True, history=history(c.journal, job_id, sees))
    row = structs.replace(job_row(view, c.judge.limits_s.get(job_id)), health=c.health().of(job_id))
    shown = picked(JobPage, row, *Job.__struct_fields__, step_times=view.step_times[-CURVE_POINTS:])
    if not may_see((view.job.uid,), asked.person, api.who.operators):
        return shown
    about = [each for each in c.judge.incidents if job_id in each.job_ids and is_announced(each)]
    named = {each.rank for incident in about for each in incident.culprits}
    return structs.replace(
        shown, losses=view.losses, rank_rows=ranks_of(view, named), supervisor=view.supervisor,
        history=history(c.journal, job_id, sees),
    )  # fmt: skip


def node_map(view: ClusterView, incidents: Iterable[Incident]) -> tuple[MapNode, ...]:
    """Every node that Slurm or an agent speaks of, by name."""
    named = _named(incidents)
    said = {node.name: node for node in view.nodes}
    slurm = {node.name: node for node in view.slurm_nodes}
    silent, reporting = set(view.silent_nodes), set(view.reporting_nodes)
    jobs: dict[str, tuple[str, ...]] = {}
    for job in view.jobs:
        for node in job.job.nodes:
            jobs[node] = (*jobs.get(node, ()), job.job.job_id)
    rows = []
    for name in sorted({*said, *slurm, *silent, *reporting}, key=_by_number):
        gpus = sorted(said[name].gpus, key=lambda each: each.gpu.index) if name in said else []
        is_silent, listed = name in silent, slurm.get(name)
        rows.append(
            MapNode(
                node=name,
                state=_state(name in named, is_silent, name in reporting, listed.state if listed else ""),
                gpus="".join("u" if is_silent else _cell(gpu, named) for gpu in gpus),
                reason=listed.reason if listed else "",
                jobs=jobs.get(name, ()),
            )
        )
    return tuple(rows)


def _by_number(name: str) -> tuple[str, int, str]:
    """node9 before node10."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, int(digits) if digits else -1, name


def _named(incidents: Iterable[Incident]) -> set[str]:
    """Nodes and GPUs that a firing incident of its own names."""
    found: set[str] = set()
    for incident in incidents:
        if incident.state is not IncidentState.FIRING or incident.inhibited_by is not None:
            continue
        for culprit in incident.culprits:
            found |= {each for each in (culprit.node, culprit.gpu_uuid) if each}
    return found


def _state(is_named: bool, is_silent: bool, reports: bool, slurm: str) -> str:
    if is_named:
        return "named"
    if is_silent:
        return "silent"
    if is_out(slurm):
        return "away"
    return "ok" if reports else "unwatched"


def _cell(view: GpuView, named: set[str]) -> str:
    gpu = view.gpu
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
    gpus: dict[int, list[GpuView]] = {}
    for each in view.gpus:
        gpus.setdefault(each.rank, []).append(each.view)
    late = {} if is_late(view) else rank_lateness(view.waits)  # where the step is late, past waits say nothing of now
    of = {(key.node, key.pid, key.rank): each for key, each in late.items()}
    return tuple(
        _rank(
            each, gpus.get(rank, []), of.get((each.node, each.process.pid, rank)), is_named=each.process.rank in named
        )
        for each in view.ranks
        for rank in (each.process.rank or 0,)
    )


def _rank(view: ProcessView, gpus: Sequence[GpuView], late: RankLateness | None, *, is_named: bool) -> Rank:
    state, busy = view.process.state, gpus[0].gpu.utilization_ratio if len(gpus) == 1 else None
    if not view.alive or is_named:
        letter = "x"
    elif view.process.blocked or state == "D":
        letter = "e"
    elif state in ("T", "t"):
        letter = "t"
    elif late and late.is_late:
        letter = "L"
    else:
        letter = "f" if busy is None else "b" if busy > BUSY_RATIO else "i"
    ratio = None if late is None else round(late.ratio, 3)
    return Rank(view=view, gpus=tuple(each.gpu for each in gpus), letter=letter, late_ratio=ratio)


def act(run: ActionRun, waiting: documents.Waiting | None = None) -> Act:
    """What is being done, or was, for one decision."""
    decision = run.decision
    job_id = None if decision.fence is None else decision.fence.job_id
    return Act(
        incident=decision.incident_id, job_id=job_id, action=decision.action, at=decision.decided_at,
        waiting=waiting, end=run.end,
    )  # fmt: skip


def todo(
    incidents: Collection[Incident], quiet: Collection[str], open_actions: Sequence[ActionRun], journal: Journal,
    sees: Sees,
) -> tuple[Todo, ...]:  # fmt: skip
    """Incidents that wait for a person, the critical ones first: announced, looked after by no one (`quiet` has the ids
    of the others), and nothing is under way. With why nothing was done, and what usually helps."""
    handled = {run.decision.incident_id for run in open_actions} | set(quiet)
    left = [each for each in incidents if is_announced(each) and each.id not in handled]
    left.sort(key=lambda each: (each.severity is not Severity.CRITICAL, each.opened_at))
    decisions = journal.decisions_about(each.id for each in left[:SHOWN_TODO])
    return tuple(
        picked(
            Todo, each, "kind", "job_ids", incident=each.id, why=_why(decisions.get(each.id, []), may_see=sees(each)),
            hint="" if (hint := spec_of(each.kind).hint) is None else hint.try_next,
        )
        for each in left[:SHOWN_TODO]
    )  # fmt: skip


def _why(decisions: Sequence[Decision], *, may_see: bool) -> str:
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


def history(journal: Journal, job_id: str, sees: Sees) -> History:
    """A job's runs, those of its incidents that the person may see and that were reported, and what was done. Raises
    JournalError."""
    incidents = [
        each
        for each in journal.incidents(job_id=job_id, limit=SHOWN_HISTORY)
        if each.fired_at is not None and each.inhibited_by is None and sees(each)
    ]
    done = (run for each in incidents for run in journal.actions(each.id))
    return History(
        runs=tuple(sorted(journal.run_records.of(job_id=[job_id]), key=lambda run: run.began_at)),
        incidents=tuple(
            picked(documents.Incident, each, "id", "kind", "severity", "opened_at", "resolved_at") for each in incidents
        ),
        actions=tuple(
            act(run)
            for run in done
            if run.decision.action is not Action.NONE and run.decision.verdict is Verdict.ALLOWED
        ),
    )
