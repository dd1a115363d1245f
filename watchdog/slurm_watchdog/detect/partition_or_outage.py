"""`partition_or_outage`: many agents fell silent at once, by the network, the power or the controller's own link.

Fires: three agents or more, and more than 20 % of all, fell silent; or all of them.
Names: the silent nodes, without blame.
Acts: no action is taken anywhere while it lasts.
"""

from __future__ import annotations

from slurm_watchdog.analysis.slurm_nodes import away_nodes, share_silent
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Finding, Severity

NAMED = 16  # Nodes that are named one by one; the number says the rest.

NODES = 3  # So many silent nodes at least, …
PERCENT = 20.0  # … of those that have reported, besides: three of ten thousand are no outage.


def detect(view: ClusterView) -> list[Finding]:
    """One finding about the cluster, none before any agent has reported."""
    silent, known = share_silent(view)
    if known == 0:
        return []
    everybody = silent == known and silent > 1
    many = silent >= NODES and 100.0 * silent > PERCENT * known
    if not (everybody or many):
        finding, unheard = SPEC.about("cluster"), set(view.excused_nodes) - set(view.silent_nodes)
        return [finding if unheard else finding.ok(f"{known - silent} of {known} agents report")]
    mute = set(view.silent_nodes) - away_nodes(view)
    missing = [node for node in view.nodes if node.name in mute]
    shortest_s = min(view.now - view.last_heard(node) for node in missing)
    return [
        SPEC.about("cluster").bad(
            f"{silent} of {known} agents are silent: the network, the power, or this machine's own link. "
            "What happens there is unknown, and nothing is done about any job while it lasts.",
            culprits=tuple(
                Culprit(node=node.name, reason=f"no report for {view.now - view.last_heard(node):.0f} s")
                for node in missing[:NAMED]
            ),
            facts=(f"the last of them fell silent {shortest_s:.0f} s ago", "compare with: sinfo -R"),
            duration_s=shortest_s,
        )
    ]


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.CLUSTER,
    needs_cluster=True,
    severity=Severity.CRITICAL,
    sentence="Many nodes do not report",
    why_no_action="many nodes at once: the cause is shared, not one of them",
    alerts=("SlurmWatchdogManyAgentsSilent",),
)
