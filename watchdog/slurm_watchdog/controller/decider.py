"""From incidents that fire to decisions: gathers the situation, asks the policy, writes, and only then gives
to the executor what is
allowed. The service and `replay` have the same one: what differs between them is behind ports."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.actuate import kill_switch
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.from_config import limits_of, rule_book_of
from slurm_watchdog.controller.incidents.judge import proves_stuck
from slurm_watchdog.controller.policy.broken_hardware import broken_under
from slurm_watchdog.controller.policy.by_user import Trouble, crowd_of, in_trouble
from slurm_watchdog.controller.policy.decision import decide, is_final, is_news
from slurm_watchdog.controller.policy.guards import is_storm, is_storm_of_one
from slurm_watchdog.controller.policy.lost_mounts import lost_mounts
from slurm_watchdog.controller.policy.matters import Matter, decided_about, job_in, matters_of
from slurm_watchdog.controller.policy.owner_directives import OwnerDirectives, fill, wish_of
from slurm_watchdog.controller.policy.policy_input import PolicyInput, with_process
from slurm_watchdog.controller.policy.rules import Rule, permit, rule_for
from slurm_watchdog.controller.ports.executors import RestartRequest
from slurm_watchdog.controller.ports.given import DecisionPorts
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.model.actions import Action, ActionRun, Decision, Rung, Verdict
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.kill_switch import problem_of_path
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING

HISTORY_S = 7 * 86400.0
"""Attempts on a job are counted over a week, Slurm's usual longest time limit."""


MANY = 20
"""Open incidents from which on decisions not to act are written together."""
PIECE = 250
"""Incidents that are decided about before others have their turn: less than a tenth of a second."""


@dataclass
class Surroundings:
    """What is the same for every incident of one look; `recent` grows with what is allowed meanwhile."""

    wall: float
    paused: str | None
    blind: str | None
    recent: list[Decision]
    running_jobs: int
    nodes_known: int
    nodes_silent: int
    drained_by_us: int
    users_running: int
    in_trouble: Trouble
    """Jobs with an incident of a kind that fires and that nothing explains, by their users."""
    crash_loops: dict[str, str]
    """Job -> what is said of its crash loop."""
    outages: tuple[Incident, ...]
    """Of filesystems."""
    faults: dict[str, list[Incident]]
    """Node -> what is said of a GPU there that may exclude it."""


