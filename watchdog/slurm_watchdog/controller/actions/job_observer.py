"""What an action about a job sees of the world: the job in Slurm, its run in the agents' reports, and what earlier
observations leave to remember."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from slurm_watchdog.actuate.by_slurm import mark_of
from slurm_watchdog.base import clock
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.ladder.end_run import is_closed
from slurm_watchdog.controller.actions.ladder.state import (
    UNSEEN,
    LadderLimits,
    Observed,
    Stage,
    StuckNode,
    first_step_if_proven,
    ladder_limits_of,
    stage_of,
    stuck_nodes,
)
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.incidents.judge import Judge, proves_stuck
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.node_history.ledger import NodeLedger
from slurm_watchdog.controller.policy.guards import why_not_in_place
from slurm_watchdog.controller.policy.placement import freed_by, jobs_behind, objection_to_excluding
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.diagnose.filesystem import FAILURE_COUNTS_FOR_S
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.actions import ActionRun, Decision, Operation, Outcome
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.observations import Process
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import COMES, is_known
from slurm_watchdog.model.supervisor import BATCH_STEP, OrderAnswer, SupervisorStatus
from slurm_watchdog.nodetest.judge import NodeVerdict
from slurm_watchdog.recording.entries import Ended, Touched
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable


@dataclass(frozen=True)
class Tools:
    """Given to the executor that really acts, and to each of its drivers; durations in seconds."""

    config: Config
    journal: Journal
    state: ClusterState
    slurm: SlurmClient
    commands: CommandQueue
    judgement: Judge
    collect: Callable[[Decision], Awaitable[Outcome]]  # Waits for the evidence of its job, for a bounded time.
    writer: JournalWriter
    ended: Callable[[Incident, ActionRun], None]  # Reports how an action ended.
    close_incident: Callable[[Incident, str], None]
    metrics: ControllerMetrics
    blind: Callable[[float], str | None]
    record: Callable[[Ended | Touched], None]  # Takes what a recording has to say of actions.
    past: NodeLedger
    tester: Callable[[str, Sequence[str]], Awaitable[Sequence[NodeVerdict]]] | None
    why_left_alone: Callable[[SlurmJob], str]  # Why its owner wants the job left alone, a sentence; else empty.
    on_failure: Callable[[Decision], None]  # Called with the decision whose action has ended without success.

    @cached_property
    def limits(self) -> LadderLimits:
        """How long each operation may take."""
        return ladder_limits_of(self.config)

    def paused(self) -> bool:
        """Whether an operator has paused all actions."""
        return self.journal.paused() is not None

    def loop_stuck(self, job_id: str) -> bool:
        """Whether an open incident proves that the job's loop does not turn."""
        return proves_stuck(self.judgement.incidents, job_id) is not None

    @property
    def command_deadline_s(self) -> float:
        """For an answer to a command: a report to fetch it with, one that may just have left, and one to answer by."""
        return 3 * self.state.report_interval_s + self.config.agent.probe_deadline

    def incident_of(self, run: ActionRun) -> Incident | None:
        """The incident that an action is about, open or not; None where the journal fails."""
        incident = self.judgement.incidents.get(run.decision.incident_id)
        if incident is not None:
            return incident
        try:
            return self.journal.incident(run.decision.incident_id)
        except JournalError as error:
            self.writer.failed(error)
            return None


STARTS_SEEN_WITHIN = 3.0
"""Reports until the ranks of a step that was started are known, and lines count for it: one on the way, one that has
them, and the interval that state/run.py waits."""

log = logging.getLogger(__name__)


