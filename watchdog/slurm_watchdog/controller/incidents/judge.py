"""The judging core: what is known goes in, incidents come out. No I/O and no clock: the controller drives it
with real time, `replay` and the simulator with theirs."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as with_values
from operator import is_, sub
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.analysis.progress_limit import progress_limit
from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.redact import masked
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.ticking import SHOWN_S, Clock, Ticking, plain, ticking
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.incidents.correlate import (
    CorrelateContext,
    correlate,
    lasts_in_aftermath,
    run_named,
    with_hardware_cause,
)
from slurm_watchdog.controller.incidents.hang_memory import HangMemory
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.run import Run
from slurm_watchdog.controller.state.run_view import Moment
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.registry import SPECS, Settings, findings_of, spec_of
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.detect.stalled_progress import StalledProgress
from slurm_watchdog.model.cluster_view import ClusterView, JobView, NoData
from slurm_watchdog.model.incidents import (
    HARDWARE_FAULTS,
    Finding,
    HangPlace,
    Incident,
    IncidentKind,
    IncidentState,
    Truth,
)
from slurm_watchdog.model.node_events import NodeSuspicion
from slurm_watchdog.model.past_runs import SlowSearch
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING, is_known

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

    def of(self, job: SlurmJob) -> Settings:
        """Those that hold for a job."""
        own = tuple(n for n, each in enumerate(self._some) if each.match.matches(job))
        settings, floor_s = self._of(own)
        wanted_s = self._stall_after_of(job) if floor_s > 0 else 0.0
        return sooner(settings, max(wanted_s, floor_s) if wanted_s > 0 else 0.0)

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


NUMBERS_S = 30.0  # As often as a node sums them up (slurm_watchdog.agent.frames).
"""Numbers of a job that makes steps, and of which nothing is wrong, are judged so often: what they alone can show (a
slow GPU, a pace that changes) is a matter of minutes. A changed class is judged at once."""
LOOK_S = 5.0  # As often as an agent reports: numbers of a job that makes steps, and of which something else is wrong.
COMING_S, COMING_EACH_S = 60.0, 5.0
"""So long after the controller's start its agents come one after the other: a job of which some have not come yet is
judged so often, and not each time that one more has. Nothing is acted on meanwhile (controller.warm_up)."""
READ_SOON_S = 120.0  # Within so long of its start the first step of a job that logs any is read, most often.
WORLD_S = 10.0  # What is about no single job is looked at again so often, as Slurm is asked, if nothing has come.
LEAVING_AT_ONCE, LEAVING_NODES = 4, 100  # Jobs, or so many times as many nodes: some 3 ms.
RANKS_AT_ONCE, RANKS_OF_A_JOB = 1000, 50  # Some 10 ms; and what a job costs without any.
SAME_BEGIN_S = 0.01  # Of what began once: sums of floats, and ages that were measured twice.
DUE_EARLY_S = 1e-6  # Sums of floats are not exact: rather judged once more than late.
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


def _numbers_wait_s(findings: Iterable[Finding]) -> float:
    """So long numbers of a job may wait. It is not to be known that it makes steps, that no rank of it is stopped, and
    that nothing delays its steps or is asked for: then they may not."""
    well = {each.kind for each in findings if each.truth is Truth.OK}
    if _is_held_up(findings) or not well >= {IncidentKind.COLLECTIVE_HANG, IncidentKind.RANK_STOPPED}:
        return 0.0
    return LOOK_S if any(each.truth is Truth.BAD for each in findings) else NUMBERS_S


def _is_held_up(findings: Iterable[Finding]) -> bool:
    """Whether something may delay the steps of a job, or is asked for: it is late."""
    return any(each.wanted or (each.truth is Truth.BAD and spec_of(each.kind).delays_steps) for each in findings)


def _needs_each_look(job: JobView, findings: Iterable[Finding]) -> bool:
    """Whether numbers of 30 s ago are too old for a job: it is held up, or no one can read its steps. For one that
    starts, or of which this controller knows little, they do."""
    steps_are_read = job.progress is not None or job.run_age_s < READ_SOON_S
    return not steps_are_read or _is_held_up(findings)


class JudgedRun(Struct):
    """One run of a job as it was judged last."""

    at: float
    view: JobView  # Its ages go on: see `later`.
    findings: tuple[Finding, ...]
    telling: tuple[Finding, ...]  # Those of them that say more than that something is well.
    subjects: frozenset[str]  # Of all of them.
    is_close: bool  # Each report of its nodes is to be whole.
    limit_s: float
    due_at: float  # When it has to be judged again, if nothing comes.
    holds_s: tuple[float, float]
    """The same of comparisons with ages that steps, and looks at logs, move: after so long."""
    moved_at: tuple[float, float, float]  # From when these ages count (Run.moved_at).

    def said(self, asked: frozenset[str]) -> tuple[Finding, ...]:
        """What there is to say of it: all, where a subject of it is one of those that are asked about."""
        return self.telling if self.subjects.isdisjoint(asked) else self.findings

    def holds(self, run: Run, now: float) -> bool:
        """Whether it is what would be said of the run at `now`; a number, or a step, of one that is calm may wait."""
        if run.is_due or not self.at <= now < self.due_at:
            return False
        if run.has_numbers and now - self.at >= run.numbers_wait_s:
            return False
        age_s = now - self.at
        if age_s < min(self.holds_s):  # steps only make it hold longer
            return True
        step_s, grew_s, read_s = map(sub, run.moved_at, self.moved_at) if run.has_numbers else (0.0, 0.0, 0.0)
        return age_s - step_s < self.holds_s[0] and age_s - min(grew_s, read_s) < self.holds_s[1]


class _Later(Sequence[JobView]):
    """The jobs as they were judged, with ages of now: made when someone asks for them."""

    def __init__(self, state: ClusterState, judged: Mapping[str, JudgedRun], now: float):
        self._state, self._judged, self._now = state, judged, now
        self._views: tuple[JobView, ...] | None = None

    def _made(self) -> tuple[JobView, ...]:
        if self._views is None:
            self._views = tuple(
                self._state.later(job_id, each.view, each.at, self._now) for job_id, each in self._judged.items()
            )
        return self._views

    def __iter__(self) -> Iterator[JobView]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._judged)

    def __getitem__(self, index: Any) -> Any:
        return self._made()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made() == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def _stays(incident: Incident) -> bool:
    """Whether it is as it is for as long as findings are: nothing of it waits for a time."""
    return incident.state is IncidentState.FIRING and incident.clear_mono is None and incident.inhibited_by is None


def _plain(finding: Finding, now: float) -> Finding:
    """The finding, with the moment since when it holds in place of an age that grows."""
    lasts_s = finding.duration_s
    if type(lasts_s) is not Ticking:
        return finding
    began = now - plain(lasts_s) if lasts_s.slope == 1.0 else None
    return replace(finding, duration_s=plain(lasts_s), began_mono=began)


def _as_before(findings: Iterable[Finding], before: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings; those of before where only the time has gone on since: nothing is concluded from them again."""
    known = {(each.kind, each.subject): each for each in before}
    return tuple([_same_or_new(each, known.get((each.kind, each.subject))) for each in findings])


