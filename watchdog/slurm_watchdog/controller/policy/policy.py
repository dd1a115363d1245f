"""What may be done about an incident, and which guard takes it away. Pure: permits and never executes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct  # fmt: skip
from slurm_watchdog.controller.policy.by_user import (
    orphans_at_once,
    over_budget,
    spent_on_jobs,
    spent_on_processes,
)
from slurm_watchdog.controller.policy.orphan_process import job_of, objection, orphan_for_s, same
from slurm_watchdog.controller.policy.placement import objection_to_excluding
from slurm_watchdog.controller.policy.rules import Rule, action_of
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.knowledge.rungs import ENDINGS, GENTLE
from slurm_watchdog.model.actions import Action, Decision, Fence, Rung, Verdict  # fmt: skip
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentState, Kind
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode  # fmt: skip
from slurm_watchdog.model.slurm_states import CAN_BE_HELD, HOLDS_NODES, RESTARTABLE, is_out


class Limits(Struct, frozen=True, kw_only=True):
    """The configuration's `policy` block; durations in seconds."""

    cooldown_s: float
    attempts: int
    budget: int
    budget_percent: float
    budget_window_s: float
    storm_jobs: int
    storm_nodes_percent: float
    max_excluded_nodes: int
    opt_out_comment: str
    storm_cooldown_s: float = 0.0
    max_drained_nodes: int = 0
    drained_percent: float = 0.0


class PolicyInput(Struct, frozen=True, kw_only=True):
    """The world at the moment of a decision."""

    now_wall: float
    rule: Rule
    """What the configuration and the job's owner say; see slurm_watchdog.controller.policy.rules."""
    job: SlurmJob | None
    """The job as Slurm has it now, None if Slurm does not know it."""
    paused: str | None
    blind: str | None
    """Why the controller cannot see well enough: just started, just woken, Slurm not answering."""
    recent: tuple[Decision, ...]
    """Actions that were allowed within the longest window, newest last."""
    busy: bool
    """Another action on this job has not ended."""
    running_jobs: int
    jobs_in_trouble: int
    """Jobs of the same user with a firing incident of the same kind, this one included."""
    nodes_known: int
    nodes_silent: int
    mounts_stalled: tuple[str, ...]
    """Filesystems with an open outage that this job is known to use."""
    step: int | None = None
    step_s: float | None = None
    loop_turns: bool | None = None
    """Whether the job makes steps within its limit; None: not known."""
    nodes: tuple[SlurmNode, ...] = ()
    """All of the cluster, as Slurm listed them last."""
    crash_loop: str | None = None
    """The sentence of an open incident that says that the job restarts and dies again and again."""
    storm_over_s: float | None = None
    """Since when the last storm is over; None if there was none."""
    drained_by_us: int = 0
    process: GpuProcess | None = None
    """What is decided about, of an incident about processes: this one, and no job."""
    process_since: float | None = None
    """Since when it has had no job, a date."""
    process_objection: str | None = None
    """Why it must not be touched now; see slurm_watchdog.controller.policy.orphan_process."""
    process_job: SlurmJob | None = None
    """The job that it came from, while Slurm remembers it."""
    users_in_trouble: int = 0
    """Users of jobs with a firing incident of the same kind, this one's included."""
    users_running: int = 1
    """Users who have jobs that run."""
    jobs_with_orphans: int = 0
    """Jobs of the same user of which processes became orphans at about the same time, this one's included."""
    users_with_orphans: int = 0
    hang: str | None = None
    """The open incident that proves that the job's loop does not turn."""
    broken: tuple[tuple[str, str], ...] = ()
    """(node, what broke there under this job): see `broken_under`."""


Guard = Callable[[Incident, PolicyInput, Limits], str | None]
"""Returns the reason to take the action away, or None."""


def _paused(_: Incident, s: PolicyInput, __: Limits) -> str | None:
    return f"actions are paused ({s.paused})" if s.paused is not None else None


def _unsure(_: Incident, s: PolicyInput, __: Limits) -> str | None:
    return s.job.unsure or None if s.job is not None else None


def _blind(_: Incident, s: PolicyInput, __: Limits) -> str | None:
    return s.blind


def _process_changed(_: Incident, s: PolicyInput, __: Limits) -> str | None:
    return s.process_objection if s.process is not None else None


