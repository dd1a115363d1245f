"""Carries actions out: asks the ladder, writes the intent, pulls the lever, writes the outcome. One task an action."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

from msgspec.structs import replace

from slurm_watchdog.actuate import by_agent, by_slurm
from slurm_watchdog.base import clock
from slurm_watchdog.controller.actions.job_observer import JobObserver, Tools, processes_there, submitted_job
from slurm_watchdog.controller.actions.ladder.next_move import next_move
from slurm_watchdog.controller.actions.ladder.process import SIGNALS, described
from slurm_watchdog.controller.actions.ladder.state import Execute, Finish, Move, Observed, Reconcile, Wait
from slurm_watchdog.controller.policy.by_user import objection, objection_by_slurm
from slurm_watchdog.model.actions import (
    ActionEnd,
    ActionRun,
    Decision,
    Operation,
    OperationOutcome,
    OperationRecord,
    Outcome,
)
from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.node_events import OUR_DRAIN
from slurm_watchdog.model.protocol import ProcessEnd
from slurm_watchdog.model.slurm import SlurmNode, is_unkillable
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.recording.entries import Touched
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)

ENDING_OPERATIONS = frozenset(
    {
        Operation.WRITE_KILL_SWITCH,
        Operation.SIGNAL_USR1,
        Operation.SIGNAL_TERM,
        Operation.WRITE_ORDER,
        Operation.REQUEUE_HOLD,
        Operation.CANCEL,
        Operation.RESUBMIT,
    }
)  # Operations after which a run ends, and what it logs about that, because of us.
TRIES_OF_ALL_NODES = 2  # So often every node is asked to remove a kill switch, also one that does not report.


class Driver:
    """Drives one action from wherever its journal stands to its end."""

    def __init__(self, run: ActionRun, tools: Tools):
        self.run = run
        self._tools = tools
        self._taken_up_at = clock.wall()
        self._listens_from = clock.monotonic()
        self._observer = JobObserver(run.decision, tools, self._taken_up_at)
        self._seen = ProcessEnd()  # What a process was like when its node was asked last.
        self.waiting_for = ""
        self.waiting_until: float | None = None  # Wall clock; what `waiting_for` is given up at.
        self._abandoned_by: str | None = None

    def abandon(self, by: str) -> bool:
        """Ends the action before anything is done to the job but asking it to save, for the operator `by`.
        False: it is too late."""
        if self.run.end is not None or not self.run.can_be_abandoned():
            return False
        self._abandoned_by = by
        return True

    def _write_abandoned(self) -> None:
        """The operator's word goes into the journal as an operation: a controller that dies now comes back to it."""
        by, self._abandoned_by = self._abandoned_by, None
        if by is None or not self.run.can_be_abandoned():
            return
        at = clock.wall()
        self._tools.journal.operation_intent(self.run.decision.id, Operation.ABANDON, 1, at)
        self._put(OperationRecord(operation=Operation.ABANDON, attempt=1, intent_at=at))
        why = f"{by} cancelled the restart; the job was left as it is"
        self._close(Operation.ABANDON, 1, OperationOutcome.DONE, why)

    async def drive(self) -> ActionEnd:
        """Until the action has ended in writing. Errors of the journal end the task, never the intent."""
        for record in self.run.records:  # of a controller before this one
            if record.operation in ENDING_OPERATIONS:
                self._note_touched(clock.monotonic() - max(0.0, clock.wall() - record.intent_at))
        while True:
            world = await self._observe()
            self._write_abandoned()
            move = next_move(replace(world, records=self.run.records, end=self.run.end))
            if isinstance(move, Finish):
                if world.job is not None and world.job.state in RUNNING:
                    self._note_touched(None)  # of the run that it was about only: that one continues
                if self.run.end is None:
                    self._tools.journal.end_action(self.run.decision.id, move.end)
                    self.run = replace(self.run, end=move.end)
                return move.end
            await self._carry_out(move)

    async def _observe(self) -> Observed:
        """The job, or the process, as Slurm and the agents have it at this moment."""
        process = self.run.decision.process
        if process is None:
            return await self._observer.observe(self.run)
        world = await _observe(self.run, process, self._tools, self._taken_up_at)
        self._seen = world.process or self._seen
        return world

    @property
    def held_up_on(self) -> tuple[str, ...]:
        """Nodes on which the old run of the requeued job does not end."""
        return self._observer.held_up_on

    async def _carry_out(self, move: Move) -> None:
        if isinstance(move, Wait):
            if move.reason != self.waiting_for:
                log.info("%s: %s", subject_words(self.run.decision), move.reason)
                self.waiting_for = move.reason
            self.waiting_until = move.until
            await asyncio.sleep(min(2.0, self._tools.config.slurm.poll_interval))
            return
        self.waiting_for = ""
        if isinstance(move, Reconcile):
            self._close(move.operation, move.attempt, move.outcome, move.detail)
        elif isinstance(move, Execute):
            at = clock.wall()
            self._tools.journal.operation_intent(self.run.decision.id, move.operation, move.attempt, at)
            self._put(OperationRecord(operation=move.operation, attempt=move.attempt, intent_at=at))
            if move.operation in ENDING_OPERATIONS and not move.skip:
                self._note_touched(clock.monotonic())
            outcome, detail = (OperationOutcome.SKIPPED, move.skip) if move.skip else await self._pull(move)
            self._close(move.operation, move.attempt, outcome, detail)

    def _note_touched(self, at: float | None) -> None:
        fence = self.run.decision.fence
        if fence is not None:
            self._tools.state.runs.note_action(fence.job_id, fence.restarts, at)
            age_s = None if at is None else max(0.0, clock.monotonic() - at)
            self._tools.record(Touched(job_id=fence.job_id, restarts=fence.restarts, age_s=age_s))

    @property
    def job_id(self) -> str:
        """Of an action about a job; empty for one about a process."""
        return self.run.decision.fence.job_id if self.run.decision.fence else ""

    def _put(self, record: OperationRecord) -> None:
        others = tuple(r for r in self.run.records if (r.operation, r.attempt) != (record.operation, record.attempt))
        self.run = replace(self.run, records=(*others, record))

    def _close(self, operation: Operation, attempt: int, outcome: OperationOutcome, detail: str) -> None:
        at = clock.wall()
        self._tools.journal.operation_outcome(self.run.decision.id, operation, attempt, outcome, at, detail)
        intent = next(r for r in self.run.records if r.operation is operation and r.attempt == attempt)
        record = replace(intent, outcome=outcome, outcome_at=at, detail=detail)
        self._put(record)
        log.info("%s: %s: %s (%s)", subject_words(self.run.decision), operation, outcome, detail)
        incident = self._tools.incident_of(self.run)
        if incident is not None:
            self._tools.writer.add_note(incident, f"{record.operation}: {record.outcome}: {record.detail}")

    async def _pull(self, move: Execute) -> Outcome:
        decision = self.run.decision
        if decision.process is not None:
            return await self._pull_on_process(decision.process, move)
        assert decision.fence is not None
        match move.operation:
            case Operation.EVIDENCE:
                return await self._tools.collect(decision)
            case Operation.WRITE_KILL_SWITCH:
                ask, deadline_s = self._tools.commands.ask, self._tools.command_deadline_s
                return await by_agent.write_kill_switch(ask, decision, deadline_s, self._batch_host)
            case Operation.WAIT_CHECKPOINT:
                return OperationOutcome.DONE, "a complete checkpoint came after the job was asked to save"
            case Operation.REQUEUE_HOLD:
                return await by_slurm.requeue_hold(
                    self._tools.slurm, decision.fence, only_unfinished=move.only_unfinished
                )
            case Operation.WRITE_ORDER | Operation.RESTART_STEP:
                return await self._order(decision, move.operation)
            case Operation.SIGNAL_USR1 | Operation.SIGNAL_TERM as operation:
                name = str(operation).rpartition("_")[2].upper()
                return await by_slurm.send_signal(self._tools.slurm, decision.fence, name, decision.signal_to)
            case Operation.RESUBMIT:
                return await by_slurm.resubmit(self._tools.slurm, decision, move.nodes)
            case Operation.DRAIN:
                reason = f"{OUR_DRAIN} {decision.by}, job {self.job_id}, incident {decision.incident_id}"
                return await by_slurm.drain(self._tools.slurm, move.nodes, reason, self._keeper("drained"))
            case Operation.SET_DOWN:
                return await self._set_down(move.nodes)
            case Operation.EXCLUDE:
                return await self._exclude(move.nodes)
            case Operation.REMOVE_KILL_SWITCH:
                # An agent that is late after our own start is no dead one: it is passed over at the third try
                # only, and by one who has listened for a while, however often others have tried before.
                reporting = frozenset(decision.nodes)
                listened_s = clock.monotonic() - self._listens_from
                if move.attempt > TRIES_OF_ALL_NODES and listened_s >= self._tools.command_deadline_s:
                    reporting = frozenset(self._tools.state.agents.reporting(clock.monotonic()))
                ask, deadline_s = self._tools.commands.ask, self._tools.command_deadline_s
                return await by_agent.remove_kill_switch(ask, decision, reporting.union(move.nodes), deadline_s)
            case Operation.CANCEL:
                return await by_slurm.cancel(self._tools.slurm, decision.fence)
            case _:
                return await self._pull_in_queue(decision, move)

    async def _pull_in_queue(self, decision: Decision, move: Execute) -> Outcome:
        slurm = self._tools.slurm
        if move.operation is Operation.HOLD_OTHERS:
            return await by_slurm.hold_others(slurm, decision)
        if move.operation is Operation.RELEASE_OTHERS:
            return await by_slurm.release_others(slurm, decision)
        if move.operation is Operation.HOLD:
            return await by_slurm.hold(slurm, self.job_id)
        if move.operation is not Operation.RELEASE:
            raise AssertionError(f"the ladder has no lever for {move.operation}")
        new = submitted_job(self.run, self._tools.state.jobs.values()) if move.instead else None
        return await by_slurm.release(slurm, self.job_id if new is None else new.job_id)

    @property
    def _batch_host(self) -> str | None:
        job = self._tools.state.jobs.get(self.job_id)
        return None if job is None else job.batch_host

    async def _order(self, decision: Decision, operation: Operation) -> Outcome:
        tools, host = self._tools, self._batch_host
        job = tools.state.jobs.get(self.job_id)
        if job is None or host is None:
            return OperationOutcome.FAILED, "the job's batch host is not known"
        ask, deadline_s = tools.commands.ask, tools.command_deadline_s
        seen = lambda: tools.state.supervisors.last_word(job)  # noqa: E731
        if operation is Operation.WRITE_ORDER:
            return await by_agent.write_order(ask, decision, host, deadline_s, seen)
        return await by_agent.restart_step(
            ask, decision, host, deadline_s, tools.limits.restart_step_s, seen, by_agent.Time()
        )

    async def _exclude(self, nodes: tuple[str, ...]) -> Outcome:
        """The ledger first: what stands in Slurm's list and in no ledger is never dropped again. So the list has to be
        known: which of its nodes are the owner's own is not to be guessed."""
        tools, decision = self._tools, self.run.decision
        job = (await self._observer.read_job())[1]
        if job is None:
            return OperationOutcome.UNKNOWN, "nothing was sent: the job and its excluded nodes cannot be read"
        for node in decision.exclude:
            if node in nodes and node not in job.excluded_nodes:
                tools.journal.node_entry(node, "excluded", decision, clock.wall())
        outcome = await by_slurm.exclude(tools.slurm, self.job_id, nodes)
        if outcome[0] is OperationOutcome.DONE:
            for entry in tools.journal.node_entries("excluded", self.job_id):
                if entry.node not in nodes:
                    tools.journal.end_node_entry(entry, clock.wall(), "dropped from the job's list")
        return outcome

    async def _pull_on_process(self, process: GpuProcess, move: Execute) -> Outcome:
        if move.operation is Operation.DRAIN:  # the names that a user gave go without what a terminal would mind
            text = f"unkillable {described(self.run, process, self._seen)}, incident {self.run.decision.incident_id}"
            reason = f"{OUR_DRAIN} {re.sub(r'[^A-Za-z0-9 ,.:;()/_@+-]', '_', text)}"
            return await by_slurm.drain(self._tools.slurm, move.nodes, reason, self._keeper("drained"))
        ask, limit_s = self._tools.commands.ask, self._tools.command_deadline_s
        return await by_agent.end_process(ask, process, SIGNALS[move.operation], limit_s)

    def _keeper(self, what: str) -> Callable[[SlurmNode], None]:
        """Writes down what was done to a node, as Slurm has it afterwards."""
        journal, decision = self._tools.journal, self.run.decision
        return lambda node: journal.node_entry(node.name, what, decision, clock.wall(), node.reason, node.reason_at)

    async def _set_down(self, nodes: tuple[str, ...]) -> Outcome:
        tools, decision = self._tools, self.run.decision
        assert decision.fence is not None

        reason = f"{OUR_DRAIN} processes of job {self.job_id} cannot be killed, incident {decision.incident_id}"
        return await by_slurm.set_down(
            tools.slurm,
            decision.fence,
            nodes,
            reason,
            self._keeper("down"),
            lambda job, node: is_unkillable(processes_there(tools, node, job), tools.limits.set_down_after_s),
        )