def _same_or_new(finding: Finding, before: Finding | None) -> Finding:
    if before is None or (finding.began_mono is None and finding.duration_s != before.duration_s):
        return finding
    if abs((finding.began_mono or 0.0) - (before.began_mono or 0.0)) > SAME_BEGIN_S:
        return finding
    return before if replace(finding, duration_s=before.duration_s, began_mono=before.began_mono) == before else finding


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
        self._of_runs = [spec for spec in self._watched if spec.subject in (Subject.JOB, Subject.RUN)]
        self._holds_s = {spec.kind: spec.hold_s for spec in SPECS}
        self._settled: list[Incident] = []  # Those that ended lately: what they explained is no news.
        self._judged: dict[str, JudgedRun] = {}  # Job id -> what was said of its run when it was judged last.
        self._shared: tuple[object, ...] = ()  # What all jobs had in common then.
        self._reporting_names: tuple[str, ...] = ()  # Nodes whose agents have been heard lately,
        self._reporting: frozenset[str] = frozenset()  # and the same as a set.
        self._leaving: list[object] = []  # Jobs and nodes as they were before: see `let_go`.
        self._asked: frozenset[str] = frozenset()  # Subjects of the incidents that were open then.
        self._asked_of: dict[str, frozenset[str]] = {}  # Job -> those of them that are one of its runs.
        self._said: dict[str, tuple[tuple[Finding, ...], float]] = {}
        """Kind -> what was said of all that is not one running job, and when it has to be asked again."""
        self._changed: tuple[object, ...] = ()  # What that depended on.
        self._concluded: Sequence[Finding] = ()  # The findings of which the incidents are as they are,
        self._concluded_at = -math.inf  # since when,
        self._because: tuple[object, ...] = ()  # and what else that depended on.
        self._masked: dict[tuple[str, str], tuple[Finding, Finding]] = {}
        """(kind, subject) -> the finding of then, and it without secrets."""
        self.view = ClusterView(now=0.0)  # What the newest judgement was about.
        self.around = self.view  # The same without jobs, of the one that is under way.
        self.limits_s: dict[str, float] = {}  # Job id -> the longest time without a step that is normal for it now.

    def add(self, incident: Incident) -> None:
        """Opens an incident that no detector found: a person's request."""
        self.incidents.add(incident)
        self._because = ()

    def close(self, over: Incident) -> None:
        """Ends an open incident because its action has ended, or was refused."""
        self.incidents.close(over.id)
        self._settled.append(over)
        self._because = ()

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
        limits: CollectiveHang = self._of_jobs.of(job.job)[CollectiveHang]
        return limits

    def detect(self, now: float) -> list[Finding]:
        """The findings of every detector on the present state: of a job that is well, and of which no incident is open,
        none. A job is judged again once something has come of it, or once a comparison with a time would come out
        differently; so is everything else, and each WORLD_S. One that fails is reported, the others continue."""
        detecting = self.detecting(lambda: now)
        while True:
            try:
                next(detecting)
            except StopIteration as end:
                found: list[Finding] = end.value
                return found

    def detecting(self, clock: Callable[[], float]) -> Generator[None, None, list[Finding]]:
        """The same; between two jobs it yields after each RANKS_AT_ONCE, and others may run. `clock` gives the moment
        at which the next ones are judged. Until the end readers see the judgement before. Of a job that was restarted
        meanwhile nothing is said."""
        asked, now = frozenset(incident.subject for incident in self.incidents), clock()
        around = replace(self.state.surroundings(now), asked=asked, suspects=self.suspects(), searches=self.searches())
        self.around = around
        if around.reporting_nodes is not self._reporting_names:
            self._reporting_names, self._reporting = around.reporting_nodes, frozenset(around.reporting_nodes)
        world = (self._slurm_is_fresh(), around.searches, around.reservations)
        if world != self._shared:
            self.state.runs.judge_all()
        if asked != self._asked:
            self._note_asked(asked)
        self._shared, known = world, dict(self._judged)
        restarts = {job_id: job.restarts for job_id, job in self.state.jobs.items()}
        changed = (self.state.changes, asked, around.suspects, self._shared)
        found, lively, ranks = dict[str, JudgedRun](), False, 0
        for job_id, run in self.state.runs.active():
            if ranks >= RANKS_AT_ONCE:
                yield
                ranks, later_s = 0, clock() - now
                now, date = now + later_s, None if around.date is None else around.date + later_s
                self.around = around = replace(around, now=now, date=date)
            if self.state.runs.get(job_id) is not run or run.job.state not in RUNNING:
                continue  # since then
            judged = known.get(job_id)
            if judged is None or not (judged.holds(run, now) or self.is_coming(run, judged)):
                judged = self._judge_run(run, around, judged)
                lively |= run.numbers_wait_s < NUMBERS_S
                ranks += len(judged.view.processes) + RANKS_OF_A_JOB
            found[job_id] = self._judged[job_id] = judged  # at once: what had come is taken, also if this ends early
        lively |= found.keys() != known.keys()
        self._judged = found
        as_judged = tuple(each.view for each in self._judged.values())
        nodes = () if self.view.nodes is around.nodes else self.view.nodes
        self.view = replace(around, jobs=_Later(self.state, self._judged, now), judged=as_judged)
        self.limits_s = {job_id: each.limit_s for job_id, each in self._judged.items()}
        self._leaving = [each for job_id, each in known.items() if found.get(job_id) is not each]
        self._leaving += [nodes[place : place + LEAVING_NODES] for place in range(0, len(nodes), LEAVING_NODES)]
        del nodes, known
        findings = [each for judged in self._judged.values() for each in judged.said(asked)]
        odd = bool(around.filesystems or around.unreached or around.silent_nodes)
        eager = lively or odd or changed != self._changed
        for spec in self._watched:
            if spec.subject is not Subject.JOB:
                findings += self._of_world(spec, now, eager=eager)
                if eager:
                    yield
        self._changed = changed
        # What was seen of a run is never held against the next one.
        now_jobs = self.state.jobs.items()
        again = {job_id for job_id, job in now_jobs if restarts.get(job_id, job.restarts) != job.restarts}
        return [each for each in findings if again.isdisjoint(each.job_ids)] if again else findings

    def let_go(self) -> Iterator[None]:
        """Frees what was known before, a part between two yields: a large cluster's is half a second of work."""
        while self._leaving:
            del self._leaving[-LEAVING_AT_ONCE:]
            yield

    def is_coming(self, run: Run, judged: JudgedRun) -> bool:
        """Whether what was said of a run is to stand for a moment longer: see COMING_S."""
        coming_s = min(COMING_S, self.config.controller.warm_up)
        if self.around.watched_s >= coming_s or not 0.0 <= self.around.now - judged.at < COMING_EACH_S:
            return False
        same = judged.view.job.restarts == run.job.restarts
        return same and not self._reporting.issuperset(run.job.nodes)

    def _note_asked(self, asked: frozenset[str]) -> None:
        """Of whom incidents are open has changed: what detectors say of jobs depends on it."""
        self._asked_of = {}
        for subject in asked:
            if (named := run_named(subject)) is not None:
                self._asked_of[named[0]] = self._asked_of.get(named[0], frozenset()) | {subject}
        for subject in asked ^ self._asked:
            named = run_named(subject)
            run = self.state.runs.get(named[0]) if named is not None else None
            if run is not None:
                run.is_due = True
        self._asked = asked

    def _of_world(self, spec: DetectorSpec, now: float, *, eager: bool) -> tuple[Finding, ...]:
        """What a detector says of all that is not one running job; what it said last where that cannot have changed."""
        found, due_at = self._said.get(spec.kind, ((), now))
        if not eager and now < due_at:
            return found
        clock = Clock()
        view = replace(self.view, now=ticking(now, clock))
        if spec.subject is Subject.RUN:
            view = replace(view, jobs=(), judged=None)
        said = [_plain(each, plain(now)) for each in self._ask(spec, view, self._settings)]
        found = _as_before(said, found)
        self._said[spec.kind] = found, now + min(clock.holds_s or WORLD_S, WORLD_S) - DUE_EARLY_S
        return found

    def _judge_run(self, run: Run, around: ClusterView, judged: JudgedRun | None) -> JudgedRun:
        run.is_due = run.has_numbers = False
        clocks = clock, by_steps, by_logs = Clock(), Clock(), Clock()
        moment = Moment(*(ticking(around.now, each) for each in clocks))
        now, job = moment.now, self.state.view_of(run, moment)
        findings, limit_s = self.findings_of(job, around, now)
        _ = job.gpu_uuids  # It is asked of all jobs in one moment.
        # How long something is gone is shown, and judged with other jobs, as of this moment.
        lasts = type(limit_s) is float and all(each.gone_s is None for each in job.processes)
        run.numbers_wait_s = _numbers_wait_s(findings) if lasts else 0.0
        said = [_plain(each, around.now) for each in findings]
        found = _as_before(said, judged.telling if judged is not None else ())
        holds_s = min(clock.holds_s, WORLD_S if job.past else math.inf)
        if any(each.is_shown for each in clocks):
            holds_s = min(holds_s, SHOWN_S)
        tells = tuple(each for each in found if each.truth is not Truth.OK or each.wanted)
        return JudgedRun(
            at=around.now,
            view=job,
            findings=found,
            telling=() if run.numbers_wait_s >= NUMBERS_S else tells,
            subjects=frozenset(each.subject for each in found),
            is_close=_needs_each_look(job, found),
            limit_s=plain(limit_s),
            due_at=around.now + holds_s - DUE_EARLY_S if lasts else around.now,
            holds_s=(by_steps.holds_s - DUE_EARLY_S, by_logs.holds_s - DUE_EARLY_S),
            moved_at=run.moved_at,
        )

    def findings_of(self, job: JobView, around: ClusterView, now: float) -> tuple[list[Finding], float]:
        """What is to be said of one job at `now`, which is the moment of `job`, and the longest time without a step
        that is normal for it."""
        settings, names = self._of_jobs.of(job.job), sorted(job.job.nodes)
        view = ClusterView(
            now=now,
            date=None if around.date is None else now + (around.date - around.now),
            jobs=(job,),
            nodes=tuple(node for name in names if (node := self.state.nodes.view(name)) is not None),
            searches=around.searches,
            reservations=around.reservations,
            slurm_nodes=self.state.lost_among(job.job.nodes),
            asked=self._asked_of.get(job.job.job_id, frozenset()),
        )
        places = frozenset(name for run in job.past for name in run.nodes).difference(names)
        more = tuple(node for name in sorted(places) if (node := self.state.nodes.view(name)) is not None)
        of_runs = replace(view, nodes=(*view.nodes, *more)) if more else view
        patience_s = self._patience_of(job.job)
        limit_s = max(progress_limit(job, settings[CollectiveHang]).seconds, patience_s)
        age_s = job.run_age_s if job.progress is None else job.progress.age_s
        findings = []
        for spec in self._of_runs:
            for found in self._ask(spec, of_runs if spec.subject is Subject.RUN else view, settings):
                is_early = found.truth is Truth.BAD and spec.kind in BY_LIMIT and age_s < patience_s
                findings.append(found.unknown() if is_early else found)
        return findings, limit_s

    def _ask(self, spec: DetectorSpec, view: ClusterView, settings: Settings) -> list[Finding]:
        """What one detector says of a view; nothing if it fails."""
        if spec.needs_slurm and not self._slurm_is_fresh():
            return []
        try:
            return [self.state.processes.with_gpus(each) for each in findings_of(spec, view, settings)]
        except NoData as error:
            log.debug("%s cannot judge: %s", spec.kind, error)
        except Exception:  # the boundary: one detector never stops the others
            log.exception("detector %s failed", spec.kind)
            self._on_failure(spec.kind)
        return []

    def conclude(
        self, findings: Sequence[Finding], now: float, wall: float, acting: frozenset[str] = frozenset()
    ) -> list[IncidentChange]:
        """Takes the findings into the incidents; those in `acting` have an action under way. Returns all that
        are, or were, open."""
        because = (acting, self.state.slurm_at, self._slurm_is_fresh())
        if because == self._because and self._concluded_at <= now < self._concluded_at + WORLD_S:
            same = len(findings) == len(self._concluded) and all(map(is_, findings, self._concluded))
            if same and not self._settled and all(map(_stays, self.incidents)):
                self._note_trouble(now)
                return [IncidentChange(before=each, after=each) for each in self.incidents]
        self._because, self._concluded_at, self._concluded = because, now, findings
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
        # Of thousands that say that something is well, or not known, few are about an open incident.
        bad = {(each.kind, each.subject) for each in findings if each.truth is Truth.BAD}
        bad |= {(each.kind, each.subject) for each in self.incidents}
        findings = [each for each in findings if each.wanted or (each.kind, each.subject) in bad]
        findings = self._with_past(with_hardware_cause(self._without_secrets(findings), now))
        findings = within_room(findings, self.incidents, self.state.left_out)
        self._settled = [each for each in self._settled if lasts_in_aftermath(each, wall)][-MAX_SETTLED:]
        after = correlate(self.incidents, findings, moment, self._new_id, self._settled)
        after = [self._with_hang(each, before.get(each.id), wall) for each in after]
        self._settled += [each for each in after if each.state is IncidentState.RESOLVED]
        self.incidents.renew(i for i in after if i.state is not IncidentState.RESOLVED)
        self._note_trouble(now)
        return [IncidentChange(before=before.get(incident.id), after=incident) for incident in after]

    def _without_secrets(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings masked; of one in which only the time goes on the words are those of before."""
        known, self._masked, found = self._masked, {}, []
        for each in findings:
            if each.truth is not Truth.OK:
                key = each.kind, each.subject
                before, shown = known.get(key) or (None, each)
                if before is not each:
                    times = {"duration_s": each.duration_s, "began_mono": each.began_mono}
                    same = before is not None and replace(before, **times) == each
                    shown = replace(shown, **times) if same else masked(each)
                self._masked[key] = each, shown
                found.append(shown)
            else:
                found.append(each)
        return found

    def _note_trouble(self, now: float) -> None:
        for incident in self.incidents:
            if spec_of(incident.kind).delays_steps:
                self.state.runs.note_trouble(incident.job_ids, now)

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

    def close_nodes(self) -> frozenset[str]:
        """Nodes of which every look counts: those that open incidents name, but for what rests on events alone, and
        those of jobs that one may hold up, that are late or asked about, or whose steps no one can read."""
        jobs, found = {job_id for job_id, judged in self._judged.items() if judged.is_close}, set[str]()
        for incident in self.incidents:
            if spec_of(incident.kind).delays_steps:
                jobs.update(incident.jobs_now)
            if incident.kind not in HARDWARE_FAULTS:
                found.update(each.node for each in incident.culprits if each.node)
        runs = map(self.state.runs.get, jobs)
        return frozenset(found.union(*(run.job.nodes for run in runs if run is not None)))

    def _slurm_is_fresh(self) -> bool:
        age_s = self.around.slurm_age_s
        return age_s is not None and age_s <= self.slurm_patience_s
