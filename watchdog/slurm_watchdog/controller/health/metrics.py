"""What Prometheus reads from the controller. Labels are job ids and fixed words only: no pid, no user's text."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slurm_watchdog import __version__
from slurm_watchdog.base.capped import CAPS
from slurm_watchdog.controller.health.cluster import Health, is_announced
from slurm_watchdog.controller.health.gpu_time import GpuTime
from slurm_watchdog.controller.health.job import Level
from slurm_watchdog.controller.policy.guards import GUARDS
from slurm_watchdog.controller.state.crowds import MAX_CROWDS
from slurm_watchdog.detect.registry import KINDS
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.model.actions import OUTCOMES, Action, Verdict
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Incident, IncidentState
from slurm_watchdog.notify.notification import Delivery
from slurm_watchdog.wire.rate_limits import CONNECTION_REASONS, REFUSED_REPORTS

MAX_OPERATIONS = 200
MAX_LOG_ERRORS = 500
"""Series, of whichever jobs come first."""
NO_OPERATIONS: Mapping[str, str] = MappingProxyType({})
MAX_JOB_INCIDENTS = 800
MAX_NOT_JUDGED = 400
MAX_JOBS = 3500
"""Jobs with series of their own: five each, which leaves room for the rest below the 20,000 series that one
controller may have."""


class ControllerMetrics:
    """The controller's own registry; nothing global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # The gauge `_incidents` and the counter `_incidents_total` may not share a registry: the library takes the
        # counter's name without its suffix. In the text that Prometheus reads they are two names.
        self._counters = CollectorRegistry()
        prefix, registry = "slurm_watchdog_", self.registry
        self._age = Gauge(
            f"{prefix}job_progress_age_seconds",
            "Time since the job's last step",
            ["job_id"],
            registry=registry,
        )
        self._step = Gauge(f"{prefix}job_step", "Newest step of the job's present run", ["job_id"], registry=registry)
        self._step_s = Gauge(
            f"{prefix}job_step_seconds",
            "Median of the recent times of one step",
            ["job_id"],
            registry=registry,
        )
        self._limit = Gauge(
            f"{prefix}job_stall_limit_seconds",
            "Progress age at which the job counts as hanging",
            ["job_id"],
            registry=registry,
        )
        self._phase = Gauge(f"{prefix}job_phase", "1 for the phase a job is in", ["job_id", "phase"], registry=registry)
        self._incidents = Gauge(f"{prefix}incidents", "Open incidents", ["kind", "state"], registry=registry)
        self.incidents_total = Counter(
            f"{prefix}incidents_total", "Incidents that fired", ["kind"], registry=self._counters
        )
        self.decisions = Counter(
            f"{prefix}decisions_total", "Decisions", ["action", "verdict", "by"], registry=registry
        )
        self.actions = Counter(f"{prefix}actions_total", "Actions that ended", ["action", "outcome"], registry=registry)
        self.lost_work = Counter(f"{prefix}lost_work_seconds_total", "Work repeated after restarts", registry=registry)
        self.lost_gpu_time = Counter(
            f"{prefix}lost_gpu_seconds_total",
            "GPU time of jobs that hung, or did work again after a restart",
            ["why"],
            registry=registry,
        )
        self.restarted_gpus = Counter(
            f"{prefix}restarted_gpus_total", "GPUs of jobs that were brought back to work", registry=registry
        )
        self._operation = Gauge(
            f"{prefix}job_operation",
            "1 for the operation of the ladder at which an action on a job is",
            ["job_id", "operation"],
            registry=registry,
        )
        self._log_errors = Gauge(
            f"{prefix}job_log_errors",
            "Error lines that are kept of the job's present run",
            ["job_id", "pattern"],
            registry=registry,
        )
        self.gpu_time = GpuTime()
        self._job_incident = Gauge(
            f"{prefix}job_incident",
            "1 for an incident that fires and that no other one explains, for each of its jobs",
            ["job_id", "kind", "severity"],
            registry=registry,
        )
        self._not_judged = Gauge(
            f"{prefix}job_not_judged",
            "1 for a job whose progress cannot be judged, with the reason",
            ["job_id", "reason"],
            registry=registry,
        )
        self._health = Gauge(
            f"{prefix}health",
            "1 for how everything is, as `status` and the page show it",
            ["level"],
            registry=registry,
        )
        self.notifications = Counter(
            f"{prefix}notifications_total",
            "Attempts to send messages, by channel: sent, failed (it is tried again), dropped (it is not)",
            ["channel", "outcome"],
            registry=registry,
        )
        self._waiting = Gauge(
            f"{prefix}notifications_waiting", "Messages that wait to be sent", ["channel"], registry=registry
        )
        self._oldest = Gauge(
            f"{prefix}notifications_oldest_age_seconds",
            "Age of the oldest message that waits to be sent; 0: none does",
            ["channel"],
            registry=registry,
        )
        self._failing = Gauge(
            f"{prefix}notifications_failing_seconds",
            "Since a channel's messages began to fail; 0: the newest was delivered",
            ["channel"],
            registry=registry,
        )
        self._nodes = Gauge(f"{prefix}nodes", "Nodes by what their agents do", ["state"], registry=registry)
        self.reports = Counter(f"{prefix}reports_total", "Reports received", ["outcome"], registry=registry)
        self.refused_connections = Counter(
            f"{prefix}refused_connections_total",
            "Connections to the agents' port that were refused",
            ["reason"],
            registry=registry,
        )
        self.certificate_expiry = Gauge(
            f"{prefix}certificate_expiry_timestamp_seconds",
            "When a certificate of ours ends",
            ["certificate"],
            registry=registry,
        )
        self.slurm_unreadable = Counter(
            f"{prefix}slurm_unreadable_total",
            "Fields of Slurm's listings that could not be read; row: a whole row was left out; partial: "
            "Slurm shows not all jobs",
            ["field"],
            registry=registry,
        )
        self.tick_duration = Histogram(f"{prefix}tick_duration_seconds", "Time of one judgement", registry=registry)
        self.last_tick = Gauge(
            f"{prefix}controller_last_complete_tick_timestamp_seconds",
            "Dead-man switch: must keep rising",
            registry=registry,
        )
        self.slurm_requests = Counter(
            f"{prefix}slurm_requests_total", "Requests to Slurm", ["call", "outcome"], registry=registry
        )
        self.detector_failures = Counter(
            f"{prefix}detector_failures_total", "Detectors that raised", ["kind"], registry=registry
        )

        self._without_series = Gauge(
            f"{prefix}jobs_without_series",
            f"Running jobs beyond the {MAX_JOBS} that have series of their own",
            registry=registry,
        )
        self._shown: dict[tuple[Gauge, tuple[str, ...]], Gauge] = {}
        """Series of jobs, by gauge and labels."""
        self._ones: dict[Gauge, set[tuple[str, ...]]] = {}
        """The series of a gauge that are 1, and all that it has."""
        self._left_out = Counter(
            f"{prefix}left_out_total",
            "Entries of a container that had no room, by container",
            ["what"],
            registry=registry,
        )
        self._left_out_so_far: dict[str, int] = {}
        self._crowds = Gauge(
            f"{prefix}processes_left_out",
            f"Processes of a job that its nodes have and are not looked at one by one, by job and user; of "
            f"the {MAX_CROWDS} largest crowds",
            ["job_id", "uid"],
            registry=registry,
        )
        build = Gauge(f"{prefix}build_info", "1, with the version", ["version"], registry=registry)
        build.labels(__version__).set(1)
        self._tallies = {
            (kind, state): self._incidents.labels(kind, state)
            for kind in KINDS
            for state in (IncidentState.PENDING, IncidentState.FIRING)
        }
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Series whose first event matters exist before it: a counter that begins with 1 has no increase that an
        alert could see."""
        for action in Action:
            if action is Action.NONE:
                continue
            for outcome in OUTCOMES:
                self.actions.labels(action, outcome)
            for guard, _ in GUARDS:
                self.decisions.labels(action, Verdict.SUPPRESSED, guard)
            self.decisions.labels(action, Verdict.OBSERVED, "mode")
        for why in ("standstill", "redone"):
            self.lost_gpu_time.labels(why)
        for kind in KINDS:
            self.incidents_total.labels(kind)
            self.detector_failures.labels(kind)
        for reason in CONNECTION_REASONS:
            self.refused_connections.labels(reason)
        for outcome in REFUSED_REPORTS:
            self.reports.labels(outcome)
        for what in CAPS:
            self._left_out.labels(what)

    def show_left_out(self, totals: Mapping[str, int]) -> None:
        """`totals`: a key of CAPS -> entries that had no room so far."""
        for what, total in totals.items():
            more = total - self._left_out_so_far.get(what, 0)
            if more:
                self._left_out.labels(what).inc(more)
                self._left_out_so_far[what] = total

    def show_crowds(self, crowds: Mapping[tuple[str, int], int]) -> None:
        """`crowds`: (job, user) -> processes that there was no room for."""
        self._crowds.clear()
        for (job_id, uid), count in crowds.items():
            self._crowds.labels(job_id, str(uid)).set(count)

    def show_certificates(self, expires: Callable[[], Mapping[str, float]]) -> None:
        """`expires` gives when our certificates end, by name, in seconds since the epoch; the names never change."""
        for name in expires():
            self.certificate_expiry.labels(name).set_function(partial(_value, expires, name))

    def count_refused_connection(self, reason: str) -> None:
        """`reason` is one of CONNECTION_REASONS."""
        self.refused_connections.labels(reason).inc()

    def show(
        self,
        view: ClusterView,
        limits_s: dict[str, float],
        open_incidents: Iterable[Incident],
        operations: Mapping[str, str] = NO_OPERATIONS,
    ) -> None:
        """Sets every gauge from one view; series of jobs that are gone go as well. `operations`: job -> where
        an action on it is.

        Of more than MAX_JOBS jobs those with an open incident have series, and then those that were there
        first; how many have none is a series, too.
        """
        open_incidents = tuple(open_incidents)
        jobs = _with_series(view.jobs, {job_id for each in open_incidents for job_id in each.job_ids})
        values = {key: value for job in jobs for key, value in self._of_job(job, limits_s)}
        values |= {
            (self._operation, (job_id, operation)): 1
            for job_id, operation in islice(operations.items(), MAX_OPERATIONS)
        }
        values |= islice(self._errors(jobs), MAX_LOG_ERRORS)
        self.lost_gpu_time.labels("standstill").inc(self.gpu_time.add(view, open_incidents))
        for gauge, labels in self._shown.keys() - values.keys():
            gauge.remove(*labels)
            del self._shown[gauge, labels]
        for (gauge, labels), value in values.items():
            child = self._shown.get((gauge, labels))
            if child is None:
                child = self._shown[gauge, labels] = gauge.labels(*labels)
            child.set(value)
        self._without_series.set(len(view.jobs) - len(jobs))
        tally = Tally((incident.kind, incident.state) for incident in open_incidents)
        for key, series in self._tallies.items():
            series.set(tally[key])
        self._nodes.labels("reporting").set(len(view.reporting_nodes))
        self._nodes.labels("silent").set(len(view.silent_nodes))

    def show_health(self, found: Health, open_incidents: Iterable[Incident]) -> None:
        """How everything is, the jobs that are not judged, and the incidents by job."""
        for level in Level:
            self._health.labels(level.value).set(level is found.level)
        unseen = ((each.job_id, each.not_judged.value) for each in found.jobs if each.not_judged is not None)
        wrong = (
            (job_id, each.kind, each.severity.value)
            for each in open_incidents
            if is_announced(each)
            for job_id in each.jobs_now or each.job_ids
        )
        self._show_only(self._not_judged, islice(unseen, MAX_NOT_JUDGED))
        self._show_only(self._job_incident, islice(wrong, MAX_JOB_INCIDENTS))

    def _show_only(self, gauge: Gauge, labels: Iterable[tuple[str, ...]]) -> None:
        """1 for each of `labels`, and no other series of this gauge."""
        wanted, there = set(labels), self._ones.setdefault(gauge, set())
        for gone in there - wanted:
            gauge.remove(*gone)
        for new in wanted - there:
            gauge.labels(*new).set(1)
        self._ones[gauge] = wanted

    def show_deliveries(self, deliveries: Iterable[Delivery]) -> None:
        """How the messages of each channel fare."""
        for each in deliveries:
            self._waiting.labels(each.channel).set(each.waiting)
            self._oldest.labels(each.channel).set(each.oldest_s)
            self._failing.labels(each.channel).set(each.failing_s or 0.0)

    def _of_job(
        self, job: JobView, limits_s: dict[str, float]
    ) -> Iterator[tuple[tuple[Gauge, tuple[str, ...]], float]]:
        """((gauge, labels), value) of every series of a job."""
        job_id, progress = job.job.job_id, job.progress
        yield (self._limit, (job_id,)), limits_s.get(job_id, 0.0)
        if progress is None:
            yield (self._age, (job_id,)), job.run_age_s
            yield (self._phase, (job_id, "starting")), 1
            return
        yield (self._age, (job_id,)), progress.age_s
        yield (self._phase, (job_id, progress.phase or "training")), 1
        if progress.known_step is not None:
            yield (self._step, (job_id,)), progress.known_step
        if progress.step_s is not None:
            yield (self._step_s, (job_id,)), progress.step_s

    def _errors(self, jobs: Iterable[JobView]) -> Iterator[tuple[tuple[Gauge, tuple[str, ...]], float]]:
        for job in jobs:
            found = Tally(
                name if (name := line.event.pattern or "") in log_table().means else "other" for line in job.errors
            )
            yield from (((self._log_errors, (job.job.job_id, name)), number) for name, number in found.items())

    def text(self) -> bytes:
        return generate_latest(self.registry) + generate_latest(self._counters)


def _value(read: Callable[[], Mapping[str, float]], name: str) -> float:
    return read()[name]


def _with_series(jobs: tuple[JobView, ...], troubled: Collection[str]) -> tuple[JobView, ...]:
    """The jobs that have series of their own."""
    if len(jobs) <= MAX_JOBS:
        return jobs
    ranked = sorted(jobs, key=lambda job: (job.job.job_id not in troubled, job.job.start_at or 0.0, job.job.job_id))
    return tuple(ranked[:MAX_JOBS])
