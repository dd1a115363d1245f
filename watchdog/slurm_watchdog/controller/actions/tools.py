"""What every action is driven with: what the executor is given, the configuration, and who hears of what is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.ladder.state import LadderLimits
from slurm_watchdog.controller.incidents.judge import proves_stuck
from slurm_watchdog.controller.ports.given import ActionPorts
from slurm_watchdog.model.actions import ActionRun, OperationRecord


@dataclass(frozen=True)
class Tools:
    """Given to every driver; durations in seconds."""

    ports: ActionPorts
    config: Config
    limits: LadderLimits
    on_record: Callable[[ActionRun, OperationRecord], None]
    on_touch: Callable[[str, int, float | None], None]
    """Called with job and restart count when an action touched a run at that moment (monotonic); None:
    the run continues without the action."""

    def paused(self) -> bool:
        """Whether an operator has paused all actions."""
        return self.ports.journal.paused() is not None

    def loop_stuck(self, job_id: str) -> bool:
        """Whether an open incident proves that the job's loop does not turn."""
        return proves_stuck(self.ports.judgement.incidents, job_id) is not None

    @property
    def command_deadline_s(self) -> float:
        """For an answer to a command: a report to fetch it with, one that may just have left, and one to answer by."""
        return 3 * self.ports.state.report_interval_s + self.config.agent.probe_deadline
