"""What every action is carried out with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.ladder.state import LadderLimits, ladder_limits_of
from slurm_watchdog.controller.incidents.judge import Judge, proves_stuck
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.model.actions import ActionRun, Decision, Outcome
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.slurm import SlurmJob

if TYPE_CHECKING:
    from slurm_watchdog.controller.health.metrics import ControllerMetrics
    from slurm_watchdog.controller.ingest.command_queue import CommandQueue
    from slurm_watchdog.controller.node_history.ledger import NodeLedger
    from slurm_watchdog.controller.state.cluster import ClusterState
    from slurm_watchdog.journal.journal import Journal
    from slurm_watchdog.journal.writer import JournalWriter
    from slurm_watchdog.nodetest.judge import NodeVerdict
    from slurm_watchdog.slurm.client import SlurmClient
    from slurm_watchdog.trace.records import Own


@dataclass(frozen=True)
class Tools:
    """Given to the executor that really acts, and to each of its drivers; durations in seconds."""

    config: Config
    journal: Journal
    state: ClusterState
    slurm: SlurmClient
    commands: CommandQueue
    judgement: Judge
    collect: Callable[[Decision], Awaitable[Outcome]]
    """Waits for the evidence of the decision's job, for a bounded time."""
    writer: JournalWriter
    ended: Callable[[Incident, ActionRun], None]  # Reports how an action ended.
    close_incident: Callable[[Incident, str], None]
    metrics: ControllerMetrics
    blind: Callable[[float], str | None]
    record: Callable[[Own], None]  # Takes what a recording has to say of actions.
    past: NodeLedger
    tester: Callable[[str, Sequence[str]], Awaitable[Sequence[NodeVerdict]]] | None
    why_left_alone: Callable[[SlurmJob], str]
    """Why the job's owner wants it left alone, a sentence; empty: he says nothing of the kind."""
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
