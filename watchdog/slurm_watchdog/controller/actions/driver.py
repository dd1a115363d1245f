"""Carries actions out: asks the ladder, writes the intent, pulls the lever, writes the outcome. One task an action."""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from slurm_watchdog.actuate import cancel_resubmit, drain, kill_switch, requeue, set_down, signals
from slurm_watchdog.base import clock
from slurm_watchdog.controller.actions import process_driver
from slurm_watchdog.controller.actions.dependents import jobs_behind
from slurm_watchdog.controller.actions.ladder.next_move import (
    Execute,
    Finish,
    Move,
    Observed,
    Reconcile,
    Wait,
    next_move,
)
from slurm_watchdog.controller.actions.ladder.restart_proof import first_step_if_proven
from slurm_watchdog.controller.actions.ladder.state import asks, can_be_abandoned
from slurm_watchdog.controller.actions.ladder.stuck_requeue import StuckNode, stuck_nodes
from slurm_watchdog.controller.actions.tools import Tools
from slurm_watchdog.controller.policy.placement import objection_to_excluding
from slurm_watchdog.diagnose.filesystem import CONVICTS_FOR_S
from slurm_watchdog.model.actions import (
    ActionEnd,
    ActionRun,
    Operation,
    OperationOutcome,
    OperationRecord,
    Outcome,
)
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.observations import Process
from slurm_watchdog.model.protocol import Command, CommandResult, ProcessEnd
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import RUNNING, is_known
from slurm_watchdog.model.stuck_node import is_unkillable
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)

TOUCHES = frozenset(
    {
        Operation.WRITE_KILL_SWITCH,
        Operation.SIGNAL_USR1,
        Operation.SIGNAL_TERM,
        Operation.REQUEUE_HOLD,
        Operation.CANCEL,
        Operation.RESUBMIT,
    }
)
"""Operations after which a run ends, and what it logs about that, because of us."""
SURE_TRIES = 2
"""So often every node is asked to remove a kill switch, also one that does not report."""


