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

from collections.abc import Iterable, Iterator

from slurm_watchdog.agent.collectors.collector import Collector, CollectorSpec, Family, Problem, Series, job_label
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.report import GpuSection, ProcessSection, Report

SLOW_NVML_S = 3.0  # Its first answer may take seconds, until the driver has woken the GPUs; then the wait is reported.


class GpuCollector(Collector):
    """What NVML says of every GPU, and what it announced."""

    def begin(self, now: float) -> None:
        """NVML is slow: its worker reads while the other collectors look."""
        self.context.gpus.ask(now, self.deadline_s)

    def collect(self, now: float) -> GpuSection:
        """Every GPU; one that did not answer, with the reason."""
        gpus = self.context.gpus.collect(now)
        ranks = (p for p in self.sections.of(ProcessSection).processes if p.role is Role.RANK)
        self.context.gpus.suspect((rank.pid for rank in ranks if rank.blocked is not None), now)
        events = self.context.gpus.drain_events(now)
        return GpuSection(gpus=gpus, node_events=events, node_events_dropped=self.context.gpus.events_dropped)

    def problems(self, now: float) -> Iterator[Problem]:
        """Why NVML says nothing, or that it is waited for."""
        if self.context.gpus.problem:
            yield Problem(self.context.gpus.problem)
        waiting_s = self.context.gpus.waiting_s(now)
        if waiting_s is not None and waiting_s >= SLOW_NVML_S:
            yield Problem(f"NVML has not answered for {waiting_s:.0f} s, and no GPU is known yet")


GPU = ("gpu_uuid", "gpu")
GPU_VALUES: tuple[tuple[str, str, str], ...] = (
    ("utilization_ratio", "Share of the time in which it computed.", "utilization_ratio"),
    ("sm_clock_hertz", "Clock of its multiprocessors.", "sm_clock_hz"),
    ("memory_clock_hertz", "Clock of its memory.", "memory_clock_hz"),
    ("power_watts", "Power it draws.", "power_w"),
    ("temperature_celsius", "Temperature of its chip.", "temperature_c"),
    ("memory_used_bytes", "Memory in use.", "memory_used_bytes"),
    ("memory_total_bytes", "Memory it has.", "memory_total_bytes"),
    ("ecc_corrected_errors_total", "Corrected ECC errors.", "ecc_corrected"),
    ("ecc_uncorrected_errors_total", "Uncorrected ECC errors.", "ecc_uncorrected"),
    ("remapped_rows_corrected", "Rows replaced for corrected errors.", "remapped_rows_corrected"),
    ("remapped_rows_uncorrected", "Rows replaced for uncorrected errors.", "remapped_rows_uncorrected"),
    ("remap_pending", "1: a row will be replaced at the next reset.", "remap_pending"),
    ("remap_failed", "1: no spare row was left.", "remap_failed"),
    ("retired_pages", "Pages retired for memory errors.", "retired_pages"),
    ("retired_pages_pending", "1: a page will be retired at the next reset.", "retired_pages_pending"),
    ("pcie_link_width", "Lanes of PCIe in use.", "pcie_link_width"),
    ("pcie_link_width_max", "Lanes of PCIe that it could have.", "pcie_link_width_max"),
    ("pcie_link_generation", "Generation of PCIe in use; lower while idle.", "pcie_link_generation"),
    ("pcie_replays_total", "Retransmissions on PCIe.", "pcie_replays"),
    ("nvlinks_active", "Links to other GPUs that work.", "nvlinks_active"),
    ("nvlinks_down", "Links that it has and that are not active.", "nvlinks_down"),
    ("nvlink_errors_total", "Errors of all its links.", "nvlink_errors"),
    ("sm_active_ratio", "Share of its multiprocessors that had work, over about a minute.", "sm_active_ratio"),
    ("tensor_active_ratio", "Share of its tensor cores that had work.", "tensor_active_ratio"),
    ("dram_active_ratio", "Share of its memory's bandwidth in use.", "dram_active_ratio"),
    ("nvlink_bytes_per_second", "Sent and received by all its links.", "nvlink_bytes_s"),
    ("pcie_bytes_per_second", "Sent and received on PCIe.", "pcie_bytes_s"),
)  # fmt: skip
"""Name, help, and where the value is in Gpu. A GPU that does not answer has no value, not its last one."""


def metrics(report: Report) -> Iterable[Family]:
    """Every value of every GPU, and whose each GPU is."""
    gpus = [(gpu, (gpu.uuid, str(gpu.index))) for gpu in report.gpus]
    for name, text, field in GPU_VALUES:
        series = [(labels, value) for gpu, labels in gpus if (value := getattr(gpu, field)) is not None]
        yield Family(f"gpu_{name}", text, GPU, series)
    throttled = [((*labels, reason), 1.0) for gpu, labels in gpus for reason in gpu.throttle or ()]
    text = "1 for each reason why its clocks are lower than they could be."
    yield Family("gpu_throttle_reason", text, (*GPU, "reason"), throttled)
    text = "1 for the job and the rank whose processes hold it."
    yield Family("gpu_job", text, (*GPU, "job_id", "rank"), _jobs(report))


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


SPEC = CollectorSpec("gpu", GpuSection, GpuCollector, metrics)
