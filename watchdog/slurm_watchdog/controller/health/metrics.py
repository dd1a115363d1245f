"""What Prometheus reads from the controller. Labels are job ids and fixed words only: no pid, no user's text."""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slurm_watchdog import __version__
from slurm_watchdog.base.capped import CAPS, Shortage
from slurm_watchdog.controller.health.cluster import Health, is_announced
from slurm_watchdog.controller.policy.guards import GUARDS
from slurm_watchdog.detect.registry import KINDS, spec_of
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.model.actions import OUTCOMES, Action, Verdict
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.documents import Delivery, Level
from slurm_watchdog.model.incidents import Incident, IncidentState
from slurm_watchdog.model.slurm import SlurmView
from slurm_watchdog.wire.rate_limits import CONNECTION_REASONS

LOOK_EVERY_S = 5.0  # While no job is stalled.
LONGEST_TICK_S = 60.0  # A longer time between two looks was a stall of the controller: nothing is known of it.

LOST_STREAMS = {
    "reset": "it was reset: the agent has ended, or something between us",
    "closed_by_agent": "the agent closed it",
    "closed_by_us": "this controller ends",
    "silent": "no frame came in time: it is half-open, or the agent hangs",
    "replaced": "its node has begun another one",
    "slow_reader": "it does not read what it is sent",
}  # How streams of agents end that were not refused -> what it means.
REFUSED_REPORTS = (
    "unauthorized", "replayed", "wrong_node", "garbage", "too_large", "too_slow", "too_often",
    "cut_off", "busy", "no_munge", "wrong_job", "no_room", "standby", "failed", "old_agent",
)  # fmt: skip
"""Outcomes of requests that were refused; the others are those of reports that were taken."""


class GpuTime:
    """Adds up, look by look. A job with two incidents is counted once."""

    def __init__(self) -> None:
        self._gpus: dict[str, int] = {}  # Job -> the most GPUs that its ranks held: a dead one holds none.
        self._still: frozenset[str] = frozenset()
        self._looked_at: float | None = None

    def gpus_of(self, job_id: str) -> int:
        """How many GPUs a job has; 0 if unknown."""
        return self._gpus.get(job_id, 0)

    def add(self, view: ClusterView, incidents: Iterable[Incident]) -> float:
        """GPU-seconds that jobs have been stalled since the call before, and how long each had when that was
        found out."""
        late_s: dict[str, float] = {}
        kept = set[str]()
        for incident in incidents:
            kept.update(incident.job_ids)
            if incident.state is IncidentState.FIRING and spec_of(incident.kind).stops_steps:
                for job_id in incident.job_ids:
                    late_s[job_id] = max(late_s.get(job_id, 0.0), incident.detected_after_s or 0.0)
        recently = self._looked_at is not None and view.now - self._looked_at < LOOK_EVERY_S
        if recently and not late_s and not self._still:
            return 0.0
        here = {job.job.job_id: len(job.gpu_uuids) for job in view.ageless_jobs}
        kept |= here.keys()
        known: Mapping[str, int] = self._gpus
        self._gpus = {job_id: max(here.get(job_id, 0), known.get(job_id, 0)) for job_id in kept}
        since_s = 0.0 if self._looked_at is None else min(LONGEST_TICK_S, max(0.0, view.now - self._looked_at))
        still = frozenset(late_s) & here.keys()
        lost = sum(self._gpus[job_id] * since_s for job_id in still & self._still)
        lost += sum(self._gpus[job_id] * late_s[job_id] for job_id in still - self._still)
        # One that is queued again holds no GPU, and has not returned yet.
        self._still = still | (self._still & late_s.keys())
        self._looked_at = view.now
        return lost


log = logging.getLogger(__name__)


class UnreadableRows:
    """Remembers what of the newest listing could not be read."""

    def __init__(self, metrics: ControllerMetrics):
        self._metrics = metrics
        self._newest: frozenset[str] = frozenset()

    def count(self, view: SlurmView) -> None:
        """Takes a listing."""
        odd = {f"job {job.job_id}: {name}": name for job in view.jobs for name in job.unreadable}
        odd |= {f"node {node.name}: {name}": name for node in view.nodes for name in node.unreadable}
        odd |= dict.fromkeys(view.dropped, "row")
        odd |= {view.partial: "partial"} if view.partial and not view.dropped else {}
        for what, name in odd.items():
            self._metrics.slurm_unreadable.labels(name).inc()
            if what not in self._newest:
                log.warning("Slurm's listing: not known: %s", what[:300])
        self._newest = frozenset(odd)


