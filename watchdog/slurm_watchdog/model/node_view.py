"""Nodes, GPUs and mounts as detectors see them. Pure."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.observations import Gpu, GpuHolder, HungProbe, Link, MountProbe, NodeEvent, Pressure, Usage


class Rise(Struct):
    """A counter of corrected errors that rose in look after look, never a quarter of an hour apart."""

    counter: str  # `ecc_corrected`, `pcie_replays` or `nvlink_errors`; of a link `errors`.
    first_at: float
    last_at: float
    times: int


class GpuView(Struct):
    """One GPU with what its recent past tells. `*_at` and `*_since` are on the clock of `ClusterView.now`."""

    node: str
    gpu: Gpu
    idle_since: float | None = None  # Utilisation has been (almost) nothing in every look since; None: it is not.
    busy_since: float | None = None  # Utilisation has been high in every look since.
    ecc_uncorrected_rose_at: float | None = None  # When its count of uncorrected memory errors was last seen to rise.
    rising: tuple[Rise, ...] = ()  # Those of its counters of corrected errors that rise again and again.


def work_ratio(gpu: Gpu) -> float | None:
    """How much of it does what only work does: its tensor cores, or its memory. None: it does not say."""
    known = [ratio for ratio in (gpu.tensor_active_ratio, gpu.dram_active_ratio) if ratio is not None]
    return max(known, default=None)


class SeenEvent(Struct):
    """A line of the kernel or the driver, and when it was said (on the clock of `ClusterView.now`)."""

    at: float
    event: NodeEvent


class SeenMount(Struct):
    """The newest probe of a mount on a node."""

    at: float
    probe: MountProbe


class SeenUsage(Struct):
    """What was in use of a limit when a node last had it; kept for a while when its group is gone."""

    at: float
    usage: Usage
    refused_at: float | None = None  # When its count of those who went without was last seen to rise.


class LinkView(Struct):
    """One network link with what its recent past tells."""

    link: Link
    down_since: float | None = None  # It was up since the node's start and is not now: when it was first seen so.
    went_down: tuple[float, ...] = ()  # When it was seen to have gone down, within the last hour, oldest first.
    best_rate_bits_s: int | None = None  # The most at which it was seen to run.
    usual_bytes_s: float | None = None  # Went through it, both ways: average over about an hour. None: few looks.
    rising: Rise | None = None  # Of its errors, where they rise look after look.
    carried: bool = False  # Something was seen to go through it.


class NodeView(Struct):
    """What a node itself is like, as its newest whole report said. `*_at` are on the clock of `ClusterView.now`."""

    name: str
    reported_at: float  # When its newest whole report was made.
    boot_id: str = ""
    gpus: tuple[GpuView, ...] = ()
    events: tuple[SeenEvent, ...] = ()  # Of the last hour at most, oldest first, since the agent was started.
    holders: tuple[GpuHolder, ...] = ()
    released: tuple[GpuHolder, ...] = ()  # Those that held one within the last day and do not any more.
    mounts: tuple[SeenMount, ...] = ()
    hung_probes: tuple[HungProbe, ...] = ()
    problems: tuple[str, ...] = ()
    usages: tuple[SeenUsage, ...] = ()
    pressures: tuple[Pressure, ...] = ()
    links: tuple[LinkView, ...] = ()
    rates: tuple[tuple[str, str, int], ...] = ()  # (name, kind, bits a second) of its links that are up.
    quiet: bool = False  # Nothing in it that a detector could speak of: slurm_watchdog.analysis.slurm_nodes.


class SlurmNodeView(Struct):
    """Slurm's word about a node."""

    name: str
    state: str  # In capitals, such as IDLE, ALLOCATED, DOWN*, MIXED+DRAIN.
    reason: str = ""
    runs_job: bool = False  # Whether a running job, of whatever partition, has it: then it is in use.
    back_at: float | None = None
    """When it was returned to service (from maintenance, power saving, a drain); None: it was not seen to be."""
    lost_listings: int | None = None
    """In so many listings in a row, up to the newest, Slurm has said that it lost the node; None: not counted."""


class UnreachedNode(Struct, kw_only=False):
    """A node whose machine does not answer, while others do."""

    name: str
    tries: int  # In a row, since its agent's newest report.
    seconds: float  # Since the first of them.
