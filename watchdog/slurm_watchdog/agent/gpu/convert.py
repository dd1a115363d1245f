"""GPUs and their events from what the `nvml` child read: units, names, and nothing made up."""

from __future__ import annotations

import msgspec

from slurm_watchdog.agent.workers.answer_types import GpuHealthRow, GpuProcesses, GpuRow
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.observations import FaultSeverity, Gpu, NodeEvent

MAX_LINE = 200
"""Characters of an event's line."""

THROTTLE = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of NVML's mask (nvmlClocksEventReason*, nvml.h), named as nvidia-smi names them in clocks_event_reasons.*."""


def parse_throttle(mask: int) -> tuple[str, ...]:
    """The names of all bits in `mask`, lowest first; an unknown bit is `bit_N`."""
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return tuple(THROTTLE.get(1 << bit, f"bit_{bit}") for bit in bits)


def parse_bus_id(text: str) -> str:
    """NVML's `00000000:C1:00.0` as the kernel writes it in sysfs and in its log: `0000:c1:00.0`."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def make_gpu(row: GpuRow, processes: GpuProcesses | None = None, health: GpuHealthRow | None = None) -> Gpu:
    """One GPU from the row that the child read in this tick, and from its newest processes and health."""
    used, total = row.memory_bytes or (None, None)
    held = _by_pid(processes) if processes is not None else None
    slow = msgspec.structs.asdict(health) if health is not None else {}
    memory_clock_mhz = slow.pop("memory_clock_mhz", None)
    return Gpu(
        uuid=row.uuid, index=row.index, pci_bus_id=None if row.bus_id is None else parse_bus_id(row.bus_id),
        minor=row.minor, name=row.name, utilization_ratio=_scaled(row.utilization_percent, 1 / 100),
        sm_clock_hz=_scaled(row.sm_clock_mhz, 1e6), power_w=_scaled(row.power_mw, 1 / 1000),
        temperature_c=_scaled(row.temperature_c, 1.0), memory_used_bytes=used, memory_total_bytes=total,
        throttle=None if row.throttle_mask is None else parse_throttle(row.throttle_mask), error=row.error,
        pids=None if held is None else tuple(held),
        process_memory_bytes=None if held is None else tuple(held.values()),
        memory_clock_hz=_scaled(memory_clock_mhz, 1e6), **slow,
    )  # fmt: skip


def _by_pid(processes: GpuProcesses) -> dict[int, int | None]:
    """Bytes by pid; a pid that is listed twice (MIG) holds the sum."""
    held: dict[int, int | None] = {}
    for pid, used in sorted(processes, key=lambda row: row[0]):
        held[pid] = (held.get(pid) or 0) + used if used is not None else held.get(pid)
    return held


XID_EVENT, ECC_EVENT = 0x8, 0x2
"""nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError (nvml.h)."""


def parse_event(
    kind: int, data: int, gpu: Gpu | None, age_s: float, repeats: int = 0, uuid: str | None = None
) -> NodeEvent:
    """One event of NVML's set about `gpu` (None: not known which). `data` of an Xid event is its number."""
    name, xid, severity, may_exclude = f"nvml_event_{kind:#x}", None, FaultSeverity.WARNING, False
    line = f"NVML announced event {kind:#x} ({data})"
    if kind == XID_EVENT:
        row = describe_xid(data)
        name, xid, severity, may_exclude = "xid", data, row.severity, row.may_exclude_node
        line = f"NVML: Xid {data}, {row.name}: {row.text}"
    elif kind == ECC_EVENT:
        name, severity = "gpu_ecc_uncorrected", FaultSeverity.ERROR
        line = "NVML: a memory error that ECC could not correct"
    return NodeEvent(
        source="nvml",
        name=name,
        severity=severity,
        age_s=age_s,
        line=line[:MAX_LINE],
        repeats=repeats,
        xid=xid,
        gpu_uuid=gpu.uuid if gpu is not None else uuid,
        pci_bus_id=gpu.pci_bus_id if gpu is not None else None,
        may_exclude_node=may_exclude,
    )


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else round(value * factor, 3)


def without_values(gpu: Gpu, error: str) -> Gpu:
    """Which GPU it is, and why there is nothing to say about it."""
    return Gpu(
        uuid=gpu.uuid,
        index=gpu.index,
        pci_bus_id=gpu.pci_bus_id,
        minor=gpu.minor,
        name=gpu.name,
        error=error,
    )
