"""`host_fault`: the kernel reports that a part of a node is broken that is not a GPU: memory, processor, PCIe, network
adapter, disk, local filesystem, or heat.

Fires: at once for an uncorrected or fatal error (critical), and for one that was survived (warning); for corrected
errors in 10 minutes of an hour (warning).
Names: the node, the part (DIMM, PCI device, adapter, disk), the kernel's line, and the jobs that ran there.
Acts: after an uncorrected or fatal error any restart of its job avoids the node, unless three nodes have the same
within 10 min.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_watchdog.analysis.slurm_nodes import CROWD_NODES, CROWD_S, nodes_in_service
from slurm_watchdog.base.text import plural
from slurm_watchdog.detect.gpu_fault import LOUD, JobsOfNodes, is_of_gpu, unended
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.diagnose.kernel_log.verdict import broken_disk, disk_of
from slurm_watchdog.knowledge.host_parts import PARTS, SURVIVED
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity
from slurm_watchdog.model.node_view import NodeView, SeenEvent
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent

RECENT_S = 3600.0  # A line counts for so long: as long as the controller keeps it.
SAME_S = 60.0  # A PCIe error and the GPU's own line about it come within this time.
RECOVERS_S = 10.0  # A device on the bus is given so long to be recovered, or to be named as a GPU by its driver.
SURVIVED_MINUTES, CORRECTED_MINUTES = 3, 10
"""Errors that a driver usually survives, or that were corrected, are reported when they came in so many minutes of the
hour: a burst of thousands within a minute is one event."""
MAX_LINES = 8
_LABEL = re.compile(r"\bon (\S*(?:DIMM|_MC#)\S*)")
"""EDAC: `1 UE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0 (…)`."""


@dataclass(frozen=True)
class _Fault:
    """What the lines of a node say about one place of it."""

    node: NodeView
    place: str
    part: str
    seen: tuple[SeenEvent, ...]  # Those that it is reported for, oldest first.
    what: str
    detail: str  # The DIMM or device, and how often; empty: not known.
    fatal: bool


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each place of a node about which its kernel logged something."""
    nodes = nodes_in_service(view)
    faults = [fault for node in nodes if node.events for fault in _faults(view, node)]
    jobs = JobsOfNodes(view, (fault.node.name for fault in faults))
    crowds = _crowds(faults)
    found = [_finding(view, jobs, fault, crowds) for fault in faults]
    told = {each.subject for each in found}
    names = {node.name for node in nodes}
    over = [each for each in sorted(view.asked or ()) if each.startswith("host:") and each not in told]
    well = [SPEC.about(each) for each in over if each[5:].partition("/")[0] in names]
    if view.watched_s >= RECENT_S:  # before, a controller that was started again does not know what was reported
        well = [each.ok("the kernel has reported no error of it lately") for each in well]
    return [*found, *well]


def _faults(view: ClusterView, node: NodeView) -> list[_Fault]:
    places: dict[str, list[SeenEvent]] = {}
    gpus = [each.at for each in node.events if is_of_gpu(each.event) and each.event.may_exclude_node]
    remote = {each.event.device for each in node.events if each.event.name == "nvme_fabric"}
    standing = {id(each) for each in unended(node.events)}
    for seen in node.events:
        event, age_s = seen.event, view.now - seen.at
        if age_s > RECENT_S or event.part not in PARTS or is_of_gpu(event):
            continue
        if (event.part == "pcie" and age_s < RECOVERS_S) or (event.severity in LOUD and id(seen) not in standing):
            continue
        if event.part == "pcie" and any(abs(seen.at - at) <= SAME_S for at in gpus):
            continue  # the bus of a GPU that `gpu_fault` names
        place = _place(event)
        if place and place not in remote:
            places.setdefault(place, []).append(seen)
    found = (_fault(node, place, seen) for place, seen in places.items())
    return [each for each in found if each is not None]


def _place(event: NodeEvent) -> str:
    """Where in its node: one fault is one incident. Empty: about no part of the node."""
    disk = disk_of(event.device)
    if event.part == "filesystem" or disk is not None:
        local = disk is not None and not disk.startswith(("loop", "rbd", "nbd", "drbd"))
        return re.sub(r"^(nvme\d+)n\d+$", r"\1", disk) if disk and local else ""
    return PARTS[event.part].place or event.pci_bus_id or event.device or event.part


