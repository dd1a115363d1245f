"""The agent's own /metrics: how it fares itself, and what is worth a graph without a controller.

A tick only leaves its report here and adds to a few counters; everything else happens when Prometheus asks. No label holds a
pid or a user's text, and no metric has more than MAX_ROWS series: what is above is left out, and counted.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import slurm_watchdog
from slurm_watchdog.agent.prometheus_text import Row, family, histogram, serve
from slurm_watchdog.base.loop import Isolated
from slurm_watchdog.model.observations import Checkpoint, Gpu, NodeEvent
from slurm_watchdog.model.report import Report

PREFIX: Final = "slurm_watchdog_"
MAX_ROWS: Final = 512
"""Series of one metric: 16 GPUs with 32 kinds of fault each; a node has far fewer of anything."""
TICK_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
JOB_ID: Final = re.compile(r"\d{1,12}(_\d{1,12})?")
PROBE_OWNER: Final = re.compile(r":(-?\d+|self)$")

GpuValue = Callable[[Gpu], float | None]
GPU: Final = ("gpu_uuid", "gpu")
GPU_VALUES: Final[tuple[tuple[str, str, str, GpuValue], ...]] = (
    ("utilization_ratio", "gauge", "Share of the time in which it computed.", lambda gpu: gpu.utilization_ratio),
    ("sm_clock_hertz", "gauge", "Clock of its multiprocessors.", lambda gpu: gpu.sm_clock_hz),
    ("memory_clock_hertz", "gauge", "Clock of its memory.", lambda gpu: gpu.memory_clock_hz),
    ("power_watts", "gauge", "Power it draws.", lambda gpu: gpu.power_w),
    ("temperature_celsius", "gauge", "Temperature of its chip.", lambda gpu: gpu.temperature_c),
    ("memory_used_bytes", "gauge", "Memory in use.", lambda gpu: gpu.memory_used_bytes),
    ("memory_total_bytes", "gauge", "Memory it has.", lambda gpu: gpu.memory_total_bytes),
    ("ecc_corrected_errors_total", "counter", "Memory errors that ECC put right.", lambda gpu: gpu.ecc_corrected),
    ("ecc_uncorrected_errors_total", "counter", "Memory errors that ECC could not.", lambda gpu: gpu.ecc_uncorrected),
    ("remapped_rows_corrected", "gauge", "Rows replaced for corrected errors.", lambda gpu: gpu.remapped_rows_corrected),
    ("remapped_rows_uncorrected", "gauge", "Rows replaced for uncorrected errors.", lambda gpu: gpu.remapped_rows_uncorrected),
    ("remap_pending", "gauge", "1: a row will be replaced at the next reset.", lambda gpu: gpu.remap_pending),
    ("remap_failed", "gauge", "1: no spare row was left.", lambda gpu: gpu.remap_failed),
    ("retired_pages", "gauge", "Pages retired for memory errors.", lambda gpu: gpu.retired_pages),
    ("retired_pages_pending", "gauge", "1: a page will be retired at the next reset.", lambda gpu: gpu.retired_pages_pending),
    ("pcie_link_width", "gauge", "Lanes of PCIe in use.", lambda gpu: gpu.pcie_link_width),
    ("pcie_link_width_max", "gauge", "Lanes of PCIe that it could have.", lambda gpu: gpu.pcie_link_width_max),
    ("pcie_link_generation", "gauge", "Generation of PCIe in use; lower while idle.", lambda gpu: gpu.pcie_link_generation),
    ("pcie_replays_total", "counter", "Retransmissions on PCIe.", lambda gpu: gpu.pcie_replays),
    ("nvlinks_active", "gauge", "Links to other GPUs that work.", lambda gpu: gpu.nvlinks_active),
    ("nvlinks_down", "gauge", "Links that it has and that are not active.", lambda gpu: gpu.nvlinks_down),
    ("nvlink_errors_total", "counter", "Errors of all its links.", lambda gpu: gpu.nvlink_errors),
)  # fmt: skip
"""Name, type, help, and where the value stands in model.Gpu. A GPU that does not answer has no value, not its last one."""


class AgentMetrics:
    """What the loop counts, and its last report. `update` and `count_*` are cheap; `render` may run in any thread."""

    def __init__(
        self,
        count_probes: Callable[[], Mapping[str, int]] = dict,
        read_driver_s: Callable[[], float | None] = lambda: None,
        read_expiry: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`count_probes` gives children by state, `read_driver_s` the time that the last tick spent in NVML, `read_expiry` when
        certificates end."""
        self.read_expiry = read_expiry
        self._count_probes, self._read_driver_s = count_probes, read_driver_s
        self._report: Report | None = None
        self._seen = Isolated()
        self._spool_bytes = 0
        self._outcomes: Counter[str] = Counter()
        self._node_events: Counter[tuple[str, str]] = Counter()
        self._node_events_dropped = 0
        self._events_dropped = 0
        self._xids: dict[tuple[str, int], Counter[str]] = {}
        self._skipped: dict[tuple[str, str], int] = {}
        self._skipped_bytes = 0
        self._tick_counts = [0] * (len(TICK_BOUNDS) + 1)
        self._tick_s = 0.0
        self._gpu_of: dict[str, tuple[str, str]] = {}
        self._mounts: dict[str, float] = {}
        """The last answer of each mount, in seconds: a probe answers once a minute, Prometheus asks in between."""
        self._left_out = 0

    # -- what the loop says ------------------------------------------------------------------------------------

    def count_report(self, outcome: str) -> None:
        """Adds one report with this outcome. May be called from any thread."""
        self._outcomes[outcome] += 1

    def count_tick(self, seconds: float) -> None:
        """Adds one tick that took so long, whole or not."""
        self._tick_counts[bisect_left(TICK_BOUNDS, seconds)] += 1
        self._tick_s += seconds

    def update(self, report: Report, seen: Isolated, spool_bytes: int) -> None:
        """Takes over what one tick saw."""
        self._report, self._seen, self._spool_bytes = report, seen, spool_bytes
        if not report.processes:
            self._mounts.clear()  # no job, no mount of a job
        self._mounts.update({probe.mount: probe.seconds for probe in report.mounts})
        self._events_dropped += report.events_dropped
        self._node_events_dropped += report.node_events_dropped
        for event in report.node_events:
            self._count_node_event(event)
        skipped = {(row.job_id, row.path): row.skipped_bytes for row in report.logs if row.skipped_bytes}
        for key, skipped_bytes in skipped.items():
            self._skipped_bytes += max(0, skipped_bytes - self._skipped.get(key, 0))
        self._skipped = skipped

    def _count_node_event(self, event: NodeEvent) -> None:
        if event.backlog:
            return  # before our time: what is counted begins with the agent
        self._node_events[event.name, event.severity.value] += 1 + event.repeats
        if event.xid is not None:
            by_source = self._xids.setdefault(
                (event.gpu_uuid or event.pci_bus_id or "", event.xid), Counter()
            )
            by_source[event.source] += 1 + event.repeats

    # -- what Prometheus asks ----------------------------------------------------------------------------------

    def render(self) -> bytes:
        """All series, in Prometheus' text format."""
        report, seen = self._report, self._seen
        self._left_out = 0
        lines = self._own_lines(seen)
        if report is not None:
            lines += self._node_lines(report)
            lines += self._gpu_lines(report)
            lines += self._job_lines(report)
        lines += self._family("agent_series_dropped", "gauge", "Series above the limit of their metric.", (), [((), self._left_out)])  # fmt: skip
        return ("\n".join(lines) + "\n").encode(errors="replace")

    def serve(self, host: str, port: int) -> int | None:
        """Answers on this address from a thread; returns the port, None where it can't be had: watching goes on."""
        return serve(host, port, self.render)

    def _own_lines(self, seen: Isolated) -> list[str]:
        ticks = sum(self._tick_counts)
        driver_s = self._read_driver_s()
        return [
            *self._family("agent_build_info", "gauge", "1, with the version.", ("version",), [((slurm_watchdog.__version__,), 1)]),
            *self._family("ticks_total", "counter", "Ticks of the loop.", (), [((), ticks)]),
            *histogram(f"{PREFIX}agent_tick_duration_seconds", "Time of one tick.", TICK_BOUNDS, list(self._tick_counts), self._tick_s),
            *self._family("collector_success", "gauge", "1 if the collector worked in the last tick.", ("collector",),
                          [((name,), name not in seen.failed) for name in list(seen.seconds)]),
            *self._family("collector_duration_seconds", "gauge", "Time the collector took in the last tick.", ("collector",),
                          [((name,), seconds) for name, seconds in list(seen.seconds.items())]),
            *self._family("probes", "gauge", "Children of the agent.", ("state",),
                          [((state,), count) for state, count in self._count_probes().items()]),
            *self._family("spool_bytes", "gauge", "Reports that wait for the controller.", (), [((), self._spool_bytes)]),
            *self._family("agent_reports_total", "counter", "Reports by what became of them: sent, failed (will be tried again), rejected, expired.",
                          ("outcome",), [((outcome,), count) for outcome, count in sorted(self._outcomes.items())]),
            *self._family("certificate_expiry_timestamp_seconds", "gauge", "When a certificate of ours ends.", ("certificate",),
                          [((name,), moment) for name, moment in self.read_expiry().items()]),
            *self._family("nvml_driver_seconds", "gauge", "Time that the last tick spent in NVML.", (),
                          [] if driver_s is None else [((), driver_s)]),
        ]  # fmt: skip

    def _node_lines(self, report: Report) -> list[str]:
        hung = _largest((probe_label(probe.probe), probe.seconds) for probe in report.hung_probes)
        mounts = _largest(list(self._mounts.items()))
        return [
            *self._family("probe_hung", "gauge", "Seconds that a child of the agent has not come back.", ("probe",), hung),
            *self._family("mount_probe_seconds", "gauge", "Time the last probe of a mount took, or has been out.", ("mount",), mounts),
            *self._family("node_events_total", "counter", "What the kernel's log and NVML said about this node.", ("name", "severity"),
                          sorted(self._node_events.items())),
            *self._family("node_events_dropped_total", "counter", "Of these, those that could not be read or sent.", (),
                          [((), self._node_events_dropped)]),
            *self._family("log_events_dropped_total", "counter", "Events of logs that were left out of reports.", (),
                          [((), self._events_dropped)]),
            *self._family("log_skipped_bytes_total", "counter", "Bytes of logs that were passed over unread.", (),
                          [((), self._skipped_bytes)]),
            *self._family("log_lag_bytes", "gauge", "Bytes of logs that are still to be read.", (),
                          [((), sum(row.lag_bytes for row in report.logs))]),
        ]  # fmt: skip

    def _gpu_lines(self, report: Report) -> list[str]:
        lines = []
        gpus = [(gpu, (gpu.uuid, str(gpu.index))) for gpu in report.gpus]
        for name, kind, text, read in GPU_VALUES:
            rows = [(labels, value) for gpu, labels in gpus if (value := read(gpu)) is not None]
            lines += self._family(f"gpu_{name}", kind, text, GPU, rows)
        throttled = [((*labels, reason), 1.0) for gpu, labels in gpus for reason in gpu.throttle or ()]
        lines += self._family("gpu_throttle_reason", "gauge", "1 for each reason why its clocks are lower than they could be.",
                              (*GPU, "reason"), throttled)  # fmt: skip
        held = Counter(
            uuid
            for holder in report.gpu_holders
            if holder.orphan_for_s is not None
            for uuid in holder.gpu_uuids
        )
        lines += self._family("gpu_orphans", "gauge", "Processes that hold it and belong to no job that runs here.", GPU,
                              [(labels, held[gpu.uuid]) for gpu, labels in gpus])  # fmt: skip
        lines += self._family("gpu_job", "gauge", "1 for the job and the rank whose processes hold it.", (*GPU, "job_id", "rank"),
                              _gpu_jobs(report))  # fmt: skip
        for gpu, labels in gpus:
            self._gpu_of.update({gpu.uuid: labels, gpu.pci_bus_id or gpu.uuid: labels})
        return lines + self._family(
            "gpu_xid_total", "counter", "NVIDIA's numbers of faults.", (*GPU, "xid"), self._xid_rows()
        )

    def _xid_rows(self) -> list[Row]:
        """One fault is told by the kernel's log and by NVML: of the two counts the larger holds, whichever of them is missing."""
        totals: dict[tuple[str, ...], Counter[str]] = {}
        for (gpu, xid), by_source in list(self._xids.items()):
            key = (*self._gpu_of.get(gpu, (gpu, "")), str(xid))
            totals.setdefault(key, Counter()).update(by_source)
        return sorted((key, max(by_source.values())) for key, by_source in totals.items())

    def _job_lines(self, report: Report) -> list[str]:
        blocked: list[tuple[tuple[str, str], float]] = [
            ((job_label(process.job_id), "" if process.rank is None else str(process.rank)), process.blocked.seconds)
            for process in report.processes
            if process.blocked is not None
        ]  # fmt: skip
        newest: dict[str, Checkpoint] = {}
        writing: dict[str, bool] = {}
        for row in report.checkpoints:
            job = job_label(row.job_id)
            writing[job] = writing.get(job, False) or row.writing
            if row.step is not None and (job not in newest or row.step > (newest[job].step or 0)):
                newest[job] = row
        return [
            *self._family("process_uninterruptible_seconds", "gauge",
                          'Time that the longest blocked thread of a rank (rank="": of any other process) has been in one call.',
                          ("job_id", "rank"), _largest_rows(blocked)),
            *self._family("checkpoint_step", "gauge", "Step of the newest complete checkpoint.", ("job_id",),
                          [((job,), row.step) for job, row in newest.items() if row.step is not None]),
            *self._family("checkpoint_age_seconds", "gauge", "Its age.", ("job_id",),
                          [((job,), row.age_s) for job, row in newest.items() if row.age_s is not None]),
            *self._family("checkpoint_writing", "gauge", "1 while a newer one is being written.", ("job_id",),
                          [((job,), value) for job, value in writing.items()]),
        ]  # fmt: skip

    def _family(
        self, name: str, kind: str, text: str, labels: tuple[str, ...], rows: Iterable[Row]
    ) -> list[str]:
        """The lines of one metric, cut to MAX_ROWS series."""
        kept = list(rows)
        self._left_out += max(0, len(kept) - MAX_ROWS)
        return family(PREFIX + name, kind, text, labels, kept[:MAX_ROWS])


