"""What the controller answers to the commands and the page, of a diagnosis, too. Unknown fields are ignored, missing
ones have a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from slurm_watchdog.base.capped import Shortage
from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.actions import ActionEnd, Wish
from slurm_watchdog.model.incidents import Culprit, Silence


class Answer(Struct, omit_defaults=False):
    """Common settings of every answer: all keys are there."""


class Level(StrEnum):
    """How things are. Only OK is green, and only what was seen is OK."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Level:
        """A word of a later release."""
        return cls.UNKNOWN


class Pause(Answer):
    reason: str = ""
    by: str = ""
    at: float | None = None


class Paused(Answer):
    """`paused` is None where actions are allowed."""

    paused: Pause | None = None


class ControllerState(Answer):
    version: str = ""
    started_at: float | None = None
    last_tick_age_s: float | None = None  # Since it last judged.
    warming_up: bool = False
    journal_error: str | None = None


class SlurmState(Answer):
    age_s: float | None = None  # Since Slurm last answered; None if it never did.
    error: str | None = None
    notes: tuple[str, ...] = ()


class Nodes(Answer):
    reporting: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


class JobHealth(Answer):
    """Health of a job, the same on page, `status`, Slack and metrics."""

    job_id: str = ""
    state: str = "not judged"  # A few words: `training`, another phase, `starting`, `beyond its limit`, `hangs` …
    level: Level = Level.UNKNOWN
    reason: str = ""  # Why it is not simply training; a sentence's rest.
    todo: str = ""  # What the owner or an administrator can do about it.
    not_judged: str | None = None  # Why nothing can be said of it.
    by_incident: bool = False  # An open incident says it already: a headline need not name the job.


class NamedJob(Answer):
    job_id: str
    name: str = ""
    user: str = ""
    nodes: tuple[str, ...] = ()
    step: int | None = None
    checkpoint_step: int | None = None


class Job(NamedJob):
    state: str = ""
    restarts: int = 0
    restarts_in_place: int = 0  # Of the present run, by its supervisor: of its own accord, and by order.
    total_steps: int | None = None
    step_s: float | None = None
    progress_age_s: float | None = None  # Since the step last rose.
    step_times_s: tuple[float, ...] = ()  # Of the newest steps, oldest first.
    limit_s: float | None = None  # How old that may become before the job counts as hanging.
    phase: str | None = None  # `starting`, `training`, `evaluating`, `checkpointing`, `finishing`.
    phase_age_s: float | None = None  # Since a log announced it.
    ranks: int | None = None
    ranks_alive: int | None = None
    saved_age_s: float | None = None  # Since its newest checkpoint was complete, also where its step is not known.
    health: JobHealth | None = None

    @property
    def has_lost_rank(self) -> bool:
        return self.ranks is not None and self.ranks_alive is not None and self.ranks_alive < self.ranks


class IncidentCounts(Answer):
    firing: int = 0
    pending: int = 0
    resolved: int = 0


class OpenIncident(Answer):
    """One of the most urgent of those that are open."""

    id: str
    kind: str = ""
    state: str = ""
    severity: str = ""
    job_id: str | None = None
    job_ids: tuple[str, ...] = ()  # All jobs that it is about.
    opened_at: float | None = None
    inhibited_by: str | None = None  # The incident that explains this one.
    headline: str = ""  # Rank, node, what is wrong, what is done about it, in at most 120 characters.
    summary: str = ""
    summary_at: float | None = None  # When that was judged last.
    quiet: str = ""  # Who has silenced it.


class Delivery(Answer):
    """How the notifications of one channel fare."""

    channel: str = ""
    failing_s: float | None = None
    """Since the first failure without a success since; None: the newest was delivered, or there was none."""
    error: str = ""
    waiting: int = 0  # Messages that wait to be sent.
    oldest_s: float = 0.0  # Age of the oldest of these.


class Silences(Answer):
    """Those that hold, and the id of the one that was just made."""

    id: str | None = None
    silences: tuple[Silence, ...] = ()


class Reason(Answer):
    """Why the level is what it is, one of several."""

    level: Level = Level.UNKNOWN
    text: str = ""


class Status(Answer):
    level: Level = Level.UNKNOWN
    headline: str = (
        "the controller does not say how things are: is it of an older release? Compare: slurm-watchdog --version."
    )
    reasons: tuple[Reason, ...] = ()  # Why all is not well, the gravest first.
    mode: str = ""
    controller: ControllerState = ControllerState()
    slurm: SlurmState = SlurmState()
    nodes: Nodes = Nodes()
    incidents: IncidentCounts = IncidentCounts()
    jobs: tuple[Job, ...] = ()
    open: tuple[OpenIncident, ...] = ()
    paused: Pause | None = None
    silences: tuple[Silence, ...] = ()
    left_out: tuple[Shortage, ...] = ()  # What the controller has no room for, lately.
    deliveries: tuple[Delivery, ...] = ()
    waiting: Mapping[str, str] = {}  # Job -> why its restart does not come about.


class DecisionSummary(Answer):
    action: str = ""
    verdict: str = ""
    by: str = ""
    reason: str = ""
    rule: str = ""  # The part of the configuration, or the wish, that gave the ladder.
    ladder: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # Nodes that a restart leaves out.
    outcome: str | None = None