class JobObserver:
    """Observes the job of one decision, for as long as its action lasts."""

    def __init__(self, decision: Decision, tools: Tools, taken_up_at: float):
        """`taken_up_at`: date at which this controller took the action up."""
        self._decision, self._tools, self._taken_up_at = decision, tools, taken_up_at
        self._job_id = decision.fence.job_id if decision.fence is not None else ""
        self._step = decision.step_at_decision
        self._total_steps: int | None = None
        self._stride = 1  # Steps between two log lines of the run that the decision is about.
        self._saved: int | None = None  # Step of the newest complete checkpoint that was seen of it.
        self._submission_noticed: float | None = None  # Monotonic: since when a submitted job is searched for.
        self._ended_since: float | None = None  # Monotonic: since when the run of the decision is seen to be over.
        self._refused = self._unread = ""  # Why its state is not known: refused, or an answer of no use.
        self._unread_since: float | None = None
        self._behind: tuple[str, ...] = ()  # Jobs that waited for the end of its run when it was seen running last.
        self.held_up_on: tuple[str, ...] = ()  # Nodes on which the old run of the requeued job does not end.

    async def observe(self, run: ActionRun) -> Observed:
        """The job as Slurm has it at this moment, and its run as the agents report it."""
        known, job = await self.read_job()
        now = clock.monotonic()
        stuck = self._stuck(job)
        self.held_up_on = tuple(node.name for node in stuck)
        unread_s = 0.0 if self._unread_since is None else now - self._unread_since
        if job is not None:
            self._tools.state.apply_job(job, now, clock.wall())
        view = self._tools.state.job_view(self._job_id, now)
        fence = self._decision.fence
        assert fence is not None
        over = known and stage_of(run, job) is Stage.FINISHED
        self._ended_since = (now if self._ended_since is None else self._ended_since) if over else None
        before = view if view is not None and view.job.restarts == fence.restarts else None
        after = view if view is not None and view.job.restarts > fence.restarts else None
        submitted = submitted_job(run, self._tools.state.jobs.values())
        if submitted is not None:
            after = self._tools.state.job_view(submitted.job_id, now)
        supervisor = None if job is None else self._tools.state.supervisors.of(job, now)
        new_step = before if before is not None and self._is_new_step(run, before, supervisor) else None
        if new_step is not None:
            before = None  # what it says is about the step that was started in place of the decision's
        if before is not None and before.progress is not None and before.progress.step_known:
            self._step = max(self._step or 0, before.progress.step)
            self._total_steps, self._stride = before.progress.total_steps, before.progress.widest_stride
        if before is not None and before.checkpoint is not None:
            self._saved = max(self._saved or 0, before.checkpoint.step)
        loaded_step, expired = self._loaded_step(after), self._expired_exclusions(job)
        return Observed(
            decision=run.decision,
            limits=self._tools.limits,
            now=clock.wall(),
            job_known=known,
            unread=self._unread,
            unread_s=unread_s,
            refused=self._refused,
            job=job,
            step=self._step,
            total_steps=self._total_steps,
            complete_checkpoint_step=self._saved_step(run, before),
            next_first_step=first_step_if_proven(after, loaded_step),
            stride=self._stride,
            loaded_step=loaded_step,
            next_stride=after.progress.widest_stride if after is not None and after.progress is not None else 1,
            next_by_epochs=after is not None and after.progress is not None and after.progress.by_epochs,
            stalled_mounts=self._stalled_mounts(run, now),
            paused=self._tools.paused(),
            ended_s=0.0 if self._ended_since is None else now - self._ended_since,
            taken_up_at=self._taken_up_at,
            submitted=submitted,
            submission_looked_for=self._has_looked_for_submission(run, now),
            behind=() if job is None else jobs_behind(job, self._tools.state.jobs.values()),
            freed=self._freed(run, job),
            left_alone="" if job is None else self._tools.why_left_alone(job),
            exclude_objection=self._exclude_objection(job, expired),
            loop_stuck=self._tools.loop_stuck(self._job_id),
            expired_exclusions=expired,
            supervisor=supervisor,
            in_place_objection=why_not_in_place(supervisor),
            unseen_lines=self._unseen_lines(job, new_step),
            new_step_first_step=first_step_if_proven(new_step, loaded_step),
            stuck=stuck,
        )

    def _unseen_lines(self, job: SlurmJob | None, new_step: JobView | None) -> int:
        """How many of the first lines of what runs now may have been missed: a new step may have written some before
        its ranks were reported, which count for the one before."""
        if new_step is None:
            return 0 if job is not None and job.counted_at_once else UNSEEN
        seen_s = new_step.progress.step_s if new_step.progress is not None else None
        step_s = seen_s or self._decision.step_s
        return UNSEEN + (int(STARTS_SEEN_WITHIN * self._tools.state.report_interval_s / step_s) if step_s else 0)

    def _is_new_step(self, run: ActionRun, view: JobView, supervisor: SupervisorStatus | None) -> bool:
        """Whether the ranks that are seen belong to the step that the supervisor has started for this decision."""
        if supervisor is None or supervisor.order != self._decision.id or not run.tried(Operation.WRITE_ORDER):
            return False
        # Of a start in the batch step the state has forgotten everything older by the time it knows of it.
        in_batch = view.step_id == BATCH_STEP and supervisor.starts > self._decision.start
        other = view.step_id not in (None, self._decision.step_id)
        return supervisor.answer is OrderAnswer.STARTED and (other or in_batch)

    def _stuck(self, job: SlurmJob | None) -> tuple[StuckNode, ...]:
        """Where the old run of the requeued job has not ended, as far as Slurm's newest listing and the agents say."""
        fence, state, limits = self._decision.fence, self._tools.state, self._tools.limits
        if job is None or fence is None or job.restarts != fence.restarts + 1:
            return ()
        listed = {node.name: node for node in state.slurm_nodes}
        allowed = min(limits.max_drained_nodes, int(len(listed) * limits.drained_percent / 100))
        partial = state.slurm_partial or ("" if state.slurm_at is not None else "Slurm has not listed its jobs yet")
        there = lambda node: processes_there(self._tools, node, job)  # noqa: E731
        jobs = tuple(state.jobs.values())
        return stuck_nodes(job, listed, jobs, partial, allowed, there, limits.set_down_after_s)

    def _freed(self, run: ActionRun, job: SlurmJob | None) -> tuple[SlurmJob, ...]:
        """Jobs that wait for the end of the decision's run; once it is over, those that waited for it and come."""
        jobs = self._tools.state.jobs
        if job is not None and stage_of(run, job) is Stage.SAME_RUN:
            self._behind = tuple(each.job_id for each in freed_by(job, jobs.values()))
        found = (jobs.get(job_id) for job_id in self._behind)
        return tuple(each for each in found if each is not None and each.state in COMES and not each.held)

    def _loaded_step(self, after: JobView | None) -> int | None:
        """Of the newest complete checkpoint of the run that the decision is about, as far as it is known.
        What was saved last of all may be newer than the last step that was read; that run's last step is
        noted, too: it may have made steps while it was ended."""
        fence = self._decision.fence
        past = after.past if after is not None else ()
        of_past = next((run for run in past if fence is not None and run.restarts == fence.restarts), None)
        if of_past is not None:
            self._stride = max(self._stride, of_past.stride)
            self._step = max((step for step in (self._step, of_past.last_step) if step is not None), default=None)
        known = (of_past.checkpoint_step if of_past is not None else None, self._saved)
        return max((step for step in known if step is not None), default=None)

    def _has_looked_for_submission(self, run: ActionRun, now: float) -> bool:
        """Whether Slurm has listed its jobs since the last try, or since we took the action up."""
        if not run.tried(Operation.RESUBMIT):
            self._submission_noticed = None
            return False
        self._submission_noticed = now if self._submission_noticed is None else self._submission_noticed
        listed_at = self._tools.state.slurm_at
        return listed_at is not None and listed_at > self._submission_noticed + self._tools.config.slurm.deadline

    def _exclude_objection(self, job: SlurmJob | None, ended: tuple[str, ...]) -> str | None:
        """Why the decision's nodes must not be kept from the job as the cluster is now. Those that it is kept from
        already count, but those of `ended`."""
        exclude = self._decision.exclude
        if job is None or not exclude:
            return None
        job = replace(job, excluded_nodes=tuple(node for node in job.excluded_nodes if node not in ended))
        return objection_to_excluding(job, exclude, self._tools.state.slurm_nodes)

    def _expired_exclusions(self, job: SlurmJob | None) -> tuple[str, ...]:
        """Nodes that we once kept from this job, longer ago than such a thing lasts."""
        if job is None or not job.held or not job.excluded_nodes:
            return ()
        oldest = clock.wall() - self._tools.limits.exclusion_s
        entries = self._tools.journal.node_entries("excluded", self._job_id)
        young = {entry.node for entry in entries if entry.at >= oldest}
        old = {entry.node for entry in entries if entry.at < oldest and entry.node not in young}
        return tuple(sorted(old))

    async def read_job(self) -> tuple[bool, SlurmJob | None]:
        """Whether the job is known, and the job, None if Slurm says that there is none."""
        self._refused = self._unread = ""
        try:
            job = await self._tools.slurm.read_job(self._job_id)
            if job is None or (not job.unsure and is_known(job.state)):
                self._unread_since = None
                return True, job
            self._unread = job.unsure or f"Slurm has the job as {job.state}, which is not known here"
        except SlurmRefused as error:
            log.warning("job %s cannot be read: %s", self._job_id, error)
            self._refused = str(error)
            return False, None
        except SlurmUnavailable as error:
            log.warning("job %s cannot be read: %s", self._job_id, error)
            self._unread = str(error) if error.answered else ""
        since = clock.monotonic() if self._unread_since is None else self._unread_since
        self._unread_since = since if self._unread else None
        return False, None

    def _saved_step(self, run: ActionRun, view: JobView | None) -> int | None:
        """Step of a checkpoint that was completed after the job was asked to save."""
        asked = run.save_requests()
        if view is None or view.checkpoint is None or not asked:
            return None
        completed_at = clock.wall() - view.checkpoint.age_s
        return view.checkpoint.step if completed_at >= asked[0].intent_at else None

    def _stalled_mounts(self, run: ActionRun, now: float) -> tuple[str, ...]:
        """Mounts of the decision, or of any open trouble of this job, that do not answer everywhere where the job will
        run."""
        concerned = set(self._decision.wait_until_responding)
        if not concerned:
            return ()
        exempt = {*self._decision.exclude, *(() if is_closed(run) else self._decision.avoid)}
        stalled = set()
        for filesystem in self._tools.state.filesystem_views(now):
            nodes = {
                node
                for node, answer in filesystem.answers
                if not answer.responding and answer.same_filesystem and answer.age_s <= FAILURE_COUNTS_FOR_S
            }
            if filesystem.mount in concerned and nodes - exempt:
                stalled.add(filesystem.mount)
        return tuple(sorted(stalled))


def submitted_job(run: ActionRun, jobs: Iterable[SlurmJob]) -> SlurmJob | None:
    """The job that was submitted in place of the run's, identified by its comment; of several the first one."""
    if not run.tried(Operation.RESUBMIT):
        return None
    mark = mark_of(run.decision)
    found = [job for job in jobs if mark in job.comment.split()]
    return min(found, key=lambda job: (len(job.job_id), job.job_id), default=None)


def processes_there(tools: Tools, node: str, job: SlurmJob) -> tuple[Process, ...]:
    """The job's processes on a node whose agent reports at this moment; none of a silent one, whose last report
    may be out of date."""
    state = tools.state
    return state.processes_on(node, job) if state.agents.reports(node, clock.monotonic()) else ()
