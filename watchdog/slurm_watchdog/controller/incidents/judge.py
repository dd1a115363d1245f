"""The judging core: what is known goes in, incidents come out. No I/O and no clock: the controller drives it with real time,
`replay` and the simulator with theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.progress_limit import progress_limit
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.incidents.correlate import (
    CorrelateSettings,
    Moment,
    correlate,
    lasts_in_aftermath,
)
from slurm_watchdog.controller.incidents.open_limit import OpenIncidents, within_room
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect.registry import DETECTORS, WITHOUT_SLURM
from slurm_watchdog.model.cluster_view import ClusterView, NoData
from slurm_watchdog.model.incidents import Finding, Incident, IncidentState, Kind, Truth
from slurm_watchdog.model.slurm_states import RUNNING, is_known
from slurm_watchdog.wire.redact_values import masked

log = logging.getLogger(__name__)


STANDING: frozenset[Kind] = frozenset(
    {
        Kind.FILESYSTEM_OUTAGE, Kind.FILESYSTEM_STALL, Kind.LINGERING_JOB, Kind.COLLECTIVE_HANG, Kind.STALLED_PROGRESS,
        Kind.WEDGED_TEARDOWN, Kind.DEAD_RANK, Kind.RANK_STOPPED, Kind.GPU_IDLE_RANK,
    }
)  # fmt: skip
"""While such an incident is open, a step that takes long teaches nothing about the job. A job with a bad card or a loss that is no
number makes its steps as ever, and its limits are learnt from them."""


JOB_BY_JOB: frozenset[Kind] = frozenset(
    {
        Kind.LINGERING_JOB, Kind.COLLECTIVE_HANG, Kind.STALLED_PROGRESS, Kind.WEDGED_TEARDOWN, Kind.DEAD_RANK, Kind.RANK_STOPPED,
        Kind.GPU_IDLE_RANK, Kind.GPU_CLOCK_LOW, Kind.SLOW_JOB, Kind.SLOW_NODE, Kind.LOSS_SPIKE, Kind.LOSS_NAN,
        Kind.CHECKPOINT_OVERDUE,
    }
)  # fmt: skip
"""Detectors of which each finding is about one running job, and of no job that is not in the view. On a large cluster they are not
asked about every job in every tick: see slurm_watchdog.controller.state.scan_schedule."""


MAX_SETTLED = 1000
"""Incidents that ended lately and are remembered."""


def proves_stuck(incidents: Iterable[Incident], job_id: str) -> Incident | None:
    """The open incident that proves that a job's loop does not turn, with evidence good enough to act on now; None if there is none."""
    return next(
        (
            each
            for each in incidents
            if each.kind in STANDING
            and each.state is IncidentState.FIRING
            and each.actionable
            and job_id in each.jobs_now
        ),
        None,
    )


class Change(Struct, frozen=True, kw_only=True):
    """One incident before and after a judgement; `before` None: it was opened."""

    before: Incident | None
    after: Incident

    @property
    def is_over(self) -> bool:
        """Whether the incident has ended."""
        return self.after.state is IncidentState.RESOLVED

    @property
    def is_explained(self) -> bool:
        """Whether another incident now explains one that was announced."""
        before, after = self.before, self.after
        return (
            before is not None
            and before.state is after.state is IncidentState.FIRING
            and before.inhibited_by is None
            and after.inhibited_by is not None
        )


