"""Which node of a job asks NCCL's RAS, and which one asks once more where the first could not."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.evidence_collection import Collected
from slurm_watchdog.controller.state.run import has_ranks
from slurm_watchdog.model.incidents import Incident


def ras_nodes(found: Collected, cluster: ClusterState, incidents: Iterable[Incident], now: float) -> list[str]:
    """Nodes that may ask, the first first: they report and have a rank. One that `incidents` suspect comes last: what
    it has may hang."""
    run = cluster.runs.get(found.job.job_id)
    suspected = {culprit.node for incident in incidents for culprit in incident.culprits}
    nodes = [
        node for node in found.job.nodes if cluster.agents.reports(node, now) and (run is None or has_ranks(run, node))
    ]
    return sorted(nodes, key=lambda node: node in suspected)


def second_node(found: Collected) -> str | None:
    """Who asks once more; None where there is an answer, or nobody listened on the first: the job has none."""
    if found.ras is not None or len(found.ras_nodes) < 2:
        return None
    first, second = found.ras_nodes[:2]
    return second if found.ras_failed or found.nodes[first].state == "failed" else None
