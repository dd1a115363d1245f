"""GPUs of this node: see slurm_watchdog.agent.gpu.reader, which has NVML read them.

Sees: UUID, PCI address, minor; utilisation, clocks, power, temperature, memory, throttle reasons; processes
    with their memory; ECC, remapped rows, retired pages, PCIe, NVLink, MIG; activity of multiprocessors, tensor
    cores, memory and links (GPM); Xid events
From: NVML, in one child
How often: values every tick (temperature, memory and throttle reasons every other); processes and health of
    a GPU once a minute, one GPU after the other, in 5 ms of driver time a tick; all at once only if a rank
    is under suspicion
Never: NVML in the loop; a setting, a reset
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from slurm_watchdog.agent.collectors.collector import CollectorContext, CollectorSpec, Problem
from slurm_watchdog.agent.collectors.presentation import (
    BAD,
    Family,
    Row,
    Series,
    Table,
    job_label,
    number,
    with_unit,
)
from slurm_watchdog.model.observations import Gpu, Role
from slurm_watchdog.model.report import GpuSection, ProcessSection, Report

SLOW_NVML_S = 3.0
"""Its first answer may take seconds, where the driver has to wake the GPUs; after that, the wait is reported."""
HEALTH_COLUMNS = ("GPU", "ECC errors", "rows remapped", "pages retired", "PCIe", "NVLink")


class GpuCollector:
    """What NVML says of every GPU, and what it announced."""

    def __init__(self, context: CollectorContext):
        self._reader, self._sections = context.gpus, context.sections
        self._deadline_s = context.settings.probe_deadline

    def begin(self, now: float) -> None:
        """NVML is slow: its worker reads while the other collectors look."""
        self._reader.ask(now, self._deadline_s)

    def collect(self, now: float) -> GpuSection:
        """Every GPU; one that did not answer, with the reason."""
        gpus = self._reader.collect(now)
        ranks = (p for p in self._sections.of(ProcessSection).processes if p.role is Role.RANK)
        self._reader.suspect((rank.pid for rank in ranks if rank.blocked is not None), now)
        events = self._reader.drain_events(now)
        return GpuSection(gpus=gpus, node_events=events, node_events_dropped=self._reader.events_dropped)

    def problems(self, now: float) -> Iterator[Problem]:
        """Why NVML says nothing, or that it is waited for."""
        if self._reader.problem:
            yield Problem(self._reader.problem)
        waiting_s = self._reader.waiting_s(now)
        if waiting_s is not None and waiting_s >= SLOW_NVML_S:
            yield Problem(f"NVML has not answered for {waiting_s:.0f} s, and no GPU is known yet")


def tables(report: Report) -> Iterable[Table]:
    """What moves, and what changes slowly: errors of memory and links."""
    columns = (
        "GPU",
        "UUID",
        "PCI",
        "minor",
        "busy",
        "SM clock",
        "power",
        "heat",
        "memory",
        "throttled by",
        "pids",
    )
    yield Table("GPUs", columns, tuple(row for gpu in report.gpus for row in _rows(gpu)))
    health = ((gpu, (_ecc(gpu), _remapped(gpu), _retired(gpu), _pcie(gpu), _nvlink(gpu))) for gpu in report.gpus)
    yield Table("GPU health", HEALTH_COLUMNS, tuple(Row((gpu.index, *cells)) for gpu, cells in health if any(cells)))


def _rows(gpu: Gpu) -> Iterator[Row]:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    cells = (
        gpu.index,
        gpu.uuid,
        gpu.pci_bus_id,
        gpu.minor,
        with_unit(gpu.utilization_ratio, "{:.0%}"),
        with_unit(gpu.sm_clock_hz and gpu.sm_clock_hz / 1e6, "{:.0f} MHz"),
        with_unit(gpu.power_w, "{:.0f} W"),
        with_unit(gpu.temperature_c, "{:.0f} °C"),
        None if used is None or total is None else f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB",
        None if gpu.throttle is None else ", ".join(gpu.throttle),
        None if gpu.pids is None else ", ".join(map(str, gpu.pids)),
    )
    yield Row(cells)
    if gpu.error:
        yield Row(("", gpu.error), BAD)
    for slice_ in gpu.mig or ():
        yield Row(("MIG", slice_.uuid))


def _ecc(gpu: Gpu) -> str:
    if gpu.ecc_corrected is None and gpu.ecc_uncorrected is None:
        return ""
    return f"{number(gpu.ecc_corrected)} corrected, {number(gpu.ecc_uncorrected)} not"


def _remapped(gpu: Gpu) -> str:
    if gpu.remapped_rows_uncorrected is None:
        return ""
    notes = (", pending" if gpu.remap_pending else "") + (", FAILED" if gpu.remap_failed else "")
    return f"{number(gpu.remapped_rows_corrected)} + {gpu.remapped_rows_uncorrected}{notes}"


def _retired(gpu: Gpu) -> str:
    if gpu.retired_pages is None:
        return ""
    return f"{gpu.retired_pages}{', pending' if gpu.retired_pages_pending else ''}"


def _pcie(gpu: Gpu) -> str:
    if gpu.pcie_link_width is None:
        return ""
    generation = (
        ""
        if gpu.pcie_link_generation is None
        else f"gen {gpu.pcie_link_generation} of {number(gpu.pcie_link_generation_max)}, "
    )
    return (
        f"{generation}x{gpu.pcie_link_width} of x{number(gpu.pcie_link_width_max)}, {number(gpu.pcie_replays)} replays"
    )


def _nvlink(gpu: Gpu) -> str:
    if gpu.nvlinks_active is None:
        return ""
    return f"{gpu.nvlinks_active} up, {number(gpu.nvlinks_down)} down, {number(gpu.nvlink_errors)} errors"


GpuValue = Callable[[Gpu], float | None]
GPU = ("gpu_uuid", "gpu")
GPU_VALUES: tuple[tuple[str, str, str, GpuValue], ...] = (
    ("utilization_ratio", "gauge", "Share of the time in which it computed.", lambda gpu: gpu.utilization_ratio),
    ("sm_clock_hertz", "gauge", "Clock of its multiprocessors.", lambda gpu: gpu.sm_clock_hz),
    ("memory_clock_hertz", "gauge", "Clock of its memory.", lambda gpu: gpu.memory_clock_hz),
    ("power_watts", "gauge", "Power it draws.", lambda gpu: gpu.power_w),
    ("temperature_celsius", "gauge", "Temperature of its chip.", lambda gpu: gpu.temperature_c),
    ("memory_used_bytes", "gauge", "Memory in use.", lambda gpu: gpu.memory_used_bytes),
    ("memory_total_bytes", "gauge", "Memory it has.", lambda gpu: gpu.memory_total_bytes),
    ("ecc_corrected_errors_total", "counter", "Corrected ECC errors.", lambda gpu: gpu.ecc_corrected),
    ("ecc_uncorrected_errors_total", "counter", "Uncorrected ECC errors.", lambda gpu: gpu.ecc_uncorrected),
    ("remapped_rows_corrected", "gauge", "Rows replaced for corrected errors.",
     lambda gpu: gpu.remapped_rows_corrected),
    ("remapped_rows_uncorrected", "gauge", "Rows replaced for uncorrected errors.",
     lambda gpu: gpu.remapped_rows_uncorrected),
    ("remap_pending", "gauge", "1: a row will be replaced at the next reset.", lambda gpu: gpu.remap_pending),
    ("remap_failed", "gauge", "1: no spare row was left.", lambda gpu: gpu.remap_failed),
    ("retired_pages", "gauge", "Pages retired for memory errors.", lambda gpu: gpu.retired_pages),
    ("retired_pages_pending", "gauge", "1: a page will be retired at the next reset.",
     lambda gpu: gpu.retired_pages_pending),
    ("pcie_link_width", "gauge", "Lanes of PCIe in use.", lambda gpu: gpu.pcie_link_width),
    ("pcie_link_width_max", "gauge", "Lanes of PCIe that it could have.", lambda gpu: gpu.pcie_link_width_max),
    ("pcie_link_generation", "gauge", "Generation of PCIe in use; lower while idle.",
    lambda gpu: gpu.pcie_link_generation),
    ("pcie_replays_total", "counter", "Retransmissions on PCIe.", lambda gpu: gpu.pcie_replays),
    ("nvlinks_active", "gauge", "Links to other GPUs that work.", lambda gpu: gpu.nvlinks_active),
    ("nvlinks_down", "gauge", "Links that it has and that are not active.", lambda gpu: gpu.nvlinks_down),
    ("nvlink_errors_total", "counter", "Errors of all its links.", lambda gpu: gpu.nvlink_errors),
    ("sm_active_ratio", "gauge", "Share of its multiprocessors that had work, over about a minute.",
     lambda gpu: gpu.sm_active_ratio),
    ("tensor_active_ratio", "gauge", "Share of its tensor cores that had work.", lambda gpu: gpu.tensor_active_ratio),
    ("dram_active_ratio", "gauge", "Share of its memory's bandwidth in use.", lambda gpu: gpu.dram_active_ratio),
    ("nvlink_bytes_per_second", "gauge", "Sent and received by all its links.", lambda gpu: gpu.nvlink_bytes_s),
    ("pcie_bytes_per_second", "gauge", "Sent and received on PCIe.", lambda gpu: gpu.pcie_bytes_s),
)  # fmt: skip
"""Name, type, help, and where the value is in Gpu. A GPU that does not answer has no value, not its last one."""


def metrics(report: Report) -> Iterable[Family]:
    """Every value of every GPU, and whose each GPU is."""
    gpus = [(gpu, (gpu.uuid, str(gpu.index))) for gpu in report.gpus]
    for name, kind, text, read in GPU_VALUES:
        series = [(labels, value) for gpu, labels in gpus if (value := read(gpu)) is not None]
        yield Family(f"gpu_{name}", kind, text, GPU, series)
    throttled = [((*labels, reason), 1.0) for gpu, labels in gpus for reason in gpu.throttle or ()]
    text = "1 for each reason why its clocks are lower than they could be."
    yield Family("gpu_throttle_reason", "gauge", text, (*GPU, "reason"), throttled)
    text = "1 for the job and the rank whose processes hold it."
    yield Family("gpu_job", "gauge", text, (*GPU, "job_id", "rank"), _jobs(report))


def _jobs(report: Report) -> list[Series]:
    """One series for each GPU, job and rank: it joins the series of GPUs with those of jobs."""
    of_pid = {process.pid: process for process in report.processes}
    found = {
        (gpu.uuid, str(gpu.index), job_label(process.job_id), "" if process.rank is None else str(process.rank))
        for gpu in report.gpus
        for pid in gpu.pids or ()
        if (process := of_pid.get(pid)) is not None
    }  # fmt: skip
    return [(labels, 1.0) for labels in sorted(found)]


SPEC = CollectorSpec("gpu", GpuSection, GpuCollector, tables, metrics)
