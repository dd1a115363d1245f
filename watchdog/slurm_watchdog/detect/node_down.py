"""`node_down`: Slurm itself has lost a node that had an agent.

Fires: Slurm lists the node as DOWN, not responding or the like.
Names: the node.
Note: Slurm requeues the jobs of the node by itself; one with a supervisor and `--no-kill` is started again in place.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.analysis.slurm_nodes import asked_nodes, jobs_by_node
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity
from slurm_watchdog.model.node_view import NodeView, SlurmNodeView
from slurm_watchdog.model.slurm_states import is_away, is_lost

LISTINGS, LISTINGS_REPORTING = 2, 3
"""So many listings in a row, of a node whose agent is silent, too, and of one whose agent reports: after a
broken connection Slurm's own ping (SlurmdTimeout of slurm.conf(5)) has to come through before it takes a node
back."""
FRESH_S = 12.0
"""An agent that reports every 5 s was heard within this time, or it is as quiet as its node."""


@dataclass(frozen=True, kw_only=True)
class NodeDown:
    """Slurm has lost a node that had an agent. Slurm ends and requeues its jobs by itself; one that lives on without
    the node (`--no-kill`) and has a supervisor is started again on its other nodes."""


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each node that has ever reported and that Slurm knows, as far as it is asked about or down."""
    asked = asked_nodes(view)
    states = {node.name: node for node in view.slurm_nodes if is_lost(node.state) or node.name in asked}
    nodes = [node for node in view.nodes if node.name in states] if states else []
    silent, jobs = set(view.silent_nodes), jobs_by_node(view) if nodes else {}
    return [
        _node_finding(view, node, states[node.name], node.name in silent, jobs.get(node.name, ())) for node in nodes
    ]


def _node_finding(
    view: ClusterView, node: NodeView, slurm: SlurmNodeView, silent: bool, job_ids: tuple[str, ...]
) -> Finding:
    finding = SPEC.about(f"node:{node.name}")
    if not is_lost(slurm.state) or is_away(slurm.state, slurm.runs_job):
        return finding.ok(f"Slurm has {node.name} as {slurm.state}")
    age_s = view.now - node.reported_at
    quiet = silent or age_s > FRESH_S
    enough = LISTINGS if quiet else LISTINGS_REPORTING
    if slurm.lost_listings is not None and slurm.lost_listings < enough:
        return finding.unknown(
            f"Slurm has {node.name} as {slurm.state} in {slurm.lost_listings} of the {enough} listings that count"
        )
    agent = (
        f"its agent has not reported for {age_s:.0f} s, too"
        if quiet
        else "yet its agent reports: the node runs, and Slurm does not reach its slurmd"
    )
    jobs = f" Jobs there: {', '.join(job_ids)}." if job_ids else ""
    reason = f" ({slurm.reason})" if slurm.reason else ""
    severity = Severity.CRITICAL if job_ids else Severity.WARNING
    return replace(finding, job_ids=job_ids, severity=severity).bad(
        f"Slurm has lost {node.name}: {slurm.state}{reason}; {agent}.{jobs}",
        culprits=(Culprit(node=node.name, reason=f"Slurm says {slurm.state}"),),
        facts=(f"scontrol show node {node.name}", f"{node.name}: {agent}"),
        duration_s=age_s if silent else 0.0,
        actionable=quiet and bool(job_ids),
        exclude_nodes=(node.name,),
    )


SPEC = DetectorSpec(
    kind=IncidentKind.NODE_DOWN,
    detect=detect,
    settings=NodeDown,
    takes=(),
    subject=Subject.NODE,
    needs_cluster=True,
    severity=Severity.CRITICAL,
    blames_node=1.0,
    sentence="A node is down",
    explained_by=(IncidentKind.PARTITION_OR_OUTAGE,),
    ladder=(Rung.RESTART_STEP,),
    alerts=("SlurmWatchdogNodeTrouble",),
)
