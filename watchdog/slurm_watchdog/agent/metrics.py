"""The agent's metrics for node_exporter's textfile collector: GPUs, what only this node knows, how the agent fares.

Every WRITE_S the loop replaces one file, in memory (/run), where writing cannot hang. No label holds a pid or a user's
text, and no metric has more than MAX_ROWS series: what is above is left out, and counted. What is in the file is as old
as the file: node_exporter serves that as node_textfile_mtime_seconds. At the agent's end the file goes.

Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4) is written here:
importing prometheus_client takes 14 MiB, half of what an agent may have.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import slurm_watchdog
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import Isolated
from slurm_watchdog.model.report import Report

log = logging.getLogger(__name__)

FILE = "slurm-watchdog.prom"
WRITE_S = 15.0  # As often as Prometheus usually asks.
PREFIX = "slurm_watchdog_"
MAX_ROWS = 512  # Series of one metric: 16 GPUs with 32 reasons each; a node has far fewer of anything.
PROBE_OWNER = re.compile(r":(-?\d+|self)$")
JOB_ID = re.compile(r"\d{1,12}(_\d{1,12})?")
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

Labels = tuple[str, ...]


class Family(NamedTuple):
    """One metric with its series. No label holds a pid or a user's text."""

    name: str  # Without the prefix that all metrics have; ends in its unit.
    help: str
    labels: Labels = ()
    series: Iterable[tuple[Labels, float]] = ()

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


class AgentMetrics:
    """What the loop counts, and its last report."""

    def __init__(self, directory: str = "", node: str = "", certificates: Callable[[], Mapping[str, float]] = dict):
        """Without a directory nothing is written. `certificates` says when certificates end; it must not block."""
        self.path = os.path.join(directory, FILE) if directory else ""
        self._node, self._certificates = node, certificates
        self._report: Report | None = None
        self._seen, self._spool_bytes = Isolated(), 0
        self._outcomes: Counter[str] = Counter()
        self._ticks, self._longest_s = 0, 0.0
        self._driver_s: float | None = None
        self._events: Counter[Labels] = Counter()
        self._mounts: dict[str, float] = {}  # The last answer of each: a probe answers once a minute.
        self._written_at, self._problem = float("-inf"), ""

    def count_report(self, outcome: str) -> None:
        """Adds one report with this outcome. May be called from any thread."""
        self._outcomes[outcome] += 1

    def count_tick(self, seconds: float) -> None:
        """Adds one tick that took so long, whole or not."""
        self._ticks, self._longest_s = self._ticks + 1, max(self._longest_s, seconds)

    def update(self, report: Report, seen: Isolated, spool_bytes: int, driver_s: float | None = None) -> None:
        """Takes over what one tick saw; `driver_s` is the time that it spent in NVML."""
        if driver_s is not None:
            self._driver_s = max(self._driver_s or 0.0, driver_s)
        self._report, self._seen, self._spool_bytes = report, seen, spool_bytes
        if not report.processes:
            self._mounts.clear()
        self._mounts.update({probe.mount: probe.seconds for probe in report.mounts})
        for event in report.node_events:
            if not event.backlog:
                self._events[event.name, event.severity.value] += 1 + event.repeats

    def write(self, now: float) -> None:
        """Replaces the file in one step, where it is due. What hinders is logged once."""
        if not self.path or now - self._written_at < WRITE_S:
            return
        problem, directory, temporary = "", os.path.dirname(self.path), f"{self.path}.new"
        try:
            if not os.path.isdir(directory):
                os.mkdir(directory)
                os.chmod(directory, 0o755)  # noqa: S103 -- for node_exporter, whatever umask the unit has
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o644)
                file.write(self.render())
            os.replace(temporary, self.path)
        except OSError as error:
            problem = f"no metrics are written: {describe(error)} (agent.metrics_directory)"
        if problem and problem != self._problem:
            log.warning("%s", problem)
        self._problem, self._written_at, self._longest_s, self._driver_s = problem, now, 0.0, None

    def remove(self) -> None:
        """Takes the file away: its values would be taken for new ones."""
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)

    def families(self) -> list[Family]:
        """Every metric, those without series included."""
        return [*self._own(), *_of_report(self._report or _NOTHING, self._mounts)]

    def render(self) -> bytes:
        """All series, in Prometheus' text format."""
        lines, left_out = [], 0
        for each in self.families():
            series = list(each.series)
            left_out += max(0, len(series) - MAX_ROWS)
            lines += format_family(each._replace(series=series[:MAX_ROWS]))
        lines += format_family(DROPPED._replace(series=[((), left_out)]))
        return ("\n".join(lines) + "\n").encode(errors="replace")

    def _own(self) -> Iterable[Family]:
        seen = self._seen
        text, built = "1, with the version, and Slurm's name of the node.", (slurm_watchdog.__version__, self._node)
        yield Family("agent_build_info", text, ("version", "node"), [(built, 1)])
        yield Family("ticks_total", "Ticks of the loop.", (), [((), self._ticks)])
        text = "The longest tick since the file was written last."
        yield Family("agent_tick_seconds", text, (), [((), self._longest_s)])
        spent = [] if self._driver_s is None else [((), self._driver_s)]
        yield Family("nvml_driver_seconds", "The longest that one of these ticks spent in NVML.", (), spent)
        succeeded = [((name,), name not in seen.failed) for name in seen.seconds]
        yield Family("collector_success", "1 if the collector worked in the last tick.", ("collector",), succeeded)
        took = [((name,), seconds) for name, seconds in seen.seconds.items()]
        yield Family("collector_duration_seconds", "Time the collector took in the last tick.", ("collector",), took)
        yield Family("spool_bytes", "Reports that wait for the controller.", (), [((), self._spool_bytes)])
        text = "Reports by what became of them: sent, failed (will be tried again), rejected, expired."
        outcomes = [((outcome,), count) for outcome, count in sorted(dict(self._outcomes).items())]
        yield Family("agent_reports_total", text, ("outcome",), outcomes)
        ends = [((name,), moment) for name, moment in self._certificates().items()]
        text = "When a certificate of ours ends."
        yield Family("certificate_expiry_timestamp_seconds", text, ("certificate",), ends)
        text = "What the kernel's log and NVML report about this node."
        yield Family("node_events_total", text, ("name", "severity"), sorted(self._events.items()))


