"""`gpu_fault`: the driver, the kernel or the GPU reports that something is broken, and what is to blame.

Fires: the driver does not answer for 60 s; a GPU is off the bus; an Xid or a kernel line blames hardware or
driver; uncorrectable ECC; a row cannot be remapped or waits to be; fewer PCIe lanes under load.
Names: the GPU by UUID and slot, the node, and the job that computes on it.
Acts: where hardware is proven broken, any restart of the job avoids the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from slurm_watchdog.analysis.slurm_nodes import is_quiet_gpu, nodes_in_service
from slurm_watchdog.base.text import duration
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.knowledge.kernel_causes import ENDS, things_of
from slurm_watchdog.knowledge.limits import span
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit, Finding, Severity
from slurm_watchdog.model.node_view import GpuView, NodeView, SeenEvent
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent

GONE = ("GPU_IS_LOST", "does not list this GPU any more", "RESET_REQUIRED", "GPU_NOT_FOUND")
"""Words of a GPU's row that mean the GPU itself is not there: NVML's names, and the agent's own for one that
vanished."""
GPU_EVENTS = ("xid", "gpu", "nvlink", "nvswitch", "sxid", "amdgpu")  # Beginnings of names of kernel lines about a GPU.
LOUD = frozenset({FaultSeverity.ERROR, FaultSeverity.CRITICAL})
UNNAMED = "unnamed"  # Place of a GPU that a line of its driver does not name: an assertion prints no address.
DRIVER_SILENT_S = 60.0  # Without an answer of the GPU driver on a node.
SAME_S = 120.0  # A driver's assertions come so close to its own line (Xid 79) about the same GPU.


@dataclass(frozen=True, kw_only=True)
class GpuFault:
    """The kernel, the driver or the GPU itself says that something is broken, and it is not the program.

    Nothing is done about it, unless `except` has a ladder. A restart for what follows from it (a dead rank, a hang)
    avoids the node where the evidence proves that hardware is broken."""

    recent: float = span(600.0, "A line of the kernel or the driver counts for so long.")


def detect(view: ClusterView, settings: GpuFault) -> list[Finding]:
    """One finding for each GPU that has a name, and one for the driver of each node that has GPUs."""
    findings = []
    nodes = nodes_in_service(view)  # someone who resets a GPU on a drained node wants to hear nothing of it
    jobs = JobsOfNodes(view, (node.name for node in nodes))
    for node in nodes:
        if not (node.gpus or node.events):
            continue
        findings.append(_judge_driver(node))
        events = _by_gpu(node)
        named = {gpu.gpu.uuid for gpu in node.gpus}
        findings += [
            _judge_gpu(view, jobs, node, gpu, events.get(gpu.gpu.uuid, ()), settings.recent)
            for gpu in node.gpus
            if gpu.gpu.uuid and (gpu.gpu.uuid in events or not is_quiet_gpu(gpu) or _is_asked(view, gpu))
        ]
        findings += [
            _judge_stranger(view, jobs, node, place, seen, settings.recent)
            for place, seen in events.items()
            if place not in named
        ]
    return findings


def _is_asked(view: ClusterView, gpu: GpuView) -> bool:
    return view.asked is None or f"gpu:{gpu.node}/{gpu.gpu.uuid}" in view.asked


def _by_gpu(node: NodeView) -> dict[str, tuple[SeenEvent, ...]]:
    """The kept lines about GPUs, by UUID where the PCI address is one of the node's GPUs, else by that address."""
    by_address = {gpu.gpu.pci_bus_id: gpu.gpu.uuid for gpu in node.gpus if gpu.gpu.pci_bus_id}
    found: dict[str, tuple[SeenEvent, ...]] = {}
    unnamed: list[SeenEvent] = []
    for seen in unended(node.events):
        event = seen.event
        place = event.gpu_uuid or by_address.get(event.pci_bus_id or "") or _of_process(node, event.pid)
        place = place or event.pci_bus_id or (event.device if event.name.startswith("accelerator") else None)
        if place and is_of_gpu(event):
            found[place] = (*found.get(place, ()), seen)
        elif event.name.startswith("gpu_") and event.severity is FaultSeverity.CRITICAL:
            unnamed.append(seen)
    named = [each.at for seen in found.values() for each in seen if each.event.severity is FaultSeverity.CRITICAL]
    unnamed = [seen for seen in unnamed if not any(abs(seen.at - at) <= SAME_S for at in named)]
    return {**found, UNNAMED: tuple(unnamed)} if unnamed else found