class Judge:
    """The open incidents, and how they change. `now` is the monotonic clock of whoever asks, `wall` the date of that moment."""

    def __init__(
        self,
        config: Config,
        state: ClusterState,
        incidents: Iterable[Incident],
        new_id: Callable[[], str],
        on_failure: Callable[[Kind], None] = lambda kind: None,
    ):
        """`incidents` are those that are open at the start; `on_failure` is told of a detector that failed."""
        self.config = config
        self.state = state
        self._open = OpenIncidents(incidents)
        self._new_id = new_id
        self._on_failure = on_failure
        self._watched = [(kind, detect) for kind, detect in DETECTORS if config.mode_of(kind) != "off"]
        self._holds_s = {
            kind: float(getattr(getattr(config.detectors, kind), "hold", 0.0)) for kind, _ in DETECTORS
        }
        self._settled: list[Incident] = []
        """Those that ended lately: what they explained is no news."""
        self._said: dict[Kind, dict[str, list[Finding]]] = {}
        """What detectors that judge job by job said of each when it was looked at last."""
        self.view = ClusterView(now=0.0)
        """What the newest judgement was about."""
        self.limits_s: dict[str, float] = {}
        """Job id -> the longest time without a step that is normal for it now."""

    @property
    def incidents(self) -> OpenIncidents:
        """The open ones, to be read."""
        return self._open

    def add(self, incident: Incident) -> None:
        """Opens an incident that no detector found: a person's request."""
        self._open.add(incident)

    def close(self, incident_id: str) -> None:
        """Forgets an open incident because its action has ended, or was refused."""
        self._open.close(incident_id)

    @property
    def slurm_patience_s(self) -> float:
        """An older listing says nothing about now: three polls that failed, the last one by its deadline."""
        return 3 * self.config.slurm.poll_interval + self.config.slurm.deadline

    def look(self, now: float) -> list[Finding]:
        """What every detector says of the present state. One that fails is told of, the others go on."""
        asked = frozenset(incident.subject for incident in self.incidents)
        self.view, looked_at = self.state.next_view(now, asked)
        newest = replace(self.view, jobs=tuple(job for job in self.view.jobs if job.job.job_id in looked_at))
        settings = self.config.detectors.collective_hang
        there = {job.job.job_id for job in self.view.jobs}
        self.limits_s = {job_id: limit for job_id, limit in self.limits_s.items() if job_id in there}
        self.limits_s |= {job.job.job_id: progress_limit(job, settings).seconds for job in newest.jobs}
        findings: list[Finding] = []
        fresh = self._slurm_is_fresh()
        for kind, detect in self._watched:
            if not (fresh or kind in WITHOUT_SLURM):
                continue
            try:
                if kind in JOB_BY_JOB:
                    found = self._join(kind, detect(newest, self.config.detectors), looked_at, there)
                else:
                    found = detect(self.view, self.config.detectors)
                findings.extend(self.state.gpus.name(finding) for finding in found)
            except NoData as error:
                log.debug("%s cannot judge: %s", kind, error)
            except Exception:  # the boundary: one detector never stops the others
                log.exception("detector %s failed", kind)
                self._on_failure(kind)
        return findings

    def _join(
        self, kind: Kind, found: Sequence[Finding], looked_at: frozenset[str], there: set[str]
    ) -> list[Finding]:
        """What was just found, and of the jobs whose turn it is not, what was said when it was."""
        kept = {
            job_id: known
            for job_id, known in self._said.get(kind, {}).items()
            if job_id in there and job_id not in looked_at
        }
        for finding in found:
            kept.setdefault(finding.job_ids[0], []).append(finding)
        self._said[kind] = kept
        return [finding for known in kept.values() for finding in known]

    def conclude(
        self, findings: Sequence[Finding], now: float, wall: float, acting: frozenset[str] = frozenset()
    ) -> list[Change]:
        """Takes the findings into the incidents; those in `acting` have an action under way. Returns all that are, or were, open."""
        jobs = self.state.jobs.values()
        unsure = {job.job_id for job in jobs if "restarts" in job.unreadable or not is_known(job.state)}
        active = {
            job.job_id: job.restarts for job in jobs if job.state in RUNNING and job.job_id not in unsure
        }
        involved = {job for incident in self.incidents for job in incident.job_ids}
        fresh = self._slurm_is_fresh()
        over = frozenset(job for job in involved if fresh and job not in active and job not in unsure)
        unheard = frozenset(each.name for each in self.view.slurm_nodes).difference(self.view.reporting_nodes)
        moment = Moment(
            mono=now, wall=wall, restarts=active, over=over, acting=acting, blind=not fresh, unheard_nodes=unheard,
            owners={job.job_id: job.uid for job in self.state.jobs.values()},
        )  # fmt: skip
        before = {incident.id: incident for incident in self.incidents}
        settings = CorrelateSettings(
            hold_s=self._holds_s, resolve_after_s=self.config.controller.resolve_after
        )
        findings = [masked(each) if each.truth is not Truth.OK else each for each in findings]
        findings = within_room(findings, self.incidents, self.state.left_out)
        self._settled = [each for each in self._settled if lasts_in_aftermath(each, wall)][-MAX_SETTLED:]
        after = correlate(self.incidents, findings, settings, moment, self._new_id, self._settled)
        self._settled += [each for each in after if each.state is IncidentState.RESOLVED]
        self._open.renew(i for i in after if i.state is not IncidentState.RESOLVED)
        for incident in self.incidents:
            if incident.kind in STANDING:
                self.state.note_trouble(incident.job_ids, now)
        return [Change(before=before.get(incident.id), after=incident) for incident in after]

    def settle(self, change: Change, now: float) -> None:
        """A filesystem that is well again: its jobs' clocks start anew."""
        incident = change.after
        if incident.state is IncidentState.RESOLVED and incident.subject.startswith("mount:"):
            self.state.filesystems.end(incident.subject)
            self.state.grant_grace(now, incident.job_ids)

    def _slurm_is_fresh(self) -> bool:
        age_s = self.view.slurm_age_s
        return age_s is not None and age_s <= self.slurm_patience_s