def _job_changed(incident: Incident, s: PolicyInput, _: Limits) -> str | None:
    if s.process is not None:
        return None  # its job is over: that is what the incident says
    if s.job is None:
        return "Slurm does not know the job (any more)"
    runs = dict(incident.runs)
    if s.job.job_id not in runs:
        return "the job's run was not known when the incident fired"
    if Rung.HOLD in s.rule.ladder:  # it restarts all the time: that is what it is held for
        return None if s.job.state in {*RESTARTABLE, *CAN_BE_HELD} else f"the job is {s.job.state}"
    if s.job.restarts != runs[s.job.job_id]:
        return f"the job has restarted since (restart {s.job.restarts}, the incident is about {runs[s.job.job_id]})"
    if s.job.state not in RESTARTABLE:
        return f"the job is {s.job.state}"
    return None


def _opted_out(_: Incident, s: PolicyInput, limits: Limits) -> str | None:
    job = s.job or s.process_job
    if job is not None and limits.opt_out_comment and limits.opt_out_comment in job.comment:
        return f"the job's comment says {limits.opt_out_comment}"
    return s.rule.refused or None


def _not_possible(_: Incident, s: PolicyInput, __: Limits) -> str | None:
    endings = [rung for rung in s.rule.ladder if rung in ENDINGS]
    reasons = [] if s.job is None else [why_not(rung, s.job) for rung in endings]
    return "; ".join(dict.fromkeys(r for r in reasons if r)) if reasons and all(reasons) else None


def why_not(ending: Rung, job: SlurmJob) -> str | None:
    """Why a job cannot be ended this way, known before it is tried; None if it may."""
    if ending is Rung.REQUEUE and not job.is_batch:
        return "Slurm can requeue batch jobs only, and this one was started by srun or salloc"
    if ending is Rung.REQUEUE and job.requeueable is False:
        return "the job was submitted with --no-requeue; add #SBATCH --requeue"
    if ending is Rung.REQUEUE and job.not_requeueable:
        return job.not_requeueable
    if ending is Rung.RESUBMIT and job.het_job_id:
        return "a heterogeneous job is not submitted again: its components' options are not known"
    if ending is Rung.RESUBMIT and not job.is_batch:
        return "there is no stored script of a job that was started by srun or salloc"
    if ending is Rung.RESUBMIT and "_" in job.job_id:
        return "an element of an array is not submitted again alone"
    return None


def _evidence(incident: Incident, _: PolicyInput, __: Limits) -> str | None:
    return None if incident.actionable else "the evidence is strong enough to report it, and not to act on it"


def _storage(_: Incident, s: PolicyInput, __: Limits) -> str | None:
    if s.mounts_stalled:
        return f"{', '.join(s.mounts_stalled)} does not answer: a restart would hang as well"
    return None


def _busy(_: Incident, s: PolicyInput, __: Limits) -> str | None:
    return "another action on this job has not ended yet" if s.busy else None


def _job_hangs(incident: Incident, s: PolicyInput, __: Limits) -> str | None:
    asks = any(rung in GENTLE for rung in s.rule.ladder)
    if s.hang is None or s.hang == incident.id or not asks or incident.kind == Kind.OPERATOR_RESTART:
        return None
    return f"the job hangs, and cannot be asked to save: what is done is decided with incident {s.hang}"


def _cooldown(_: Incident, s: PolicyInput, limits: Limits) -> str | None:
    last = max((d.decided_at for d in s.recent if _is_about(d, s)), default=None)
    cooldown_s = limits.cooldown_s if s.rule.cooldown_s is None else s.rule.cooldown_s
    if last is not None and s.now_wall - last < cooldown_s:
        return f"the last action on this {_what(s)} was {(s.now_wall - last) / 60:.0f} min ago (cooldown {cooldown_s / 60:.0f} min)"
    return None


