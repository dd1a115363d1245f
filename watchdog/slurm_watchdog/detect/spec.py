"""What a detector declares beside its function: `SPEC`, and its options, if any, as a frozen dataclass. Pure.

Whatever else depends on the kind of an incident (configuration, correlation, policy, evidence, metrics, page,
alert rules, documentation) is derived from these values: see slurm_watchdog.detect.registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity

STORAGE = (IncidentKind.FILESYSTEM_OUTAGE, IncidentKind.FILESYSTEM_STALL)  # They explain whatever hangs in a job.
BROKEN = (*STORAGE, IncidentKind.DISK_FULL, IncidentKind.GPU_FAULT, IncidentKind.NODE_DOWN)
HANGS = (IncidentKind.COLLECTIVE_HANG, IncidentKind.LINGERING_JOB, IncidentKind.WEDGED_TEARDOWN)


def each_job(judge: Callable[..., Finding | None]) -> Callable[..., list[Finding]]:
    """A detector of what judges one running job, given the view, the job and the settings; None: nothing to say."""

    @wraps(judge)
    def detect(view: ClusterView, *settings: Any) -> list[Finding]:
        return [found for job in view.jobs if (found := judge(view, job, *settings)) is not None]

    return detect


class Subject(StrEnum):
    """What a finding is about."""

    JOB = "job"  # One running job: its detectors see it and its nodes (controller.incidents.judge).
    RUN = "run"  # A run of a job that may be over, or several of them.
    PROCESS = "process"  # A process whose job is over: no rung for jobs answers it.
    GPU = "gpu"
    NODE = "node"
    FILESYSTEM = "filesystem"
    CLUSTER = "cluster"


@dataclass(frozen=True, kw_only=True)
class DetectorSpec:
    """Everything about a kind of incident that other parts of the program have to know."""

    kind: str = ""  # Its name everywhere (configuration key, metric label, journal); as shipped that of its module.
    doc: str = ""  # Lines that begin with `Fires:`, `Names:`, `Acts:`, for docs/detectors.md; else its module's are.
    detect: Callable[..., list[Finding]]  # Called with a view, its own settings if it has any, and those of `also`.
    settings: type[Any] | None = None  # Frozen dataclass of its options; its docstring is in the configuration.
    also: tuple[type[Any], ...] = ()  # Settings of other detectors.
    hold_s: float = 0.0  # Default of its option `hold`: how long the condition has to last before it is reported.
    subject: Subject = Subject.JOB
    needs_slurm: bool = True  # False: it can judge while Slurm does not answer.
    needs_cluster: bool = False  # It compares with other jobs and nodes of Slurm: off on one machine without it.
    severity: Severity = Severity.WARNING  # The most severe that its findings can have.
    sentence: str  # What anybody may read of such an incident: none of it comes from a user.
    job_state: str = ""
    """What the job does meanwhile, such as "hangs": of kinds that say that its training loop has stopped.
    The policy treats the loop as stopped, and the limits of the job learn nothing from its pace."""
    steps_continue: bool = False  # The job may make steps meanwhile: later evidence that it does contradicts nothing.
    explained_by: tuple[str, ...] = ()  # Of the same job: what they explain is neither announced nor acted on.
    explains: tuple[str, ...] = ()  # The same relation, declared by a cause that is newer than they are.
    not_delayed_by: tuple[str, ...] = ()  # Of those that explain it, the ones whose mere suspicion does not delay it.
    has_aftermath: bool = True  # False: what persists after its explanation has ended is a separate fault.
    wants_evidence: bool = False  # Stacks and other evidence of its job are collected: its ranks are still there.
    ladder: tuple[Rung, ...] = ()  # The rungs that are shipped; none: it is reported only.
    site_may_act: bool = False  # Without a shipped ladder: the evidence can be good enough for a site to configure one.
    asks: bool | None = None
    """Whether a ladder that ends the job has to ask it to save before (True: it makes steps), or may not (False: what
    it would save is damaged); None: as the site likes."""
    blames_node: float = 0.0
    """How strong the evidence against the node that it names is, from 0, none, to 1: the node itself is
    proven broken. See slurm_watchdog.controller.node_history.suspicion."""
    planned: bool = False  # It is announced, and comes to many jobs at once: no storm, and no budget counts it.
    why_no_action: str = ""  # Why nothing is done, where it is more than evidence that is not good enough.
    hint: Hint | None = None  # What it usually is and what to try next; knowledge.remediation_hints has more.
    alerts: tuple[str, ...] = ()  # Rules of deploy/prometheus/alerts.yaml that ask for incidents of this kind.

    def __post_init__(self) -> None:
        """Its kind is the name of its module, unless it is given."""
        object.__setattr__(self, "kind", self.kind or self.detect.__module__.rpartition(".")[2])

    def about_job(self, job_id: str) -> Finding:
        """A finding about a running job: UNKNOWN until the detector says more."""
        return self.about(f"job:{job_id}", job_id)

    def about(self, subject: str, *job_ids: str) -> Finding:
        """A finding about whatever it is: UNKNOWN until the detector says more."""
        return Finding(kind=self.kind, subject=subject, job_ids=job_ids, severity=self.severity)

    @cached_property
    def arguments(self) -> tuple[type[Any], ...]:
        """The settings that `detect` is called with."""
        return self.also if self.settings is None else (self.settings, *self.also)

    @property
    def delays_steps(self) -> bool:
        """Whether a job's steps take longer, or never come, because of it."""
        return bool(self.job_state)

    @property
    def stops_steps(self) -> bool:
        """Whether the job makes no step at all because of it."""
        return self.delays_steps and not self.steps_continue

    @property
    def may_act(self) -> bool:
        """Whether such an incident can have a ladder."""
        return bool(self.ladder) or self.site_may_act
