"""Evidence from every rank of a suspect job: asked of all its nodes at once, kept with the incident, and judged.

What a node answers is written into the journal as soon as it is there and then let go; in memory stay the stacks, of
which a thousand ranks share most, until the vote is taken. A node that does not answer is a row with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.evidence.collection import (
    DUMPS,
    Collected,
    RankRow,
    SharedFrames,
    addresses_of,
    diagnosis_of,
    dumps_to_ask,
    follows,
    gathered_of,
    main_call,
    own_words_of,
    ras_nodes,
    second_node,
)
from slurm_watchdog.controller.evidence.requests import EvidenceRequests, FairSlots
from slurm_watchdog.controller.evidence.store import EvidenceStore
from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.run import ids_on
from slurm_watchdog.detect.filesystem_stall import FilesystemStall, blocked_limit_s
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.diagnose.filesystem import Scope, assess, blocked_call, probes_wanted
from slurm_watchdog.diagnose.job import Diagnosis, diagnose
from slurm_watchdog.diagnose.stacks.sentences import group_words
from slurm_watchdog.journal.evidence import pack
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.actions import Decision, OperationOutcome
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.documents import NodeRow
from slurm_watchdog.model.evidence import NodeEvidence
from slurm_watchdog.model.incidents import Incident, IncidentKind
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.protocol import CollectEvidence, CommandResult
from slurm_watchdog.model.slurm import SlurmJob

log = logging.getLogger(__name__)

MAX_ERROR = 300  # Characters of a node's reason that are kept.
RAS_PROBLEM = "RAS"  # In what an agent says of an answer that it did not get (agent.evidence.collection).
AT_ONCE = 4  # Jobs of which evidence is collected at the same time; the others wait.
OF_ONE_USER = 3  # … of one user: whose jobs all hang leaves a slot for another's, and those who wait take turns.
REUSABLE_S = 300.0  # Younger evidence of the same run, taken since an incident began, is not collected again.
FINISHED_KEPT = 64  # Remembered when they are over, without their stacks, for those who asked for them.


class CollectionLimits(Struct):
    """Bounds of all collections; durations in seconds."""

    apart_s: float = 60.0
    """Between the starts of two collections of one run that no one waits for: each stops nothing, but costs
    its nodes. One that a person or an action waits for starts at once; budgets and cooldowns bound these."""
    slack_s: float = 30.0  # For a node to fetch its command, to read everything but stacks, and to send the answer.
    probes_s: float = 15.0  # For nodes that are still being asked about a filesystem: a probe's deadline and a report.
    spread_s: float = 5.0  # Every rank is dumped three times over this, to tell stuck from busy; nothing is stopped.
    limit_s: float = 90.0  # An action waits so long for the evidence, which dies with its job; then it goes on without.
    silence_every_s: float = 2.0  # Between two checks whether a node that is waited for still reports.


LIMITS = CollectionLimits()


class Collector:
    """Starts collections, and knows those that run. One event loop owns it."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        writer: JournalWriter,
        cluster: ClusterState,
        judgement: Judge,
        probes: EvidenceRequests,
        diagnosed: Callable[[Incident, list[str]], None],
        limits: CollectionLimits = LIMITS,
    ):
        """`diagnosed` reports what the evidence of an incident shows."""
        self._journal, self._writer, self._diagnosed = journal, writer, diagnosed
        self._cluster, self._judgement = cluster, judgement
        self._agents, self._probes = probes.commands, probes
        self._limits = limits
        self.store = EvidenceStore(config, journal, writer, cluster.left_out, self._spawn)
        self._filesystem_stall = config.detectors.of(FilesystemStall)
        self._known = defaultdict[tuple[str, int], list[Collected]](list)  # (job, restarts) -> its own, newest first.
        self._over = deque[Collected]()  # Those of them that are over, the newest last.
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = FairSlots(AT_ONCE, OF_ONE_USER)

    def on_fire(self, incident: Incident, now: float, views: Mapping[str, JobView]) -> None:
        """An incident has begun to fire: its jobs' evidence is kept with it, unless another incident explains it.
        `views` are those of its jobs that someone has looked at in this moment already."""
        if not spec_of(incident.kind).wants_evidence or incident.inhibited_by is not None:
            return
        for job_id in incident.jobs_now or incident.job_ids:
            view = views.get(job_id) or self._cluster.job_view(job_id, now)
            if view is None or not view.living_ranks:
                continue
            found = self._counting(view.job, now, incident.id, incident.opened_at)
            if found.incident_id != incident.id:
                self._writer.add_note(incident, f"evidence of job {job_id} is kept with incident {found.incident_id}")

    def collect(self, job: SlurmJob, now: float, incident_id: str | None = None) -> Collected:
        """The collection of this run of this job: the one that runs, or a new one."""
        found = next((each for each in self._of(job) if not each.finished.is_set()), None)
        found = self._new(job, now, incident_id) if found is None else self._store(found, incident_id)
        found.hurry.set()
        return found

    def _counting(self, job: SlurmJob, now: float, incident_id: str, opened_at: float) -> Collected:
        """The collection that counts for an incident whose trouble began at `opened_at` (date): made since
        then, or a new one."""
        for found in self._of(job):
            lately = found.incident_id is not None and now - found.began < REUSABLE_S
            if found.counts_for(opened_at) and (lately or not found.finished.is_set()):
                return self._store(found, incident_id)
        return self._new(job, now, incident_id)

    def _new(self, job: SlurmJob, now: float, incident_id: str | None) -> Collected:
        before = next(iter(self._of(job)), None)
        found = Collected(
            id=uuid.uuid4().hex[:12], job=job, began=now, began_at=clock.wall(), incident_id=incident_id,
            nodes={node: NodeRow(node=node, state="asked") for node in job.nodes}, shared=SharedFrames(),
        )  # fmt: skip
        self._known[found.key].insert(0, found)
        self._spawn(self._collect(found, before))
        return found

    def _store(self, found: Collected, incident_id: str | None) -> Collected:
        """An incident that a collection counts for: it is stored with the first of them, and shared with the others."""
        if incident_id is None or incident_id == found.incident_id or incident_id in found.shared_with:
            return found
        if found.incident_id is None:
            found.incident_id = incident_id
            for packed in found.packed:
                self.store.keep(found, "node", packed)
            found.packed.clear()
        else:
            stored_with = found.incident_id
            found.shared_with.add(incident_id)
            if not self._writer.write(lambda: self._journal.evidence.share(incident_id, found.id, stored_with)):
                found.lost = True
            if found.diagnosis is not None:  # what it says was announced with the first of them, and is of then
                ago = duration(max(0.0, clock.monotonic() - found.began))
                self._note(incident_id, f"{found.sentence()}, collected {ago} before, for incident {stored_with}")
        return found

    def known(self, collection_id: str) -> Collected | None:
        """One that runs, or was over lately."""
        return next((each for some in self._known.values() for each in some if each.id == collection_id), None)

    def _of(self, job: SlurmJob) -> list[Collected]:
        """Those of this run of the job, the newest first."""
        return self._known.get((job.job_id, job.restarts), [])

    def _is_over(self, found: Collected) -> None:
        """Forgets the oldest of those that are over; one that runs is someone's answer."""
        self._over.append(found)
        if len(self._over) > FINISHED_KEPT:
            oldest = self._over.popleft()
            self._known[oldest.key].remove(oldest)
            if not self._known[oldest.key]:
                del self._known[oldest.key]

    async def operation(self, decision: Decision) -> tuple[OperationOutcome, str]:
        """The first operation of an action: waits until the evidence is kept, never longer than its limit."""
        now, fence = clock.monotonic(), decision.fence
        job = self._cluster.jobs.get(fence.job_id) if fence is not None else None
        if job is None or fence is None or job.restarts != fence.restarts:
            return OperationOutcome.SKIPPED, "the run that the decision is about is over"
        found = self._counting(job, now, decision.incident_id, self._since(decision))
        found.hurry.set()
        try:
            await wait_for(found.finished.wait(), self._limits.limit_s)
        except TimeoutError:
            return OperationOutcome.FAILED, f"not complete within {self._limits.limit_s:.0f} s: {found.sentence()}"
        if found.error is not None:
            return OperationOutcome.FAILED, f"given up ({found.error}): {found.sentence()}"
        elsewhere = f" (kept with incident {found.incident_id})" if found.incident_id != decision.incident_id else ""
        return OperationOutcome.DONE, f"{found.sentence()}{elsewhere}"

    def _since(self, decision: Decision) -> float:
        """The date since which evidence counts for a decision: when its incident began. A restart that
        someone asked for is no trouble of its own: for it any recent evidence counts."""
        incident = self._judgement.incidents.get(decision.incident_id)
        if incident is None:
            return decision.decided_at
        return float("-inf") if incident.kind == IncidentKind.OPERATOR_RESTART else incident.opened_at

    async def _collect(self, found: Collected, before: Collected | None) -> None:
        """Asks, judges and forgets. `before`: the last one of the same run, which comes first, and from which
        it keeps its distance unless someone waits for it."""
        try:
            if before is not None:
                await before.finished.wait()
                with suppress(TimeoutError):
                    await wait_for(found.hurry.wait(), before.began + self._limits.apart_s - clock.monotonic())
            async with self._slots.of(found.job.uid):
                found.began, found.began_at, found.begun = clock.monotonic(), clock.wall(), True
                self._request_probes(found)
                found.dumps_asked, found.known = dumps_to_ask(self._cluster.job_view(found.job.job_id, found.began))
                ids = filter(None, (found.incident_id, *found.shared_with))
                incidents = filter(None, map(self._judgement.incidents.get, ids))
                found.ras_nodes = ras_nodes(found, self._cluster, incidents, found.began)
                await self._ask_all(found)
                await self._ask_ras_again(found)
                mounts = self._request_probes(found)
                if mounts:  # whose fault a blocked filesystem is, the other nodes tell: their answers are waited for
                    await self._probes.answered(mounts, self._limits.probes_s)
                self._conclude(found)
        except (Exception, asyncio.CancelledError) as error:
            found.error = type(error).__name__
            raise
        finally:
            found.rows, found.packed, found.settings, found.dumps, found.ras, found.shared = [], [], {}, {}, None, None
            found.known, found.addresses = (), {}
            found.took_s = clock.monotonic() - found.began
            found.finished.set()
            self._is_over(found)

    def _request_probes(self, found: Collected) -> frozenset[str]:
        """Where a process of the job is blocked, other nodes are asked whether they reach that filesystem.
        Returns the mounts of which it is not known yet whose fault it is."""
        now = clock.monotonic()
        view = self._view(now)
        mounts = set()
        for filesystem in view.filesystems:
            blocked = [p for p in filesystem.blocked if p.process.job_id == found.job.job_id]
            if blocked:
                state = assess(filesystem, max(blocked_call(p).seconds for p in blocked))
                # A node that has failed once is asked again, and takes all of its time: nothing depends on that.
                if state.scope is Scope.UNKNOWN or not {p.node for p in blocked} <= {*state.unanswering}:
                    mounts.add(filesystem.mount)
                for wanted in probes_wanted(view, filesystem):
                    self._probes.probe(wanted, now)
        return frozenset(mounts)

    def _view(self, now: float) -> ClusterView:
        """As the last tick saw everything, with the filesystems as they are now."""
        return replace(self._judgement.view, filesystems=self._cluster.filesystem_views(now))

    async def _ask_all(self, found: Collected) -> None:
        """Asks every node that reports; one that falls silent meanwhile is not waited for."""
        tasks = {node: asyncio.create_task(self._ask(found, node)) for node in found.job.nodes}
        try:
            while pending := {node for node, task in tasks.items() if not task.done()}:
                now = clock.monotonic()
                for node in [node for node in pending if not self._cluster.agents.reports(node, now)]:
                    tasks[node].cancel()
                    found.note(node, state="failed", error=f"the agent on {node} does not report")
                await asyncio.wait([tasks[node] for node in pending], timeout=self._limits.silence_every_s)
        finally:
            for task in tasks.values():
                task.cancel()
            outcomes = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _ask(self, found: Collected, node: str) -> None:
        run = self._cluster.runs.get(found.job.job_id)
        for process_job_id in (found.job.process_id,) if run is None else ids_on(run, node):
            await self._ask_about(found, node, process_job_id)

    async def _ask_about(self, found: Collected, node: str, process_job_id: str) -> None:
        ras = found.ras_nodes[:1] == [node]
        result = await self._request(
            found, node, process_job_id, self._limits.spread_s + self._limits.slack_s, dumps=found.dumps_asked,
            apart_s=self._limits.spread_s / (DUMPS - 1), ras=ras,
        )  # fmt: skip
        evidence = result.evidence
        if evidence is None:
            why = result.error or "it sent no evidence: is its release older?"
            found.note(node, state="failed", error=why[:MAX_ERROR])
            return
        await self._add_answer(found, node, evidence if ras else replace(evidence, ras=None))
        if ras and evidence.ras is None:
            found.ras_failed = any(RAS_PROBLEM in problem for problem in evidence.problems)
        ranks = [rank for rank in evidence.ranks if rank.role is Role.RANK]
        before, undumped = found.nodes[node], sum(rank.error is not None for rank in ranks)
        found.note(node, state="answered", ranks=before.ranks + len(ranks), undumped=before.undumped + undumped)

    async def _request(self, found: Collected, node: str, job_id: str, expires_s: float, **what: Any) -> CommandResult:
        """What a node answers; without evidence if that is about another job."""
        command = CollectEvidence(
            id=uuid.uuid4().hex, job_id=job_id, restarts=found.job.restarts, expires_s=expires_s, **what
        )
        result = await self._agents.ask(node, command, expires_s + 3 * self._cluster.report_interval_s, found.job.uid)
        if result.evidence is None or result.evidence.job_id == job_id:
            return result
        return replace(result, evidence=None, error="it answered about another job")

    async def _ask_ras_again(self, found: Collected) -> None:
        """One more node asks NCCL's RAS, where the first could not."""
        node = second_node(found)
        if node is None:
            return
        run = self._cluster.runs.get(found.job.job_id)
        job_id = found.job.process_id if run is None else ids_on(run, node)[0]
        result = await self._request(found, node, job_id, self._limits.slack_s, dumps=1, ras=True, only_ras=True)
        if result.evidence is not None:
            found.ras = result.evidence.ras

    async def _add_answer(self, found: Collected, node: str, evidence: NodeEvidence) -> None:
        """Writes what a node said, and keeps of it what the vote needs. A node speaks for itself only."""
        if evidence.node != node:
            evidence = replace(evidence, node=node)
        packed = await asyncio.to_thread(lambda: pack(msgspec.json.encode(evidence)))
        if found.incident_id is not None:
            self.store.keep(found, "node", packed)
        else:
            found.packed.append(packed)
        assert found.shared is not None
        found.rows += [RankRow(node, found.shared.of(rank), main_call(rank)) for rank in evidence.ranks]
        found.settings[node] = dict(evidence.settings)
        found.ras = found.ras or evidence.ras
        found.addresses[node] = addresses_of(evidence.ranks)
        begun = clock.monotonic() - evidence.took_s  # its ages are of some moment since
        for file in evidence.files:
            if file.said is not None and file.rank is not None:
                found.own_words.append((node, file.rank, clock.monotonic() - file.age_s, file.said[:MAX_ERROR]))
            if file.record is not None:
                found.dumps[node, file.record.rank] = begun - file.age_s, found.shared.record(file.record)

    def _conclude(self, found: Collected) -> None:
        now = clock.monotonic()
        view = self._cluster.job_view(found.job.job_id, now)
        if view is None or view.job.restarts != found.job.restarts:
            return
        gathered = gathered_of(found, view, now)
        self._cluster.runs.add_records(
            found.job.job_id, found.job.restarts, gathered.collectives, found.began, own_words_of(found, view, now), now
        )
        cluster, limits = self._view(now), self._judgement.hang_limits(view)
        blocked_s, limit_s = blocked_limit_s(cluster, view, self._filesystem_stall), self._judgement.limits_s
        found.diagnosis = diagnose(
            cluster, view, gathered, blocked_for_s=blocked_s, limits=limits, limit_s=limit_s.get(view.job.job_id)
        )
        if found.incident_id is None:
            return
        incident = self._judgement.incidents.get(found.incident_id)
        if incident is not None:
            found.diagnosis = follows(found.diagnosis, incident, clock.wall() - incident.opened_at)
        document = diagnosis_of(found)
        self.store.keep(found, "diagnosis", pack(msgspec.json.encode(document)))
        ids = (found.incident_id, *sorted(found.shared_with))
        for incident_id in ids:
            self._note(incident_id, f"{found.sentence()}. {found.diagnosis.summary}")
        self._announce(ids, found.diagnosis)

    def _note(self, incident_id: str, note: str) -> None:
        self._writer.write(lambda: self._journal.add_note(incident_id, clock.wall(), note))

    def _announce(self, incident_ids: Iterable[str], diagnosis: Diagnosis) -> None:
        """Says once what the evidence tells, with one of its incidents that people know of: that of its own kind, if
        there is one."""
        known = list(filter(is_announced, filter(None, map(self._judgement.incidents.get, incident_ids))))
        incident = next((each for each in known if each.kind == diagnosis.kind), known[0] if known else None)
        if incident is None:
            return
        groups = [f"{group_words(group)}." for group in diagnosis.groups[:4]]
        hints = [f"Usually: {hint.usually} Try next: {hint.try_next}" for hint in diagnosis.hints[:1]]
        differences = [each.line for each in diagnosis.differences[:4]]
        said = [diagnosis.summary, *groups, *differences, *hints]
        self._writer.write(lambda: self._diagnosed(incident, said))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("collecting evidence failed", exc_info=error)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