def _budget(_: Incident, s: PolicyInput, limits: Limits) -> str | None:
    """Jobs and processes have one each: an orphan's end is no reason to let a job hang, nor the other way
    round. A share is of the
    running jobs or, for processes, which have none, of the nodes; those that one job left on one node count
    as one. One user has half."""
    process, window_s = s.process, limits.budget_window_s
    if process is None:
        spent, whole = spent_on_jobs(s.recent, s.now_wall, window_s), s.running_jobs
        uid, others = None if s.job is None else s.job.uid, s.users_running > 1
    else:
        spent, whole = spent_on_processes(s.recent, process, s.now_wall, window_s), s.nodes_known
        uid, others = process.uid, True
    allowed = min(limits.budget, max(1, int(whole * limits.budget_percent / 100)))
    why = over_budget(spent, uid, allowed, limits.budget, others)
    if why is None:
        return None
    done = spent.total()
    return f"{done} action{'s' if done != 1 else ''} in the last {window_s / 60:.0f} min, and {why}"


def _storm(_: Incident, s: PolicyInput, limits: Limits) -> str | None:
    if s.users_in_trouble >= limits.storm_jobs:
        return f"jobs of {s.users_in_trouble} users have the same trouble at once: it is the fabric or the storage"
    if s.jobs_in_trouble >= limits.storm_jobs:
        return (
            f"{s.jobs_in_trouble} jobs have the same trouble at once, all of one user: it is what they share"
        )
    if s.users_with_orphans >= limits.storm_jobs:
        return f"processes of {s.users_with_orphans} users outlived their jobs at once: it is Slurm, or an outage"
    if s.jobs_with_orphans >= limits.storm_jobs:
        return f"processes of {s.jobs_with_orphans} jobs of one user outlived them at once: it is what they share, or Slurm"
    if s.nodes_known and 100.0 * s.nodes_silent / s.nodes_known > limits.storm_nodes_percent:
        return f"{s.nodes_silent} of {s.nodes_known} nodes are silent: it is the network or the controller"
    if s.storm_over_s is not None and s.storm_over_s < limits.storm_cooldown_s:
        return f"a storm was over only {s.storm_over_s:.0f} s ago: all gets {limits.storm_cooldown_s:.0f} s to recover by itself"
    return None


def is_storm(s: PolicyInput, limits: Limits) -> bool:
    """Whether so much is wrong at once that it is nobody's fault, at this moment."""
    return s.users_in_trouble >= limits.storm_jobs or (
        s.nodes_known > 0 and 100.0 * s.nodes_silent / s.nodes_known > limits.storm_nodes_percent
    )


def is_storm_of_one(s: PolicyInput, limits: Limits) -> bool:
    """Whether so many jobs of this user have the same trouble: nothing is done about his, and others have
    nothing to do with it."""
    return s.jobs_in_trouble >= limits.storm_jobs


def _attempts(_: Incident, s: PolicyInput, limits: Limits) -> str | None:
    done = sum(1 for d in s.recent if _is_about(d, s) and not d.asked_by)
    attempts = limits.attempts if s.rule.attempts is None else s.rule.attempts
    what = _what(s)
    return f"{done} actions on this {what} already: a person has to look" if done >= attempts else None


def _crash_loop(incident: Incident, s: PolicyInput, __: Limits) -> str | None:
    if s.crash_loop is None or incident.kind == Kind.CRASH_LOOP:
        return None
    return f"the job is crash-looping, another restart would fail the same way: {s.crash_loop[:200]}"


def _exclusions(incident: Incident, s: PolicyInput, limits: Limits) -> str | None:
    if s.job is not None and s.rule.exclude_nodes:
        total = len({*s.job.excluded_nodes, *incident.exclude_nodes})
        if incident.exclude_nodes and total > limits.max_excluded_nodes:
            return (
                f"the job would have {total} excluded nodes, at most {limits.max_excluded_nodes} are allowed"
            )
    return None


GUARDS: tuple[tuple[str, Guard], ...] = (
    ("paused", _paused),
    ("blind", _blind),
    ("unsure", _unsure),
    ("job_changed", _job_changed),
    ("process_changed", _process_changed),
    ("opted_out", _opted_out),
    ("not_possible", _not_possible),
    ("evidence", _evidence),
    ("storage", _storage),
    ("busy", _busy),
    ("job_hangs", _job_hangs),
    ("cooldown", _cooldown),
    ("budget", _budget),
    ("storm", _storm),
    ("attempts", _attempts),
    ("crash_loop", _crash_loop),
    ("exclusions", _exclusions),
)
"""In this order; the first that objects gives its name and its reason to the decision. Mode is the last one."""

