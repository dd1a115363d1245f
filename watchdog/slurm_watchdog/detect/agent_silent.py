"""`agent_silent`: a node's agent does not report, and Slurm reports the node healthy: what its jobs do is unknown.

Fires: no report for 40 s (`controller.agent_silent_after`), and Slurm still has the node.
Names: the node.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.analysis.slurm_nodes import asked_nodes, jobs_by_node, may_be_starting, share_silent
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.slurm_states import is_away, is_lost

MIN_TOGETHER, TOGETHER_S = 10, 10.0
"""So many that fell silent within this time of each other are a switch, a room, or the network: whether it is
still more, and thus one matter (partition_or_outage), shows as soon as all of them had a report due. Twice
the agent's default interval."""


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each node that has ever reported, or is asked about or silent. It is silent after the
    controller's `agent_silent_after`."""
    silent = set(view.silent_nodes)
    meant = silent | asked_nodes(view)
    nodes = [node for node in view.nodes if node.name in meant] if meant else []
    if not nodes:
        return []
    states, jobs, share = {node.name: node for node in view.slurm_nodes}, jobs_by_node(view), share_silent(view)
    together, excused = _just_fell_silent(view, nodes, silent), frozenset(view.excused_nodes)
    findings = []
    for node in nodes:
        finding, slurm, age_s = SPEC.about(f"node:{node.name}"), states.get(node.name), view.now - view.last_heard(node)
        if node.name not in silent:
            is_excused = node.name in excused
            findings.append(finding if is_excused else finding.ok(f"the agent of {node.name} reports"))
            continue
        state = "" if slurm is None else slurm.state
        finding = replace(finding, duration_s=age_s)
        if view.slurm_nodes and (slurm is None or not state or is_away(state, slurm.runs_job) or is_lost(state)):
            # Told as node_down, or as nothing at all: a node that is switched off or not in the cluster has no agent.
            finding = finding.ok(f"Slurm says that {node.name} is {state or 'no node of this cluster'}")
        elif slurm is not None and not may_be_starting(view, node, slurm) and node.name not in together:
            there = ", ".join(jobs.get(node.name, ()))
            finding = finding.bad(
                f"The agent of {node.name} has not reported for {age_s:.0f} s, while Slurm has the node as {state}: "
                f"what happens there is unknown. {f'Jobs there: {there}.' if there else 'No watched job runs there.'}",
                culprits=(Culprit(node=node.name, reason=f"no report for {age_s:.0f} s"),),
                facts=(
                    f"on {node.name}: systemctl status slurm-watchdog-agent",
                    f"{share[0]} of {share[1]} agents are silent",
                ),
            )
        findings.append(finding)
    return findings


def _just_fell_silent(view: ClusterView, nodes: list[NodeView], silent: set[str]) -> frozenset[str]:
    """Nodes that have counted as silent for a moment only, where they are many."""
    if view.silent_after_s is None:
        return frozenset()
    since = view.now - view.silent_after_s - TOGETHER_S
    found = frozenset(node.name for node in nodes if node.name in silent and view.last_heard(node) > since)
    return found if len(found) >= MIN_TOGETHER else frozenset()


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.NODE,
    sentence="An agent does not report",
    explained_by=(IncidentKind.PARTITION_OR_OUTAGE, IncidentKind.NODE_DOWN),
    why_no_action="silence proves nothing about the jobs on the node",
)