def _fault(node: NodeView, place: str, seen: Sequence[SeenEvent]) -> _Fault | None:
    """The worst of what was said about one place, if it was said often enough to be reported."""
    by_weight: dict[str, list[SeenEvent]] = {}
    for each in seen:
        by_weight.setdefault(_weight(each.event), []).append(each)
    least = {"broken": 1, "failed": 1, "survived": SURVIVED_MINUTES, "often": CORRECTED_MINUTES}
    for weight, minutes in least.items():
        found = by_weight.get(weight, ())
        spread = len({each.at // 60 for each in found})
        if not found or spread < minutes:
            continue
        first = min(found, key=lambda each: list(PARTS).index(each.event.part))
        words = PARTS[first.event.part]
        what = {"broken": words.broken, "failed": words.failed}.get(weight, words.often)
        rate = f"{plural(sum(1 + each.event.repeats for each in found), 'line')} in {spread} min of the last hour"
        labels = (match[1] for each in seen if (match := _LABEL.search(each.event.line)))
        part = next(labels, "") or first.event.device or first.event.pci_bus_id  # the DIMM if any line names one
        detail = ", ".join(each for each in (part, rate if minutes > 1 else "") if each)
        if what:
            return _Fault(node, place, first.event.part, tuple(found), what, detail, fatal=weight == "broken")
    return None


def _weight(event: NodeEvent) -> str:
    """`broken`: certainly. An NVMe disk of the node itself is; what is called sd may be a stick, or elsewhere."""
    if event.may_exclude_node or (broken_disk(event) or "").startswith("nvme"):
        return "broken"
    if event.severity in LOUD:
        return "survived" if event.name in SURVIVED else "failed"
    return "often" if event.severity is FaultSeverity.WARNING else ""


def _crowds(faults: Sequence[_Fault]) -> Counter[tuple[str, int]]:
    """(part, stretch of time) -> nodes that had their first uncorrected error of it then."""
    first: dict[tuple[str, str], float] = {}
    for fault in faults:
        if fault.fatal:
            key = fault.node.name, fault.part
            first[key] = min(fault.seen[0].at, first.get(key, fault.seen[0].at))
    return Counter((part, int(at // CROWD_S)) for (_, part), at in first.items())


def _finding(view: ClusterView, jobs: JobsOfNodes, fault: _Fault, crowds: Counter[tuple[str, int]]) -> Finding:
    node, seen = fault.node.name, fault.seen
    began = seen[0].at
    ran = [job.job.job_id for job in jobs.on(node) if _had_node(view, job, seen[-1].at)]
    alike = sum(crowds[fault.part, int(began // CROWD_S) + stretch] for stretch in (-1, 0, 1)) if fault.fatal else 0
    shared = alike >= CROWD_NODES
    lines = [f"the kernel of {node}, {max(0.0, view.now - each.at):.0f} s ago: {each.event.line}" for each in seen]
    jobs_were = ("jobs", "were") if len(ran) > 1 else ("job", "was")
    where = f"; {jobs_were[0]} {', '.join(ran)} {jobs_were[1]} running there" if ran else ""
    why = f"{alike} nodes have the same at about the same time: the cause is what they share, so none is excluded"
    detail = f" ({fault.detail})" if fault.detail else ""
    reason = f"{fault.what[0].lower()}{fault.what[1:]}{detail}"
    subject = f"host:{node}/{fault.place}" + ("" if fault.fatal else "/errors")  # an incident keeps its severity
    finding = SPEC.about(subject, *(ran if fault.fatal else ()))
    return finding.bad(
        f"{fault.what} on {node}{detail}{where}.",
        severity=Severity.CRITICAL if fault.fatal else Severity.WARNING,
        culprits=(Culprit(node=node, reason=reason),) if fault.fatal else (),
        facts=(*((why,) if shared else ()), *lines[:MAX_LINES]),
        duration_s=max(0.0, view.now - began),
        actionable=fault.fatal and bool(ran) and not shared,
        exclude_nodes=(node,) if fault.fatal and not shared else (),
    )


def _had_node(view: ClusterView, job: JobView, at: float) -> bool:
    """Whether this run of the job had begun by then."""
    start_at = job.job.start_at
    by_slurm_s = 0.0 if view.date is None or start_at is None else view.date - start_at
    return max(job.run_age_s, by_slurm_s) >= view.now - at


SPEC = DetectorSpec(
    detect=detect,
    subject=Subject.NODE,
    severity=Severity.CRITICAL,
    blames_node=1.0,
    sentence="Hardware of a node has a fault",
    steps_continue=True,
    explains=(IncidentKind.DEAD_RANK, IncidentKind.LOG_ERROR),
    site_may_act=True,
    alerts=("SlurmWatchdogHardwareFault",),
    hint=Hint(
        usually="A memory module, a network adapter, a disk, a cable or a fan that has to be repaired or exchanged.",
        try_next="Drain the node (scontrol); its management controller's log (ipmitool sel list, racadm), "
        "ras-mc-ctl --errors, lspci -vv of the device and smartctl -a of the disk show more; then record the repair "
        "(slurm-watchdog nodes, with --mended).",
        documented="Linux admin guide, RAS",
    ),
)
