"""The whole cluster on one page: what the map, the curves and the tables of the page are drawn from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from slurm_watchdog.analysis.lateness import is_late
from slurm_watchdog.analysis.rank_lateness import RankLateness, rank_lateness
from slurm_watchdog.controller.api.json_views import Sees, fields_of, job_json, open_json, status_json
from slurm_watchdog.controller.health.cluster import Health, job_health_json
from slurm_watchdog.controller.health.job import JobHealth
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.incidents import Incident, IncidentState
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

# A node's cells are one letter a GPU, in the order of their indices: x named by an incident, e does not
# answer, t slowed down, i a process holds it and it idles, b works, f free; u: its node is silent and nobody
# knows.


def overview_json(
    view: ClusterView,
    limits_s: Mapping[str, float],
    incidents: Collection[Incident],
    resolved: int,
    sees: Sees,
    found: Health,
) -> dict[str, Any]:
    """Nodes with a letter for every GPU, jobs with their recent step times, open incidents in one line each."""
    document = status_json(view, dict(limits_s), incidents, resolved, sees, found)
    points = max(FEW_POINTS, min(CURVE_POINTS, ALL_POINTS // max(1, len(view.jobs))))
    curves = {job.job.job_id: _curve(job, points) for job in view.jobs}
    for job in document["jobs"]:
        job["times"] = curves[job["job_id"]]
    document["map"] = _map(view, incidents)
    document["open"] = [open_json(incident, sees) for incident in incidents]
    return document


def _curve(job: JobView, points: int = CURVE_POINTS) -> list[tuple[int, float]]:
    return [(each.step, round(each.seconds, 4)) for each in job.step_times[-points:]]


def _map(view: ClusterView, incidents: Iterable[Incident]) -> list[dict[str, Any]]:
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


def job_page_json(
    view: JobView, limit_s: float | None, found: JobHealth | None, *, may_see: bool = True
) -> dict[str, Any]:
    """One job: its ranks with what each of them does and its GPU, its curves, its earlier runs.

    For those who may not see it: what a status says, without its ranks, its losses and its past.
    """
    gpus: dict[int, list[GpuView]] = {}
    for each in view.gpus:
        gpus.setdefault(each.rank, []).append(each.view)
    past = ("restarts", "state", "first_step", "last_step", "checkpoint_step")
    losses = [(each.step, each.loss if abs(each.loss) < float("inf") else None) for each in view.losses]
    return job_json(view, limit_s) | {
        "health": job_health_json(found),
        "supervisor": _supervisor(view) if may_see else None,
        "times": _curve(view),
        "losses": losses if may_see else [],
        "ranks": _ranks(view, gpus) if may_see else [],
        "past": [
            fields_of(run, *past) | {"seconds": run.ended_at - run.began_at} for run in (view.past if may_see else ())
        ],
    }


def _supervisor(view: JobView) -> dict[str, Any] | None:
    """What `slurm-watchdog run` in the job says of itself; None: it has none, or it does not live."""
    if view.supervisor is None:
        return None
    return fields_of(view.supervisor, "state", "starts", "restarts_left", "spares", "avoided", "words")


def _ranks(view: JobView, gpus: Mapping[int, Sequence[GpuView]]) -> list[dict[str, Any]]:
    """In a job whose step is late, who waited in its last steps says nothing of now."""
    late = {} if is_late(view) else rank_lateness(view.waits)
    of = {(key.node, key.pid, key.rank): each for key, each in late.items()}
    return [
        _rank(each, gpus.get(each.process.rank or 0, []), of.get((each.node, each.process.pid, each.process.rank or 0)))
        for each in view.ranks
    ]


def _rank(view: ProcessView, gpus: Sequence[GpuView], late: RankLateness | None) -> dict[str, Any]:
    process, blocked = view.process, view.process.blocked
    gpu = gpus[0].gpu if len(gpus) == 1 else None
    waits = None
    if blocked is not None:
        waits = f"{blocked.syscall or 'waits'} on {blocked.path or blocked.mount or 'a file'}"
    figures = ("utilization_ratio", "sm_clock_hz", "power_w", "temperature_c")
    return {
        **fields_of(process, "rank", "pid", "state"),
        **fields_of(view, "node", "alive", "cpu_ratio"),
        "blocked": waits,
        "blocked_s": None if blocked is None else blocked.seconds,
        "late": late is not None and late.is_late,
        "late_ratio": None if late is None else round(late.ratio, 3),
        "gpus": [each.gpu.uuid for each in gpus],
        **{f"gpu_{name}": getattr(gpu, name) if gpu else None for name in figures},
    }
