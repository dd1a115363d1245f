"""`suspect_node`: a node has failed again and again, more often than chance explains: its past, not its present.

Every event that names a node is remembered, and weighs by its kind and age; events of one part (one GPU, one link)
add up, those of different parts do not: docs/nodes.md.

Fires: three events of one part within 14 days, give or take (a suspicion of 2.25); stays until 1.5.
Names: the node, the part of it that failed most, and each event.
Acts: `policy.suspects` has restarts avoid it, `policy.quarantine` drains it. After a repair: `slurm-watchdog nodes
NODE --mended WHY`.
"""

from __future__ import annotations

from slurm_watchdog.analysis.slurm_nodes import asked_nodes
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Finding
from slurm_watchdog.model.node_events import GPU_PLACE, NodeSuspicion
from slurm_watchdog.model.slurm_states import is_out

SUSPECT_FROM = 2.25  # An event of broken hardware weighs 1: tests/simulation/lemons.py says what names lemons best.
UNTIL = 1.5  # A suspicion below which the incident ends: events weigh half after 28 days.


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each node with a past, and for each that is asked about."""
    known = {each.node: each for each in view.suspects or ()}
    asked = asked_nodes(view) if view.suspects is not None and view.asked is not None else frozenset()
    out = {node.name for node in view.slurm_nodes if is_out(node.state)}
    found = []
    for name in sorted(asked | known.keys()):
        finding, suspect = SPEC.about(f"node:{name}"), known.get(name, NodeSuspicion(node=name))
        if suspect.score >= SUSPECT_FROM:
            found.append(finding if name in out else _bad(finding, suspect))
        elif name in asked:
            found.append(finding if suspect.score >= UNTIL else finding.ok(f"{name} is not suspect any more"))
    return found


def _bad(finding: Finding, suspect: NodeSuspicion) -> Finding:
    node, place = suspect.node, suspect.place
    reason = f"suspicion {suspect.score:.2f}{f', most of it {place}' if place else ''}"
    drain = f'to drain it: scontrol update NodeName={node} State=DRAIN Reason="suspect node"'  # to be pasted
    return finding.bad(
        f"{node} fails again and again: {suspect.recent} events within 14 days ({reason}).",
        culprits=(Culprit(node=node, gpu_uuid=place if place.startswith(GPU_PLACE) else None, reason=reason),),
        facts=(suspect.reasons, f"slurm-watchdog nodes {node}", drain),
    )


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.NODE,
    needs_cluster=True,
    sentence="A node fails again and again",
    why_no_action="restarts avoid such nodes with policy.suspects",
    hint=Hint(
        usually="One part of it (a GPU, a link, a memory module) fails under load and looks well at rest.",
        try_next="Test it under load (slurm-watchdog test-nodes), drain it (scontrol) and, "
        "once it is repaired, record that (slurm-watchdog nodes, with --mended).",
    ),
    alerts=("SlurmWatchdogNodeTrouble",),
)
