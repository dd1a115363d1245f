"""`agent_silent`: a node's agent no longer reports, and Slurm reports the node healthy. The state of its
jobs is unknown.

Fires: no report for 40 s (`controller.agent_silent_after`), and Slurm still has the node.
Names: the node.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.analysis.slurm_nodes import (
    asked_nodes,
    expected_away,
    jobs_by_node,
    may_be_starting,
    share_silent,
)
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity
from slurm_watchdog.model.node_view import NodeView, SlurmNodeView
from slurm_watchdog.model.slurm_states import is_away, is_lost


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each node that has ever reported, or is asked about or silent. It is silent after the
    controller's `agent_silent_after`."""
    silent = set(view.silent_nodes)
    meant = silent | asked_nodes(view)
    nodes = [node for node in view.nodes if node.name in meant] if meant else []
    if not nodes:
        return []
    states = {node.name: node for node in view.slurm_nodes}
    jobs, share = jobs_by_node(view), share_silent(view)
    together = _just_fell_silent(view, nodes, silent)
    excused = set(view.excused_nodes) - silent
    return [
        SPEC.about(f"node:{node.name}", f"no report of {node.name} since this controller stalled")
        if node.name in excused
        else _node_finding(
            view,
            node,
            node.name in silent,
            states.get(node.name),
            jobs.get(node.name, ()),
            share,
            node.name in together,
        )
        for node in nodes
    ]


MIN_TOGETHER, TOGETHER_S = 10, 10.0
"""So many that fell silent within this time of each other are a switch, a room, or the network: whether it is
still more, and thus one matter (partition_or_outage), shows as soon as all of them had a report due. Twice
the agent's default interval."""


def _just_fell_silent(view: ClusterView, nodes: list[NodeView], silent: set[str]) -> frozenset[str]:
    """Nodes that have counted as silent for a moment only, where they are many."""
    if view.silent_after_s is None:
        return frozenset()
    since = view.now - view.silent_after_s - TOGETHER_S
    found = frozenset(node.name for node in nodes if node.name in silent and node.reported_at > since)
    return found if len(found) >= MIN_TOGETHER else frozenset()


def _node_finding(
    view: ClusterView,
    node: NodeView,
    silent: bool,
    slurm: SlurmNodeView | None,
    job_ids: tuple[str, ...],
    share: tuple[int, int],
    together: bool,
) -> Finding:
    finding = SPEC.about(f"node:{node.name}")
    if not silent:
        return finding.ok(f"the agent of {node.name} reports")
    age_s = view.now - node.reported_at
    finding = replace(finding, duration_s=age_s)
    state = None if slurm is None else slurm.state
    if not view.slurm_nodes:
        return finding.unknown(f"Slurm's nodes are not known, and the agent of {node.name} is silent")
    if slurm is None or not state or is_away(state, slurm.runs_job) or is_lost(state):
        # Told as node_down, or as nothing at all: a node that was switched off or taken out of the cluster
        # has no agent.
        return finding.ok(f"Slurm says that {node.name} is {state or 'no node of this cluster'}")
    if slurm.back_at is not None and may_be_starting(node, slurm, view.now):
        return finding.unknown(
            f"{node.name} is back in service for {view.now - slurm.back_at:.0f} s and may be starting"
        )
    if together:
        return finding.unknown(
            f"{node.name} has just fallen silent, one of {MIN_TOGETHER} or more: how many they are shows in a moment"
        )
    jobs = f" Jobs there: {', '.join(job_ids)}." if job_ids else " No watched job runs there."
    return finding.bad(
        f"The agent of {node.name} has not reported for {age_s:.0f} s, while Slurm has the node as {state}: "
        f"what happens there is unknown.{jobs}",
        culprits=(Culprit(node=node.name, reason=f"no report for {age_s:.0f} s"),),
        facts=(f"on {node.name}: systemctl status slurm-watchdog-agent", expected_away(share)),
    )


SPEC = DetectorSpec(
    kind=IncidentKind.AGENT_SILENT,
    detect=detect,
    subject=Subject.NODE,
    severity=Severity.WARNING,
    sentence="An agent does not report",
    explained_by=(IncidentKind.PARTITION_OR_OUTAGE, IncidentKind.NODE_DOWN),
    why_no_action="silence proves nothing about the jobs on the node",
)
