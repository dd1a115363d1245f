"""Decides about incidents that fire: asks the policy, writes the decision, and only then gives what is allowed to the
executor."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

from msgspec.structs import replace

from slurm_watchdog.actuate.by_agent import content_for
from slurm_watchdog.base import clock
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.decision_inputs import (
    CHUNK,
    TOGETHER_FROM,
    DecisionInputs,
    DecisionPorts,
    TickContext,
)
from slurm_watchdog.controller.actions.owned_paths import OwnedPaths
from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.controller.policy.by_user import is_same_process
from slurm_watchdog.controller.policy.decision import decide, is_final, is_news
from slurm_watchdog.controller.policy.guards import OPT_OUT, with_process
from slurm_watchdog.controller.policy.rules import wished
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.model.actions import ActionRun, Decision, Rung, Verdict, Wish
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.recording.entries import Request

Matter = str | GpuProcess  # The id of a job, or a process.


class Decider:
    """Decides about every incident, once; what is allowed is given to the executor. One event loop owns it."""

    def __init__(self, config: Config, ports: DecisionPorts, chunk: int = CHUNK):
        """Raises JournalError."""
        self._paths = OwnedPaths(config.jobs, ports.cluster)
        self._inputs = DecisionInputs(config, ports, self._paths)
        self._journal, self._cluster, self._judgement = ports.journal, ports.cluster, ports.judgement
        self._executor, self._news = ports.executor, ports.news
        self._new_incident_id = ports.new_incident_id
        self._chunk = chunk
        self._earlier: dict[str, list[Decision]] = {}  # Incident -> its decisions, as the journal has them.
        self._failed: set[str] = set()  # Decisions in `_earlier` whose action has ended without success.
        self._done: dict[str, Incident] = {}  # Incidents of which nothing is left to decide, as they are, and
        self._listed_at: float | None = None  # as Slurm listed their jobs then.

    def decide(self, now: float) -> None:
        """Looks at every incident that fires and is not explained by another one, all in one piece."""
        for _ in self.pieces(now):
            pass

    def pieces(self, now: float) -> Iterator[None]:
        """The same; where it yields, everything that was decided is written, and other work is served. What
        they change (a pause, an action, an incident that is over) is known to the next piece."""
        open_ones = {incident.id for incident in self._judgement.incidents}
        for incident_id in [each for each in self._earlier if each not in open_ones]:
            self._failed.difference_update(decision.id for decision in self._earlier.pop(incident_id))
        if self._cluster.slurm_at != self._listed_at:  # its owner, or an exception, may mean something else by now
            self._done, self._listed_at = {}, self._cluster.slurm_at
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
                now = clock.monotonic()

    def _decide_some(self, left: deque[str], now: float) -> None:
        """Takes incidents from the left until about a chunk of decisions were made, and writes those that were
        held back to be written together."""
        known = {incident.id: incident for incident in self._judgement.incidents}
        context: TickContext | None = None
        held: list[tuple[Incident, Decision]] | None = [] if len(known) > TOGETHER_FROM else None
        made = 0
        while left and made < self._chunk:
            incident = known.get(left.popleft())
            if incident is None or not is_announced(incident) or self._done.get(incident.id) is incident:
                continue
            settled = True
            for matter in self._matters(incident):
                try:
                    if self._is_settled(incident, matter):
                        continue
                    settled = False
                    context = context or self._inputs.context(now)
                    self._decide_one(incident, matter, now, context, held)
                    made += 1
                except JournalError as error:
                    settled = False
                    self._news.journal_failed(error)
            if settled:
                self._done[incident.id] = incident
        self._write_together(held or [])

    def _write_together(self, held: list[tuple[Incident, Decision]]) -> None:
        """Decisions that nothing is done for: of thousands at once the disk is waited for once, and the
        others' actions are not kept."""
        try:
            with self._journal.together() if held else nullcontext():
                for incident, decision in held:
                    self._write_and_execute(incident, decision)
        except JournalError as error:
            self._news.journal_failed(error)
            for incident, _ in held:  # what the journal has of them is read again
                self._earlier.pop(incident.id, None)

    def action_failed(self, decision: Decision) -> None:
        """An action has ended without success: if the trouble persists, it is decided again."""
        self._done.pop(decision.incident_id, None)
        if decision.incident_id in self._earlier:
            self._failed.add(decision.id)

    def _remember(self, incident_ids: Iterable[str]) -> None:
        """Looks up what was decided about these incidents before, unless it is known. Raises JournalError."""
        new = [incident_id for incident_id in incident_ids if incident_id not in self._earlier]
        for incident_id, found in self._journal.decisions_about(new).items():
            acted = any(each.acts for each in found)
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

    def _decided_about(self, incident: Incident, matter: Matter) -> list[Decision]:
        decisions = self._decisions(incident.id)
        if isinstance(matter, GpuProcess):
            return [each for each in decisions if is_same_process(each.process, matter)]
        return [each for each in decisions if each.fence is None or each.fence.job_id == matter]

    def _matters(self, incident: Incident) -> tuple[Matter, ...]:
        """One filesystem may hold up several jobs, and there may be many leftovers; these are decided about where a
        site has said that something is to be done. Where nothing is done one decision says so for all jobs."""
        rule_of, jobs = self._inputs.rule, self._cluster.jobs
        if incident.processes:
            return incident.processes if rule_of(incident.kind, None).ladder else ()
        acts = any(rule_of(incident.kind, jobs[each]).ladder for each in incident.jobs_now if each in jobs)
        return incident.jobs_now if acts else incident.jobs_now[:1]

    def _is_settled(self, incident: Incident, matter: Matter) -> bool:
        """Whether there is nothing left to decide. An action that failed settles nothing: if the trouble stands, it is
        decided again, under the guards that count attempts and time."""
        return any(is_final(each) and each.id not in self._failed for each in self._decided_about(incident, matter))

    def _decide_one(
        self,
        incident: Incident,
        matter: Matter,
        now: float,
        context: TickContext,
        held: list[tuple[Incident, Decision]] | None,
    ) -> None:
        earlier = self._decided_about(incident, matter)
        job = None if isinstance(matter, GpuProcess) else self._cluster.jobs.get(matter)
        situation = self._inputs.of_job(incident, job, now, context)
        if isinstance(matter, GpuProcess):
            state, open_ones = self._cluster, self._judgement.incidents
            reports = state.agents.reports(matter.node, now)
            node = state.nodes.view(matter.node)
            situation = with_process(situation, matter, node, reports, state.jobs.values(), open_ones)
        self._inputs.note_storm(situation, job, now)
        decision = self._with_switch(decide(situation, uuid.uuid4().hex[:12]), incident, job, None)
        again = bool(earlier) and earlier[-1].id in self._failed and is_final(decision)
        if not (again or is_news(decision, earlier)):
            return
        if decision.acts:
            self._write_and_execute(incident, decision)
            context.recent.append(decision)
        elif held is None:
            self._write_and_execute(incident, decision)
        else:
            held.append((incident, decision))

    def _with_switch(
        self, decision: Decision, incident: Incident, job: SlurmJob | None, asked_by: str | None
    ) -> Decision:
        """The decision with the kill switch of its run, where its ladder has one."""
        if job is None or Rung.KILL_SWITCH not in decision.ladder:
            return decision
        return replace(
            decision,
            kill_switch=self._paths.kill_switch(job),
            hold_first=self._paths.switch_of_others(job)[1],
            kill_switch_uid=job.uid,
            kill_switch_content=content_for(decision.id, incident.id, incident.summary, asked_by),
        )

    def _write_and_execute(self, incident: Incident, decision: Decision) -> None:
        """Writes the decision before anything else; only then it is reported and, if allowed, carried out."""
        self._journal.add_decision(decision)
        self._earlier.setdefault(incident.id, []).append(decision)
        if decision.acts:
            self._inputs.note_allowed(decision, clock.monotonic())
        self._news.decided(incident, decision)
        if decision.acts:
            self._executor.drive(ActionRun(decision=decision))

    def why_left_alone(self, job: SlurmJob) -> str:
        """Why its owner wants it left alone, a sentence; empty: he says nothing of the kind."""
        wish = self._paths.directives_of(job)
        if wish.leave_alone or wish.problem or OPT_OUT in job.comment:
            return f"its owner opted out ({wish.problem or wish.source or '--comment'})"
        return ""

    def ask_restart(
        self, job: SlurmJob, exclude: tuple[str, ...], reason: str, asked_by: str, *, at_once: bool = False,
        wish: Wish = Wish.RESTART, within_s: float | None = None,
    ) -> tuple[Incident, Decision]:  # fmt: skip
        """What a person asks for: an incident and a decision like any other. `at_once`: without a kill switch,
        for a loop that does not turn, or a person who does not want to wait for a checkpoint. `within_s`: for so
        long a complete checkpoint is waited for; None: as usual. Raises JournalError."""
        now, wall = clock.monotonic(), clock.wall()
        words = {Wish.SAVE: "asked job {} to save", Wish.HOLD: "asked job {} to save, to be requeued and held"}
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
            summary=f"{asked_by} {words.get(wish, 'asked for a restart of job {}').format(job.job_id)}"
            + (f" without {', '.join(exclude)}" if exclude else "")
            + (f": {reason}" if reason else "."),
            runs=((job.job_id, job.restarts),),
            owners=(job.uid,),
            actionable=True,
            exclude_nodes=exclude,
        )
        situation = self._inputs.of_job(incident, job, now, self._inputs.context(now))
        if at_once:
            situation = replace(situation, loop_turns=False)
        situation = replace(situation, rule=wished(situation.rule, wish, within_s))
        decision = decide(situation, uuid.uuid4().hex[:12])
        decision = self._with_switch(decision, incident, job, asked_by)
        decision = replace(decision, asked_by=asked_by, hold=wish is Wish.HOLD)
        self._journal.save_incident(incident)
        asked = Request(
            job_id=job.job_id, by=asked_by, reason=reason, exclude=exclude, at_once=at_once, wish=wish,
            within_s=within_s,
        )  # fmt: skip
        self._news.requested(incident, asked)
        self._write_and_execute(incident, decision)
        if decision.verdict is Verdict.ALLOWED:
            self._news.add_incident(incident)
        else:
            self._news.close_incident(incident, f"refused: {decision.reason}")
        return incident, decision
