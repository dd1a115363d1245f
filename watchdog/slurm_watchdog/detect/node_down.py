"""`node_down`: Slurm itself has lost a node that had an agent.

Fires: Slurm lists the node as DOWN, not responding or the like. Or, before Slurm has noticed: its agent is silent
(`controller.agent_silent_after`), its slurmd does not answer three connections while others do, and its job makes no
step.
Names: the node.
Acts: Slurm requeues the jobs of the node; one with a supervisor and `--no-kill` is started again in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.analysis.lateness import is_overdue
from slurm_watchdog.analysis.slurm_nodes import asked_nodes, jobs_by_node
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity
from slurm_watchdog.model.node_view import NodeView, SlurmNodeView, UnreachedNode
from slurm_watchdog.model.slurm_states import is_away, is_lost

LISTINGS, LISTINGS_REPORTING = 2, 3
"""So many listings in a row, of a node whose agent is silent, too, and of one whose agent reports: after a broken
connection Slurm's own ping (SlurmdTimeout of slurm.conf(5)) has to come through before it takes a node back."""
TRIES = 3  # Connections in vain, 5 s apart.
LAST_STEPS = 3  # Intervals of reports: it lived for one after its last, steps are read one later, reports come late.
FRESH_S = 12.0  # An agent that reports every 5 s was heard within this time, or it is as quiet as its node.


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each node that has ever reported and that Slurm knows, as far as it is asked about or down."""
    asked = asked_nodes(view)
    silent = set(view.silent_nodes)
    gone = {each.name: each for each in view.unreached if each.tries >= TRIES and each.name in silent}
    meant = asked | gone.keys()
    states = {node.name: node for node in view.slurm_nodes if is_lost(node.state) or node.name in meant}
    nodes = [node for node in view.nodes if node.name in states] if states else []
    jobs = jobs_by_node(view) if nodes else {}
    return [
        _node_finding(view, node, states[node.name], gone.get(node.name), node.name in silent, jobs.get(node.name, ()))
        for node in nodes
    ]


def _node_finding(
    view: ClusterView,
    node: NodeView,
    slurm: SlurmNodeView,
    gone: UnreachedNode | None,
    silent: bool,
    jobs: Sequence[str],
) -> Finding:
    finding, age_s = SPEC.about(f"node:{node.name}"), view.now - view.last_heard(node)
    quiet, is_down = silent or age_s > FRESH_S, is_lost(slurm.state)
    if is_away(slurm.state, slurm.runs_job) or not (is_down or gone):
        return finding.ok(f"Slurm has {node.name} as {slurm.state}")
    if gone is not None and not is_down:  # BAD if the machine is gone for its jobs as well
        stand = [
            each
            for each in view.jobs
            if each.job.job_id in jobs and each.progress is not None and is_overdue(each)
            if each.progress.age_s >= age_s - LAST_STEPS * each.read_later_s
        ]
        if not stand or len(stand) < len(jobs):
            return finding
        tries = f"{gone.tries} connections in {gone.seconds:.0f} s"
        fact = f"neither its agent, for {age_s:.0f} s, nor its slurmd ({tries}) answers, while other nodes do"
        reason = "neither its agent nor its slurmd answers"
        what = f"{node.name} is down: {fact}; Slurm reports it as {slurm.state}. No step since in its jobs: "
        what += f"{', '.join(jobs)}."
    else:
        enough = LISTINGS if quiet else LISTINGS_REPORTING
        if slurm.lost_listings is not None and slurm.lost_listings < enough:
            return finding
        agent = "yet its agent reports: the node runs, and Slurm does not reach its slurmd"
        agent = f"its agent has not reported for {age_s:.0f} s, too" if quiet else agent
        fact, reason, why = f"{node.name}: {agent}", f"Slurm says {slurm.state}", slurm.reason
        what = f"Slurm has lost {node.name}: {slurm.state}{f' ({why})' if why else ''}; {agent}."
        what += f" Jobs there: {', '.join(jobs)}." if jobs else ""
    return finding.bad(
        what,
        job_ids=tuple(jobs),
        severity=Severity.CRITICAL if jobs else Severity.WARNING,
        culprits=(Culprit(node=node.name, reason=reason),),
        facts=(f"scontrol show node {node.name}", fact),
        duration_s=age_s if silent else 0.0,
        actionable=quiet and bool(jobs),
        exclude_nodes=(node.name,),
    )


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.NODE,
    needs_cluster=True,
    severity=Severity.CRITICAL,
    blames_node=1.0,
    sentence="A node is down",
    explained_by=(IncidentKind.PARTITION_OR_OUTAGE,),
    ladder=(Rung.RESTART_STEP,),
    alerts=("SlurmWatchdogNodeTrouble",),
)
