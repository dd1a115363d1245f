"""What several detectors ask about nodes: who runs there, how many are silent."""

from __future__ import annotations

from slurm_watchdog.analysis.links import has_complaint
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.node_view import GpuView, NodeView, SeenUsage, SlurmNodeView
from slurm_watchdog.model.slurm_states import is_away

CROWD_S, CROWD_NODES = 600.0, 3
"""So many nodes with the same kind of fault within this time: what they share is to blame. By chance it happens
once in centuries: 6.5 failures in 1,000 node-days (A. Kokolis et al., Revisiting Reliability in Large-Scale Machine
Learning Research Clusters, HPCA 2025, arXiv:2410.21680, RSC-1) are 0.05 in 10 min on 1,000 nodes."""


def asked_nodes(view: ClusterView) -> frozenset[str]:
    """The nodes of which it has to be said that they are well."""
    if view.asked is None:
        return frozenset(node.name for node in view.nodes)
    return frozenset(subject[5:] for subject in view.asked if subject.startswith("node:"))


def is_quiet(node: NodeView) -> bool:
    """Whether nothing in it speaks of anything but health: no line of the kernel, no error, no holder, no
    counter that tells.

    Of ten thousand nodes nearly all are so. A detector may pass over them: it would find them well. What is
    compared among the GPUs of a job (clocks, power, heat) is no matter of quiet.
    """
    if node.events or node.holders or node.released or node.hung_probes or node.problems:
        return False
    if any(seen.probe.error is not None or not seen.probe.responding for seen in node.mounts):
        return False
    if is_tight(node) or any(map(has_complaint, node.links)):
        return False
    return all(is_quiet_gpu(view) for view in node.gpus)


NEAR_FROM = 0.8  # Share of a limit below which no one asks how near it is.
WAITS_FROM = 0.1  # Share of a minute in which all that a node, or a job on it, had to do waited.


def is_tight(node: NodeView) -> bool:
    """Whether a job on it may be near a limit."""
    return any(map(is_near, node.usages)) or any(each.full_ratio >= WAITS_FROM for each in node.pressures)


def is_near(seen: SeenUsage) -> bool:
    """Whether something near its limit, or beyond it, is to be told."""
    return seen.usage.ratio >= NEAR_FROM or seen.refused_at is not None


def is_quiet_gpu(view: GpuView) -> bool:
    """Whether none of its own values complains of anything."""
    gpu = view.gpu
    return not (
        gpu.error
        or view.ecc_uncorrected_rose_at is not None
        or gpu.remap_failed
        or gpu.remap_pending
        or gpu.retired_pages_pending
        or gpu.pcie_link_width != gpu.pcie_link_width_max
    )


def nodes_to_judge(view: ClusterView) -> tuple[NodeView, ...]:
    """Nodes that have something to tell, or about which, or about a GPU of which, an incident is open."""
    if view.asked is None:
        return view.nodes
    asked = {
        subject.partition(":")[2].partition("/")[0]
        for subject in view.asked
        if subject.startswith(("node:", "gpu:", "link:", "host:"))
    }
    odd = _odd_nodes(view.nodes)
    if not asked.difference(node.name for node in odd):
        return odd
    return tuple(node for node in view.nodes if not node.quiet or node.name in asked)


@by_identity
def _odd_nodes(nodes: tuple[NodeView, ...]) -> tuple[NodeView, ...]:
    return tuple(node for node in nodes if not node.quiet)


@by_identity
def _names(nodes: tuple[NodeView, ...]) -> frozenset[str]:
    return frozenset(node.name for node in nodes)


def nodes_in_service(view: ClusterView) -> list[NodeView]:
    """Of these, the ones that report and that Slurm does not have as taken away."""
    out = {*view.silent_nodes, *away_nodes(view)}
    return [node for node in nodes_to_judge(view) if node.name not in out]


def away_nodes(view: ClusterView) -> frozenset[str]:
    """Those that Slurm has as taken away."""
    return _away(view.slurm_nodes)


@by_identity
def _away(nodes: tuple[SlurmNodeView, ...]) -> frozenset[str]:
    return frozenset(node.name for node in nodes if is_away(node.state, node.runs_job))


def jobs_by_node(view: ClusterView) -> dict[str, tuple[str, ...]]:
    """Node -> the jobs that Slurm runs there."""
    found: dict[str, tuple[str, ...]] = {}
    for job in view.ageless_jobs:
        for name in job.job.nodes:
            found[name] = (*found.get(name, ()), job.job.job_id)
    return found


BOOT_S = 600.0  # A node that was just given back may still be starting, as ResumeTimeout of slurm.conf(5) has it.


def may_be_starting(view: ClusterView, node: NodeView, slurm: SlurmNodeView) -> bool:
    """Whether it was returned to service so lately, and has not reported since, that its silence says nothing yet."""
    back_at = slurm.back_at
    return back_at is not None and view.now - back_at < BOOT_S and view.last_heard(node) < back_at


def share_silent(view: ClusterView) -> tuple[int, int]:
    """(silent nodes, nodes that have ever reported), without those that Slurm has as taken away or has just
    given back."""
    silent, away = set(view.silent_nodes), away_nodes(view)
    if silent:
        slurm = {node.name: node for node in view.slurm_nodes}
        away |= {
            node.name
            for node in view.nodes
            if node.name in silent and node.name in slurm and may_be_starting(view, node, slurm[node.name])
        }
    here = _names(view.nodes) - away
    return len(here & silent), len(here)