ASKED_FOR: frozenset[str] = frozenset(
    {"paused", "blind", "unsure", "job_changed", "not_possible", "storage", "busy", "exclusions"}
)
"""The guards that also hold against an operator who asks for a restart: those that protect the job itself."""


def _what(situation: PolicyInput) -> str:
    return "job" if situation.process is None else "process"


def _is_about(decision: Decision, situation: PolicyInput) -> bool:
    if situation.process is not None:
        return same(decision.process, situation.process)
    fence, job = decision.fence, situation.job
    return fence is not None and job is not None and fence.job_id == job.job_id


def decide(incident: Incident, situation: PolicyInput, limits: Limits, decision_id: str) -> Decision:
    """The decision about one incident that fires: allowed, suppressed by a named guard, or only observed."""
    rule, job = situation.rule, situation.job
    if incident.kind != Kind.OPERATOR_RESTART:  # a person says himself what to avoid
        avoided = dict.fromkeys((*incident.exclude_nodes, *(node for node, _ in situation.broken)))
        incident = replace(incident, exclude_nodes=tuple(avoided))
    # A person's request passes the opt-out, and so the owner's wish for a ladder of his own.
    ladder, left_out = _possible(rule.ladder, situation)
    asked = incident.kind == Kind.OPERATOR_RESTART
    action = action_of(ladder, situation.loop_turns) if rule.mode != "off" or asked else Action.NONE
    verdict, by, reason = Verdict.ALLOWED, str(incident.kind), _why_allowed(incident, asked=asked)
    if action is Action.NONE:
        reason = _why_none(incident, rule)
    else:
        for name, guard in GUARDS:
            objection = None if asked and name not in ASKED_FOR else guard(incident, situation, limits)
            if objection is not None:
                verdict, by, reason = Verdict.SUPPRESSED, name, objection
                break
        else:
            if rule.mode != "act" and not asked:
                verdict, by = Verdict.OBSERVED, "mode"
                reason = f"the mode is {rule.mode}, not act"
    exclude, kept_in = _to_exclude(incident, situation)
    drain, not_drained = _to_drain(incident, situation, limits)
    if verdict is not Verdict.SUPPRESSED and action is not Action.NONE:
        told = [f"{node} is avoided: {what}" for node, what in situation.broken if node in exclude]
        reason = "; ".join((reason, *left_out, *told, *kept_in, *not_drained))
    return Decision(
        id=decision_id,
        incident_id=incident.id,
        action=action,
        verdict=verdict,
        by=by,
        reason=reason,
        decided_at=situation.now_wall,
        fence=None if job is None else Fence(job_id=job.job_id, restarts=job.restarts, start_at=job.start_at),
        exclude=exclude,
        nodes=() if job is None else job.nodes,
        step_at_decision=situation.step,
        wait_until_responding=incident.mounts,
        ladder=ladder,
        rule=rule.source,
        loop_turns=situation.loop_turns,
        lose_work=rule.lose_work,
        signal_to=rule.signal_to,
        rung_limits=rule.rung_limits,
        drain=drain,
        step_s=situation.step_s,
        process=situation.process,
        process_since=situation.process_since,
        uid=None if job is None else job.uid,
    )


def _why_allowed(incident: Incident, *, asked: bool) -> str:
    if asked:
        return "a person asked for it and no guard holds it back"
    return "the evidence is clear and no guard holds it back"


def _why_none(incident: Incident, rule: Rule) -> str:
    if rule.mode == "off" and rule.ladder:
        return f"the mode is off ({rule.source}): it is reported, and nothing is done about it"
    return (
        spec_of(incident.kind).why_no_action
        or "this kind of incident is reported, and nothing is done about it"
    )


def _possible(ladder: tuple[Rung, ...], situation: PolicyInput) -> tuple[tuple[Rung, ...], tuple[str, ...]]:
    """What of a ladder makes sense for this job, and a sentence for each step that does not.

    If no way of ending it is left they all stay: then a guard says why.
    """
    job = situation.job
    reasons: dict[Rung, str] = {}
    for rung in ladder:
        if rung is Rung.KILL_SWITCH and situation.loop_turns is False:
            reasons[rung] = "no kill switch: a loop that does not turn would not see it"
        elif rung in ENDINGS and job is not None and (why := why_not(rung, job)) is not None:
            reasons[rung] = f"no {rung}: {why}"
    endings = [rung for rung in ladder if rung in ENDINGS]
    if endings and all(rung in reasons for rung in endings):
        return ladder, ()
    left = tuple(rung for rung in ladder if rung not in reasons)
    return left, tuple(reasons.values())


