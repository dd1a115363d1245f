"""What may be done about an incident, and which guard takes it away. Pure: permits and never executes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from slurm_watchdog.base.text import plural
from slurm_watchdog.controller.policy.guards import ASKED_FOR, GUARDS, NO_SUPERVISOR, PolicyInput, is_held, why_not
from slurm_watchdog.controller.policy.placement import Suspects, objection_to_excluding, to_avoid
from slurm_watchdog.controller.policy.rules import Rule, action_of
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.knowledge.rungs import ENDINGS
from slurm_watchdog.model.actions import RESTARTING, Action, Decision, Fence, Rung, Verdict
from slurm_watchdog.model.incidents import Incident, IncidentKind
from slurm_watchdog.model.slurm_states import is_out
from slurm_watchdog.model.supervisor import SupervisorState, in_use

RUNG_LIMITS = (("checkpoint_s", "checkpoint_limit"), ("signal_s", "signal_limit"))
"""Limits of operations that a rule may have: as the ladder calls them, and their options."""


def decide(situation: PolicyInput, decision_id: str) -> Decision:
    """The decision about one incident that fires: allowed, suppressed by a named guard, or only observed."""
    rule, job, incident, config = situation.rule, situation.job, situation.incident, situation.config
    if incident.kind != IncidentKind.OPERATOR_RESTART:  # a person says himself what to avoid
        avoided = dict.fromkeys((*incident.exclude_nodes, *(node for node, _ in situation.broken)))
        incident = replace(incident, exclude_nodes=tuple(avoided))
        situation = replace(situation, incident=incident)
    # A person's request passes the opt-out, and so the owner's wish for a ladder of his own.
    ladder, left_out = _possible(situation.rule.ladder, situation)
    asked = incident.kind == IncidentKind.OPERATOR_RESTART
    held_why = situation.why_held or "" if not asked and is_held(situation) else ""
    if held_why:
        ladder = tuple(rung for rung in ladder if rung in (Rung.EVIDENCE, Rung.REQUEUE))
    action = action_of(ladder, situation.loop_turns)
    action = Action.HOLD if held_why and action is not Action.NONE else action
    verdict, by = Verdict.ALLOWED, str(incident.kind)
    reason = f"{'a person asked for it' if asked else 'the evidence is conclusive'} and no guard objects"
    if action is Action.NONE:
        reason = _why_none(incident, rule)
        if restarts_itself(situation):
            by, reason = RESTARTING, "`slurm-watchdog run` restarts the command"
    else:
        for name, guard in GUARDS:
            objection = None if asked and name not in ASKED_FOR else guard(situation)
            if objection is not None:
                verdict, by, reason = Verdict.SUPPRESSED, name, objection
                break
        else:
            if not rule.acts and not asked:
                verdict, by = Verdict.OBSERVED, "mode"
                reason = "the configuration says to observe only (restart)"
    exclude, kept_in = _to_exclude(situation)
    avoid = _to_avoid(situation) if Rung.RESTART_STEP in ladder else ()
    supervisor = situation.supervisor if Rung.RESTART_STEP in ladder else None
    resume_from = situation.resume_from if Rung.RESTART_STEP in ladder else ""
    drain, not_drained = _to_drain(situation)
    suspects = _suspects(situation, exclude)
    whole = (*exclude, *(node for node, _ in suspects))
    if verdict is not Verdict.SUPPRESSED and action is not Action.NONE:
        why_avoided = [f"{node} is avoided: {what}" for node, what in situation.broken if node in exclude]
        kept_in = () if avoid else kept_in  # the step is started again without them
        why_avoided += [f"{node} is avoided: {what}" for node, what in suspects]
        if held_why:
            why_avoided.append(f"it is requeued and stays held: {held_why}")
        if resume_from:
            why_avoided.append(f"the checkpoint {resume_from} is passed to it")
        reason = "; ".join((reason, *left_out, *why_avoided, *kept_in, *not_drained))
    return Decision(
        id=decision_id,
        incident_id=incident.id,
        action=action,
        verdict=verdict,
        by=by,
        reason=reason,
        decided_at=situation.now_wall,
        fence=None if job is None else Fence(job_id=job.job_id, restarts=job.restarts, start_at=job.start_at),
        exclude=whole,
        held_why=held_why,
        nodes=() if job is None else in_use(job, situation.supervisor),
        process_job_id=None if job is None else job.process_id,
        step_at_decision=situation.step,
        wait_until_responding=incident.mounts,
        ladder=ladder,
        rule=rule.source,
        loop_turns=situation.loop_turns,
        lose_work=rule.lose_work,
        signal_to=rule.signal_to,
        rung_limits=tuple(
            (name, seconds)
            for name, key in RUNG_LIMITS
            if (seconds := getattr(rule, key)) != getattr(config.policy, key)
        ),
        drain=drain,
        step_s=situation.step_s,
        step_id="" if supervisor is None else supervisor.step_id,
        start=0 if supervisor is None else supervisor.starts,
        avoid=avoid,
        resume_from=resume_from,
        process=situation.process,
        process_since=situation.process_since,
        uid=None if job is None else job.uid,
    )


def restarts_itself(s: PolicyInput) -> bool:
    """Whether the job's command has ended, and what runs it is about to start it again."""
    status = s.supervisor
    waits = status is not None and status.state in (SupervisorState.STARTING, SupervisorState.ENDING)
    return bool(s.job is not None and s.job.starts_again) or (waits and status is not None and bool(status.failed))