def _gpu_jobs(report: Report) -> list[Row]:
    """One row a GPU, job and rank: what joins the series of GPUs with those of jobs."""
    of_pid = {process.pid: process for process in report.processes}
    found = {
        (
            gpu.uuid,
            str(gpu.index),
            job_label(process.job_id),
            "" if process.rank is None else str(process.rank),
        )
        for gpu in report.gpus
        for pid in gpu.pids or ()
        if (process := of_pid.get(pid)) is not None
    }
    return [(labels, 1.0) for labels in sorted(found)]


def job_label(job_id: str) -> str:
    """A job's number as a label; `other` for what is none, for a process may claim anything in its environment."""
    return job_id if JOB_ID.fullmatch(job_id) else "other"


def probe_label(probe: str) -> str:
    """Kind and mount of a child: `files:/shared` of `files:/shared:1000`, `identify` of `identify:4711`. No user, no pid."""
    kind, _, rest = probe.partition(":")
    return f"{kind}:{PROBE_OWNER.sub('', rest)}" if rest.startswith("/") else kind


def _largest(pairs: Iterable[tuple[str, float]]) -> list[Row]:
    return _largest_rows([((label,), value) for label, value in pairs])


def _largest_rows(pairs: Iterable[tuple[tuple[str, ...], float]]) -> list[Row]:
    found: dict[tuple[str, ...], float] = {}
    for labels, value in pairs:
        found[labels] = max(found.get(labels, 0.0), value)
    return sorted(found.items())
