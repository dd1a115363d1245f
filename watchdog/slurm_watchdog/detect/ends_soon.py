"""`ends_soon`: maintenance begins on a node of the job, or its own time limit is over, before its work is done.

Fires: a reservation with the flag MAINT takes a node of the job within an hour (`maintenance`), or the end of its
time limit is nearer than `time_limit`, where that is set; and at its pace the job is not finished before.
Names: the nodes that are taken; of a time limit none.
Acts: `[kill_switch]`, or `[kill_switch, requeue]`: the job is asked to save in time. Storms and budgets do not count
such jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_watchdog.base.text import duration
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.knowledge.limits import span_or_never
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Culprit, Finding

SPARE = 1.2  # Work is counted as done in time only if it may take so much longer than at the present pace.


@dataclass(frozen=True, kw_only=True)
class EndsSoon:
    """Maintenance or a time limit ends the job before its work is done. Acted on only where `except` has a
    ladder for it."""

    maintenance: float = span_or_never(
        3600.0, "A reservation with the flag MAINT takes a node of the job so soon; 0s = never reported."
    )
    time_limit: float = span_or_never(0.0, "The job's own time limit is over so soon; 0s = never reported.")


@each_job
def detect(view: ClusterView, job: JobView, settings: EndsSoon) -> Finding | None:
    """One finding for each running job."""
    job_id, slurm, date = job.job.job_id, job.job, view.date
    if date is None:
        return None
    finding = SPEC.about_job(job_id)
    if slurm.state != "RUNNING":
        return finding
    limit_at = math.inf
    if slurm.time_limit_s is not None and slurm.start_at is not None:
        limit_at = slurm.start_at + slurm.time_limit_s
    ends = [
        (each.start_at, f"maintenance (reservation {each.name})", tuple(n for n in slurm.nodes if n in each.nodes))
        for each in view.reservations
        if each.is_maintenance and "TIME_FLOAT" not in each.flags and 0 < each.start_at - date <= settings.maintenance
        if each.start_at < limit_at and slurm.reservation != each.name and not set(slurm.nodes).isdisjoint(each.nodes)
    ]  # one that floats never begins; beside one that has begun the job may run on
    if slurm.time_limit_s is not None and limit_at - date <= settings.time_limit:
        ends.append((limit_at, f"its time limit of {duration(slurm.time_limit_s)}", ()))
    if not ends:
        return finding.ok(f"job {job_id} ends by nothing that is known")
    ends_at, what, nodes = min(ends)
    left_s, needs_s = max(0.0, ends_at - date), _needs_s(job)
    if needs_s is not None and SPARE * needs_s < left_s:
        return finding.ok(f"job {job_id} is done before: at its pace in {duration(needs_s)}")
    saved = "" if job.checkpoint is None else f" Its last complete checkpoint is of step {job.checkpoint.step}."
    takes = f" takes {', '.join(nodes[:3])}{' and more' if len(nodes) > 3 else ''}" if nodes else " ends it"
    return finding.bad(
        f"Job {job_id} is not done when {what}{takes}, in {duration(left_s)}.{saved}",
        culprits=tuple(Culprit(node=node, reason="it is taken for maintenance") for node in nodes[:8]),
        facts=(() if needs_s is None else (f"at its pace it needs {duration(needs_s)} more",)),
        actionable=True,
    )


def _needs_s(job: JobView) -> float | None:
    """How long the rest takes at the present pace; None: not known."""
    progress = job.progress
    if progress is None or progress.total_steps is None or progress.step_s is None or not progress.step_known:
        return None
    return None if progress.begun_anew else max(0, progress.total_steps - progress.step) * progress.step_s


SPEC = DetectorSpec(
    detect=detect,
    settings=EndsSoon,
    sentence="Maintenance or a time limit ends the job soon",
    steps_continue=True,
    site_may_act=True,
    planned=True,
    why_no_action="as shipped it is reported only; an entry of `except` with a ladder has the job asked to save",
    hint=Hint(
        usually="Maintenance is announced, or the job is longer than its limit.",
        try_next="Have it save: slurm-watchdog restart --save-only --hold JOB; see docs/operating.md, Maintenance.",
    ),
)