def subject_words(decision: Decision) -> str:
    """The job or process that an action is about, for the log."""
    process = decision.process
    if process is not None:
        return f"process {process.pid} on {process.node}"
    return f"job {decision.fence.job_id if decision.fence else '?'}"


async def _observe(run: ActionRun, process: GpuProcess, tools: Tools, taken_up_at: float) -> Observed:
    """What an action about a process sees. Its node is asked once something was tried; Slurm about its job each time,
    and by its listing about its user's others."""
    seen = (
        await by_agent.look_at_process(tools.commands.ask, process, tools.command_deadline_s) if run.records else None
    )
    now = clock.monotonic()
    listed_at = tools.state.slurm_at
    known = listed_at is not None and now - listed_at <= tools.judgement.slurm_patience_s
    jobs = list(tools.state.jobs.values())
    try:
        job = await tools.slurm.read_job(process.job_id)
    except SlurmUnavailable:
        known = False
    except SlurmRefused:
        pass  # the id of a whole array as well: of its elements the listing knows
    else:
        jobs += [] if job is None else [job]
    if run.records:
        why_not = objection_by_slurm(process, jobs)
    else:
        reports = tools.state.agents.reports(process.node, now)
        why_not = objection(process, tools.state.nodes.view(process.node), reports, jobs)
    return Observed(
        decision=run.decision,
        limits=tools.limits,
        now=clock.wall(),
        job_known=known,
        paused=tools.paused(),
        taken_up_at=taken_up_at,
        process=seen,
        process_objection=why_not,
    )
