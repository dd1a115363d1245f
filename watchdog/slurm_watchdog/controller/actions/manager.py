"""The actions under way: resumes what a journal left open, drives each to its end, says how it ended,
takes back what lasted long enough."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container

from slurm_watchdog.actuate import by_slurm
from slurm_watchdog.base import clock
from slurm_watchdog.base.hours import is_within
from slurm_watchdog.base.text import duration
from slurm_watchdog.controller.actions.decision_inputs import subject_of
from slurm_watchdog.controller.actions.driver import Driver, subject_words
from slurm_watchdog.controller.actions.job_observer import Tools
from slurm_watchdog.controller.node_history import quarantine
from slurm_watchdog.controller.node_history.node_tests import NodeTests
from slurm_watchdog.controller.node_history.quarantine import QuarantineTools
from slurm_watchdog.controller.policy.placement import suspects_of
from slurm_watchdog.controller.policy.rules import rule_for
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import NodeEntry
from slurm_watchdog.model.actions import Action, ActionRun, Operation, OperationOutcome
from slurm_watchdog.model.documents import Waiting
from slurm_watchdog.model.incidents import IncidentKind, IncidentState
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import WAITING
from slurm_watchdog.recording.entries import Ended
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)

EXPIRY_EVERY_S = 60.0  # Between two looks at what we did to nodes and may be taken back.
RESTARTS = frozenset({Operation.REQUEUE_HOLD, Operation.WRITE_ORDER, Operation.RESUBMIT})
"""Operations that end a run to have it started again."""
PLAIN_RESTARTS = frozenset({Action.REQUEUE, Action.GRACEFUL_RESTART, Action.RESTART_STEP})
DRIVE_AGAIN_S = 15.0  # After an action's task has failed (a full disk under the journal), before it is taken up again.


class Actions:
    """Keeps the running actions; who decides gives them in, and asks which jobs are busy. One event loop owns it. The
    Executor of the service."""

    def __init__(self, tools: Tools):
        self._tools, self._config = tools, tools.config
        self._journal, self._state, self._slurm = tools.journal, tools.state, tools.slurm
        self._judgement, self._writer, self._metrics = tools.judgement, tools.writer, tools.metrics
        self._report_end, self._close_incident = tools.ended, tools.close_incident
        self._blind, self._on_failure, self._record = tools.blind, tools.on_failure, tools.record
        past = tools.past
        self._quarantine = QuarantineTools(tools.slurm, self._config.policy, past.events, past.record, clock.wall)
        floors = bool(self._config.node_tests.floors)
        self._tests = NodeTests(self._quarantine, tools.tester, self._held_back, floors=floors)
        self._expiry: asyncio.Task[None] | None = None
        self._swept_at = float("-inf")
        self._drivers: dict[str, Driver] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def resume_open_actions(self) -> None:
        """Goes on with every action that a journal left open. The ladder asks the world before it does anything."""
        for run in self._journal.open_actions():
            if run.decision.action is not Action.NONE and run.decision.id not in self._drivers:
                if run.decision.fence is not None:
                    self._state.remember_action(
                        run.decision.fence, run.decision.nodes, run.decision.process_job_id or None
                    )
                log.warning("taking up the %s of %s (%s)", *_names(run))
                self.drive(run)

    def drive(self, run: ActionRun) -> None:
        """Carries an allowed decision out, in a task of its own."""
        driver = Driver(run, self._tools)
        self._drivers[run.decision.id] = driver
        self._tasks[run.decision.id] = asyncio.create_task(self._drive(driver))

    def is_busy(self, job_id: str) -> bool:
        """Whether an action on the job is under way."""
        return any(job_id == each for each, _ in self._on_jobs())

    def _on_jobs(self) -> list[tuple[str, Driver]]:
        """(job, driver) of the actions about jobs."""
        return [(driver.job_id, driver) for driver in self._drivers.values() if driver.job_id]

    def waiting(self, decision_id: str) -> Waiting | None:
        """What an action under way waits for, if it waits."""
        driver = self._drivers.get(decision_id)
        if driver is None or not driver.waiting_for:
            return None
        return Waiting(what=driver.waiting_for, until=driver.waiting_until)

    def abandon(self, job_id: str, by: str) -> str | None:
        """Ends the restart of a job that a person asked for. Returns why it cannot be, a sentence; None if it
        is being ended."""
        for each, driver in self._on_jobs():
            if each != job_id or driver.run.decision.asked_by is None:
                continue
            if driver.abandon(by):
                return None
            return f"job {job_id} is being ended or was requeued already: the restart cannot be cancelled any more"
        return f"no restart of job {job_id} that a person asked for is under way"

    def acting(self) -> frozenset[str]:
        """Ids of the incidents that are being acted on."""
        return frozenset(driver.run.decision.incident_id for driver in self._drivers.values())

    def subjects(self) -> list[str]:
        """The runs and processes that are being acted on, sorted, as a recording names them."""
        return sorted(subject_of(driver.run.decision) for driver in self._drivers.values())

    def operations(self) -> dict[str, str]:
        """Job -> the operation at which an action on it is; `between` while none is being tried."""
        return {
            job_id: next((str(record.operation) for record in driver.run.records if record.outcome is None), "between")
            for job_id, driver in self._on_jobs()
        }

    def under_way(self, wall: float) -> dict[str, str]:
        """Job -> the action on it and what that waits for. What a wait quotes after its colon may be a
        user's, and everybody reads this."""
        found = {}
        for job_id, driver in self._on_jobs():
            waits = driver.waiting_for.partition(":")[0]
            left_s = None if driver.waiting_until is None else driver.waiting_until - wall
            at_most = f" (for {duration(left_s)} at most)" if waits and left_s is not None and left_s > 0 else ""
            action = driver.run.decision.action
            what = "restart" if action in PLAIN_RESTARTS else str(action).replace("_", " ")
            found[job_id] = f"its {what} is under way" + (f", {waits}{at_most}" if waits else "")
        return found | self.stuck()

    def restarting(self) -> frozenset[str]:
        """Jobs whose run is ended, or being ended, by an action that has it started again: nothing is left to do but to
        wait."""
        return frozenset(
            job_id
            for job_id, driver in self._on_jobs()
            if not driver.held_up_on and not driver.run.decision.held_why
            and any(each.operation in RESTARTS and each.outcome is OperationOutcome.DONE for each in driver.run.records)
        )  # fmt: skip

    def stuck(self) -> dict[str, str]:
        """Job -> why its restart does not come about, where its old run does not end on a node. No user's
        words: everybody reads it."""
        return {
            job_id: "its restart waits until its old run has ended on "
            f"{', '.join(driver.held_up_on)} (explain has the processes, and what helps)"
            for job_id, driver in self._on_jobs()
            if driver.held_up_on
        }

    async def _drive(self, driver: Driver) -> None:
        """Drives to the end; a journal that fails stops nothing for good: the action is taken up again."""
        decision_id = driver.run.decision.id
        while True:
            try:
                await driver.drive()
                break
            except JournalError as error:
                self._writer.failed(error)
                log.error("action %s waits for the journal: %s", decision_id, error)
                await asyncio.sleep(DRIVE_AGAIN_S)
                self._writer.write(lambda: self._reload(driver))
        self._drivers.pop(decision_id, None)
        self._tasks.pop(decision_id, None)
        self._ended(driver.run)

    def _reload(self, driver: Driver) -> None:
        """After a failed write, what the journal holds is what counts."""
        for run in self._journal.open_actions():
            if run.decision.id == driver.run.decision.id:
                driver.run = run

    def _ended(self, run: ActionRun) -> None:
        end = run.end
        assert end is not None
        self._record(Ended(subject=subject_of(run.decision), end=end))
        self._metrics.actions.labels(run.decision.action, end.outcome).inc()
        if end.ok:
            self._count_gpus(run, end.steps_lost or 0)
        else:
            self._on_failure(run.decision)
        log.warning("the %s of %s (%s) has ended: %s", *_names(run), end.detail)
        incident = self._tools.incident_of(run)
        if incident is None:
            return
        self._writer.add_note(incident, f"{run.decision.action} {end.words}: {end.detail}")
        self._writer.write_or_queue(lambda: self._report_end(incident, run))
        busy = incident.id in self.acting()
        if (
            not busy
            and run.decision.process is None  # others of its job may be there: the nodes say when none is
            and incident.state is not IncidentState.RESOLVED
            and (end.ok or incident.kind == IncidentKind.OPERATOR_RESTART)
        ):
            self._close_incident(incident, end.detail)

    def _count_gpus(self, run: ActionRun, steps_lost: int) -> None:
        """What a restart that went well cost, and how many GPUs it brought back to work that no one asked for."""
        metrics, fence = self._metrics, run.decision.fence
        gpus = metrics.gpu_time.gpus_of(fence.job_id) if fence is not None else 0
        redone_s = steps_lost * (self._step_s(run) or 0.0)
        metrics.lost_work.inc(redone_s)
        metrics.lost_gpu_time.labels("redone").inc(redone_s * gpus)
        if run.decision.asked_by is None:
            metrics.restarted_gpus.inc(gpus)

    def _step_s(self, run: ActionRun) -> float | None:
        """How long a step of the run that was ended took: of the next one no one has seen two steps yet."""
        fence = run.decision.fence
        view = self._state.job_view(fence.job_id, clock.monotonic()) if fence is not None else None
        if view is None or fence is None:
            return None
        before = next((past.step_s for past in view.past if past.restarts == fence.restarts), None)
        now = view.progress.step_s if view.progress is not None else None
        return before if before is not None else now

    def sweep(self, now: float) -> None:
        """Now and then: exclusions and drains of ours that have lasted long enough are taken back, in a task
        of their own."""
        busy = self._expiry is not None and not self._expiry.done()
        if busy or now - self._swept_at < EXPIRY_EVERY_S:
            return
        try:
            if self._journal.paused() is None and self._blind(now) is None:
                self._swept_at = now
                self._expiry = asyncio.create_task(self._expire())
        except JournalError as error:
            self._writer.failed(error)

    def _held_back(self) -> str | None:
        """Why no test of nodes is begun now, a sentence. Raises JournalError."""
        paused = self._journal.paused()
        if paused is not None:
            return f"actions are paused ({paused[0] or 'no reason given'}), until `slurm-watchdog resume`"
        return self._blind(clock.monotonic())

    async def _expire(self) -> None:
        busy = {job_id for job_id, _ in self._on_jobs()}
        try:
            policy = self._config.policy
            await self._take_back(busy)
            quiet = any(is_within(each, clock.wall()) for each in policy.no_action)
            drains = policy.quarantine and not quiet and rule_for(self._config, IncidentKind.SUSPECT_NODE, None).acts
            suspects = [(node, incident.id) for incident in self._judgement.incidents for node in suspects_of(incident)]
            await quarantine.sweep(self._quarantine, suspects, self._state.slurm_nodes, drains=drains)
            permitted = drains and policy.quarantine_test
            others = {each.node: each.reason for each in self._journal.node_entries("drained")}
            listed = self._state.slurm_nodes, self._state.jobs, self._state.reservations
            await self._tests.turn(*listed, others, permitted=permitted)
        except JournalError as error:
            self._writer.failed(error)

    async def _take_back(self, busy: Container[str]) -> None:
        """What we did to nodes and has lasted long enough: exclusions of jobs that wait and that no action is under way
        for, drains that no one has touched. Raises JournalError."""
        policy, wall = self._config.policy, clock.wall()
        for entry in self._journal.node_entries("drained") if policy.drain_lifetime > 0 else ():
            if entry.at < wall - policy.drain_lifetime:
                self._note(entry, *await by_slurm.undrain(self._slurm, entry.node, entry.reason, entry.reason_at))
        for entry in self._journal.node_entries("excluded"):
            if entry.at < wall - policy.exclusion_lifetime and entry.job_id not in busy:
                self._note(entry, *await _drop_exclusion(self._slurm, entry, self._state.jobs.get(entry.job_id)))

    def _note(self, entry: NodeEntry, settled: bool, why: str) -> None:
        if settled:
            log.warning("node %s, %s: %s", entry.node, entry.what, why)
            self._journal.end_node_entry(entry, clock.wall(), why)
        elif why:
            log.info("node %s, %s: %s", entry.node, entry.what, why)

    async def close(self) -> None:
        """Stops driving. Nothing is lost: the journal has every intent, and the next start resumes it."""
        tasks = [*self._tasks.values(), *([self._expiry] if self._expiry is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tests.close()


def _names(run: ActionRun) -> tuple[str, str, str]:
    """What is done, to which job or process, and the id of the decision."""
    decision = run.decision
    return str(decision.action), subject_words(decision), decision.id


async def _drop_exclusion(slurm: SlurmClient, entry: NodeEntry, listed: SlurmJob | None) -> tuple[bool, str]:
    """A job that waits may use the node again. One that runs keeps its list: Slurm changes that of pending
    jobs only."""
    if listed is None:
        return True, f"job {entry.job_id} is over"
    if listed.state not in WAITING:
        return False, ""
    try:
        job = await slurm.read_job(entry.job_id)
    except (SlurmUnavailable, SlurmRefused) as error:
        return False, f"job {entry.job_id} cannot be read: {error}"
    if job is None or entry.node not in job.excluded_nodes:
        return True, f"job {entry.job_id} is not kept from it any more"
    nodes = tuple(node for node in job.excluded_nodes if node != entry.node)
    outcome, detail = await by_slurm.exclude(slurm, entry.job_id, nodes)
    if outcome is OperationOutcome.DONE:
        return True, f"job {entry.job_id} may use it again: our exclusion was over"
    return outcome is OperationOutcome.FAILED, f"job {entry.job_id}: {detail}"
