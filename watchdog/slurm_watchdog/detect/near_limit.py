"""`near_limit`: a job has nearly used up what it may have on a node (memory, processes, open files), or the node what
all of them share.

Fires: 95 % of a limit are in use for a minute (of memory: without the cache of files), a process or thread was
refused within 10 min, or for a fifth of a minute all processes of the job or node waited for memory.
Names: no rank: node, limit, and what is in use; of open files the rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_watchdog.analysis.slurm_nodes import nodes_to_judge
from slurm_watchdog.base.text import size
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import Pressure, Resource, Usage

WAITS_SHARE = 0.2  # Of a minute in which all processes waited for memory.
RECENT_S = 600.0  # A refusal is said for so long.
WORDS = {
    Resource.MEMORY: "memory",
    Resource.PIDS: "processes and threads",
    Resource.FILES: "open files",
    Resource.SHARED_MEMORY: "/dev/shm",
}
NEAR = 0.95  # Of a limit: Linux begins to reclaim long before, so less is usual.
BYTES = (Resource.MEMORY, Resource.SHARED_MEMORY)
MAX_SAID = 8


@each_job
def detect(view: ClusterView, job: JobView) -> Finding:
    """One finding for each running job."""
    finding, nodes = SPEC.about_job(job.job.job_id), {node.name: node for node in nodes_to_judge(view)}
    said = [
        each
        for name in job.job.nodes
        if name in nodes and name not in job.silent_nodes
        for each in _said(nodes[name], job.job.process_id, view.now)
    ]
    if said:
        said.sort(reverse=True)
        more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
        return finding.bad(
            f"Job {job.job.job_id} is near a limit: {said[0][1]}{more}.",
            severity=Severity.WARNING if said[0][0] >= 1.0 else Severity.INFO,
            facts=tuple(text for _, text in said[:MAX_SAID]),
        )
    known = {node.name for node in view.nodes if node.usages}
    if job.silent_nodes or not known.issuperset(job.job.nodes):
        return finding
    return finding.ok(f"job {job.job.job_id} is not seen near a limit")


def _said(node: NodeView, process_job: str, now: float) -> Iterator[tuple[float, str]]:
    """(how near, sentence) of all that is near: 1 and more where someone went without."""
    for seen in node.usages:
        usage = seen.usage
        if usage.job_id not in (None, process_job) or seen.at < node.reported_at:
            continue
        refused = usage.resource is Resource.PIDS and seen.refused_at is not None and now - seen.refused_at <= RECENT_S
        if refused or usage.ratio >= NEAR:
            yield (1.0 if refused else usage.ratio), _words(node, usage) + ("; some were refused" if refused else "")
    for pressure in node.pressures:
        waited = pressure.full_ratio
        if pressure.resource == "memory" and pressure.job_id in (None, process_job) and waited >= WAITS_SHARE:
            yield waited, f"{_whose(node, pressure)} waited for memory {waited:.0%} of the last minute"


def _whose(node: NodeView, of: Usage | Pressure) -> str:
    return f"all of {node.name}" if of.job_id is None else f"its processes on {node.name}"


def _words(node: NodeView, usage: Usage) -> str:
    number = size if usage.resource in BYTES else str
    of = f"{number(usage.used)} of {number(usage.limit or 0)} ({usage.ratio:.0%})"
    who = f"rank {usage.rank} on {node.name}" if usage.rank is not None else _whose(node, usage)
    return f"{WORDS[usage.resource]} of {who}: {of}"


SPEC = DetectorSpec(
    detect=detect,
    hold_s=60.0,
    sentence="The job is near a limit of memory, processes or open files",
    steps_continue=True,
    has_aftermath=False,
    explained_by=(IncidentKind.MEMORY_KILL,),
    why_no_action="nothing has failed yet",
    hint=Hint(
        usually="Data loader workers that keep what they read, a leak, files in /dev/shm of jobs before, sockets "
        "that are never closed.",
        try_next="Fewer workers or a smaller prefetch_factor; more --mem; ls -l /dev/shm; ulimit -n in the script.",
        documented="cgroup.conf, ConstrainRAMSpace; slurm.conf, PropagateResourceLimits",
    ),
)
