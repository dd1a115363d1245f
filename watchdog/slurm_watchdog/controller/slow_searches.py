"""Searches for the nodes that make jobs slow: begins one with a `slow_job` that no node shows a sign of, adds each
later run of the job, and tells the ledger of nodes who was found.

One event loop owns it. The journal has every search as it is here: a controller that dies loses nothing but the newest
steps of the present run, which are measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import exp

from msgspec.structs import replace

from slurm_watchdog.analysis.memo import Series
from slurm_watchdog.analysis.run_speed import RunSpeed, comparable, run_speed
from slurm_watchdog.analysis.search_words import is_first_run, slow_node_words
from slurm_watchdog.analysis.slow_node_search import SLOW, judge
from slurm_watchdog.config.schema import Config
from slurm_watchdog.detect.slow_job import Slowdown, SlowJob, slowdown_of
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.cluster_view import ClusterView, JobView, StepTime
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Truth
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from slurm_watchdog.model.node_test import NodeResult
from slurm_watchdog.model.slow_search import JobSearch, SearchRun, SearchState, SearchTest, SlowSearch
from slurm_watchdog.model.slurm import SlurmJob

log = logging.getLogger(__name__)

MAX_RUNS = 60
"""Of one job that are compared, the newest: the search among 4,096 nodes takes 13."""
SURE = 0.9
"""A node found with this confidence or more gets an event in the ledger."""
GROWN = 1.5
"""A run is measured again when it has so many times the steps: its speed is written a few times an hour at first, and
then hardly ever."""
LISTENS_EVERY_S = 15.0
"""Between two looks at the tests that others made."""
KEPT_S = 86400.0
"""A search whose job Slurm lists no longer is forgotten after this time."""


class SlowSearches:
    """See the module."""

    def __init__(
        self, config: Config, journal: Journal, writer: JournalWriter, record: Callable[[NodeEvent], None],
        wall: Callable[[], float], events: Callable[[], Iterable[NodeEvent]] = tuple,
    ):  # fmt: skip
        """`record` takes what happened to a node; `events`: all that did and still weighs. Raises JournalError."""
        self._events, self._listened_at = events, float("-inf")
        self._journal, self._writer, self._record, self._wall = journal, writer, record, wall
        self._is_on = config.policy.slow_search != "off"
        self._settings: SlowJob = config.detectors.settings()[SlowJob]
        self._known = {each.job_id: each for each in journal.slow_searches.all()} if self._is_on else {}
        self._looked: dict[str, tuple[StepTime, ...]] = {}
        """Job -> its step times as they were judged last."""

    def all(self) -> tuple[JobSearch, ...]:
        """Every search, for detectors."""
        return tuple(self._known.values())

    def get(self, job_id: str) -> JobSearch | None:
        """The search that goes with a job."""
        return self._known.get(job_id)

    def update(self, view: ClusterView, incidents: Iterable[Incident], jobs: Mapping[str, SlurmJob]) -> None:
        """After a judgement of `view`. `incidents`: all that are open; `jobs`: Slurm's newest listing."""
        if not self._is_on:
            return
        slow, signs = _slow_jobs(incidents)
        self._forget(jobs)
        self._note_tests_of_others()
        for job in view.jobs:
            job_id = job.job.job_id
            incident = slow.get(job_id)
            if incident is None and job_id not in self._known:
                continue
            if self._looked.get(job_id) is job.step_times:
                continue
            self._looked[job_id] = job.step_times
            if incident is not None and len(job.ranks_on) > 1 and signs.isdisjoint(job.ranks_on):
                self._begin(job, incident, view.now)
            elif incident is None:
                self._end_if_fast_again(job)
            if (known := self._known.get(job_id)) is not None and not is_first_run(known, job):
                self._add_run(known, job, view.now)

    def note_test(self, job_id: str, results: Sequence[NodeResult]) -> None:
        """What a test says of nodes that the job's run did not use, in the caller's transaction. One that failed is
        named, if it is among the suspects of every run that was slow, until a run contradicts it."""
        known = self._known.get(job_id)
        results = [each for each in results if known is None or each.node not in known.search.faulty]
        if known is None or not results:
            return
        at = self._wall()
        tests = tuple(
            SearchTest(node=each.node, at=at, truth=each.truth, what=_words(each))
            for each in results
        )  # fmt: skip
        faulty = dict.fromkeys((*known.search.faulty, *(each.node for each in tests if each.truth is Truth.BAD)))
        for each in tests:
            self._note(known, f"{each.node} was tested while the job ran without it: {each.what}")
        search = replace(known.search, faulty=tuple(faulty))
        changed = replace(known, search=search, tests=(*known.tests, *tests), updated_at=at)
        self._save(self._told(changed))

    def _note_tests_of_others(self) -> None:
        """A failed test of a suspect, by an operator too, says the same, if the newest run does without that node:
        people test those that are idle. Now and then: the ledger of a large cluster has thousands of events."""
        wall = self._wall()
        if not self._known or 0 <= wall - self._listened_at < LISTENS_EVERY_S:
            return
        self._listened_at = wall
        failed = [each for each in self._events() if each.kind == NodeEventKind.TEST_FAILED and not each.withdrawn_why]
        for search in self.all() if failed else ():
            runs = search.search.runs
            out = set(search.search.suspects).difference(runs[-1].nodes if runs else search.search.suspects)
            results = [
                NodeResult(node=each.node, truth=Truth.BAD, faults=((each.place, each.what),))
                for each in failed if each.node in out and each.at >= search.opened_at
            ]  # fmt: skip
            self._writer.together(partial(self.note_test, search.job_id, results))

    def _begin(self, job: JobView, incident: Incident, now: float) -> None:
        known, settings = self._known.get(job.job.job_id), self._settings
        slow = slowdown_of(job, settings.percent / 100, settings.lasts)
        if slow is None or (known is not None and is_first_run(known, job)):
            return
        before, after = _parts(job, slow, settings.lasts)
        if before is None or after is None or after.level - before.level < SLOW:
            return
        wall = self._wall()
        log.warning(
            "job %s: a slow node is searched for (incident %s): %.4g s a step before, %.4g s now, +- %.2g %%",
            job.job.job_id, incident.id, exp(before.level), exp(after.level), 100 * max(before.error, after.error),
        )  # fmt: skip
        self._save(
            JobSearch(
                job_id=job.job.job_id, chain=f"{job.job.uid}/{job.job.name}"[:400], incident_id=incident.id,
                opened_at=wall, updated_at=wall, restarts=job.job.restarts, step_id=job.step_id, step=slow.first.step,
                batch=slow.first.batch, logged=slow.first.logged,
                search=SlowSearch(
                    suspects=job.ranks_on, fast=before.level, slow=after.level, error=before.error,
                    slow_error=max(before.error, after.error), at=wall - (now - after.at),
                ),
                state=SearchState.SEARCHING,
            )
        )  # fmt: skip

    def _end_if_fast_again(self, job: JobView) -> None:
        """A run that became slow and is fast again with the same nodes: it was none of them."""
        known = self._known.get(job.job.job_id)
        if known is None or not is_first_run(known, job):
            return
        log.warning("job %s: the search for a slow node is over: it is fast again, or explained", job.job.job_id)
        self._drop(job.job.job_id)

    def _add_run(self, known: JobSearch, job: JobView, now: float) -> None:
        times = comparable(job.step_times)
        alike = (known.batch, known.logged)
        if not times or (times[-1].batch, times[-1].logged) != alike:
            return
        if len(job.ranks_on) != len(known.search.suspects):
            return  # it is faster or slower by its size alone
        history = [each for each in job.step_history if (each.batch, each.logged) == alike]
        speed = run_speed(times, history, self._settings.lasts)
        if speed is None:
            return
        run = SearchRun(
            nodes=job.ranks_on, level=speed.level, error=speed.error, at=self._wall() - (now - speed.at),
            batches=speed.batches, restarts=job.job.restarts, step_id=job.step_id,
        )  # fmt: skip
        runs = known.search.runs
        if runs and (runs[-1].restarts, runs[-1].step_id, runs[-1].nodes) == (run.restarts, run.step_id, run.nodes):
            if run.batches < GROWN * runs[-1].batches:
                return
            runs = runs[:-1]
        search = replace(known.search, runs=Series((*runs, run)[-MAX_RUNS:]))
        changed = replace(known, search=search, updated_at=self._wall())
        log.info(
            "job %s: run %d of its search, on %d nodes: %.4g s a step, +- %.2g %%, %d batches", job.job.job_id,
            len(changed.search.runs), len(run.nodes), exp(run.level), 100 * run.error, run.batches,
        )  # fmt: skip
        # In one: a node that the ledger has and the search does not name would never be withdrawn.
        self._writer.together(lambda: self._save(self._told(changed)))

    def _state(self, search: JobSearch) -> SearchState:
        verdict = judge(search.search)
        if verdict.acquitted and search.state is not SearchState.ACQUITTED:
            self._note(search, "the search for a slow node has acquitted all of them")
        return SearchState.ACQUITTED if verdict.acquitted else (
            SearchState.FOUND if verdict.over else SearchState.SEARCHING
        )  # fmt: skip

    def _told(self, search: JobSearch) -> JobSearch:
        """Writes down who was found, and what became of it; and of one that later runs contradict, that it was not.
        Returns the search with the nodes that the ledger knows of."""
        verdict = judge(search.search)
        sure = {each.node: each for each in verdict.named if each.confidence >= SURE}
        for node in sorted(sure.keys() | set(search.named)):
            found, before = sure.get(node), node in search.named
            weighs = found is not None and found.confirmed
            same = found is not None and weighs == (node in search.confirmed)
            if before and (same or (found is None and node in verdict.to_confirm)):
                continue
            what = f"{node} is not what makes job {search.job_id} slow: later runs contradict it"
            event = NodeEvent(
                key=f"search:{search.incident_id}:{node}", node=node,
                kind=NodeEventKind.SLOWED_JOB if weighs or found is None else NodeEventKind.SLOWED_ONCE,
                at=search.updated_at, what=what if found is None else slow_node_words(search, found),
                job_id=search.job_id, chain=search.chain, incident_id=search.incident_id,
            )  # fmt: skip
            if found is None:
                event = replace(event, withdrawn_at=search.updated_at, withdrawn_why="later runs contradict it")
            self._record(event)
            self._note(search, event.what)
        named = sure.keys() | set(search.named).intersection(verdict.to_confirm)
        confirmed = {node for node in named if (sure[node].confirmed if node in sure else node in search.confirmed)}
        return replace(
            search, named=tuple(sorted(named)), confirmed=tuple(sorted(confirmed)), state=self._state(search)
        )

    def _note(self, search: JobSearch, text: str) -> None:
        log.warning("job %s: %s", search.job_id, text)
        at = self._wall()
        self._writer.write_or_queue(lambda: self._journal.add_note(search.incident_id, at, text))

    def _save(self, search: JobSearch) -> None:
        self._known[search.job_id] = search
        self._writer.write_or_queue(lambda: self._journal.slow_searches.save(search))

    def _drop(self, job_id: str) -> None:
        del self._known[job_id]
        self._writer.write_or_queue(lambda: self._journal.slow_searches.drop(job_id))

    def _forget(self, jobs: Mapping[str, SlurmJob]) -> None:
        old = self._wall() - KEPT_S
        for job_id in [key for key, each in self._known.items() if key not in jobs and each.updated_at < old]:
            self._drop(job_id)
        for job_id in [key for key in self._looked if key not in jobs]:
            del self._looked[job_id]


def _words(result: NodeResult) -> str:
    """What a test says of a node, a part of a sentence."""
    if result.truth is Truth.BAD:
        return "; ".join(what for _, what in result.faults)
    if result.truth is Truth.OK:
        return "well" + (f" ({result.figures})" if result.figures else "")
    return f"not judged: {result.unsure}"


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


def _parts(job: JobView, slow: Slowdown, least_s: float) -> tuple[RunSpeed | None, RunSpeed | None]:
    """The speed before the change, and since."""
    step, alike = slow.first.step, (slow.first.batch, slow.first.logged)
    times = comparable(job.step_times)
    history = [each for each in job.step_history if (each.batch, each.logged) == alike]
    before = run_speed([t for t in times if t.step < step], [t for t in history if t.step < step], least_s)
    return before, run_speed([t for t in times if t.step >= step], [t for t in history if t.step >= step], least_s)
