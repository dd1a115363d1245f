"""Settings of a node that may differ from its neighbour's: kernel, driver, network, memory. For children."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from slurm_watchdog.agent.children.requests import ReadNodeSettings, WorkerState

MAX_PORTS = 32
CLASSES = Path("/sys/class")
DEVICES = (
    ("infiniband/*/ports/*", ("state", "phys_state", "rate", "link_layer")),
    ("infiniband/*", ("fw_ver",)),
    ("net/*", ("operstate", "mtu", "speed")),
)
PLAIN_FILES = {
    "transparent_hugepage": "/sys/kernel/mm/transparent_hugepage/enabled",
    "numa_balancing": "/proc/sys/kernel/numa_balancing",
    "cpu_governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "core_pattern": "/proc/sys/kernel/core_pattern",
    "ptrace_scope": "/proc/sys/kernel/yama/ptrace_scope",
    "swappiness": "/proc/sys/vm/swappiness",
    "peer_memory": "/sys/module/nvidia_peermem/version",
    "gdrcopy": "/sys/module/gdrdrv/version",
    "mlx5": "/sys/module/mlx5_core/version",
    "lustre": "/sys/module/lustre/version",
}
_DRIVER = re.compile(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)")


def read_node_settings(request: ReadNodeSettings, worker: WorkerState) -> list[tuple[str, str]]:
    """(name, value) of everything that this node has of the settings."""
    found: dict[str, str] = {
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "cpus": str(os.cpu_count() or 0),
    }
    for name, path in PLAIN_FILES.items():
        if (text := _text(path)) is not None:
            found[name] = text
    parts: tuple[Callable[[], dict[str, str]], ...] = (
        _driver,
        _memory,
        _shared_memory,
        _iommu,
        _devices,
    )
    for part in parts:
        try:
            found |= part()
        except (OSError, ValueError):
            continue
    return [(name, value[:300]) for name, value in found.items()]


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip() or None
    except OSError:
        return None


def parse_driver(text: str) -> str | None:
    """The release in /proc/driver/nvidia/version, of the open kernel module, too."""
    match = _DRIVER.search(text)
    return match[1] if match else None


def _driver() -> dict[str, str]:
    version = parse_driver(_text("/proc/driver/nvidia/version") or "")
    return {"nvidia_driver": version} if version else {}


def _memory() -> dict[str, str]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    found = {}
    for name, label in (("MemTotal", "memory_gib"), ("HugePages_Total", "huge_pages"), ("SwapTotal", "swap_gib")):
        if name in lines:
            number = int(lines[name].split()[0])
            found[label] = str(round(number / 1024**2)) if label.endswith("gib") else str(number)
    return found


def _shared_memory() -> dict[str, str]:
    """/dev/shm is memory: asking it cannot hang."""
    size = os.statvfs("/dev/shm")
    return {
        "shm_size_mib": str(size.f_blocks * size.f_frsize >> 20),
        "shm_free_mib": str(size.f_bavail * size.f_frsize >> 20),
    }


def _iommu() -> dict[str, str]:
    return {"iommu": "on" if os.listdir("/sys/kernel/iommu_groups") else "off"}


def _devices() -> dict[str, str]:
    """Of ports and adapters of InfiniBand, and of interfaces with a device."""
    found: dict[str, str] = {}
    for pattern, names in DEVICES:
        for place in sorted(CLASSES.glob(pattern))[:MAX_PORTS]:
            kind, *parts = (part for part in place.relative_to(CLASSES).parts if part != "ports")
            if kind == "net" and (place.name == "lo" or not (place / "device").exists()):
                continue
            texts = {name: text for name in names if (text := _text(str(place / name))) is not None}
            found |= {f"{kind}.{'/'.join(parts)}.{name}": text for name, text in texts.items()}
    return found
