"""What each part of the controller is given."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_watchdog.base import clock
from slurm_watchdog.controller.ports.commands import NodePast
from slurm_watchdog.controller.ports.executors import (
    DecisionNews,
    DiagnosisNews,
    EndNews,
    Executor,
    IncidentEditor,
    MountProbes,
)
from slurm_watchdog.controller.ports.journals import DecisionJournal, Writer
from slurm_watchdog.controller.ports.judged import JudgedView, Judgement

if TYPE_CHECKING:
    from slurm_watchdog.controller.health.metrics import ControllerMetrics
    from slurm_watchdog.controller.ingest.command_queue import CommandQueue
    from slurm_watchdog.controller.state.cluster import ClusterState
    from slurm_watchdog.journal.journal import Journal
    from slurm_watchdog.model.actions import Decision, Outcome
    from slurm_watchdog.model.slurm import SlurmJob
    from slurm_watchdog.nodetest.judge import NodeVerdict
    from slurm_watchdog.slurm.client import SlurmClient
    from slurm_watchdog.trace.records import Own


@dataclass(frozen=True)
class TickChunks:
    """How a tick with thousands of incidents is divided, so that requests and actions are served in between."""

    together_from: int = 20
    """Changes, or open incidents, from which on they are written together: one wait for the disk."""
    size: int = 250
    """Changes, or decisions, before other work is served: about a tenth of a second."""


CHUNKS = TickChunks()


@dataclass(frozen=True)
class DecisionPorts:
    """Of the Decider."""

    journal: DecisionJournal
    cluster: ClusterState
    judgement: Judgement
    executor: Executor
    news: DecisionNews
    incidents: IncidentEditor
    blind: Callable[[float], str | None]
    """Why nothing may be done at this moment (monotonic), a sentence; None if all is seen well."""
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    """Of a decision."""
    new_incident_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12]
    monotonic: Callable[[], float] = clock.monotonic
    wall: Callable[[], float] = clock.wall


@dataclass(frozen=True)
class ActionPorts:
    """Of the executor that really acts."""

    journal: Journal
    state: ClusterState
    slurm: SlurmClient
    commands: CommandQueue
    judgement: Judgement
    collect: Callable[[Decision], Awaitable[Outcome]]
    """Waits for the evidence of the decision's job, for a bounded time."""
    writer: Writer
    news: EndNews
    incidents: IncidentEditor
    metrics: ControllerMetrics
    blind: Callable[[float], str | None]
    record: Callable[[Own], None]
    """Takes what a recording has to say of actions."""
    past: NodePast
    tester: Callable[[str, Sequence[str]], Awaitable[Sequence[NodeVerdict]]] | None
    why_left_alone: Callable[[SlurmJob], str]
    """Why the job's owner wants it left alone, a sentence; empty: he says nothing of the kind."""
    on_failure: Callable[[Decision], None]
    """Called with the decision whose action has ended without success."""


@dataclass(frozen=True)
class EvidencePorts:
    """Of those who collect evidence."""

    journal: Journal
    writer: Writer
    cluster: ClusterState
    judgement: JudgedView
    agents: CommandQueue
    probes: MountProbes
    news: DiagnosisNews