def unended(events: Sequence[SeenEvent]) -> list[SeenEvent]:
    """The lines but for those about a device which its driver reported later as recovered."""
    over = {
        (name, thing): seen.at
        for seen in events
        for name in ENDS.get(seen.event.name, ())
        for thing in things_of(seen.event)
    }
    return [
        seen
        for seen in events
        if not any(over.get((seen.event.name, thing), -math.inf) >= seen.at for thing in things_of(seen.event))
    ]


def is_of_gpu(event: NodeEvent) -> bool:
    """Whether a line is about a GPU or a switch between them; an earlier release does not send the part."""
    return event.xid is not None or event.part == "gpu" or event.name.startswith(GPU_EVENTS)


def _of_process(node: NodeView, pid: int | None) -> str | None:
    """The one GPU on which the process that a line names computes; None if there are several, or none is known.

    Only for lines whose address belongs to no known GPU: where the addresses are not known, or the GPU is gone.
    """
    found = {gpu.gpu.uuid for gpu in node.gpus if pid is not None and pid in (gpu.gpu.pids or ()) and gpu.gpu.uuid}
    addressed = any(gpu.gpu.pci_bus_id for gpu in node.gpus)
    return found.pop() if len(found) == 1 and not addressed else None


def is_hardware(seen: SeenEvent) -> bool:
    """Whether the line blames the hardware or the driver, not the program that ran."""
    event = seen.event
    if event.xid is not None:
        row = describe_xid(event.xid)
        wrong = row.blame in ("hardware", "driver") or row.needs_reset or event.may_exclude_node
        return wrong and event.severity in LOUD
    return event.severity in LOUD


def _loud(view: ClusterView, events: Sequence[SeenEvent], recent_s: float) -> list[SeenEvent]:
    return [seen for seen in events if view.now - seen.at <= recent_s and is_hardware(seen)]


def _judge_driver(node: NodeView) -> Finding:
    hung = next((probe for probe in node.hung_probes if probe.probe == "nvml"), None)
    finding = SPEC.about(f"node:{node.name}")
    if hung is None:
        return finding.ok(f"the GPU driver on {node.name} answers")
    if hung.seconds < DRIVER_SILENT_S:
        return replace(finding, duration_s=hung.seconds)
    return finding.bad(
        f"The GPU driver on {node.name} has not answered for {hung.seconds:.0f} s: a GPU there is in trouble, "
        "and which one cannot be asked any more.",
        culprits=(Culprit(node=node.name, reason=f"NVML has not answered for {hung.seconds:.0f} s"),),
        facts=(f"on {node.name}: dmesg | grep -i -e xid -e nvrm",),
        duration_s=hung.seconds,
    )


def _judge_gpu(
    view: ClusterView, jobs: JobsOfNodes, node: NodeView, gpu: GpuView, events: Sequence[SeenEvent], recent_s: float
) -> Finding:
    """What a GPU says of itself, then what was said about it."""
    row, loud = gpu.gpu, _loud(view, events, recent_s)
    finding = SPEC.about(f"gpu:{node.name}/{row.uuid}")
    complaints = [*_states(view, gpu, recent_s), *(_line(view, seen) for seen in loud)]
    if not complaints:
        unread = row.utilization_ratio is None and row.error
        return finding if unread else finding.ok("nothing is wrong with it")
    where = f"GPU {row.index} of {node.name} ({row.uuid}{f', PCI {row.pci_bus_id}' if row.pci_bus_id else ''})"
    ranks = jobs.ranks_on(node.name, row.uuid, {*(row.pids or ()), *_pids(loud)})
    gone = any(word in (row.error or "") for word in GONE)
    rose_at = gpu.ecc_uncorrected_rose_at
    # Dead and waiting ranks are a consequence of what stops programs. A card that only should be exchanged one day
    # explains nothing.
    stops = gone or _are_critical(loud) or (rose_at is not None and view.now - rose_at <= recent_s)
    finding = _bad(view, finding, node, where, row.uuid, complaints, loud, ranks)
    finding = replace(finding, job_ids=_jobs_of(ranks) if stops else ())
    return _to_avoid(finding, node, loud, broken=gone or row.remap_failed is True)