class Driver:
    """Drives one action from wherever its journal stands to its end."""

    def __init__(self, run: ActionRun, tools: Tools):
        self.run = run
        self._tools = tools
        self._taken_up_at = clock.wall()
        self._listens_from = clock.monotonic()
        self._step: int | None = run.decision.step_at_decision
        self._total_steps: int | None = None
        self._stride = 1
        """Steps between two log lines of the run that the decision is about."""
        self._saved: int | None = None
        """Step of the newest complete checkpoint that was seen of it."""
        self._submission_noticed: float | None = None
        """Monotonic: since when we look for a job that may have been submitted."""
        self._seen = ProcessEnd()
        """What a process was like when its node was asked last."""
        self._refused = self._unread = ""
        """Why Slurm does not say how the job is: it refuses to, or its answer is of no use."""
        self._unread_since: float | None = None
        self.held_up_on: tuple[str, ...] = ()
        """Where the old run of the requeued job does not end."""
        self.waiting_for = ""
        self.waiting_until: float | None = None
        """Wall clock; what `waiting_for` is given up at."""
        self._abandoned_by: str | None = None

    def abandon(self, by: str) -> bool:
        """Ends the action before anything is done to the job but asking it to save, for the operator `by`.
        False: it is too late."""
        if self.run.end is not None or not can_be_abandoned(self.run):
            return False
        self._abandoned_by = by
        return True

    def _write_abandoned(self) -> None:
        """The operator's word goes into the journal as an operation: a controller that dies now comes back to it."""
        by, self._abandoned_by = self._abandoned_by, None
        if by is None or not can_be_abandoned(self.run):
            return
        at = clock.wall()
        self._tools.journal.operation_intent(self.run.decision.id, Operation.ABANDON, 1, at)
        self._put(OperationRecord(operation=Operation.ABANDON, attempt=1, intent_at=at))
        self._close(
            Operation.ABANDON,
            1,
            OperationOutcome.DONE,
            f"{by} cancelled the restart; the job was left as it is",
        )

    async def drive(self) -> ActionEnd:
        """Until the action has ended in writing. Errors of the journal end the task, never the intent."""
        for record in self.run.records:  # of a controller before this one
            if record.operation in TOUCHES:
                self._note_touched(clock.monotonic() - max(0.0, clock.wall() - record.intent_at))
        while True:
            world = await self._look()
            self._write_abandoned()
            move = next_move(self.run, world, self._tools.limits)
            if isinstance(move, Finish):
                if world.job is not None and world.job.state in RUNNING:
                    self._note_touched(None)  # of the run that it was about only: that one goes on
                if self.run.end is None:
                    self._tools.journal.end_action(self.run.decision.id, move.end)
                    self.run = replace(self.run, end=move.end)
                return move.end
            await self._make(move)

    async def _make(self, move: Move) -> None:
        if isinstance(move, Wait):
            if move.reason != self.waiting_for:
                log.info("%s: %s", self._subject, move.reason)
                self.waiting_for = move.reason
            self.waiting_until = move.until
            await asyncio.sleep(self._tools.poll_s)
            return
        self.waiting_for = ""
        if isinstance(move, Reconcile):
            self._close(move.operation, move.attempt, move.outcome, move.detail)
        elif isinstance(move, Execute):
            at = clock.wall()
            self._tools.journal.operation_intent(self.run.decision.id, move.operation, move.attempt, at)
            self._put(OperationRecord(operation=move.operation, attempt=move.attempt, intent_at=at))
            if move.operation in TOUCHES and not move.skip:
                self._note_touched(clock.monotonic())
            outcome, detail = (OperationOutcome.SKIPPED, move.skip) if move.skip else await self._pull(move)
            self._close(move.operation, move.attempt, outcome, detail)

    def _note_touched(self, at: float | None) -> None:
        fence = self.run.decision.fence
        if fence is not None:
            self._tools.state.note_action(fence.job_id, fence.restarts, at)
            self._tools.on_touch(fence.job_id, fence.restarts, at)

    @property
    def _job_id(self) -> str:
        return self.run.decision.fence.job_id if self.run.decision.fence else ""

    @property
    def _subject(self) -> str:
        process = self.run.decision.process
        return f"job {self._job_id}" if process is None else f"process {process.pid} on {process.node}"

    def _put(self, record: OperationRecord) -> None:
        others = tuple(
            r for r in self.run.records if (r.operation, r.attempt) != (record.operation, record.attempt)
        )
        self.run = replace(self.run, records=(*others, record))

    def _close(self, operation: Operation, attempt: int, outcome: OperationOutcome, detail: str) -> None:
        at = clock.wall()
        self._tools.journal.operation_outcome(self.run.decision.id, operation, attempt, outcome, at, detail)
        intent = next(r for r in self.run.records if r.operation is operation and r.attempt == attempt)
        record = replace(intent, outcome=outcome, outcome_at=at, detail=detail)
        self._put(record)
        log.info("%s: %s: %s (%s)", self._subject, operation, outcome, detail)
        self._tools.on_record(self.run, record)

    async def _pull(self, move: Execute) -> Outcome:
        decision = self.run.decision
        if decision.process is not None:
            return await self._pull_on_process(decision.process, move)
        assert decision.fence is not None
        match move.operation:
            case Operation.EVIDENCE if self._tools.collect is not None:
                return await self._tools.collect(decision)
            case Operation.WRITE_KILL_SWITCH:
                return await kill_switch.write(self._ask, decision, self._tools.command_deadline_s)
            case Operation.WAIT_CHECKPOINT:
                return OperationOutcome.DONE, "a complete checkpoint came after the kill switch"
            case Operation.REQUEUE_HOLD:
                return await requeue.requeue_hold(
                    self._tools.slurm, decision.fence, only_unfinished=move.only_unfinished
                )
            case Operation.SIGNAL_USR1 | Operation.SIGNAL_TERM:
                name = "USR1" if move.operation is Operation.SIGNAL_USR1 else "TERM"
                return await signals.send(self._tools.slurm, decision.fence, name, decision.signal_to)
            case Operation.CANCEL:
                return await cancel_resubmit.cancel(self._tools.slurm, decision.fence)
            case Operation.RESUBMIT:
                return await cancel_resubmit.resubmit(self._tools.slurm, decision, move.nodes)
            case Operation.HOLD:
                return await cancel_resubmit.hold(self._tools.slurm, self._job_id)
            case Operation.DRAIN | Operation.SET_DOWN | Operation.EXCLUDE:
                return await self._pull_on_nodes(move)
            case Operation.REMOVE_KILL_SWITCH:
                # An agent that is late after our own start is no dead one: it is passed over at the third try
                # only, and by one who
                # has listened for a while, however often others have tried before.
                reporting = frozenset(decision.nodes)
                listened_s = clock.monotonic() - self._listens_from
                if move.attempt > SURE_TRIES and listened_s >= self._tools.command_deadline_s:
                    reporting = frozenset(self._tools.state.reporting_nodes(clock.monotonic()))
                return await kill_switch.remove(
                    self._ask, decision, reporting, self._tools.command_deadline_s
                )
            case Operation.RELEASE:
                new = self._submitted() if move.instead else None
                return await requeue.release(self._tools.slurm, self._job_id if new is None else new.job_id)
            case _:
                raise AssertionError(f"the ladder has no lever for {move.operation}")

    async def _pull_on_nodes(self, move: Execute) -> Outcome:
        if move.operation is Operation.SET_DOWN:
            return await self._set_down(move.nodes)
        if move.operation is Operation.EXCLUDE:
            return await self._exclude(move.nodes)
        decision = self.run.decision
        reason = f"{decision.by}, job {self._job_id}, incident {decision.incident_id}"
        return await self._drain(move.nodes, f"{self._tools.drain_reason} {reason}")

    async def _exclude(self, nodes: tuple[str, ...]) -> Outcome:
        """The ledger first: what stands in Slurm's list and in no ledger is never dropped again."""
        tools, decision = self._tools, self.run.decision
        before = await self._read_job()
        there = before[1].excluded_nodes if before[1] is not None else nodes
        for node in decision.exclude:
            if node in nodes and node not in there:
                tools.journal.node_entry(node, "excluded", decision, clock.wall())
        outcome = await requeue.exclude(tools.slurm, self._job_id, nodes)
        if outcome[0] is OperationOutcome.DONE:
            for entry in tools.journal.node_entries("excluded", self._job_id):
                if entry.node not in nodes:
                    tools.journal.end_node_entry(entry.id, clock.wall(), "dropped from the job's list")
        return outcome

    async def _pull_on_process(self, process: GpuProcess, move: Execute) -> Outcome:
        if move.operation is Operation.DRAIN:
            reason = process_driver.drain_reason(self.run, process, self._seen, self._tools.drain_reason)
            return await self._drain(move.nodes, reason)
        return await process_driver.send(process, move.operation, self._tools)

    async def _drain(self, nodes: tuple[str, ...], reason: str) -> Outcome:
        tools, decision = self._tools, self.run.decision

        def note(node: SlurmNode) -> None:
            tools.journal.node_entry(
                node.name, "drained", decision, clock.wall(), node.reason, node.reason_at
            )

        return await drain.drain(tools.slurm, nodes, reason, note)

    async def _set_down(self, nodes: tuple[str, ...]) -> Outcome:
        tools, decision = self._tools, self.run.decision
        assert decision.fence is not None

        def note(node: SlurmNode) -> None:
            tools.journal.node_entry(node.name, "down", decision, clock.wall(), node.reason, node.reason_at)

        reason = f"{tools.drain_reason} processes of job {self._job_id} cannot be killed, incident {decision.incident_id}"
        return await set_down.set_down(
            tools.slurm, decision.fence, nodes, reason, note, lambda job, node: self._unkillable(node, job)
        )

    def _unkillable(self, node: str, job: SlurmJob) -> bool:
        return is_unkillable(self._there(node, job), self._tools.limits.set_down_after_s)

    def _there(self, node: str, job: SlurmJob) -> tuple[Process, ...]:
        """The job's processes on a node whose agent reports at this moment; none of a silent one: what it
        said last may be over."""
        state = self._tools.state
        return state.processes_on(node, job) if node in state.reporting_nodes(clock.monotonic()) else ()

    def _stuck(self, job: SlurmJob | None) -> tuple[StuckNode, ...]:
        """Where the old run of the requeued job has not ended, as far as Slurm's newest listing and the agents say."""
        fence, state, limits = self.run.decision.fence, self._tools.state, self._tools.limits
        if job is None or fence is None or job.restarts != fence.restarts + 1:
            return ()
        listed = {node.name: node for node in state.slurm_nodes}
        allowed = min(limits.max_drained_nodes, int(len(listed) * limits.drained_percent / 100))
        partial = state.slurm_partial or (
            "" if state.slurm_at is not None else "Slurm has not listed its jobs yet"
        )
        return stuck_nodes(
            job,
            listed,
            tuple(state.jobs.values()),
            partial,
            allowed,
            lambda node: self._there(node, job),
            limits.set_down_after_s,
        )

    async def _ask(self, node: str, command: Command, deadline_s: float) -> CommandResult:
        return await self._tools.desk.ask(node, command, deadline_s)

    async def _look(self) -> Observed:
        """The job as Slurm has it at this moment, and what the agents say of its run; or the process, as its
        node has it."""
        if self.run.decision.process is not None:
            world = await process_driver.look(
                self.run, self.run.decision.process, self._tools, self._taken_up_at
            )
            self._seen = world.process or self._seen
            return world
        known, job = await self._read_job()
        now = clock.monotonic()
        stuck = self._stuck(job)
        self.held_up_on = tuple(node.name for node in stuck)
        unread_s = 0.0 if self._unread_since is None else now - self._unread_since
        if job is not None:
            self._tools.state.apply_job(job, now, clock.wall())
        view = self._tools.state.job_view(self._job_id, now)
        fence = self.run.decision.fence
        assert fence is not None
        before = view if view is not None and view.job.restarts == fence.restarts else None
        after = view if view is not None and view.job.restarts > fence.restarts else None
        submitted = self._submitted()
        if submitted is not None:
            after = self._tools.state.job_view(submitted.job_id, now)
        if before is not None and before.progress is not None and before.progress.step_known:
            self._step = max(self._step or 0, before.progress.step)
            self._total_steps, self._stride = before.progress.total_steps, before.progress.widest_stride
        if before is not None and before.checkpoint is not None:
            self._saved = max(self._saved or 0, before.checkpoint.step)
        loaded_step = self._loaded_step(after)
        return Observed(
            now=clock.wall(),
            job_known=known,
            unread=self._unread,
            unread_s=unread_s,
            refused=self._refused,
            job=job,
            step=self._step,
            total_steps=self._total_steps,
            complete_checkpoint_step=self._saved_step(before),
            next_first_step=first_step_if_proven(after, loaded_step),
            stride=self._stride,
            loaded_step=loaded_step,
            next_stride=after.progress.widest_stride
            if after is not None and after.progress is not None
            else 1,
            next_by_epochs=after is not None and after.progress is not None and after.progress.by_epochs,
            stalled_mounts=self._stalled_mounts(now),
            paused=self._tools.paused(),
            taken_up_at=self._taken_up_at,
            submitted=submitted,
            submission_looked_for=self._has_looked_for_submission(now),
            behind=() if job is None else jobs_behind(job, self._tools.state.jobs.values()),
            exclude_objection=self._exclude_objection(job),
            loop_stuck=self._tools.loop_stuck(self._job_id),
            expired_exclusions=self._expired_exclusions(job),
            stuck=stuck,
        )

    def _loaded_step(self, after: JobView | None) -> int | None:
        """Of the newest complete checkpoint of the run that the decision is about, as far as it is known.
        What was saved last of all may be
        newer than the last step that was read; that run's last step is noted, too: it may have made steps
        while it was ended."""
        fence = self.run.decision.fence
        past = after.past if after is not None else ()
        of_past = next((run for run in past if fence is not None and run.restarts == fence.restarts), None)
        if of_past is not None:
            self._stride = max(self._stride, of_past.stride)
            self._step = max(
                (step for step in (self._step, of_past.last_step) if step is not None), default=None
            )
        known = (of_past.checkpoint_step if of_past is not None else None, self._saved)
        return max((step for step in known if step is not None), default=None)

    def _submitted(self) -> SlurmJob | None:
        """The job that was submitted in place of ours, known by its comment; of several the first one."""
        if not any(record.operation is Operation.RESUBMIT for record in self.run.records):
            return None
        mark = cancel_resubmit.mark_of(self.run.decision)
        found = [job for job in self._tools.state.jobs.values() if mark in job.comment.split()]
        return min(found, key=lambda job: (len(job.job_id), job.job_id), default=None)

    def _has_looked_for_submission(self, now: float) -> bool:
        """Whether Slurm has listed its jobs since the last try, or since we took the action up."""
        open_try = any(r.operation is Operation.RESUBMIT for r in self.run.records)
        if not open_try:
            self._submission_noticed = None
            return False
        self._submission_noticed = now if self._submission_noticed is None else self._submission_noticed
        listed_at = self._tools.state.slurm_at
        return (
            listed_at is not None
            and listed_at > self._submission_noticed + self._tools.listing_is_new_after_s
        )

    def _exclude_objection(self, job: SlurmJob | None) -> str | None:
        """Why the decision's nodes must not be kept from the job as the cluster is now. Those that it is kept
        from already count."""
        exclude = self.run.decision.exclude
        if job is None or not exclude:
            return None
        return objection_to_excluding(job, exclude, self._tools.state.slurm_nodes)

    def _expired_exclusions(self, job: SlurmJob | None) -> tuple[str, ...]:
        """Nodes that we once kept from this job, longer ago than such a thing lasts."""
        if job is None or not job.held or not job.excluded_nodes:
            return ()
        oldest = clock.wall() - self._tools.limits.exclusion_s
        entries = self._tools.journal.node_entries("excluded", self._job_id)
        young = {entry.node for entry in entries if entry.at >= oldest}
        return tuple(
            sorted({entry.node for entry in entries if entry.at < oldest and entry.node not in young})
        )

    async def _read_job(self) -> tuple[bool, SlurmJob | None]:
        """Whether the job is known, and the job, None if Slurm says that there is none."""
        self._refused = self._unread = ""
        try:
            job = await self._tools.slurm.read_job(self._job_id)
        except SlurmRefused as error:
            log.warning("job %s cannot be read: %s", self._job_id, error)
            self._refused = str(error)
            return False, None
        except SlurmUnavailable as error:
            log.warning("job %s cannot be read: %s", self._job_id, error)
            return self._not_read(str(error) if error.answered else "")
        if job is not None and (job.unsure or not is_known(job.state)):
            return self._not_read(job.unsure or f"Slurm has the job as {job.state}, which is not known here")
        self._unread_since = None
        return True, job

    def _not_read(self, why: str) -> tuple[bool, None]:
        """Slurm's answer is of no use for this reason; empty: there was none."""
        self._unread = why
        if not why:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = clock.monotonic()
        return False, None

    def _saved_step(self, view: JobView | None) -> int | None:
        """Step of a checkpoint that was completed after the job was asked to save."""
        asked = asks(self.run)
        if view is None or view.checkpoint is None or not asked:
            return None
        completed_at = clock.wall() - view.checkpoint.age_s
        return view.checkpoint.step if completed_at >= asked[0].intent_at else None

    def _stalled_mounts(self, now: float) -> tuple[str, ...]:
        """Mounts of the decision, or of any open trouble of this job, that do not answer everywhere."""
        concerned = set(self.run.decision.wait_until_responding)
        if not concerned:
            return ()
        exempt = set(self.run.decision.exclude)
        stalled = set()
        for filesystem in self._tools.state.view(now).filesystems:
            nodes = {
                node
                for node, answer in filesystem.answers
                if not answer.responding and answer.same_filesystem and answer.age_s <= CONVICTS_FOR_S
            }
            if filesystem.mount in concerned and nodes - exempt:
                stalled.add(filesystem.mount)
        return tuple(sorted(stalled))