class Decider:
    """Decides about every incident, once; what is allowed is given to the executor. One event loop owns it."""

    def __init__(self, config: Config, ports: DecisionPorts):
        """Raises JournalError."""
        self._config = config
        self._journal, self._cluster, self._judgement = ports.journal, ports.cluster, ports.judgement
        self._executor, self._news, self._incidents = ports.executor, ports.news, ports.incidents
        self._blind = ports.blind
        self._new_id, self._new_incident_id = ports.new_id, ports.new_incident_id
        self._monotonic, self._wall = ports.monotonic, ports.wall
        self._limits = limits_of(config)
        self._book = rule_book_of(config)
        self._storm_at: float | None = None
        """When so much was wrong at once last."""
        self._storm_of: dict[int, float] = {}
        """User -> when so much was wrong with his jobs alone."""
        self._earlier: dict[str, list[Decision]] = {}
        """Incident -> its decisions, oldest first, as the journal has them: read once, and written through."""
        self._failed: set[str] = set()
        """Decisions of the incidents in `_earlier` whose action has ended without success."""
        ago = ports.monotonic() - ports.wall()
        self._decided_mono = {
            each.id: each.decided_at + ago for each in self._journal.decisions_since(ports.wall() - HISTORY_S)
        }
        """When an action was allowed, on a clock that nobody sets: those of earlier lives by the date at our start."""

    # ------------------------------------------------------------------------------------ deciding

    def decide(self, now: float) -> None:
        """Looks at every incident that fires and is not explained by another one, all in one piece."""
        for _ in self.pieces(now):
            pass

    def pieces(self, now: float) -> Iterator[None]:
        """The same; where it yields, everything that was decided is written, and others may have their turn.
        What they change (a
        pause, an action, an incident that is over) is known to the next piece."""
        open_ones = {incident.id for incident in self._judgement.incidents}
        for incident_id in [each for each in self._earlier if each not in open_ones]:
            self._failed.difference_update(decision.id for decision in self._earlier.pop(incident_id))
        self._executor.sweep(now)
        try:
            self._remember(open_ones)
        except JournalError as error:
            self._news.journal_failed(error)
            return
        left = deque(incident.id for incident in self._judgement.incidents)
        while left:
            self._decide_some(left, now)
            if left:
                yield
                now = self._monotonic()

    def _decide_some(self, left: deque[str], now: float) -> None:
        """Takes incidents from the left until about PIECE decisions were made, and writes those that were
        held back to be written together."""
        known = {incident.id: incident for incident in self._judgement.incidents}
        surroundings: Surroundings | None = None
        held: list[tuple[Incident, Decision]] | None = [] if len(known) > MANY else None
        made = 0
        while left and made < PIECE:
            incident = known.get(left.popleft())
            if incident is None or not _stands_alone(incident):
                continue
            for matter in matters_of(incident, self._cluster.jobs.get, self._rule):
                try:
                    if self._is_settled(incident, matter):
                        continue
                    surroundings = surroundings or self._surroundings(now)
                    self._decide_one(incident, matter, now, surroundings, held)
                    made += 1
                except JournalError as error:
                    self._news.journal_failed(error)
        self._take_together(held or [])

    def _take_together(self, held: list[tuple[Incident, Decision]]) -> None:
        """Decisions that nothing is done for: of thousands at once the disk is waited for once, and the
        others' actions are not kept."""
        try:
            with self._journal.together() if held else nullcontext():
                for incident, decision in held:
                    self._take(incident, decision)
        except JournalError as error:
            self._news.journal_failed(error)
            for incident, _ in held:  # what the journal has of them is read again
                self._earlier.pop(incident.id, None)

    def action_failed(self, decision: Decision) -> None:
        """An action has ended without success: if the trouble stands, it is decided anew."""
        if decision.incident_id in self._earlier:
            self._failed.add(decision.id)

    def _remember(self, incident_ids: Iterable[str]) -> None:
        """Looks up what was decided about these incidents before, unless it is known. Raises JournalError."""
        new = [incident_id for incident_id in incident_ids if incident_id not in self._earlier]
        for incident_id, found in self._journal.decisions_about(new).items():
            acted = any(each.verdict is Verdict.ALLOWED and each.action is not Action.NONE for each in found)
            self._failed.update(
                run.decision.id
                for run in (self._journal.actions(incident_id) if acted else ())
                if run.end is not None and not run.end.ok
            )
            self._earlier[incident_id] = found

    def _decisions(self, incident_id: str) -> list[Decision]:
        """What was decided about an incident before. Raises JournalError."""
        if incident_id not in self._earlier:
            self._remember((incident_id,))
        return self._earlier[incident_id]

    def _about(self, incident: Incident, matter: Matter) -> list[Decision]:
        return decided_about(matter, self._decisions(incident.id))

    def _is_settled(self, incident: Incident, matter: Matter) -> bool:
        """Whether there is nothing left to decide. An action that failed settles nothing: if the trouble stands, it is
        decided anew, under the guards that count attempts and time."""
        return any(is_final(each) and each.id not in self._failed for each in self._about(incident, matter))

    def _decide_one(
        self,
        incident: Incident,
        matter: Matter,
        now: float,
        surroundings: Surroundings,
        held: list[tuple[Incident, Decision]] | None,
    ) -> None:
        earlier = self._about(incident, matter)
        job = job_in(matter, self._cluster.jobs.get)
        situation = self._situation(incident, job, now, surroundings)
        if isinstance(matter, GpuProcess):
            situation = self._with_process(situation, incident, matter, now)
        if situation.blind is None and is_storm(situation, self._limits):
            self._storm_at = now
        if situation.blind is None and job is not None and is_storm_of_one(situation, self._limits):
            self._storm_of[job.uid] = now
        decision = self._with_switch(
            decide(incident, situation, self._limits, self._new_id()), incident, job, None
        )
        again = bool(earlier) and earlier[-1].id in self._failed and is_final(decision)
        if not (again or is_news(decision, earlier)):
            return
        if decision.verdict is Verdict.ALLOWED and decision.action is not Action.NONE:
            self._take(incident, decision)
            surroundings.recent.append(decision)
        elif held is None:
            self._take(incident, decision)
        else:
            held.append((incident, decision))

    def _surroundings(self, now: float) -> Surroundings:
        """Raises JournalError."""
        nodes = self._cluster.known_nodes()
        active = [job for job in self._cluster.jobs.values() if job.state in RUNNING]
        wall = self._wall()
        cooldown_s = self._limits.storm_cooldown_s
        self._storm_of = {uid: at for uid, at in self._storm_of.items() if now - at <= cooldown_s}
        self._decided_mono = {each: at for each, at in self._decided_mono.items() if now - at < HISTORY_S}
        return Surroundings(
            wall=wall,
            paused=self._paused(),
            blind=self._blind(now),
            recent=[
                self._undated(each, wall, now) for each in self._journal.decisions_since(wall - HISTORY_S)
            ],
            running_jobs=len(active),
            nodes_known=len(nodes),
            nodes_silent=len(nodes) - len(self._cluster.reporting_nodes(now)),
            drained_by_us=len(self._journal.node_entries("drained")),
            users_running=len({job.uid for job in active}),
            in_trouble=in_trouble(self._judgement.incidents, self._cluster.owner_of),
            crash_loops={
                job_id: each.summary
                for each in reversed(self._judgement.incidents)
                if each.kind == IncidentKind.CRASH_LOOP and each.state is IncidentState.FIRING
                for job_id in each.job_ids
            },
            outages=tuple(
                each for each in self._judgement.incidents if each.kind == IncidentKind.FILESYSTEM_OUTAGE
            ),
            faults=_by_node(
                each for each in self._judgement.incidents if each.kind == IncidentKind.GPU_FAULT
            ),
        )

    def _undated(self, decision: Decision, wall: float, now: float) -> Decision:
        """The decision with a date that is as long ago as it was: somebody may have set the clock in between."""
        at = self._decided_mono.get(decision.id)
        return decision if at is None else replace(decision, decided_at=wall - (now - at))

    def _situation(
        self, incident: Incident, job: SlurmJob | None, now: float, around: Surroundings
    ) -> PolicyInput:
        view = self._cluster.job_view(job.job_id, now) if job is not None else None
        crowd = crowd_of(around.in_trouble, incident.kind, None if job is None else job.uid)
        storm_at = max(
            (
                at
                for at in (self._storm_at, None if job is None else self._storm_of.get(job.uid))
                if at is not None
            ),
            default=None,
        )
        return PolicyInput(
            now_wall=around.wall,
            rule=self._rule(incident.kind, job),
            job=job,
            paused=around.paused,
            blind=around.blind,
            recent=tuple(around.recent),
            busy=job is not None and self._executor.is_busy(job.job_id),
            running_jobs=around.running_jobs,
            users_running=around.users_running,
            jobs_in_trouble=crowd.own,
            users_in_trouble=crowd.users,
            nodes_known=around.nodes_known,
            nodes_silent=around.nodes_silent,
            mounts_stalled=_stalled(incident, around.outages),
            step=view.progress.known_step if view is not None and view.progress is not None else None,
            step_s=view.progress.step_s if view is not None and view.progress is not None else None,
            loop_turns=self._turns(incident.kind, view),
            nodes=self._cluster.slurm_nodes,
            hang=None
            if job is None or (stuck := proves_stuck(self._judgement.incidents, job.job_id)) is None
            else stuck.id,
            crash_loop=None if job is None else around.crash_loops.get(job.job_id),
            storm_over_s=None if storm_at is None else now - storm_at,
            drained_by_us=around.drained_by_us,
            broken=() if job is None else self._broken_under(job, around, now),
        )

    def _with_process(
        self, situation: PolicyInput, incident: Incident, process: GpuProcess, now: float
    ) -> PolicyInput:
        state, open_ones = self._cluster, self._judgement.incidents
        reporting, jobs = state.reporting_nodes(now), state.jobs.values()
        return with_process(situation, process, incident, state.nodes.view, reporting, jobs, open_ones)

    def _broken_under(self, job: SlurmJob, around: Surroundings, now: float) -> tuple[tuple[str, str], ...]:
        """What is known of its nodes' hardware and mounts; of thousands of faults only those are looked at."""
        faults = (
            [fault for node in job.nodes for fault in around.faults.get(node, ())] if around.faults else []
        )
        broken = broken_under(job, faults, self._cluster.jobs.values()) if faults else ()
        nodes = self._cluster.nodes
        views = [view for node in job.nodes if (view := nodes.view(node)) is not None]
        return broken + lost_mounts(views, nodes.views, now)

    def _rule(self, kind: str, job: SlurmJob | None) -> Rule:
        """What the administrator permits, and of that what the job's owner wants."""
        rule = rule_for(self._book, kind, job)
        return rule if job is None or kind == IncidentKind.OPERATOR_RESTART else permit(rule, self.wish(job))

    def wish(self, job: SlurmJob) -> OwnerDirectives:
        """What the job's owner has asked for, in its comment or its environment. A switch where none may lie
        leaves the job alone."""
        wish = wish_of(job.comment, self._cluster.variables_of(job))
        if wish.problem or not wish.kill_switch:
            return wish
        problem = problem_of_path(fill(wish.kill_switch, job), self._config.jobs.kill_switch_prefixes)
        return wish if problem is None else replace(wish, problem=f"kill_switch: {problem}")

    def _turns(self, kind: str, view: JobView | None) -> bool | None:
        """Whether the job's loop turns: by what the incident says, else by its steps. Somebody who asks for a
        restart knows himself."""
        if spec_of(kind).delays_steps:
            return False
        if kind == IncidentKind.OPERATOR_RESTART or view is None or view.progress is None:
            return None
        limit_s = self._judgement.limits_s.get(view.job.job_id)
        return True if limit_s is not None and view.progress.age_s <= limit_s else None

    def _with_switch(
        self, decision: Decision, incident: Incident, job: SlurmJob | None, asked_by: str | None
    ) -> Decision:
        """The decision with the kill switch of its run, where its ladder has one."""
        if job is None or Rung.KILL_SWITCH not in decision.ladder:
            return decision
        return replace(
            decision,
            kill_switch=self.kill_switch_path(job),
            process_job_id=job.process_id,
            kill_switch_uid=job.uid,
            kill_switch_content=kill_switch.content_for(decision.id, incident.id, incident.summary, asked_by),
        )

    def _paused(self) -> str | None:
        paused = self._journal.paused()
        return None if paused is None else (paused[0] or "no reason given")

    def _take(self, incident: Incident, decision: Decision) -> None:
        """Writes the decision before anything else; only then it is told and, if allowed, carried out."""
        self._journal.add_decision(decision)
        self._earlier.setdefault(incident.id, []).append(decision)
        if decision.verdict is Verdict.ALLOWED and decision.action is not Action.NONE:
            self._decided_mono[decision.id] = self._monotonic()
        self._news.decided(incident, decision)
        if decision.verdict is Verdict.ALLOWED and decision.action is not Action.NONE:
            self._executor.drive(ActionRun(decision=decision))

    # ------------------------------------------------------------------------------------ an operator asks

    def kill_switch_path(self, job: SlurmJob) -> str:
        """The kill switch of one run: where its owner wants it, else where the site has it."""
        wish = self.wish(job)
        own = wish.kill_switch if not wish.problem else None
        return fill(own, job) if own else kill_switch.path_for(self._config.jobs.kill_switch, job)

    def ask_restart(
        self, job: SlurmJob, exclude: tuple[str, ...], reason: str, asked_by: str, *, at_once: bool = False
    ) -> tuple[Incident, Decision]:
        """An operator's restart: an incident and a decision like any other. `at_once`: without a kill switch,
        for a loop that does not
        turn, or a person who does not want to wait for a checkpoint. Raises JournalError."""
        now, wall = self._monotonic(), self._wall()
        incident = Incident(
            id=self._new_incident_id(),
            kind=IncidentKind.OPERATOR_RESTART,
            subject=f"job:{job.job_id}",
            state=IncidentState.FIRING,
            severity=Severity.INFO,
            job_ids=(job.job_id,),
            opened_at=wall,
            pending_mono=now,
            fired_at=wall,
            detected_after_s=0.0,
            summary=f"{asked_by} asked for a restart of job {job.job_id}"
            + (f" without {', '.join(exclude)}" if exclude else "")
            + (f": {reason}" if reason else "."),
            runs=((job.job_id, job.restarts),),
            owners=(job.uid,),
            actionable=True,
            exclude_nodes=exclude,
        )
        situation = self._situation(incident, job, now, self._surroundings(now))
        if at_once:
            situation = replace(situation, loop_turns=False)
        decision = decide(incident, situation, self._limits, self._new_id())
        decision = replace(self._with_switch(decision, incident, job, asked_by), asked_by=asked_by)
        self._journal.save_incident(incident)
        self._news.requested(incident, RestartRequest(job, exclude, reason, asked_by, at_once))
        self._take(incident, decision)
        if decision.verdict is Verdict.ALLOWED:
            self._incidents.add_incident(incident)
        else:
            self._incidents.close_incident(incident, f"refused: {decision.reason}")
        return incident, decision


def _stands_alone(incident: Incident) -> bool:
    """Whether it fires and nothing explains it. Somebody's own wish was decided about when it was said."""
    return (
        incident.state is IncidentState.FIRING
        and incident.inhibited_by is None
        and incident.kind != IncidentKind.OPERATOR_RESTART
    )


def _by_node(incidents: Iterable[Incident]) -> dict[str, list[Incident]]:
    """Node -> the incidents that would exclude it."""
    found: dict[str, list[Incident]] = {}
    for incident in incidents:
        for node in incident.exclude_nodes:
            found.setdefault(node, []).append(incident)
    return found


def _stalled(incident: Incident, outages: Iterable[Incident]) -> tuple[str, ...]:
    """Filesystems with an open outage that concerns one of the incident's jobs."""
    jobs = set(incident.job_ids)
    return tuple(mount for other in outages if not jobs.isdisjoint(other.job_ids) for mount in other.mounts)
