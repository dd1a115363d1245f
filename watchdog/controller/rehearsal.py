"""What would be done about the incidents of a replay: the policy's decisions, kept as the journal would keep them. Acts on nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from watchdog.config import Config
from watchdog.controller.by_user import crowd_of, in_trouble
from watchdog.controller.judge import STANDING, Judge
from watchdog.controller.lost_mounts import lost_mounts
from watchdog.controller.matters import Matter, decided_about, job_in, matters_of
from watchdog.controller.policy import Situation, broken_under, decide, is_final, is_news, with_process
from watchdog.controller.rules import Rule, permit, rule_for
from watchdog.controller.settings import limits_of, rule_book_of
from watchdog.controller.state import ClusterState
from watchdog.controller.wishes import wish_of
from watchdog.model.actions import Action, Decision, Verdict
from watchdog.model.incidents import GpuProcess, Incident, IncidentState, Kind
from watchdog.model.slurm import SlurmJob
from watchdog.model.slurm_states import RUNNING


@dataclass
class Rehearsal:
    """What would have been done: the decisions, as the journal would hold them."""

    config: Config
    state: ClusterState
    judge: Judge
    decisions: dict[str, list[Decision]] = field(default_factory=dict)
    _allowed: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._limits, self._book = limits_of(self.config), rule_book_of(self.config)

    def decide(self, now: float) -> None:
        """Decides about every incident that fires and that nothing else explains, where there is news."""
        for incident in self.judge.incidents:
            if incident.state is not IncidentState.FIRING or incident.inhibited_by is not None:
                continue
            for matter in matters_of(incident, self.state.jobs.get, self._rule):
                mine = self.decisions.setdefault(incident.id, [])
                earlier = decided_about(matter, mine)
                if any(is_final(each) for each in earlier):
                    continue
                decision = decide(incident, self._situation(incident, matter, now), self._limits, "")
                if is_news(decision, earlier):
                    decision = replace(decision, id=f"{incident.id}.{len(mine) + 1}")
                    mine.append(decision)
                    if decision.verdict is Verdict.ALLOWED and decision.action is not Action.NONE:
                        self._allowed.append(decision)

    def _situation(self, incident: Incident, matter: Matter, now: float) -> Situation:
        job = job_in(matter, self.state.jobs.get)
        view = self.state.job_view(job.job_id, now) if job is not None else None
        open_ones = self.judge.incidents
        trouble = in_trouble(open_ones, self.state.owner_of)
        crowd = crowd_of(trouble, incident.kind, None if job is None else job.uid)
        nodes = self.state.known_nodes()
        active = [each for each in self.state.jobs.values() if each.state in RUNNING]
        situation = Situation(
            now_wall=now,
            rule=self._rule(incident.kind, job),
            job=job,
            paused=None,
            blind=self._blind(now),
            recent=tuple(self._allowed),
            busy=False,
            running_jobs=len(active),
            users_running=len({each.uid for each in active}),
            jobs_in_trouble=crowd.own,
            users_in_trouble=crowd.users,
            nodes_known=len(nodes),
            nodes_silent=len(nodes) - len(self.state.reporting_nodes(now)),
            mounts_stalled=tuple(
                mount
                for other in open_ones
                if other.kind is Kind.FILESYSTEM_OUTAGE and set(other.job_ids) & set(incident.job_ids)
                for mount in other.mounts
            ),
            step=view.progress.known_step if view is not None and view.progress is not None else None,
            step_s=view.progress.step_s if view is not None and view.progress is not None else None,
            loop_turns=False if incident.kind in STANDING else None,
            broken=()
            if job is None
            else broken_under(job, open_ones, tuple(self.state.jobs.values()))
            + lost_mounts(
                [node for name in job.nodes if (node := self.state.nodes.view(name)) is not None],
                self.state.nodes.views,
                now,
            ),
            nodes=(),  # a trace need not have the nodes that would be left
        )
        if not isinstance(matter, GpuProcess):
            return situation
        return with_process(
            situation, matter, incident, self.state.nodes.view, self.state.reporting_nodes(now), self.state.jobs.values(), open_ones
        )  # fmt: skip

    def _rule(self, kind: Kind, job: SlurmJob | None) -> Rule:
        rule = rule_for(self._book, kind, job)
        return rule if job is None else permit(rule, wish_of(job.comment, self.state.variables_of(job)))

    def _blind(self, now: float) -> str | None:
        """A trace that is looked at later has no warm-up; where its Slurm did not answer nothing would have been done."""
        at = self.state.slurm_at
        if at is None or now - at > self.judge.slurm_patience_s:
            return "Slurm has not answered" if at is None else f"Slurm has not answered for {now - at:.0f} s"
        return None
