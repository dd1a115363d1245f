"""The judging core: what is known goes in, incidents come out. No I/O and no clock: the controller drives it
with real time, `replay` and the simulator with theirs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace as with_values
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.analysis.progress_limit import progress_limit
from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.incidents.correlate import (
    CorrelateContext,
    correlate,
    lasts_in_aftermath,
    with_hardware_cause,
)
from slurm_watchdog.controller.incidents.hang_memory import HangMemory
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.registry import SPECS, Settings, findings_of, spec_of
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.detect.stalled_progress import StalledProgress
from slurm_watchdog.model.cluster_view import ClusterView, JobView, NoData
from slurm_watchdog.model.incidents import Finding, HangPlace, Incident, IncidentKind, IncidentState, Truth
from slurm_watchdog.model.node_events import NodeSuspicion
from slurm_watchdog.model.past_runs import SlowSearch
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING, is_known
from slurm_watchdog.wire.redact_values import masked

OF_ONE = 64  # Of one job or node. There are 26 kinds; a node has 16 GPUs at most, each with a fault and an orphan.


class OpenIncidents(Sequence[Incident]):
    """The incidents that are open, in the order of their opening. `Judge` owns them, and no one else edits
    them. A walk over them sees them as they were when the walk began."""

    def __init__(self, incidents: Iterable[Incident] = ()):
        self.renew(incidents)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Incident]:
        return iter(tuple(self._by_id.values()))

    def get(self, incident_id: str) -> Incident | None:
        """The open incident with this id."""
        return self._by_id.get(incident_id)

    def add(self, incident: Incident) -> None:
        """Opens one, or puts it in the place of the one with its id."""
        self._by_id[incident.id] = incident

    def close(self, incident_id: str) -> None:
        """It is not open any more; nothing happens if it was not."""
        self._by_id.pop(incident_id, None)

    def renew(self, incidents: Iterable[Incident]) -> None:
        """These, and no others, are open now."""
        self._by_id = {incident.id: incident for incident in incidents}


def within_room(findings: Sequence[Finding], incidents: Iterable[Incident], left_out: LeftOut) -> list[Finding]:
    """The findings without those that would open an incident too many. What is open already is updated and
    closed unchanged."""
    known, used = set(), Counter[str | None]()
    for incident in incidents:
        known.add((incident.kind, incident.subject))
        used[_whose(incident)] += 1
    kept = []
    for finding in findings:
        if finding.truth is Truth.BAD and (finding.kind, finding.subject) not in known:
            whose = _whose(finding)
            if whose is not None and used[whose] >= OF_ONE:
                left_out.note("incidents", whose)
                continue
            known.add((finding.kind, finding.subject))
            used[whose] += 1
        kept.append(finding)
    return kept


def _whose(about: Finding | Incident) -> str | None:
    """The one job it is about, else the node. None: it is about several jobs, which no single one may hide,
    or Slurm's own word."""
    if about.job_ids:
        return f"job {about.job_ids[0]}" if len(about.job_ids) == 1 else None
    return next((each.node for each in about.culprits if each.node), None)