def _are_critical(events: Iterable[SeenEvent]) -> bool:
    return any(seen.event.severity is FaultSeverity.CRITICAL for seen in events)


def _bad(
    view: ClusterView,
    finding: Finding,
    node: NodeView,
    where: str,
    uuid: str | None,
    complaints: Sequence[tuple[Severity, str]],
    loud: Sequence[SeenEvent],
    ranks: Ranks,
) -> Finding:
    """The culprit is the one rank that is on the GPU, or the one process that its lines name."""
    pids = {rank.process.pid for _, rank in ranks} or _pids(loud)
    pid = pids.pop() if len(pids) == 1 else None
    rank = ranks[0][1].process.rank if ranks and pid is not None else None
    reason = complaints[0][1]
    return finding.bad(
        f"{where}: {reason}.",
        severity=max((each[0] for each in complaints), key=list(Severity).index),
        culprits=(Culprit(node=node.name, gpu_uuid=uuid, pid=pid, rank=rank, reason=reason),),
        facts=(
            *(text for _, text in complaints[1:9]),
            *(
                f"rank {rank.process.rank} of job {job.job.job_id} (pid {rank.process.pid}) "
                f"{'computes' if rank.alive else 'computed'} on it"
                for job, rank in ranks
            ),
        ),
        duration_s=max(0.0, view.now - loud[0].at) if loud else 0.0,
    )


def _states(view: ClusterView, gpu: GpuView, recent_s: float) -> list[tuple[Severity, str]]:
    """(severity, half a sentence) for everything the GPU's own values complain of."""
    row, rose_at, width = gpu.gpu, gpu.ecc_uncorrected_rose_at, gpu.gpu.pcie_link_width
    count = f"{row.ecc_uncorrected} in all" if row.ecc_uncorrected is not None else "how many is not known"
    uncorrected = f"its memory had an error that could not be corrected ({count}): the hardware"
    lost = row.error and any(word in row.error for word in GONE)
    narrow = width is not None and 0 < width < (row.pcie_link_width_max or 0) and gpu.busy_since is not None
    waits, failed = "waits for a reset of the GPU to be", "a bad row of its memory has no spare left: exchange the GPU"
    rows: tuple[tuple[object, Severity, str], ...] = (
        (lost, Severity.CRITICAL, f"it is lost, the driver reports: {row.error}"),
        (rose_at is not None and view.now - rose_at <= recent_s, Severity.CRITICAL, uncorrected),
        (row.remap_failed, Severity.CRITICAL, failed),
        (row.remap_pending and not row.remap_failed, Severity.WARNING, f"a bad row of its memory {waits} replaced"),
        (row.retired_pages_pending, Severity.WARNING, f"a bad page of its memory {waits} retired"),
        (narrow, Severity.WARNING, f"its PCIe link runs with {width} of {row.pcie_link_width_max} lanes under load"),
    )
    return [(severity, words) for wrong, severity, words in rows if wrong]


def _line(view: ClusterView, seen: SeenEvent) -> tuple[Severity, str]:
    event = seen.event
    severity = Severity.CRITICAL if event.severity is FaultSeverity.CRITICAL else Severity.WARNING
    age = f"{duration(max(0.0, view.now - seen.at))} ago"  # In minutes soon: an incident does not change each second.
    if event.xid is None:
        return severity, f"{age}: {event.line}"
    row = describe_xid(event.xid)
    return severity, f"Xid {event.xid} {age}: {row.text} (usually the {row.blame})"


