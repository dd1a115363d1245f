"""What every action is driven with: the journal, the state, Slurm, the agents, and the limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slurm_watchdog.controller.actions.ladder.state import LadderLimits
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import ActionRun, Decision, OperationRecord, Outcome
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.slurm.client import SlurmClient


@dataclass(frozen=True)
class Tools:
    """Given to every driver; durations in seconds."""

    journal: Journal
    state: ClusterState
    slurm: SlurmClient
    commands: CommandQueue
    limits: LadderLimits
    probe_deadline_s: float  # What a node may take for a command that a filesystem holds up.
    poll_s: float
    paused: Callable[[], bool]
    on_record: Callable[[ActionRun, OperationRecord], None]
    on_touch: Callable[[str, int, float | None], None] = lambda job_id, restarts, at: None
    """Called with job and restart count when an action touched a run at that moment (monotonic); None:
    the run continues without the action."""
    loop_stuck: Callable[[str], bool] = lambda job_id: False
    """Whether an open incident proves that the job's loop does not turn."""
    why_left_alone: Callable[[SlurmJob], str] = lambda job: ""
    """Why the job's owner wants it left alone, a sentence; empty: he says nothing of the kind."""
    collect: Callable[[Decision], Awaitable[Outcome]] | None = None
    """Waits for the evidence of the decision's job, for a bounded time."""
    listing_is_new_after_s: float = 30.0  # A listing that comes so long after a request began after it.
    listing_lasts_s: float = 120.0  # An older listing says nothing about now.

    @property
    def command_deadline_s(self) -> float:
        """For an answer to a command: a report to fetch it with, one that may just have left, and one to answer by."""
        return 3 * self.state.report_interval_s + self.probe_deadline_s
