"""The GPUs of this node, in every tick, as the `nvml` child reads them.

The loop itself never calls NVML. While the child does not answer, each GPU that is known is a row without values and with
the reason; a node without driver has no rows, and says so once in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from watchdog.agent.probe import Answer, Probes
from watchdog.model import Gpu

log = logging.getLogger(__name__)

KEY = "nvml"
LIST_PROCESSES_EVERY_S = 60.0
"""NVML lists processes under the driver's global lock: milliseconds a GPU, in which training may wait."""
RETRY_S = 60.0
RETRY_MISSING_S = 600.0
"""A driver that is installed while the agent runs is found; until then a child that only looks for it costs too much."""
SETTLE_S = 0.1
"""The loop gives the child this long, at the end of its tick. It never waits for more."""

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
    """The names of all bits in `mask`, lowest first; a bit that nobody has told us of is `bit_N`."""
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return tuple(THROTTLE.get(1 << bit, f"bit_{bit}") for bit in bits)


def parse_bus_id(text: str) -> str:
    """NVML's `00000000:C1:00.0` as the kernel writes it in sysfs and in its log: `0000:c1:00.0`."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def parse_gpu(row: Mapping[str, Any]) -> Gpu:
    """One GPU from what the child read (nvml.read_gpus). What is absent there is None here."""
    memory = row.get("memory_bytes")
    mask = row.get("throttle_mask")
    bus_id = row.get("bus_id")
    pids = row.get("pids")
    return Gpu(
        uuid=row.get("uuid", ""),
        index=row["index"],
        pci_bus_id=None if bus_id is None else parse_bus_id(bus_id),
        minor=row.get("minor"),
        name=row.get("name", ""),
        utilization_ratio=_scaled(row.get("utilization_percent"), 1 / 100),
        sm_clock_hz=_scaled(row.get("sm_clock_mhz"), 1e6),
        memory_clock_hz=_scaled(row.get("memory_clock_mhz"), 1e6),
        power_w=_scaled(row.get("power_mw"), 1 / 1000),
        temperature_c=_scaled(row.get("temperature_c"), 1.0),
        memory_used_bytes=None if memory is None else memory[0],
        memory_total_bytes=None if memory is None else memory[1],
        throttle=None if mask is None else parse_throttle(mask),
        pids=None if pids is None else tuple(sorted(set(pids))),
        error=row.get("error"),
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


@dataclass
class GpuCollector:
    """Asks the child in every tick and remembers which GPUs there are."""

    probes: Probes
    problem: str | None = None
    """Why NVML as a whole says nothing on a node that should have it; None where it works or there is no driver."""
    _known: dict[str, Gpu] = field(default_factory=dict)
    """UUID -> the GPU without values, since the agent started."""
    _pids: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    """UUID -> the newest list of processes."""
    _fresh: tuple[Gpu, ...] | None = None
    """What came since the last report."""
    _request: int | None = None
    _asked_at: float = 0.0
    _listed_at: float = float("-inf")
    _retry_at: float = float("-inf")
    _silent: str = ""
    """Why nothing is being asked at the moment."""

    def want_processes(self) -> None:
        """The next request lists the processes, too: somebody is under suspicion."""
        self._listed_at = float("-inf")

    def ask(self, now: float, deadline_s: float) -> None:
        """Gives the child its work for this tick, unless it is still at an older one."""
        if now < self._retry_at:
            return
        processes = now - self._listed_at >= LIST_PROCESSES_EVERY_S
        request = self.probes.ask(KEY, "read_gpus", {"processes": processes}, deadline_s, now, self._take)
        if request is not None:
            self._request, self._asked_at = request, now
            if processes:
                self._listed_at = now

    def settle(self, seconds: float) -> None:
        """Waits at most so long for the answer that is due."""
        if self._request is not None:
            self.probes.settle(seconds, [self._request])

    def collect(self, now: float) -> tuple[Gpu, ...]:
        """Every GPU, in NVML's order, with what it said since the last call, or with the reason why it said nothing."""
        if self._fresh is None:
            self.settle(SETTLE_S)
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            return fresh
        why = self._silent or "NVML was not asked: too many children of the agent are busy"
        if not self.probes.is_free(KEY):
            why = f"NVML has not answered for {max(now - self._asked_at, SETTLE_S):.1f} s"
        return tuple(without_values(gpu, why) for gpu in self._known.values())

    def _take(self, answer: Answer) -> None:
        self._request = None
        if answer.timed_out:
            return  # the pool says that it hangs, and collect() since when
        value = answer.value or {}
        if "gpus" in value:
            self._take_rows(value["gpus"])
            return
        why = answer.error or value.get("error") or value.get("missing") or "NVML gave no answer"
        if why != self._silent:
            log.info("no GPUs are watched on this node now: %s", why)
        self._silent = why
        self.probes.retire(KEY)
        self.want_processes()
        if "missing" in value and not self._known:
            self._retry_at = self._asked_at + RETRY_MISSING_S
        else:
            self._retry_at, self.problem = self._asked_at + RETRY_S, why

    def _take_rows(self, rows: list[dict[str, Any]]) -> None:
        self.problem, self._silent = None, ""
        anew = self._listed_at == self._asked_at
        listed = {row["uuid"] for row in rows if "uuid" in row}
        gpus = []
        for row in rows:
            gpu = parse_gpu(row)
            if not gpu.uuid:
                gpu = self._recognise(gpu, listed)
            else:
                self._known[gpu.uuid] = without_values(gpu, "")
            if anew and gpu.uuid:
                self._pids[gpu.uuid] = gpu.pids
            gpus.append(gpu if row.get("unreadable") else replace(gpu, pids=self._pids.get(gpu.uuid)))
        present = {gpu.uuid for gpu in gpus}
        gone = [gpu for uuid, gpu in self._known.items() if uuid not in present]
        self._fresh = (*gpus, *(without_values(gpu, "NVML does not list this GPU any more") for gpu in gone))
        if anew and (gone or any(row.get("unreadable") for row in rows)):
            self.probes.retire(KEY)  # handles outlive no reset of a GPU: the next session may see more

    def _recognise(self, gpu: Gpu, listed: set[str]) -> Gpu:
        """A GPU that answers nothing, not even who it is, is the one that was at this index, unless that is elsewhere now."""
        for known in self._known.values():
            if known.index == gpu.index and known.uuid not in listed:
                return without_values(known, gpu.error or "")
        return gpu