def _judge_stranger(
    view: ClusterView, jobs: JobsOfNodes, node: NodeView, place: str, events: Sequence[SeenEvent], recent_s: float
) -> Finding:
    """Lines about a GPU that NVML does not list: off the bus before the agent started, or a switch."""
    finding, loud = SPEC.about(f"gpu:{node.name}/{place}"), _loud(view, events, recent_s)
    if not loud:
        return finding.ok("nothing is wrong with it")
    ranks = jobs.ranks_on(node.name, "", _pids(loud))
    job_ids = _jobs_of(ranks)
    addressed = any(gpu.gpu.pci_bus_id for gpu in node.gpus)
    where = f"The GPU or switch at {place} of {node.name}{', which NVML does not list' if addressed else ''}"
    if place == UNNAMED:
        where = f"A GPU of {node.name}, which its driver does not name"
        there = jobs.on(node.name)
        job_ids = tuple(job.job.job_id for job in there) if len(there) == 1 else ()
    finding = _bad(view, finding, node, where, None, [_line(view, seen) for seen in loud], loud, ranks)
    return _to_avoid(replace(finding, job_ids=job_ids), node, loud) if _are_critical(loud) else finding


def _to_avoid(finding: Finding, node: NodeView, events: Iterable[SeenEvent], *, broken: bool = False) -> Finding:
    """The finding with its node as one that a restart avoids, where what was seen proves that hardware there is broken.

    Good enough to act on only where it is known whose ranks computed on it.
    """
    if not (broken or any(seen.event.may_exclude_node for seen in events)):
        return finding
    return replace(finding, exclude_nodes=(node.name,), actionable=bool(finding.job_ids))


Ranks = list[tuple[JobView, ProcessView]]


class JobsOfNodes:
    """Which jobs have a node, and which of their ranks are there: of thousands of faults each looks at its
    own node, and the ranks of all jobs are gone through once. Found out when it is asked first."""

    def __init__(self, view: ClusterView, nodes: Iterable[str]) -> None:
        """`nodes` are those that will be asked about."""
        self._view = view
        self._nodes = frozenset(nodes)

    @cached_property
    def _jobs(self) -> dict[str, list[JobView]]:
        found: dict[str, list[JobView]] = {}
        for job in self._view.jobs:
            for name in self._nodes.intersection(job.job.nodes):
                found.setdefault(name, []).append(job)
        return found

    @cached_property
    def _ranks(self) -> dict[str, Ranks]:
        found: dict[str, Ranks] = {}
        for job in self._view.ageless_jobs:
            here = self._nodes.intersection(job.job.nodes)
            for rank in job.ranks if here else ():
                if rank.node in here:
                    found.setdefault(rank.node, []).append((job, rank))
        return found

    @cached_property
    def _seats(self) -> set[tuple[str, str, str, int]]:
        """(job, node, uuid, pid) of the GPUs that ranks were seen on."""
        return {
            (job.job.job_id, each.view.node, each.view.gpu.uuid, each.pid)
            for job in self._view.ageless_jobs
            for each in job.gpus
            if each.view.node in self._nodes
        }

    def on(self, node: str) -> Sequence[JobView]:
        """The jobs on a node, in the order of the view."""
        return self._jobs.get(node, ())

    def ranks_on(self, node: str, uuid: str, pids: set[int]) -> Ranks:
        """The ranks on a GPU: those of `pids`, and those that were seen on it before. A lost GPU lists no one
        any more."""
        return [
            (job, rank)
            for job, rank in self._ranks.get(node, ())
            if rank.process.pid in pids or (job.job.job_id, node, uuid, rank.process.pid) in self._seats
        ]


def _pids(events: Iterable[SeenEvent]) -> set[int]:
    """The processes that lines name."""
    return {seen.event.pid for seen in events if seen.event.pid is not None}


def _jobs_of(ranks: Ranks) -> tuple[str, ...]:
    return tuple(dict.fromkeys(job.job.job_id for job, _ in ranks))


SPEC = DetectorSpec(
    detect=detect,
    settings=GpuFault,
    subject=Subject.GPU,
    severity=Severity.CRITICAL,
    blames_node=1.0,
    sentence="A GPU has a fault",
    steps_continue=True,
    wants_evidence=True,
    site_may_act=True,
    alerts=("SlurmWatchdogGpuFault",),
)
