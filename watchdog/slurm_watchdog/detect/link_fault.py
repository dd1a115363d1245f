"""`link_fault`: a network link of a node that runs a job is down, goes down again and again, runs below its rate, or
has errors that rise.

Fires: a link that has been up is down for a minute; went down twice within an hour; runs slower than before, or than
that of all other nodes of its job (three at least); its errors rose in ten looks, a minute apart; or its counters
cannot be read for a minute.
Names: the node and the link, with the times.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.analysis.links import DOWN_S, PEERS, Rates, complaints, rates_of, rises, rising_of
from slurm_watchdog.analysis.slurm_nodes import nodes_to_judge
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Finding, Severity
from slurm_watchdog.model.node_view import LinkView, NodeView

LINKS_PROBE = "links"  # The agent's child that reads counters (slurm_watchdog.agent.collectors.link).


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each link of the nodes that have something to tell."""
    unlike = _unlike(view)
    silent = set(view.silent_nodes)
    asked = {node.name: node for node in nodes_to_judge(view)}
    asked |= {node.name: node for node, _ in unlike.values()}
    findings = []
    for name, node in sorted(asked.items()):
        if name in silent:
            continue
        findings += _of_adapters(view, node)
        findings += [_finding(view, node, link, unlike[name][1] if name in unlike else {}) for link in node.links]
    return findings


def _of_adapters(view: ClusterView, node: NodeView) -> list[Finding]:
    """An adapter whose counters cannot be read: its driver or its firmware does not answer."""
    finding = SPEC.about(f"link:{node.name}/adapters")
    hung = next((probe for probe in node.hung_probes if probe.probe == LINKS_PROBE), None)
    if hung is None:
        asked = view.asked is None or finding.subject in view.asked
        return [finding.ok(f"the adapters of {node.name} answer")] if asked and node.links else []
    if hung.seconds < DOWN_S:
        return [replace(finding, duration_s=hung.seconds)]
    reason = f"a network adapter has not let its counters be read for {hung.seconds:.0f} s"
    return [
        finding.bad(
            f"On {node.name} {reason}: its driver or its firmware does not answer.",
            culprits=(Culprit(node=node.name, reason=reason),),
            duration_s=hung.seconds,
        )
    ]


def _unlike(view: ClusterView) -> dict[str, tuple[NodeView, Rates]]:
    """The nodes of jobs whose links do not all run at the same rates, with the rates of all nodes of the job."""
    found: dict[str, tuple[NodeView, Rates]] = {}
    nodes: dict[str, NodeView] = {}
    for job in view.ageless_jobs:
        if len(job.job.nodes) <= PEERS:
            continue
        nodes = nodes or {node.name: node for node in view.nodes}
        mine = [nodes[name] for name in job.job.nodes if name in nodes]
        if len({node.rates for node in mine if node.rates}) > 1:
            rates = rates_of(mine)
            found |= {node.name: (node, rates) for node in mine}
    return found


def _finding(view: ClusterView, node: NodeView, link: LinkView, rates: Rates) -> Finding:
    name = link.link.name
    jobs = {job.job.job_id: job.job.nodes for job in view.ageless_jobs if node.name in job.job.nodes}
    finding = SPEC.about(f"link:{node.name}/{name}", *jobs)
    peers = {each for nodes in jobs.values() for each in nodes} if rises(link) else set()
    rising = rising_of(each for each in view.nodes if each.name in peers)
    wrong = complaints(node, link, view.now, rates, rising)
    if not wrong:
        return finding.ok(f"link {name} of {node.name} is up") if link.link.up else finding
    first = wrong[0]
    return finding.bad(
        f"Link {name} ({link.link.kind}) of {node.name} {first.text}.",
        severity=Severity.INFO if first.signal == "errors" else Severity.WARNING,
        duration_s=max(0.0, view.now - first.since),
        culprits=(Culprit(node=node.name, link=name, reason=first.text),),
        facts=tuple(f"{name} {each.text}" for each in wrong[1:]),
    )


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.NODE,
    blames_node=0.5,
    sentence="A network link has a fault",
    steps_continue=True,
    why_no_action="a job that hangs or slows for it is acted on as that",
    alerts=("SlurmWatchdogSlow",),
    hint=Hint(
        usually="A cable, a transceiver or a port of the switch; an adapter that is too hot.",
        try_next="mlxlink -d DEVICE, ibdiagnet, ethtool -m; the same port with another cable.",
        documented="sysfs-class-infiniband (counters); mlxlink",
    ),
)
