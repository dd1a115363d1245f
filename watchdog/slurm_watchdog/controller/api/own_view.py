"""What one user is answered about himself: his jobs and incidents, and nothing of others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.text import plural
from slurm_watchdog.controller.api.json_views import status_json
from slurm_watchdog.controller.health.cluster import ORDER, Health, is_announced
from slurm_watchdog.controller.health.job import RESTARTING, Level
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Incident


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