class Incident(OpenIncident):
    fired_at: float | None = None
    resolved_at: float | None = None
    detected_after_s: float | None = None
    culprits: tuple[Culprit, ...] = ()
    evidence: tuple[Any, ...] = ()  # Sentences.
    decisions: tuple[DecisionSummary, ...] = ()
    resolution: str = ""
    owner_uids: tuple[int, ...] = ()  # Owners of its jobs that Slurm named; empty for who may not see its details.
    details_for: str = ""  # Who may see the details, where the caller may not.


class Moment(Answer):
    at: float
    text: str


class Evidence(Answer):
    at: float
    kind: str
    document: Any = None  # Text, or any JSON.
    number: int | None = None  # By which a document is fetched that is too large to come with the rest.
    incident: str | None = None  # With which incident it is stored; None (older controllers): the one asked for.
    taken: str = ""  # When it was taken, seen from the incident.


class Operation(Answer):
    """An `OperationRecord` of any release."""

    operation: str
    attempt: int = 1
    intent_at: float
    outcome: str | None = None  # None while it is being tried.
    outcome_at: float | None = None
    detail: str = ""


class Waiting(Answer):
    """What an action under way waits for, and when it gives that up (wall clock)."""

    what: str = msgspec.field(name="for", default="")
    until: float | None = None


class ActionRun(DecisionSummary):
    """What was done for one decision."""

    decision_id: str
    incident_id: str = ""
    job_id: str | None = None
    decided_at: float | None = None
    operations: tuple[Operation, ...] = ()
    waiting: Waiting | None = None
    end: ActionEnd | None = None


class Explanation(Answer):
    """Everything about one incident."""

    incident: Incident
    timeline: tuple[Moment, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    actions: tuple[ActionRun, ...] = ()


class SelectedJob(NamedJob):
    """A job that selectors named."""

    partition: str = ""
    why_not: str = ""  # Why it cannot be asked to save; empty: as far as is known it can.


class Answered(Answer):
    """What policy said to what a person asked for of a job."""

    job_id: str = ""
    verdict: str
    by: str = ""
    reason: str = ""
    incident_id: str = ""
    decision_id: str = ""


LONGEST_S = 30 * 86400.0  # What is to be quiet, or to have saved, later than that is a matter of the configuration.
MAX_AT_ONCE = 50  # Jobs of one request: each is some writes to the disk, and other work does not wait for them.
MAX_FOLLOWED = 1000
MAX_NAMED = 1000
Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_NAMED)]


class PauseRequest(Answer):
    reason: str = ""  # Kept in the journal.


class JobRequest(Answer):
    job_id: str  # Slurm's number: `4711`, `4711_3`.


class RestartRequest(JobRequest):
    exclude: Names = ()  # Names of nodes, one by one.
    reason: str = ""
    now: bool = False  # Also of a job that hangs and cannot save: from its last checkpoint.


class SaveRequest(Answer):
    """The same for some jobs."""

    job_ids: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_AT_ONCE)]
    wish: Wish
    exclude: Names = ()
    before: float | None = None  # The checkpoint has to be there by then, a date.
    reason: str = ""


class FollowRequest(Answer):
    incident_ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_FOLLOWED)]


class SilenceRequest(Answer):
    for_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]
    kinds: Names = ()
    jobs: Names = ()
    nodes: Names = ()
    reason: str = ""


class Cancelled(Answer):
    """A restart that was ended before it began."""

    job_id: str = ""
    cancelled: bool = True


class NodeRow(Answer):
    """How far one node is with its evidence."""

    node: str
    state: str = ""  # asked, answered, failed.
    ranks: int = 0
    undumped: int = 0
    error: str | None = None


class Group(Answer):
    """Ranks that stand in the same frames."""

    frames: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    place: str = ""


class Suspect(Answer):
    rank: int | None = None
    host: str | None = None
    pid: int | None = None
    reason: str | None = None
    path: str | None = None
    mount: str | None = None
    gpu_uuid: str | None = None


class Difference(Answer):
    line: str = ""


class FilesystemVerdict(Answer):
    mount: str = ""
    summary: str = ""
    scope: str = ""  # `one_node`, `outage`, …


class Hint(Answer):
    """What a fault of this class usually is, and what to try."""

    usually: str = ""
    try_next: str = ""
    documented: str = ""


class Diagnosis(Answer):
    """What is to be said about one job."""

    job_id: str = ""
    taken_at: float | None = None  # When its ranks were asked.
    summary: str = ""
    is_hang: bool | None = None
    kind: str = msgspec.field(default="unknown", name="class")
    incident_kind: str = msgspec.field(default="", name="kind")  # The kind of incident that it comes to.
    ranks: int = 0
    missing: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    culprits: tuple[Suspect, ...] = ()
    undumped: tuple[Suspect, ...] = ()
    differences: tuple[Difference, ...] = ()
    filesystems: tuple[FilesystemVerdict, ...] = ()
    hints: tuple[Hint, ...] = ()
    nodes: tuple[NodeRow, ...] = ()


class DiagnosisProgress(Answer):
    """A diagnosis under way, or over."""

    id: str
    job_id: str = ""
    state: str = "collecting"
    age_s: float = 0.0
    nodes: tuple[NodeRow, ...] = ()
    diagnosis: Diagnosis | None = None