DROPPED = Family("agent_series_dropped", "Series above the limit of their metric.")
_NOTHING = Report(node="", boot_id="", agent_id="", sequence=0)


def _of_report(report: Report, mounts: Mapping[str, float]) -> Iterable[Family]:
    gpus = [(gpu, (gpu.uuid, str(gpu.index))) for gpu in report.gpus]
    for name, text, field in GPU_VALUES:
        series = [(labels, value) for gpu, labels in gpus if (value := getattr(gpu, field)) is not None]
        yield Family(f"gpu_{name}", text, GPU, series)
    throttled = [((*labels, reason), 1.0) for gpu, labels in gpus for reason in gpu.throttle or ()]
    text = "1 for each reason why its clocks are lower than they could be."
    yield Family("gpu_throttle_reason", text, (*GPU, "reason"), throttled)
    text = "1 for the job and the rank whose processes hold it."
    yield Family("gpu_job", text, (*GPU, "job_id", "rank"), _jobs(report))
    orphans = (holder for holder in report.gpu_holders if holder.orphan_for_s is not None)
    held = Counter(uuid for holder in orphans for uuid in holder.gpu_uuids)
    text = "Processes that hold it and belong to no job that runs here."
    yield Family("gpu_orphans", text, GPU, [(labels, held[gpu.uuid]) for gpu, labels in gpus])
    hung = _largest(((probe_label(probe.probe),), probe.seconds) for probe in report.hung_probes)
    yield Family("probe_hung", "Seconds that a child of the agent has not returned.", ("probe",), hung)
    text = "Time the last probe of a mount took, or has been out."
    yield Family("mount_probe_seconds", text, ("mount",), _largest(((name,), value) for name, value in mounts.items()))
    blocked = [
        ((job_label(process.job_id), "" if process.rank is None else str(process.rank)), process.blocked.seconds)
        for process in report.processes
        if process.blocked is not None
    ]  # fmt: skip
    text = 'Time that the longest blocked thread of a rank (rank="": of any other process) has been in one call.'
    yield Family("process_uninterruptible_seconds", text, ("job_id", "rank"), _largest(blocked))
    newest: dict[str, tuple[int, float]] = {}
    for row in report.checkpoints:
        if row.step is not None and row.age_s is not None:
            found = row.step, row.age_s
            newest[job_label(row.job_id)] = max(newest.get(job_label(row.job_id), found), found)
    ages = [((job,), age_s) for job, (_, age_s) in newest.items()]
    yield Family("checkpoint_age_seconds", "Age of the newest complete checkpoint.", ("job_id",), ages)
    lag_bytes = sum(row.lag_bytes for row in report.logs)
    yield Family("log_lag_bytes", "Bytes of logs that are still to be read.", (), [((), lag_bytes)])


def _jobs(report: Report) -> list[tuple[Labels, float]]:
    """One series for each GPU, job and rank: it joins the series of GPUs with those of jobs."""
    of_pid = {process.pid: process for process in report.processes}
    found = {
        (gpu.uuid, str(gpu.index), job_label(process.job_id), "" if process.rank is None else str(process.rank))
        for gpu in report.gpus
        for pid in gpu.pids or ()
        if (process := of_pid.get(pid)) is not None
    }  # fmt: skip
    return [(labels, 1.0) for labels in sorted(found)]


def _largest(pairs: Iterable[tuple[Labels, float]]) -> list[tuple[Labels, float]]:
    """One series for each combination of labels: its largest value."""
    found: dict[Labels, float] = {}
    for labels, value in pairs:
        found[labels] = max(found.get(labels, 0.0), value)
    return sorted(found.items())


def job_label(job_id: str) -> str:
    """A job's number as a label; `other` for what is none, for a process may claim anything in its environment."""
    return job_id if JOB_ID.fullmatch(job_id) else "other"


def probe_label(probe: str) -> str:
    """Kind and mount of a child: `files:/shared` of `files:/shared:1000`. No user, no pid."""
    kind, _, rest = probe.partition(":")
    return f"{kind}:{PROBE_OWNER.sub('', rest)}" if rest.startswith("/") else kind


def escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def format_value(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def format_family(family: Family) -> list[str]:
    """The lines of one metric; none if it has no series. Bytes of names that are no UTF-8 become question marks."""
    name, lines = PREFIX + family.name, []
    for values, value in family.series:
        pairs = ",".join(f'{key}="{escape_label(each)}"' for key, each in zip(family.labels, values, strict=True))
        lines.append(f"{name}{{{pairs}}} {format_value(value)}" if pairs else f"{name} {format_value(value)}")
    return [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}", *lines] if lines else []
