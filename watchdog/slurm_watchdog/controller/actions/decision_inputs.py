"""What the Decider is given, and what decisions depend on, gathered as one value for the policy."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from slurm_watchdog.analysis.good_checkpoint import resume_from
from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import picked
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.owned_paths import OwnedPaths
from slurm_watchdog.controller.incidents.judge import Judge, proves_stuck
from slurm_watchdog.controller.policy.by_user import Trouble, crowd_of, in_trouble
from slurm_watchdog.controller.policy.guards import Moment, PolicyInput, is_storm, is_storm_of_one
from slurm_watchdog.controller.policy.placement import broken_under, freed_by, lost_mounts, suspect_nodes
from slurm_watchdog.controller.policy.rules import Rule, permit, rule_for
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import ActionRun, Decision
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import HARDWARE_FAULTS, Incident, IncidentKind, IncidentState
from slurm_watchdog.model.kill_switch import is_absolute_path
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.recording.entries import Request

HISTORY_S = 7 * 86400.0  # Attempts on a job are counted over a week, Slurm's usual longest time limit.


CHUNK = 250  # Changes, or decisions, before other work is served: about a tenth of a second.
TOGETHER_FROM = 20  # Changes, or open incidents, from which on they are written together: one wait for the disk.


class Executor(Protocol):
    """Carries out what was allowed; `Actions` really does, a replay writes it down."""

    def drive(self, run: ActionRun) -> None: ...

    def is_busy(self, job_id: str) -> bool:
        """Whether an action on the job is under way."""

    def sweep(self, now: float) -> None:
        """Takes back what lasted long enough."""


class DecisionNews(Protocol):
    """Reports what was decided, after it is written and before anything is done for it; opens and closes the incidents
    that no detector opens and closes."""

    def decided(self, incident: Incident, decision: Decision) -> None: ...

    def requested(self, incident: Incident, request: Request) -> None:
        """A person asks for a restart: the request is an incident."""

    def journal_failed(self, error: JournalError) -> None: ...

    def add_incident(self, incident: Incident) -> None:
        """Opens the incident of a request that is carried out."""

    def close_incident(self, incident: Incident, why: str) -> None:
        """Its action has ended, or was refused."""


@dataclass(frozen=True)
class DecisionPorts:
    """Of the Decider."""

    journal: Journal
    cluster: ClusterState
    judgement: Judge
    executor: Executor
    news: DecisionNews
    blind: Callable[[float], str | None]  # Why nothing may be done now (monotonic), a sentence; None: all is seen well.
    new_incident_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12]


class TickContext(Moment):
    """With what the policy is given of it for one incident at a time."""

    in_trouble: Trouble  # Jobs with an incident of a kind that fires and that nothing explains, by their users.
    crash_loops: dict[str, str]  # Job -> the summary of its crash loop.
    outages: tuple[Incident, ...]  # Of filesystems.
    full: tuple[Incident, ...]  # About filesystems without space left.
    faults: dict[str, list[Incident]]  # Node -> incidents of its hardware that may exclude it.


class DecisionInputs:
    """Knows when the last storms were and when actions were allowed. One event loop owns it."""

    def __init__(self, config: Config, ports: DecisionPorts, paths: OwnedPaths):
        """Raises JournalError."""
        self._journal, self._cluster, self._judgement = ports.journal, ports.cluster, ports.judgement
        self._is_busy, self._blind = ports.executor.is_busy, ports.blind
        self._paths = paths
        self.config = config
        self._storm_at: float | None = None  # When so much was wrong at once last.
        self._storm_of: dict[int, float] = {}  # User -> when so much was wrong with his jobs alone.
        ago = clock.monotonic() - clock.wall()
        self._decided_mono = {
            each.id: each.decided_at + ago for each in self._journal.decisions_since(clock.wall() - HISTORY_S)
        }  # When an action was allowed, on a clock that no one sets: those of earlier lives by the date at our start.

    def note_allowed(self, decision: Decision, now: float) -> None:
        """An action was allowed now."""
        self._decided_mono[decision.id] = now

    def note_storm(self, situation: PolicyInput, job: SlurmJob | None, now: float) -> None:
        """Remembers a storm: its cooldown begins when it is over."""
        if situation.blind is None and is_storm(situation):
            self._storm_at = now
        if situation.blind is None and job is not None and is_storm_of_one(situation):
            self._storm_of[job.uid] = now

    def context(self, now: float) -> TickContext:
        """What is the same for every incident at this moment (monotonic). Raises JournalError."""
        nodes = self._cluster.agents.known()
        jobs = self._cluster.jobs.values()
        active = [job for job in jobs if job.state in RUNNING]
        wall = clock.wall()
        cooldown_s = self.config.policy.storm_cooldown
        self._storm_of = {uid: at for uid, at in self._storm_of.items() if now - at <= cooldown_s}
        self._decided_mono = {each: at for each, at in self._decided_mono.items() if now - at < HISTORY_S}
        paused, faults = self._journal.paused(), defaultdict[str, list[Incident]](list)
        for each in self._judgement.incidents:
            for node in each.exclude_nodes if each.kind in HARDWARE_FAULTS else ():
                faults[node].append(each)
        return TickContext(
            now_wall=wall,
            paused=None if paused is None else (paused[0] or "no reason given"),
            blind=self._blind(now),
            recent=[self._undated(each, wall, now) for each in self._journal.decisions_since(wall - HISTORY_S)],
            running_jobs=len(active),
            nodes_known=len(nodes),
            nodes_silent=len(nodes) - len(self._cluster.agents.reporting(now)),
            drained_by_us=len(self._journal.node_entries("drained")),
            users_running=len({job.uid for job in active}),
            in_trouble=in_trouble(self._judgement.incidents, {each.job_id: each.uid for each in jobs}.get),
            crash_loops={
                job_id: each.summary
                for each in reversed(self._judgement.incidents)
                if each.kind == IncidentKind.CRASH_LOOP and each.state is IncidentState.FIRING
                for job_id in each.job_ids
            },
            nodes=self._cluster.slurm_nodes,
            suspects=suspect_nodes(self._judgement.incidents),
            outages=tuple(each for each in self._judgement.incidents if each.kind == IncidentKind.FILESYSTEM_OUTAGE),
            full=tuple(each for each in self._judgement.incidents if each.kind == IncidentKind.DISK_FULL),
            faults=faults,
        )

    def _undated(self, decision: Decision, wall: float, now: float) -> Decision:
        """The decision with a date that is as long ago as it was: someone may have set the clock in between."""
        at = self._decided_mono.get(decision.id)
        return decision if at is None else replace(decision, decided_at=wall - (now - at))

    def of_job(self, incident: Incident, job: SlurmJob | None, now: float, context: TickContext) -> PolicyInput:
        """What a decision about this job of the incident depends on; None: Slurm does not know the job."""
        view = self._cluster.job_view(job.job_id, now) if job is not None else None
        crowd = crowd_of(context.in_trouble, incident.kind, None if job is None else job.uid)
        storms = (self._storm_at, None if job is None else self._storm_of.get(job.uid))
        storm_at = max((at for at in storms if at is not None), default=None)
        progress = None if view is None else view.progress
        stuck = None if job is None else proves_stuck(self._judgement.incidents, job.job_id)
        return picked(
            PolicyInput,
            context,
            *Moment.__struct_fields__,
            incident=incident,
            config=self.config,
            rule=self.rule(incident.kind, job),
            job=job,
            busy=job is not None and self._is_busy(job.job_id),
            jobs_in_trouble=crowd.own,
            users_in_trouble=crowd.users,
            mounts_stalled=_mounts_of(incident, context.outages),
            full=_mounts_of(incident, context.full),
            step=None if progress is None else progress.known_step,
            step_s=None if progress is None else progress.step_s,
            loop_turns=self._turns(incident.kind, view),
            why_held=self._judgement.hangs.why_held(incident.id),
            hang=None if stuck is None else stuck.id,
            crash_loop=None if job is None else context.crash_loops.get(job.job_id),
            storm_over_s=None if storm_at is None else now - storm_at,
            supervisor=None if job is None else self._cluster.supervisors.of(job, now),
            resume_from=self._resume_from(view),
            switch_unknown="" if job is None else self._paths.why_switch_unknown(job, now),
            waits_behind=tuple(each.job_id for each in freed_by(job, self._cluster.jobs.values())) if job else (),
            switch_of_others="" if job is None else self._paths.switch_of_others(job)[0],
            broken=() if job is None else self._broken_under(job, context, now),
        )

    def _resume_from(self, view: JobView | None) -> str:
        """The checkpoint that an order of a restart names; empty: none, the trainer chooses."""
        supervisor = None if view is None else view.supervisor
        if view is None or supervisor is None or not supervisor.takes_resume:
            return ""
        path = resume_from(view, self._judgement.incidents, supervisor.resumed_from)
        return path if is_absolute_path(path) else ""

    def _broken_under(self, job: SlurmJob, context: TickContext, now: float) -> tuple[tuple[str, str], ...]:
        """What is known of its nodes' hardware and mounts; of thousands of faults only those are looked at."""
        faults = [fault for node in job.nodes for fault in context.faults.get(node, ())] if context.faults else []
        broken = broken_under(job, faults, self._cluster.jobs.values()) if faults else ()
        nodes = self._cluster.nodes
        views = [view for node in job.nodes if (view := nodes.view(node)) is not None]
        return broken + lost_mounts(views, nodes.views, now)

    def rule(self, kind: str, job: SlurmJob | None) -> Rule:
        """What the administrator permits, and of that what the job's owner wants."""
        rule, asked = rule_for(self.config, kind, job), kind == IncidentKind.OPERATOR_RESTART
        return rule if job is None or asked else permit(rule, self._paths.directives_of(job))

    def _turns(self, kind: str, view: JobView | None) -> bool | None:
        """Whether the job's loop turns: by what the incident says, else by its steps. Someone who asks for a
        restart knows himself."""
        if spec_of(kind).delays_steps:
            return False
        if kind == IncidentKind.OPERATOR_RESTART or view is None or view.progress is None:
            return None
        limit_s = self._judgement.limits_s.get(view.job.job_id)
        return True if limit_s is not None and view.progress.age_s <= limit_s else None


def subject_of(decision: Decision) -> str:
    """What an action is about, as a recording has it: `JOB.RESTARTS` or `NODE/PID`."""
    process, fence = decision.process, decision.fence
    if process is not None:
        return f"{process.node}/{process.pid}"
    return "" if fence is None else f"{fence.job_id}.{fence.restarts}"


def _mounts_of(incident: Incident, others: Iterable[Incident]) -> tuple[str, ...]:
    """Filesystems of other open incidents that concern one of this incident's jobs."""
    jobs = set(incident.job_ids)
    return tuple(mount for other in others if not jobs.isdisjoint(other.job_ids) for mount in other.mounts)