class SettingsOfJobs:
    """Which settings of detectors hold for which jobs: the configuration's, those of `except`, and what owners say.

    An owner's `stall_after` makes the watchdog more patient (see Judge). Less patient only where the site has a floor
    (`stall_after_floor`): then the limits of a job that trains, and of one that stands, are cut to it, and never below
    that floor. Limits of a start, an evaluation and a checkpoint stay, and all that a proof needs beside time.
    `stall_after_of`: after how long without a step an owner wants the job reported; 0: not said."""

    def __init__(self, config: Config, stall_after_of: Callable[[SlurmJob], float]):
        self._config, self._known = config, dict[tuple[int, ...], tuple[Settings, float]]()
        limits = {"detectors", "stall_after_floor"}
        self._some = tuple(each for each in config.exceptions if limits & each.given().keys())
        self._stall_after_of = stall_after_of
        floors = [config.policy.stall_after_floor, *(each.given().get("stall_after_floor", 0.0) for each in self._some)]
        self._may_be_sooner = any(floor_s > 0 for floor_s in floors)

    def groups(self, view: ClusterView) -> list[tuple[ClusterView, Settings]]:
        """The jobs of a view by the settings that hold for them."""
        if not self._some and not self._may_be_sooner:
            return [(view, self._of(())[0])]
        groups: dict[tuple[tuple[int, ...], float], list[JobView]] = {}
        for job in view.jobs:
            own = tuple(n for n, each in enumerate(self._some) if each.match.matches(job.job))
            floor_s = self._of(own)[1]
            wanted_s = self._stall_after_of(job.job) if floor_s > 0 else 0.0
            groups.setdefault((own, max(wanted_s, floor_s) if wanted_s > 0 else 0.0), []).append(job)
        return [
            (replace(view, jobs=tuple(jobs)), sooner(self._of(own)[0], within_s))
            for (own, within_s), jobs in groups.items()
        ]

    def _of(self, own: tuple[int, ...]) -> tuple[Settings, float]:
        """What holds for jobs that these exceptions match, and down to what their owners may shorten it."""
        if own not in self._known:
            settings, floor_s = self._config.detectors.settings(), self._config.policy.stall_after_floor
            for number in reversed(own):
                settings = self._some[number].settings(settings)
                floor_s = self._some[number].given().get("stall_after_floor", floor_s)
            self._known[own] = (settings, floor_s)
        return self._known[own]


def sooner(settings: Settings, within_s: float) -> Settings:
    """The settings with a job reported as standing after `within_s` at the latest; 0: as they are."""
    if within_s <= 0:
        return settings
    hang, stalled = settings[CollectiveHang], settings[StalledProgress]
    ceiling_s = min(hang.ceiling or within_s, within_s)
    cut = _cut(hang, within_s, "floor", "proven_floor", "busy_limit", "everybody_limit")
    return {
        **settings,
        CollectiveHang: with_values(cut, ceiling=ceiling_s),
        StalledProgress: _cut(stalled, within_s, "busy_limit", "still_limit"),
    }


def _cut(own: Any, within_s: float, *names: str) -> Any:
    return with_values(own, **{name: min(getattr(own, name), within_s) for name in names})


log = logging.getLogger(__name__)


RESOLVE_AFTER_REPORTS = 2  # A condition has to be gone for so many reports before its incident closes.
BY_LIMIT = frozenset({IncidentKind.COLLECTIVE_HANG, IncidentKind.STALLED_PROGRESS})
"""Kinds that say that a job stands, by the time that it has made no step."""
MAX_SETTLED = 1000  # Incidents that ended lately and are remembered.


def proves_stuck(incidents: Iterable[Incident], job_id: str) -> Incident | None:
    """The open incident that proves that a job's loop does not turn, with evidence good enough to act on now;
    None if there is none."""
    return next(
        (
            each
            for each in incidents
            if spec_of(each.kind).delays_steps
            and each.state is IncidentState.FIRING
            and each.actionable
            and job_id in each.jobs_now
        ),
        None,
    )


