"""The agent's own /metrics: how it fares itself, and what is worth a graph without a controller."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, start_http_server

from watchdog.model import Report
from watchdog.runner import Isolated

log = logging.getLogger(__name__)


class AgentMetrics:
    """The series, in a registry of their own: no global state, and nothing of the interpreter's."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a date for every counter, which nobody asks for
        self.registry = CollectorRegistry()
        self._uninterruptible = Gauge(
            "slurm_watchdog_process_uninterruptible_seconds",
            "Time that the longest blocked thread of a rank (rank=\"\": of any other process) has been in one call.",
            ["job_id", "rank"],
            registry=self.registry,
        )  # fmt: skip
        self._hung = Gauge(
            "slurm_watchdog_probe_hung",
            "Seconds that a child of the agent has not come back.",
            ["probe"],
            registry=self.registry,
        )
        self._success = Gauge(
            "slurm_watchdog_collector_success",
            "1 if the collector worked in the last tick.",
            ["collector"],
            registry=self.registry,
        )
        self._duration = Gauge(
            "slurm_watchdog_collector_duration_seconds",
            "Time the collector took in the last tick.",
            ["collector"],
            registry=self.registry,
        )
        self._mount = Gauge(
            "slurm_watchdog_mount_probe_seconds",
            "Time the last probe of a mount took, or has been out.",
            ["mount"],
            registry=self.registry,
        )
        self._gpus = {
            "utilization_ratio": self._gpu_gauge(
                "utilization_ratio", "Share of the time in which it computed."
            ),
            "sm_clock_hz": self._gpu_gauge("sm_clock_hertz", "Clock of its multiprocessors."),
            "power_w": self._gpu_gauge("power_watts", "Power it draws."),
        }
        self._spool = Gauge(
            "slurm_watchdog_spool_bytes", "Reports that wait for the controller.", registry=self.registry
        )
        self._reports = Counter(
            "slurm_watchdog_reports",
            "Reports by what became of them: sent, failed (will be tried again), rejected, expired.",
            ["outcome"],
            registry=self.registry,
        )

    def _gpu_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"slurm_watchdog_gpu_{name}", text, ["gpu_uuid", "gpu"], registry=self.registry)

    def count_report(self, outcome: str) -> None:
        """Adds one report with this outcome. May be called from any thread."""
        self._reports.labels(outcome).inc()

    def update(self, report: Report, seen: Isolated, spool_bytes: int) -> None:
        """Takes over what one tick saw."""
        self._uninterruptible.clear()
        longest: dict[tuple[str, str], float] = {}
        for process in report.processes:
            if process.blocked is not None:
                key = (process.job_id, "" if process.rank is None else str(process.rank))
                longest[key] = max(longest.get(key, 0.0), process.blocked.seconds)
        for key, seconds in longest.items():
            self._uninterruptible.labels(*key).set(seconds)
        self._hung.clear()
        for probe in report.hung_probes:
            self._hung.labels(probe.probe).set(probe.seconds)
        for mount in report.mounts:
            self._mount.labels(mount.mount).set(mount.seconds)
        for field, gauge in self._gpus.items():
            gauge.clear()  # a GPU that does not answer has no value, not its last one
            for gpu in report.gpus:
                value = getattr(gpu, field)
                if value is not None:
                    gauge.labels(gpu.uuid, str(gpu.index)).set(value)
        for collector, seconds in seen.seconds.items():
            self._success.labels(collector).set(collector not in seen.failed)
            self._duration.labels(collector).set(seconds)
        self._spool.set(spool_bytes)

    def serve(self, host: str, port: int) -> bool:
        """Answers on this address from a thread; False, with a warning, where that cannot be had: watching goes on."""
        try:
            start_http_server(port, host, self.registry)
        except OSError as error:
            log.warning(
                "no metrics: %s:%d can't be listened on (%s); set agent.metrics_listen", host, port, error
            )
            return False
        return True
