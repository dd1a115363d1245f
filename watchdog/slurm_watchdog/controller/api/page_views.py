"""What the page draws beside a status: the map, curves, ranks, what is being done, what a person has to do, and a job
from its first run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import msgspec

from slurm_watchdog.analysis.lateness import RankLateness, is_late, rank_lateness
from slurm_watchdog.controller.api.journal_view import Waiting
from slurm_watchdog.controller.api.status_view import Sees
from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Action, ActionRun, Decision, Verdict
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.incidents import Incident, IncidentState, Severity
from slurm_watchdog.model.node_view import GpuView
from slurm_watchdog.model.slurm_states import is_out

BUSY_RATIO: Final = 0.05
"""A GPU that is busier than this works; nvidia-smi shows whole per cents, and a desktop's clock costs one or two."""
SLOWED_BY: Final = ("hw_", "sw_thermal", "thermal", "power_brake")
"""Beginnings of the reasons for a low clock that are no part of a healthy day (idle and power capping are)."""
CURVE_POINTS: Final = 120
"""Step times of a curve: a point every few pixels of a phone's width."""
ALL_POINTS: Final = 24_000
"""Of all curves of the overview: thousands of jobs are not looked at as closely, and all of it is made and
sent every few seconds."""
FEW_POINTS: Final = 12
SHOWN_TODO: Final = 20
SHOWN_HISTORY: Final = 50
"""Incidents of one job, the newest."""
PAST: Final = ("restarts", "state", "first_step", "last_step", "checkpoint_step")

# A node's cells are one letter a GPU, in the order of their indices: x named by an incident, e does not
# answer, t slowed down, i a process holds it and it idles, b works, f free; u: its node is silent and nobody
# knows.


def curves(view: ClusterView) -> dict[str, list[tuple[int, float]]]:
    """Job -> its recent steps with their times."""
    points = max(FEW_POINTS, min(CURVE_POINTS, ALL_POINTS // max(1, len(view.jobs))))
    return {job.job.job_id: curve(job, points) for job in view.jobs}


def curve(job: JobView, points: int = CURVE_POINTS) -> list[tuple[int, float]]:
    """The newest steps of a job with their times."""
    return [(each.step, round(each.seconds, 4)) for each in job.step_times[-points:]]


def node_map(view: ClusterView, incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Every node that Slurm or an agent speaks of, by name; a node of many has to be a few dozen bytes."""
    named = _named(incidents)
    said = {node.name: node for node in view.nodes}
    slurm = {node.name: node for node in view.slurm_nodes}
    silent, reporting = set(view.silent_nodes), set(view.reporting_nodes)
    jobs: dict[str, list[str]] = {}
    for job in view.jobs:
        for node in job.job.nodes:
            jobs.setdefault(node, []).append(job.job.job_id)
    rows = []
    for name in sorted({*said, *slurm, *silent, *reporting}, key=_by_number):
        known = said.get(name)
        gpus = sorted(known.gpus, key=lambda each: each.gpu.index) if known else []
        is_silent = name in silent
        row: dict[str, Any] = {
            "node": name,
            "state": _state(name in named, is_silent, name in reporting, slurm[name].state if name in slurm else ""),
            "gpus": "".join("u" if is_silent else _cell(gpu, named) for gpu in gpus),
        }
        if name in slurm and slurm[name].reason:
            row["reason"] = slurm[name].reason
        if name in jobs:
            row["jobs"] = jobs[name]
        rows.append(row)
    return rows


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


def job_details(view: JobView, named: Collection[int | None]) -> dict[str, Any]:
    """One job for those who may see it: its ranks with what each of them does and its GPU, its losses, its earlier
    runs. `named`: ranks that an incident names."""
    gpus: dict[int, list[GpuView]] = {}
    for each in view.gpus:
        gpus.setdefault(each.rank, []).append(each.view)
    late = {} if is_late(view) else rank_lateness(view.waits)  # where the step is late, past waits say nothing of now
    of = {(key.node, key.pid, key.rank): each for key, each in late.items()}
    return {
        "supervisor": None if view.supervisor is None else msgspec.structs.asdict(view.supervisor),
        "losses": [(each.step, each.loss if abs(each.loss) < float("inf") else None) for each in view.losses],
        "ranks": [
            _rank(each, gpus.get(rank, []), of.get((each.node, each.process.pid, rank)))
            | {"named": each.process.rank in named}
            for each in view.ranks
            for rank in (each.process.rank or 0,)
        ],
        "past": [
            {name: getattr(run, name) for name in PAST} | {"seconds": run.ended_at - run.began_at} for run in view.past
        ],
    }


def _rank(view: ProcessView, gpus: Sequence[GpuView], late: RankLateness | None) -> dict[str, Any]:
    process, blocked = view.process, view.process.blocked
    gpu = gpus[0].gpu if len(gpus) == 1 else None
    waits = None
    if blocked is not None:
        waits = f"{blocked.syscall or 'waits'} on {blocked.path or blocked.mount or 'a file'}"
    return {
        "rank": process.rank,
        "pid": process.pid,
        "state": process.state,
        "node": view.node,
        "alive": view.alive,
        "cpu_ratio": view.cpu_ratio,
        "blocked": waits,
        "blocked_s": None if blocked is None else blocked.seconds,
        "late": late is not None and late.is_late,
        "late_ratio": None if late is None else round(late.ratio, 3),
        "gpus": [each.gpu.uuid for each in gpus],
        "gpu_utilization_ratio": gpu and gpu.utilization_ratio,
        "gpu_sm_clock_hz": gpu and gpu.sm_clock_hz,
        "gpu_power_w": gpu and gpu.power_w,
        "gpu_temperature_c": gpu and gpu.temperature_c,
    }


def doing(open_actions: Sequence[ActionRun], waiting: Waiting, shows: Callable[[str], bool]) -> list[dict[str, Any]]:
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


def todo(
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


def history(journal: Journal, job_id: str, sees: Sees) -> dict[str, Any]:
    """A job's runs, those of its incidents that the person may see and that were reported, and what was done. Raises
    JournalError."""
    incidents = [
        each
        for each in journal.incidents(job_id=job_id, limit=SHOWN_HISTORY)
        if each.fired_at is not None and each.inhibited_by is None and sees(each)
    ]
    done = [run for each in incidents for run in journal.actions(each.id) if run.decision.action is not Action.NONE]
    shown = ("id", "kind", "severity", "opened_at", "resolved_at")
    return {
        "runs": sorted(journal.run_records.of(job_id=[job_id]), key=lambda run: run.began_at),
        "incidents": [{name: getattr(each, name) for name in shown} for each in incidents],
        "actions": [
            {"action": run.decision.action, "at": run.decision.decided_at, "end": run.end}
            for run in done
            if run.decision.verdict is Verdict.ALLOWED
        ],
    }
