"""GPUs with faults, and Xid lines of a node."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.node_view import GpuView, NodeView, SeenEvent
from slurm_watchdog.model.observations import FaultSeverity, Gpu, NodeEvent
from tests.builders.views import cluster, job

NOW = 10_000.0


def card(index: int = 0, *, node: str = "n1", **changes: Any) -> GpuView:
    """A busy card that is well; keys of GpuView and of Gpu may be given together."""
    outer = {name: changes.pop(name) for name in list(changes) if name in GpuView.__struct_fields__}
    given = {
        "uuid": f"GPU-{node}-{index}", "index": index, "pci_bus_id": f"0000:{index:02x}:00.0", "name": "H100",
        "utilization_ratio": 1.0, "pids": (100 + index,), "throttle": (),
        "recent_sm_clock_hz": 1.98e9, "usual_sm_clock_hz": 1.98e9,
    }  # fmt: skip
    past = {"busy_since": NOW - 500.0}
    return GpuView(**{**past, **outer, "node": node, "gpu": Gpu(**{**given, **changes})})


def xid(number: int, severity: FaultSeverity, *, age_s: float = 5.0, **changes: Any) -> SeenEvent:
    given = {
        "source": "kernel_log",
        "name": "xid",
        "xid": number,
        "pci_bus_id": "0000:00:00.0",
        "line": f"NVRM: Xid {number}",
    }
    return SeenEvent(at=NOW - age_s, event=NodeEvent(severity=severity, age_s=0.0, **{**given, **changes}))


def nodes(**changes: Any) -> ClusterView:
    return cluster(job(), nodes=(NodeView(**{"name": "n1", "reported_at": NOW - 2.0, "gpus": (card(),), **changes}),))
