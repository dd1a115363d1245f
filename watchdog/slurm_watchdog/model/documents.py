"""What the controller answers to the commands and the page. Unknown fields are ignored, missing ones have a default."""

from __future__ import annotations

from typing import Any

import msgspec

from slurm_watchdog.base.capped import Shortage
from slurm_watchdog.model.actions import ActionEnd
from slurm_watchdog.model.incidents import Culprit


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Common settings of every answer."""


class Pause(Answer, frozen=True, kw_only=True):
    reason: str = ""
    by: str = ""
    at: float | None = None


class Paused(Answer, frozen=True, kw_only=True):
    """`paused` is None where actions are allowed."""

    paused: Pause | None = None


class ControllerState(Answer, frozen=True, kw_only=True):
    version: str = ""
    started_at: float | None = None
    last_tick_age_s: float | None = None
    """Since it last judged."""
    warming_up: bool = False
    journal_error: str | None = None


class SlurmState(Answer, frozen=True, kw_only=True):
    age_s: float | None = None
    """Since Slurm last answered; None if it never did."""
    error: str | None = None
    notes: tuple[str, ...] = ()


class Nodes(Answer, frozen=True, kw_only=True):
    reporting: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


class JobHealth(Answer, frozen=True, kw_only=True):
    """Health of a job, the same on page, `status`, Slack and metrics."""

    state: str = "not judged"
    level: str = "unknown"
    reason: str = ""
    todo: str = ""
    not_judged: str | None = None


class Job(Answer, frozen=True, kw_only=True):
    job_id: str
    name: str = ""
    user: str = ""
    state: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    restarts_in_place: int = 0
    """Of the present run, by its supervisor: of its own accord, and by order."""
    step: int | None = None
    total_steps: int | None = None
    step_s: float | None = None
    progress_age_s: float | None = None
    """Since the step last rose."""
    step_times_s: tuple[float, ...] = ()
    """Of the newest steps, oldest first."""
    limit_s: float | None = None
    """How old that may become before the job counts as hanging."""
    phase: str | None = None
    """`starting`, `training`, `evaluating`, `checkpointing`, `finishing`."""
    phase_age_s: float | None = None
    """Since a log announced it."""
    ranks: int | None = None
    ranks_alive: int | None = None
    checkpoint_step: int | None = None
    saved_age_s: float | None = None
    """Since its newest checkpoint was complete, also where its step is not known."""
    health: JobHealth | None = None

    @property
    def has_lost_rank(self) -> bool:
        return self.ranks is not None and self.ranks_alive is not None and self.ranks_alive < self.ranks


class IncidentCounts(Answer, frozen=True, kw_only=True):
    firing: int = 0
    pending: int = 0
    resolved: int = 0


class OpenIncident(Answer, frozen=True, kw_only=True):
    """One of the most urgent of those that are open."""

    id: str
    kind: str = ""
    state: str = ""
    severity: str = ""
    job_id: str | None = None
    job_ids: tuple[str, ...] = ()
    """All jobs that it is about."""
    opened_at: float | None = None
    inhibited_by: str | None = None
    """The incident that explains this one."""
    summary: str = ""
    summary_at: float | None = None
    """When that was judged last."""
    quiet: str = ""
    """Who has silenced it."""


class Delivery(Answer, frozen=True, kw_only=True):
    """How the notifications of one channel fare."""

    channel: str = ""
    failing_s: float | None = None
    """Since when it fails; None: it does not."""
    error: str = ""
    waiting: int = 0


class Silence(Answer, frozen=True, kw_only=True):
    """What people are not notified of."""

    id: str
    what: str = ""
    reason: str = ""
    by: str = ""
    at: float | None = None
    until: float | None = None


class Silences(Answer, frozen=True, kw_only=True):
    """Those that hold, and the id of the one that was just made."""

    id: str | None = None
    silences: tuple[Silence, ...] = ()


class LeftOut(Shortage, frozen=True, kw_only=True):
    """What the controller has no room for, lately."""

    meaning: str = ""


class Reason(Answer, frozen=True, kw_only=True):
    level: str = "unknown"
    text: str = ""


class Status(Answer, frozen=True, kw_only=True):
    level: str = "unknown"
    """`ok`, `warning`, `critical` or `unknown`."""
    headline: str = (
        "the controller does not say how things are: is it of an older release? Compare: slurm-watchdog --version."
    )
    reasons: tuple[Reason, ...] = ()
    """Why all is not well, the gravest first."""
    mode: str
    controller: ControllerState
    slurm: SlurmState
    nodes: Nodes
    incidents: IncidentCounts
    jobs: tuple[Job, ...] = ()
    open: tuple[OpenIncident, ...] = ()
    paused: Pause | None = None
    silences: tuple[Silence, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    waiting: dict[str, str] = {}
    """Job -> why its restart does not come about."""


class DecisionSummary(Answer, frozen=True, kw_only=True):
    action: str = ""
    verdict: str = ""
    by: str = ""
    reason: str = ""
    rule: str = ""
    """The part of the configuration, or the wish, that gave the ladder."""
    ladder: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Nodes that a restart leaves out."""
    outcome: str | None = None