class IncidentChange(Struct):
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
    """The open incidents, and how they change. `now` is the monotonic clock of the caller, `wall` the date
    of that moment."""

    def __init__(
        self,
        config: Config,
        state: ClusterState,
        incidents: Iterable[Incident],
        new_id: Callable[[], str],
        on_failure: Callable[[str], None] = lambda kind: None,
        hangs: Iterable[HangPlace] = (),
        patience_of: Callable[[SlurmJob], float] = lambda job: 0.0,
    ):
        """`incidents` are those that are open at the start; `on_failure` gets the kind of a detector that failed.
        `hangs`: where jobs hung before. `patience_of`: how long a job makes no step before it is said to stand."""
        self.suspects: Callable[[], tuple[NodeSuspicion, ...] | None] = lambda: None
        self.searches: Callable[[], tuple[SlowSearch, ...]] = tuple
        """Nodes with a past, and the searches for those that make jobs slow; set by who keeps them."""
        self.hangs = HangMemory(hangs)
        self.config = config
        self.state = state
        self.incidents = OpenIncidents(incidents)  # The open ones, to be read.
        self._new_id = new_id
        self._on_failure = on_failure
        self._settings = config.detectors.settings()
        self._patience_of = patience_of
        self._of_jobs = SettingsOfJobs(config, patience_of)
        self._watched = [spec for spec in SPECS if config.detectors.is_enabled(spec.kind)]
        self._holds_s = {spec.kind: spec.hold_s for spec in SPECS}
        self._settled: list[Incident] = []  # Those that ended lately: what they explained is no news.
        self._said: dict[str, dict[str, list[Finding]]] = {}  # What was said of each job when it was looked at last.
        self.view = ClusterView(now=0.0)  # What the newest judgement was about.
        self.limits_s: dict[str, float] = {}  # Job id -> the longest time without a step that is normal for it now.

    def add(self, incident: Incident) -> None:
        """Opens an incident that no detector found: a person's request."""
        self.incidents.add(incident)

    def close(self, over: Incident) -> None:
        """Ends an open incident because its action has ended, or was refused."""
        self.incidents.close(over.id)
        self._settled.append(over)

    @property
    def slurm_patience_s(self) -> float:
        """An older listing says nothing about now: three polls that failed, the last one by its deadline."""
        return 3 * self.config.slurm.poll_interval + self.config.slurm.deadline

    @property
    def patience_s(self) -> tuple[float, float] | None:
        """Time without a step after which `stalled_progress` reports a job whose ranks all do nothing, and any
        other job; None: it is off."""
        if not any(spec.kind == IncidentKind.STALLED_PROGRESS for spec in self._watched):
            return None
        settings = self._settings[StalledProgress]
        return settings.still_limit, settings.busy_limit

    def hang_limits(self, job: JobView) -> CollectiveHang:
        """The limits that hold for this job."""
        ((_, own),) = self._of_jobs.groups(replace(self.view, jobs=(job,)))
        limits: CollectiveHang = own[CollectiveHang]
        return limits

    def detect(self, now: float) -> list[Finding]:
        """The findings of every detector on the present state. One that fails is reported, the others continue."""
        asked = frozenset(incident.subject for incident in self.incidents)
        self.view, looked_at = self.state.next_view(now, asked)
        self.view = replace(self.view, suspects=self.suspects(), searches=self.searches())
        newest = replace(self.view, jobs=tuple(job for job in self.view.jobs if job.job.job_id in looked_at))
        groups = self._of_jobs.groups(newest)
        there = {job.job.job_id for job in self.view.jobs}
        self.limits_s = {job_id: limit for job_id, limit in self.limits_s.items() if job_id in there}
        self.limits_s |= {
            job.job.job_id: max(progress_limit(job, own[CollectiveHang]).seconds, self._patience_of(job.job))
            for group, own in groups
            for job in group.jobs
        }
        findings: list[Finding] = []
        fresh = self._slurm_is_fresh()
        for spec in self._watched:
            if spec.needs_slurm and not fresh:
                continue
            try:
                if spec.subject is Subject.JOB:
                    found = [each for group, own in groups for each in findings_of(spec, group, own)]
                    if spec.kind in BY_LIMIT:
                        found = self._patient(found, newest)
                    found = self._join(spec.kind, found, looked_at, there)
                else:
                    found = findings_of(spec, self.view, self._settings)
                findings.extend(self.state.gpus.with_gpus(finding) for finding in found)
            except NoData as error:
                log.debug("%s cannot judge: %s", spec.kind, error)
            except Exception:  # the boundary: one detector never stops the others
                log.exception("detector %s failed", spec.kind)
                self._on_failure(spec.kind)
        return findings

    def _patient(self, found: Sequence[Finding], view: ClusterView) -> list[Finding]:
        """The findings; of a job whose owner wants more patience, and that made a step since, that it is not known."""
        jobs, kept = {job.job.job_id: job for job in view.jobs}, []
        for each in found:
            job = jobs[each.job_ids[0]]
            wanted_s = self._patience_of(job.job) if each.truth is Truth.BAD else 0.0
            age_s = job.run_age_s if job.progress is None else job.progress.age_s
            kept.append(each.unknown() if age_s < wanted_s else each)
        return kept

    def _join(self, kind: str, found: Sequence[Finding], looked_at: frozenset[str], there: set[str]) -> list[Finding]:
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
    ) -> list[IncidentChange]:
        """Takes the findings into the incidents; those in `acting` have an action under way. Returns all that
        are, or were, open."""
        jobs = self.state.jobs.values()
        unsure = {job.job_id for job in jobs if "restarts" in job.unreadable or not is_known(job.state)}
        active = {job.job_id: job.restarts for job in jobs if job.state in RUNNING and job.job_id not in unsure}
        involved = {job for incident in self.incidents for job in incident.job_ids}
        fresh = self._slurm_is_fresh()
        over = frozenset(job for job in involved if fresh and job not in active and job not in unsure)
        unheard = frozenset(each.name for each in self.view.slurm_nodes).difference(self.view.reporting_nodes)
        moment = CorrelateContext(
            mono=now, wall=wall, hold_s=self._holds_s, restarts=active,
            resolve_after_s=RESOLVE_AFTER_REPORTS * self.config.agent.interval,
            over=over, acting=acting, blind=not fresh, unheard_nodes=unheard,
            owners={job.job_id: job.uid for job in self.state.jobs.values()},
        )  # fmt: skip
        before = {incident.id: incident for incident in self.incidents}
        findings = [masked(each) if each.truth is not Truth.OK else each for each in findings]
        findings = self._with_past(with_hardware_cause(findings))
        findings = within_room(findings, self.incidents, self.state.left_out)
        self._settled = [each for each in self._settled if lasts_in_aftermath(each, wall)][-MAX_SETTLED:]
        after = correlate(self.incidents, findings, moment, self._new_id, self._settled)
        after = [self._with_hang(each, before.get(each.id), wall) for each in after]
        self._settled += [each for each in after if each.state is IncidentState.RESOLVED]
        self.incidents.renew(i for i in after if i.state is not IncidentState.RESOLVED)
        for incident in self.incidents:
            if spec_of(incident.kind).delays_steps:
                self.state.runs.note_trouble(incident.job_ids, now)
        return [IncidentChange(before=before.get(incident.id), after=incident) for incident in after]

    def _with_past(self, findings: Sequence[Finding]) -> list[Finding]:
        ids = {(each.kind, each.subject): each.id for each in self.incidents}
        found = []
        for each in findings:
            said = self.hangs.said(ids.get((each.kind, each.subject))) if each.truth is Truth.BAD else ()
            found.append(replace(each, facts=(*said, *each.facts)) if said else each)
        return found

    def _with_hang(self, incident: Incident, before: Incident | None, wall: float) -> Incident:
        """The incident; if a job has just been found to hang where one hung before, with the sentence that says so."""
        fired = incident.state is IncidentState.FIRING and (before is None or before.state is not incident.state)
        if not fired or not spec_of(incident.kind).stops_steps:
            return incident
        said = self.hangs.note(incident, self.view, wall)
        return incident if said is None else replace(incident, facts=(said, *incident.facts))

    def settle(self, change: IncidentChange, now: float) -> None:
        """A filesystem that is well again: its jobs' clocks are restarted."""
        incident = change.after
        if incident.state is IncidentState.RESOLVED and incident.subject.startswith("mount:"):
            self.state.filesystems.end(incident.subject)
            self.state.runs.grant_grace(now, incident.job_ids)

    def _slurm_is_fresh(self) -> bool:
        age_s = self.view.slurm_age_s
        return age_s is not None and age_s <= self.slurm_patience_s
