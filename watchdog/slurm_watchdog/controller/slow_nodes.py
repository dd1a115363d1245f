"""Narrows down which node makes a job slow: begins with a `slow_job` that no node shows a sign of, adds each later run
of the job and each failed test of its nodes, and tells the history of nodes who was found.

One event loop owns it. It is in memory alone: after a restart the controller knows what the history of nodes has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from slurm_watchdog.analysis.level_shift import comparable, run_speed
from slurm_watchdog.analysis.slow_node_suspects import SLOW, is_first_run, is_run_of, judge, named_words
from slurm_watchdog.detect.slow_job import SlowJob, slowdown_of
from slurm_watchdog.model.cluster_view import ClusterView, JobView, StepTime
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from slurm_watchdog.model.past_runs import SearchRun, SlowSearch
from slurm_watchdog.model.slurm import SlurmJob

log = logging.getLogger(__name__)

MAX_RUNS = 60  # Of one job that are compared, the newest.
GROWN = 1.5  # A run is measured again when it has so many times the steps.


class SlowNodes:
    """See the module."""

    def __init__(
        self,
        settings: SlowJob,
        record: Callable[[NodeEvent], None],
        wall: Callable[[], float],
        events: Callable[[], Iterable[NodeEvent]],
    ) -> None:
        """`record` takes what happened to a node; `events`: all that did and still weighs."""
        self._settings, self._record, self._wall, self._events = settings, record, wall, events
        self._known: dict[str, SlowSearch] = {}
        self._looked: dict[str, tuple[StepTime, ...]] = {}  # Job -> its step times as they were judged last.

    def all(self) -> tuple[SlowSearch, ...]:
        """For detectors."""
        return tuple(self._known.values())

    def update(self, view: ClusterView, incidents: Iterable[Incident], jobs: Mapping[str, SlurmJob]) -> None:
        """After a judgement of `view`. `incidents`: all that are open; `jobs`: Slurm's newest listing."""
        slow, signs = _slow_jobs(incidents)
        self._known = {key: each for key, each in self._known.items() if key in jobs}
        self._looked = {key: each for key, each in self._looked.items() if key in jobs}
        self._listen()
        for job in view.jobs if slow or self._known else ():
            job_id = job.job.job_id
            incident, known = slow.get(job_id), self._known.get(job_id)
            if (incident is None and known is None) or self._looked.get(job_id) is job.step_times:
                continue
            self._looked[job_id] = job.step_times
            first = known is not None and is_first_run(known, job)
            if incident is not None and not first and len(job.ranks_on) > 1 and signs.isdisjoint(job.ranks_on):
                self._begin(job, incident, view.now)
            elif incident is None and first:  # it is fast again with the same nodes, or explained
                del self._known[job_id]
            if (known := self._known.get(job_id)) is not None and not is_first_run(known, job):
                self._add_run(known, job, view.now)

    def _listen(self) -> None:
        """A failed test of a suspect that the newest run does without is held against it."""
        events = self._events() if self._known else ()
        failed = [each for each in events if each.kind == NodeEventKind.TEST_FAILED and not each.withdrawn_why]
        for search in self.all() if failed else ():
            out = set(search.first.nodes).difference((search.runs or (search.first,))[-1].nodes)
            faulty = {each.node for each in failed if each.node in out and each.at >= search.opened_at}
            if faulty - set(search.faulty):
                self._tell(replace(search, faulty=tuple(sorted(faulty | set(search.faulty)))))

    def _begin(self, job: JobView, incident: Incident, now: float) -> None:
        lasts_s = self._settings.lasts
        slow = slowdown_of(job, self._settings.percent / 100, lasts_s)
        if slow is None:
            return
        alike, step = (slow.first.batch, slow.first.logged), slow.first.step
        times, history = comparable(job.step_times), _alike(job.step_history, alike)
        before = run_speed([t for t in times if t.step < step], [t for t in history if t.step < step], lasts_s)
        after = run_speed([t for t in times if t.step >= step], [t for t in history if t.step >= step], lasts_s)
        if before is None or after is None or after.level - before.level < SLOW:
            return
        wall = self._wall()
        log.warning("job %s: a slow node is looked for (incident %s)", job.job.job_id, incident.id)
        self._known[job.job.job_id] = SlowSearch(
            job_id=job.job.job_id,
            chain=f"{job.job.uid}/{job.job.name}"[:400],
            incident_id=incident.id,
            opened_at=wall,
            step=step,
            alike=alike,
            fast=before.level,
            error=max(before.error, after.error),
            first=_run(job, after, wall - (now - after.at)),
        )

    def _add_run(self, known: SlowSearch, job: JobView, now: float) -> None:
        times, same_size = comparable(job.step_times), len(job.ranks_on) == len(known.first.nodes)
        speed = run_speed(times, _alike(job.step_history, known.alike), self._settings.lasts)
        if speed is None or not same_size or not _alike(times[-1:], known.alike):
            return  # it is faster or slower by its size alone
        run, runs = _run(job, speed, self._wall() - (now - speed.at)), known.runs
        if runs and is_run_of(runs[-1], job):
            if run.batches < GROWN * runs[-1].batches:
                return
            runs = runs[:-1]
        self._tell(replace(known, runs=(*runs, run)[-MAX_RUNS:]))

    def _tell(self, search: SlowSearch) -> None:
        """Keeps the search, and writes down who was found, or that later runs contradict it."""
        verdict, at = judge(search), self._wall()
        found = ((verdict.named, verdict.confirmed),) if verdict.named else ()
        for node, full in dict((*search.named, *found)).items():
            if (node, full) in search.named and (node, full) in found:
                continue
            is_named = node == verdict.named
            what = f"{node} is not what makes job {search.job_id} slow: later runs contradict it"
            event = NodeEvent(
                key=f"search:{search.incident_id}:{node}",
                node=node,
                kind=NodeEventKind.SLOWED_JOB if full else NodeEventKind.SLOWED_ONCE,
                at=at,
                what=named_words(search, verdict) if is_named else what,
                job_id=search.job_id,
                chain=search.chain,
                incident_id=search.incident_id,
                withdrawn_at=None if is_named else at,
                withdrawn_why="" if is_named else "later runs contradict it",
            )
            log.warning("job %s: %s", search.job_id, event.what)
            self._record(event)
        self._known[search.job_id] = replace(search, named=found)


def _run(job: JobView, speed: SearchRun, at: float) -> SearchRun:
    return replace(speed, nodes=job.ranks_on, at=at, restarts=job.job.restarts, step_id=job.step_id)


def _slow_jobs(incidents: Iterable[Incident]) -> tuple[dict[str, Incident], set[str]]:
    """Job -> the `slow_job` that is reported of it; and the nodes that any other incident names."""
    slow: dict[str, Incident] = {}
    signs: set[str] = set()
    for each in incidents:
        if each.state is not IncidentState.FIRING:
            continue
        if each.kind == IncidentKind.SLOW_JOB:
            slow |= {job_id: each for job_id in each.jobs_now if each.inhibited_by is None}
        elif each.kind not in (IncidentKind.SUSPECT_NODE, IncidentKind.STRAGGLER):  # these prove nothing of a node
            signs |= {culprit.node for culprit in each.culprits if culprit.node}
    return slow, signs


def _alike(times: Iterable[StepTime], alike: tuple[float | None, bool]) -> list[StepTime]:
    """Those of one batch size, by the log itself or not."""
    return [each for each in times if (each.batch, each.logged) == alike]