PREFIX = "slurm_watchdog_"
M = TypeVar("M", Gauge, Counter)
Series = tuple[Gauge, tuple[str, ...]]  # A gauge, and its labels.
MAX_OPERATIONS = 200
MAX_CROWDS, FRESH_S = 20, 60.0  # Series, and their age: agents report every few seconds, changes alone every minute.
MAX_LOG_ERRORS = 500  # Series, of whichever jobs come first.
SILENCED = "silenced"  # In the place of the state of one that fires and is silenced: alerts ask for `firing`.
MAX_JOB_INCIDENTS = 800
MAX_NOT_JUDGED = 400
MAX_JOBS = 3500  # With series of their own, five each: one controller may have 20,000 series.


class ControllerMetrics:
    """The controller's own registry; nothing global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # The gauge `_incidents` and the counter `_incidents_total` may not share a registry: the library takes the
        # counter's name without its suffix. In the text that Prometheus reads they are two names.
        self._counters = CollectorRegistry()
        gauge, counter = partial(_new, Gauge, self.registry), partial(_new, Counter, self.registry)
        self._age = gauge("job_progress_age_seconds", "Time since the job's last step", "job_id")
        self._step = gauge("job_step", "Newest step of the job's present run", "job_id")
        self._step_s = gauge("job_step_seconds", "Median of the recent times of one step", "job_id")
        self._limit = gauge("job_stall_limit_seconds", "Progress age at which the job counts as hanging", "job_id")
        self._phase = gauge("job_phase", "1 for the phase a job is in", "job_id", "phase")
        self._incidents = gauge("incidents", "Open incidents; those that fire and are silenced apart", "kind", "state")
        self.incidents_total = _new(Counter, self._counters, "incidents_total", "Incidents that fired", "kind")
        self.decisions = counter("decisions_total", "Decisions", "action", "verdict", "by")
        self.actions = counter("actions_total", "Actions that ended", "action", "outcome")
        self.lost_work = counter("lost_work_seconds_total", "Work repeated after restarts")
        self.lost_gpu_time = counter("lost_gpu_seconds_total", "GPU time of jobs that hung, or redid work", "why")
        self.restarted_gpus = counter("restarted_gpus_total", "GPUs of jobs that were brought back to work")
        self._operation = gauge(
            "job_operation", "1 for the operation that an action on a job is at", "job_id", "operation"
        )
        self._log_errors = gauge("job_log_errors", "Error lines kept of the job's present run", "job_id", "pattern")
        self.gpu_time = GpuTime()
        self._job_incident = gauge(
            "job_incident", "1 for an incident that fires and that no other one explains, for each of its jobs",
            "job_id", "kind", "severity",
        )  # fmt: skip
        self._not_judged = gauge("job_not_judged", "1 for a job that cannot be judged", "job_id", "reason")
        self._health = gauge("health", "1 for how everything is, as `status` and the page show it", "level")
        self.notifications = counter(
            "notifications_total",
            "Attempts to send messages, by channel: sent, failed (it is tried again), dropped (it is not)",
            "channel",
            "outcome",
        )
        self._waiting = gauge("notifications_waiting", "Messages that wait to be sent", "channel")
        self._oldest = gauge("notifications_oldest_age_seconds", "Age of the oldest message that waits", "channel")
        self._failing = gauge("notifications_failing_seconds", "Since a channel's messages began to fail", "channel")
        self._nodes = gauge("nodes", "Nodes by what their agents do", "state")
        self.reports = counter("reports_total", "Reports received", "outcome")
        self.refused_connections = counter("refused_connections_total", "Refused connections of agents", "reason")
        self.lost_streams = counter("lost_streams_total", "Connections of agents that ended, by how", "reason")
        self.certificate_expiry = gauge(
            "certificate_expiry_timestamp_seconds", "When a certificate ends", "certificate"
        )
        self.slurm_unreadable = counter(
            "slurm_unreadable_total",
            "Fields of Slurm's listings that could not be read; row: a whole row was left out; "
            "reservation: one was left out; partial: Slurm shows not all jobs",
            "field",
        )
        name = f"{PREFIX}tick_duration_seconds"
        self.tick_duration = Histogram(name, "Time of one judgement", registry=self.registry)
        self.last_tick = gauge("controller_last_complete_tick_timestamp_seconds", "Dead-man switch: must keep rising")
        self._active = gauge("controller_active", "1: the controller that judges and acts, 0: the standby")
        self._active.set(1)
        self.ready = gauge(
            "controller_ready",
            "1: the active controller, or a standby that can take its place; 0: a standby that cannot, as its "
            "database does not answer or its journal is of a later release",
        )
        self.ready.set(1)
        self._epoch = gauge("controller_epoch", "Number of failovers")
        self._lease_age = gauge(
            "controller_lease_age_seconds",
            "Time since the active controller renewed its lease; NaN: a standby does not know",
        )
        self.slurm_requests = counter("slurm_requests_total", "Requests to Slurm", "call", "outcome")
        self.detector_failures = counter("detector_failures_total", "Detectors that raised", "kind")
        self._without_series = gauge("jobs_without_series", f"Running jobs beyond the {MAX_JOBS} with separate series")
        self._left_out = counter("left_out_total", "Entries dropped because there was no room, by kind", "what")
        self._left_out_so_far: dict[str, int] = {}
        crowds = f"Processes that are not looked at one by one, of the {MAX_CROWDS} largest crowds"
        self._crowds = gauge("processes_left_out", crowds, "job_id", "uid")
        gauge("build_info", "1, with the version", "version").labels(__version__).set(1)
        self._of_jobs: dict[Series, Gauge] = {}  # What `show` has shown.
        self._of_health: dict[Series, Gauge] = {}  # What `show_health` has shown.
        self._tallies = {
            (kind, state): self._incidents.labels(kind, state)
            for kind in KINDS
            for state in (IncidentState.PENDING, IncidentState.FIRING, SILENCED)
        }
        self._show_zeros()
        self.refresh: Callable[[], None] = lambda: None  # Sets what is shown of the newest tick, when it is asked for.

    def show_role(self, *, active: bool, epoch: Callable[[], float], age_s: Callable[[], float]) -> None:
        """Where there may be two controllers; read when asked for."""
        self._active.set(active)
        self._epoch.set_function(epoch)
        self._lease_age.set_function(age_s)

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
        for reason in LOST_STREAMS:
            self.lost_streams.labels(reason)
        for outcome in REFUSED_REPORTS:
            self.reports.labels(outcome)
        for what in CAPS:
            self._left_out.labels(what)

    def detector_failed(self, kind: str) -> None:
        """It has raised."""
        self.detector_failures.labels(kind).inc()

    def show_left_out(self, totals: Mapping[str, int]) -> None:
        """`totals`: a key of CAPS -> entries that had no room so far."""
        for what, total in totals.items():
            more = total - self._left_out_so_far.get(what, 0)
            if more:
                self._left_out.labels(what).inc(more)
                self._left_out_so_far[what] = total

    def show_crowds(self, shortages: Iterable[Shortage]) -> None:
        """Processes that there was no room for, by job and user."""
        found = Tally[tuple[str, str]]()
        for each in shortages:
            if each.what == "processes" and each.uid is not None and each.job_id is not None and each.age_s <= FRESH_S:
                found[each.job_id, str(each.uid)] += each.count
        self._crowds.clear()
        for labels, count in found.most_common(MAX_CROWDS):
            self._crowds.labels(*labels).set(count)

    def show_certificates(self, expires: Callable[[], Mapping[str, float]]) -> None:
        """`expires` gives when our certificates end, by name, in seconds since the epoch; the names never change."""
        for name in expires():
            self.certificate_expiry.labels(name).set_function(partial(lambda each: expires()[each], name))

    def note_standstill(self, view: ClusterView, open_incidents: Iterable[Incident]) -> None:
        """Adds up the GPU time that is lost, in each tick."""
        self.lost_gpu_time.labels("standstill").inc(self.gpu_time.add(view, open_incidents))

    def show(
        self,
        view: ClusterView,
        limits_s: dict[str, float],
        open_incidents: Iterable[Incident],
        operations: Mapping[str, str],
        is_silenced: Callable[[Incident], bool],
    ) -> None:
        """Sets every gauge from one view; series of jobs that are gone go as well. `operations`: job -> where an action
        on it is. Of more than MAX_JOBS jobs those with an open incident have series, and then those that were there
        first; how many have none is a series, too."""
        open_incidents = tuple(open_incidents)
        jobs = _with_series(view.jobs, {job_id for each in open_incidents for job_id in each.job_ids})
        values = {key: value for job in jobs for key, value in self._of_job(job, limits_s)}
        values |= {
            (self._operation, (job_id, operation)): 1
            for job_id, operation in islice(operations.items(), MAX_OPERATIONS)
        }
        values |= islice(self._errors(jobs), MAX_LOG_ERRORS)
        _show_only(self._of_jobs, values)
        self._without_series.set(len(view.jobs) - len(jobs))
        tally = Tally(
            (each.kind, SILENCED if each.state is IncidentState.FIRING and is_silenced(each) else each.state)
            for each in open_incidents
        )
        for key, series in self._tallies.items():
            series.set(tally[key])
        self._nodes.labels("reporting").set(len(view.reporting_nodes))
        self._nodes.labels("silent").set(len(view.silent_nodes))

    def show_health(self, found: Health, open_incidents: Iterable[Incident]) -> None:
        """How everything is, the jobs that are not judged, and the incidents by job."""
        for level in Level:
            self._health.labels(level.value).set(level is found.level)
        unseen = (
            (self._not_judged, (each.job_id, each.not_judged)) for each in found.jobs if each.not_judged is not None
        )
        wrong = (
            (self._job_incident, (job_id, each.kind, each.severity.value))
            for each in open_incidents
            if is_announced(each)
            for job_id in each.jobs_now or each.job_ids
        )
        shown = (*islice(unseen, MAX_NOT_JUDGED), *islice(wrong, MAX_JOB_INCIDENTS))
        _show_only(self._of_health, dict.fromkeys(shown, 1))

    def show_deliveries(self, deliveries: Iterable[Delivery]) -> None:
        """How the messages of each channel fare."""
        for each in deliveries:
            self._waiting.labels(each.channel).set(each.waiting)
            self._oldest.labels(each.channel).set(each.oldest_s)
            self._failing.labels(each.channel).set(each.failing_s or 0.0)

    def _of_job(self, job: JobView, limits_s: dict[str, float]) -> Iterator[tuple[Series, float]]:
        """Every series of a job, with its value."""
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

    def _errors(self, jobs: Iterable[JobView]) -> Iterator[tuple[Series, float]]:
        for job in jobs:
            found = Tally(
                name if (name := line.event.pattern or "") in log_table().means else "other" for line in job.errors
            )
            yield from (((self._log_errors, (job.job.job_id, name)), number) for name, number in found.items())

    def text(self) -> bytes:
        self.refresh()
        return generate_latest(self.registry) + generate_latest(self._counters)


def _new(kind: type[M], registry: CollectorRegistry, name: str, text: str, *labels: str) -> M:
    return kind(f"{PREFIX}{name}", text, labels, registry=registry)


def _show_only(shown: dict[Series, Gauge], values: Mapping[Series, float]) -> None:
    """Sets these series, and removes the others of `shown`."""
    for gauge, labels in shown.keys() - values.keys():
        gauge.remove(*labels)
        del shown[gauge, labels]
    for (gauge, labels), value in values.items():
        child = shown.get((gauge, labels))
        if child is None:
            child = shown[gauge, labels] = gauge.labels(*labels)
        child.set(value)


def _with_series(jobs: Sequence[JobView], troubled: Collection[str]) -> tuple[JobView, ...]:
    """The jobs with separate series."""
    if len(jobs) <= MAX_JOBS:
        return tuple(jobs)
    ranked = sorted(jobs, key=lambda job: (job.job.job_id not in troubled, job.job.start_at or 0.0, job.job.job_id))
    return tuple(ranked[:MAX_JOBS])