def _to_exclude(incident: Incident, s: PolicyInput) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes that the restart avoids, and why one of them is not avoided, if one is not."""
    if s.job is None or not incident.exclude_nodes:
        return incident.exclude_nodes, ()
    if not s.rule.exclude_nodes:
        return (), (
            f"{', '.join(incident.exclude_nodes)} may be used again: {s.rule.source} excludes no nodes",
        )
    objection = objection_to_excluding(s.job, incident.exclude_nodes, s.nodes)
    return (incident.exclude_nodes, ()) if objection is None else ((), (objection,))


def _to_drain(incident: Incident, s: PolicyInput, limits: Limits) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes to drain, within both budgets, and why a node is not drained."""
    nodes = incident.exclude_nodes if s.process is None else (s.process.node,)
    if not s.rule.drain or not nodes:
        return (), ()
    allowed = min(limits.max_drained_nodes, int(len(s.nodes) * limits.drained_percent / 100))
    out = [node for node in s.nodes if is_out(node.state)]
    room = allowed - max(s.drained_by_us, len(out))
    if len(nodes) > room:
        names = ", ".join(nodes)
        return (), (f"{names} not drained: {len(out)} nodes are out already, and {allowed} may be",)
    return nodes, ()


def broken_under(
    job: SlurmJob, incidents: Sequence[Incident], jobs: Collection[SlurmJob]
) -> tuple[tuple[str, str], ...]:
    """(node, sentence) of each place where the hardware is known to have broken under a job, whatever became
    of the job by it.

    A dead rank or a hang after it are the consequence: a restart on the same card would meet it again. A
    fault that names
    no job counts only where the job has the node for itself (of `jobs` some have ended: Slurm lists them for minutes).
    """
    found: dict[str, str] = {}
    for incident in incidents:
        if incident.kind != Kind.GPU_FAULT or incident.state is not IncidentState.FIRING:
            continue
        for node in set(incident.exclude_nodes) & set(job.nodes):
            if job.job_id in incident.jobs_now or (not incident.jobs_now and _is_alone(job, node, jobs)):
                found.setdefault(node, incident.summary)
    return tuple(sorted(found.items()))


def _is_alone(job: SlurmJob, node: str, jobs: Collection[SlurmJob]) -> bool:
    """Whether no other job holds the node."""
    return not any(
        node in each.nodes and each.state in HOLDS_NODES and each.job_id != job.job_id for each in jobs
    )


def with_process(
    situation: PolicyInput, process: GpuProcess, incident: Incident, view: Callable[[str], NodeView | None],
    reporting: Collection[str], jobs: Collection[SlurmJob], incidents: Collection[Incident],
) -> PolicyInput:  # fmt: skip
    """The situation, with what is known of this process of the incident. `view` gives a node's newest report."""
    crowd, node = orphans_at_once(incident, process, incidents), view(process.node)
    orphan_s = orphan_for_s(process, node)
    return replace(
        situation,
        process=process,
        process_since=None if orphan_s is None else situation.now_wall - orphan_s,
        process_objection=objection(process, node, process.node in reporting, jobs),
        process_job=job_of(process, jobs),
        jobs_with_orphans=crowd.own,
        users_with_orphans=crowd.users,
    )


def is_news(decision: Decision, earlier: Sequence[Decision]) -> bool:
    """Whether a decision differs from the last one on its incident: only then it is written and told.

    Evidence comes and goes with every report, and sight with every start of the controller: that there is none at
    this moment is told once, if nothing else was.
    """
    last = earlier[-1] if earlier else None
    if last is not None and decision.verdict is Verdict.SUPPRESSED and decision.by in ("evidence", "blind"):
        return False
    return last is None or (last.verdict, last.by, last.action) != (
        decision.verdict,
        decision.by,
        decision.action,
    )


def is_final(decision: Decision) -> bool:
    """Whether a decision ends the matter: an action that was allowed is never decided again."""
    return decision.verdict is Verdict.ALLOWED