class Incident(Answer, frozen=True, kw_only=True):
    id: str
    kind: str
    state: str
    severity: str = ""
    job_id: str | None = None
    job_ids: tuple[str, ...] = ()
    """All jobs that it is about."""
    opened_at: float | None = None
    fired_at: float | None = None
    resolved_at: float | None = None
    detected_after_s: float | None = None
    culprits: tuple[Culprit, ...] = ()
    summary: str = ""
    evidence: tuple[Any, ...] = ()
    """Sentences."""
    decisions: tuple[DecisionSummary, ...] = ()
    resolution: str = ""
    inhibited_by: str | None = None
    """The incident that explains this one."""
    owner_uids: tuple[int, ...] = ()
    """Owners of its jobs, as far as Slurm has named them; empty for a caller who may not see its details."""
    details_for: str = ""
    """Who may see the details, where the caller may not."""


class Moment(Answer, frozen=True, kw_only=True):
    at: float
    text: str


class Evidence(Answer, frozen=True, kw_only=True):
    at: float
    kind: str
    document: Any = None
    """Text, or any JSON."""
    number: int | None = None
    """By which a document is fetched that is too large to come with the rest."""
    incident: str | None = None
    """With which incident it is stored; older controllers do not send it, and mean the one that was asked for."""
    taken: str = ""
    """When it was taken, seen from the incident."""


class Operation(Answer, frozen=True, kw_only=True):
    """As `OperationRecord`, of any release."""

    operation: str
    attempt: int = 1
    outcome: str | None = None
    """None while it is being tried."""
    detail: str = ""
    intent_at: float
    outcome_at: float | None = None


class Waiting(Answer, frozen=True, kw_only=True):
    """What an action under way waits for, and when it gives that up (wall clock)."""

    what: str = msgspec.field(name="for", default="")
    until: float | None = None


class ActionRun(Answer, frozen=True, kw_only=True):
    decision_id: str
    action: str = ""
    verdict: str = ""
    by: str = ""
    reason: str = ""
    rule: str = ""
    """The part of the configuration, or the wish, that gave the ladder."""
    ladder: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()
    waiting: Waiting | None = None
    end: ActionEnd | None = None


class Explanation(Answer, frozen=True, kw_only=True):
    """Everything about one incident."""

    incident: Incident
    timeline: tuple[Moment, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    actions: tuple[ActionRun, ...] = ()


class Accepted(Answer, frozen=True, kw_only=True):
    """What policy said to a restart that a person asked for."""

    incident_id: str
    decision_id: str
    verdict: str
    by: str = ""
    reason: str = ""


class SelectedJob(Answer, frozen=True, kw_only=True):
    """A job that selectors named."""

    job_id: str
    user: str = ""
    name: str = ""
    partition: str = ""
    nodes: tuple[str, ...] = ()
    step: int | None = None
    checkpoint_step: int | None = None
    why_not: str = ""
    """Why it cannot be asked to save; empty: as far as is known it can."""


class Selected(Answer, frozen=True, kw_only=True):
    jobs: tuple[SelectedJob, ...] = ()


class Answered(Answer, frozen=True, kw_only=True):
    """What policy said to one of many requests."""

    job_id: str
    verdict: str
    reason: str = ""
    incident_id: str | None = None


class AnsweredAll(Answer, frozen=True, kw_only=True):
    jobs: tuple[Answered, ...] = ()


class Progress(Answer, frozen=True, kw_only=True):
    """How far actions are, by their incidents."""

    actions: dict[str, ActionRun] = {}
