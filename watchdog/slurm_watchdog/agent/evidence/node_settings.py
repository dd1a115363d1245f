"""Settings of a node that may differ from its neighbour's: kernel, driver, network, memory. For children."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from slurm_watchdog.agent.children.requests import ReadNodeSettings, WorkerState

MAX_PORTS = 32
CLASSES = Path("/sys/class")
DEVICES = (
    ("infiniband/*/ports/*", ("state", "phys_state", "rate", "link_layer")),
    ("infiniband/*", ("fw_ver",)),
    ("net/*", ("operstate", "mtu", "speed")),
)
ALL = r"(?s)\s*(.*\S)"
DRIVER = r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)"
FILES = {
    "transparent_hugepage": ("/sys/kernel/mm/transparent_hugepage/enabled", ALL),
    "numa_balancing": ("/proc/sys/kernel/numa_balancing", ALL),
    "cpu_governor": ("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", ALL),
    "core_pattern": ("/proc/sys/kernel/core_pattern", ALL),
    "ptrace_scope": ("/proc/sys/kernel/yama/ptrace_scope", ALL),
    "swappiness": ("/proc/sys/vm/swappiness", ALL),
    "peer_memory": ("/sys/module/nvidia_peermem/version", ALL),
    "gdrcopy": ("/sys/module/gdrdrv/version", ALL),
    "mlx5": ("/sys/module/mlx5_core/version", ALL),
    "lustre": ("/sys/module/lustre/version", ALL),
    "nvidia_driver": ("/proc/driver/nvidia/version", DRIVER),  # of the open kernel module, too
    "memory_gib": ("/proc/meminfo", r"MemTotal: +(\d+)"),
    "huge_pages": ("/proc/meminfo", r"HugePages_Total: +(\d+)"),
    "swap_gib": ("/proc/meminfo", r"SwapTotal: +(\d+)"),
}
"""Setting -> file, and the pattern of its value there, the first group; of `…_gib` in KiB."""


def read_node_settings(request: ReadNodeSettings, worker: WorkerState) -> list[tuple[str, str]]:
    """(name, value) of everything that this node has of the settings."""
    about = os.uname()
    found = {"kernel": about.release, "machine": about.machine, "cpus": str(os.cpu_count() or 0)}
    for name, (path, pattern) in FILES.items():
        if (match := re.search(pattern, _text(path))) is not None:
            found[name] = str(round(int(match[1]) / 1024**2)) if name.endswith("_gib") else match[1]
    with suppress(OSError):  # memory: asking it cannot hang
        size = os.statvfs("/dev/shm")
        found["shm_size_mib"] = str(size.f_blocks * size.f_frsize >> 20)
        found["shm_free_mib"] = str(size.f_bavail * size.f_frsize >> 20)
    with suppress(OSError):
        found["iommu"] = "on" if os.listdir("/sys/kernel/iommu_groups") else "off"
    return [(name, value[:300]) for name, value in (found | _devices()).items()]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _devices() -> dict[str, str]:
    """Of ports and adapters of InfiniBand, and of interfaces with a device."""
    found: dict[str, str] = {}
    for pattern, names in DEVICES:
        for place in sorted(CLASSES.glob(pattern))[:MAX_PORTS]:
            kind, *parts = (part for part in place.relative_to(CLASSES).parts if part != "ports")
            if kind == "net" and (place.name == "lo" or not (place / "device").exists()):
                continue
            texts = {name: text for name in names if (text := _text(str(place / name)).strip())}
            found |= {f"{kind}.{'/'.join(parts)}.{name}": text for name, text in texts.items()}
    return found