def _why_none(incident: Incident, rule: Rule) -> str:
    if Rung.RESTART_STEP in rule.ladder:
        return f"it is left to Slurm: {NO_SUPERVISOR}"
    return spec_of(incident.kind).why_no_action or "this kind of incident is reported, and nothing is done about it"


def _possible(ladder: tuple[Rung, ...], situation: PolicyInput) -> tuple[tuple[Rung, ...], tuple[str, ...]]:
    """What of a ladder makes sense for this job, and a sentence for each step that does not. If no way of ending it is
    left they all stay: then a guard says why."""
    job = situation.job
    if situation.supervisor is None:  # as for most jobs: no news
        ladder = tuple(rung for rung in ladder if rung is not Rung.RESTART_STEP)
    reasons: dict[Rung, str] = {}
    for rung in ladder:
        if rung is Rung.KILL_SWITCH and situation.loop_turns is False:
            reasons[rung] = "no kill switch: a loop that does not turn would not see it"
        elif rung in ENDINGS and job is not None and (why := why_not(rung, job, situation.supervisor)) is not None:
            reasons[rung] = f"no {rung}: {why}"
    endings = [rung for rung in ladder if rung in ENDINGS]
    if endings and all(rung in reasons for rung in endings):
        return ladder, ()
    left = tuple(rung for rung in ladder if rung not in reasons)
    return left, tuple(reasons.values())


def _to_exclude(s: PolicyInput) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes that the restart avoids, and why one of them is not avoided, if one is not."""
    if s.job is None or not s.incident.exclude_nodes:
        return s.incident.exclude_nodes, ()
    if not s.rule.exclude_nodes:
        return (), (f"{', '.join(s.incident.exclude_nodes)} may be used again: {s.rule.source} excludes no nodes",)
    objection = objection_to_excluding(s.job, s.incident.exclude_nodes, s.nodes)
    return (s.incident.exclude_nodes, ()) if objection is None else ((), (objection,))


def _suspects(s: PolicyInput, exclude: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Suspect nodes that the restart avoids beside those in `exclude`; a person says himself what to avoid."""
    if s.job is None or not s.rule.exclude_nodes or s.incident.kind == IncidentKind.OPERATOR_RESTART:
        return ()
    policy = s.config.policy
    return to_avoid(s.job, s.suspects, exclude, Suspects(policy.suspects), s.nodes, policy.max_excluded_nodes)


def _to_avoid(s: PolicyInput) -> tuple[str, ...]:
    """Nodes that the step is started again without: those of the present start that are to blame."""
    if s.supervisor is None or not s.rule.exclude_nodes:
        return ()
    return tuple(node for node in s.incident.exclude_nodes if node in s.supervisor.nodes)


def _to_drain(s: PolicyInput) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes to drain, within both budgets, and why a node is not drained."""
    nodes = s.incident.exclude_nodes if s.process is None else (s.process.node,)
    if not s.rule.drain or not nodes or s.incident.kind == IncidentKind.OPERATOR_RESTART:  # no one's word drains
        return (), ()
    allowed = min(s.config.policy.max_drained_nodes, int(len(s.nodes) * s.config.policy.drained_percent / 100))
    out = [node for node in s.nodes if is_out(node.state)]
    room = allowed - max(s.drained_by_us, len(out))
    if len(nodes) > room:
        names = ", ".join(nodes)
        return (), (f"{names} not drained: out of service already: {plural(len(out), 'node')}; allowed: {allowed}",)
    return nodes, ()


def is_news(decision: Decision, earlier: Sequence[Decision]) -> bool:
    """Whether a decision differs from the last one on its incident: only then it is written and announced. Evidence
    comes and goes with every report, and sight with every start of the controller: that there is none at this moment is
    reported once, if nothing else was."""
    last = earlier[-1] if earlier else None
    if last is not None and decision.verdict is Verdict.SUPPRESSED and decision.by in ("evidence", "blind"):
        return False
    return last is None or (last.verdict, last.by, last.action) != (decision.verdict, decision.by, decision.action)


def is_final(decision: Decision) -> bool:
    """Whether a decision ends the matter: an action that was allowed is never decided again."""
    return decision.verdict is Verdict.ALLOWED


def why_blind(
    *,
    journal_error: str | None,
    slurm_age_s: float | None,
    slurm_patience_s: float,
    slurm_problem: str,
    warming_s: float | None,
) -> str | None:
    """Why nothing may be done now, a sentence; None if all is seen well. `slurm_age_s`: of the newest listing, None if
    there is none; `slurm_problem`: why the newest answer was of no use, if it was not; `warming_s`: for how long in all
    a controller that has just started only observes, None if it is warm."""
    if journal_error is not None:
        return f"the journal cannot be written: {journal_error}"
    if slurm_age_s is None or slurm_age_s > slurm_patience_s:
        since = "yet" if slurm_age_s is None else f"for {slurm_age_s:.0f} s"
        return (
            f"Slurm's answer cannot be used ({slurm_problem})" if slurm_problem else f"Slurm has not answered {since}"
        )
    if warming_s is not None:
        return f"the controller has just started, or was stalled: it only observes for {warming_s:.0f} s"
    return None
