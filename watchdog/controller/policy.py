"""What may be done about an incident, and which guard takes it away. Pure: permits and never executes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from watchdog.model import Action, Decision, Fence, Incident, Kind, SlurmJob, Value, Verdict

ACTIONS: dict[Kind, Action] = {
    Kind.FILESYSTEM_STALL: Action.REQUEUE,
    Kind.LINGERING_JOB: Action.REQUEUE,
    Kind.COLLECTIVE_HANG: Action.REQUEUE,
    Kind.RANK_STOPPED: Action.REQUEUE,
    Kind.OPERATOR_RESTART: Action.GRACEFUL_RESTART,
}
"""What answers each kind. A loop that does not turn cannot hear a kill switch: it is requeued from its last
complete checkpoint. Whatever is not here is told, and nothing is done about it: a filesystem's fault is answered by waiting."""


def action_for(kind: Kind) -> Action:
    """What answers incidents of this kind."""
    return ACTIONS.get(kind, Action.NONE)


WHY_NONE: dict[Kind, str] = {
    Kind.FILESYSTEM_OUTAGE: "no restart helps while the filesystem is away, and no node is to blame",
    Kind.PARTITION_OR_OUTAGE: "many nodes at once are no fault of any of them",
    Kind.AGENT_SILENT: "silence proves nothing about the jobs on the node",
    Kind.NODE_DOWN: "Slurm ends and requeues the jobs of a node that it has lost by itself",
    Kind.LOG_ERROR: "what went wrong is in the log, and a restart does not mend a program",
    Kind.DISK_FULL: "somebody has to make room",
    Kind.CRASH_LOOP: "another restart would end like those before it: a person has to look",
    Kind.SLURM_UNREACHABLE: "nobody knows what runs while Slurm does not answer",
}
"""Why nothing is done, in words, where there is more to say than that."""

REQUEUEABLE_STATES = frozenset({"RUNNING"})


class Limits(Value, frozen=True, kw_only=True):
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


class Situation(Value, frozen=True, kw_only=True):
    """The world at the moment of a decision."""

    now_wall: float
    mode: str
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
    """Jobs with a firing incident of the same kind, this one included."""
    nodes_known: int
    nodes_silent: int
    mounts_stalled: tuple[str, ...]
    """Filesystems with an open outage that this job is known to use."""
    checkpoint_step: int | None = None
    step: int | None = None


Guard = Callable[[Incident, Situation, Limits], str | None]
"""Returns the reason to take the action away, or None."""


def _paused(_: Incident, s: Situation, __: Limits) -> str | None:
    return f"actions are paused ({s.paused})" if s.paused is not None else None


def _blind(_: Incident, s: Situation, __: Limits) -> str | None:
    return s.blind


def _job_changed(incident: Incident, s: Situation, _: Limits) -> str | None:
    if s.job is None:
        return "Slurm does not know the job (any more)"
    runs = dict(incident.runs)
    if s.job.job_id not in runs:
        return "the job's run was not known when the incident fired"
    if s.job.restarts != runs[s.job.job_id]:
        return f"the job has restarted since (restart {s.job.restarts}, the incident is about {runs[s.job.job_id]})"
    if s.job.state not in REQUEUEABLE_STATES:
        return f"the job is {s.job.state}"
    return None


def _opted_out(_: Incident, s: Situation, limits: Limits) -> str | None:
    if s.job is not None and limits.opt_out_comment and limits.opt_out_comment in s.job.comment:
        return f"the job's comment says {limits.opt_out_comment}"
    return None


def _not_possible(_: Incident, s: Situation, __: Limits) -> str | None:
    if s.job is not None and not s.job.is_batch:
        return "Slurm can requeue batch jobs only, and this one was started by srun or salloc"
    if s.job is not None and s.job.requeueable is False:
        return "the job was submitted with --no-requeue; add #SBATCH --requeue"
    return None


def _evidence(incident: Incident, _: Situation, __: Limits) -> str | None:
    return None if incident.actionable else "the evidence is not good enough to act on, only to tell"


def _storage(_: Incident, s: Situation, __: Limits) -> str | None:
    if s.mounts_stalled:
        return f"{', '.join(s.mounts_stalled)} does not answer: a restart would hang as well"
    return None


def _busy(_: Incident, s: Situation, __: Limits) -> str | None:
    return "another action on this job has not ended yet" if s.busy else None


def _cooldown(_: Incident, s: Situation, limits: Limits) -> str | None:
    last = max((d.decided_at for d in s.recent if _is_about(d, s)), default=None)
    if last is not None and s.now_wall - last < limits.cooldown_s:
        return f"the last action on this job was {s.now_wall - last:.0f} s ago (cooldown {limits.cooldown_s:.0f} s)"
    return None


def _budget(_: Incident, s: Situation, limits: Limits) -> str | None:
    used = sum(1 for d in s.recent if s.now_wall - d.decided_at < limits.budget_window_s and not d.asked_by)
    allowed = min(limits.budget, max(1, int(s.running_jobs * limits.budget_percent / 100)))
    if used >= allowed:
        return f"{used} actions in the last {limits.budget_window_s:.0f} s, and the budget is {allowed}"
    return None


def _storm(_: Incident, s: Situation, limits: Limits) -> str | None:
    if s.jobs_in_trouble >= limits.storm_jobs:
        return f"{s.jobs_in_trouble} jobs have the same trouble at once: it is the fabric or the storage"
    if s.nodes_known and 100.0 * s.nodes_silent / s.nodes_known > limits.storm_nodes_percent:
        return f"{s.nodes_silent} of {s.nodes_known} nodes are silent: it is the network or the controller"
    return None


def _attempts(_: Incident, s: Situation, limits: Limits) -> str | None:
    done = sum(1 for d in s.recent if _is_about(d, s) and not d.asked_by)
    if done >= limits.attempts:
        return f"{done} actions on this job already: a person has to look"
    return None


def _exclusions(incident: Incident, s: Situation, limits: Limits) -> str | None:
    if s.job is not None:
        total = len({*s.job.excluded_nodes, *incident.exclude_nodes})
        if incident.exclude_nodes and total > limits.max_excluded_nodes:
            return (
                f"the job would have {total} excluded nodes, at most {limits.max_excluded_nodes} are allowed"
            )
    return None


GUARDS: tuple[tuple[str, Guard], ...] = (
    ("paused", _paused),
    ("blind", _blind),
    ("job_changed", _job_changed),
    ("opted_out", _opted_out),
    ("not_possible", _not_possible),
    ("evidence", _evidence),
    ("storage", _storage),
    ("busy", _busy),
    ("cooldown", _cooldown),
    ("budget", _budget),
    ("storm", _storm),
    ("attempts", _attempts),
    ("exclusions", _exclusions),
)
"""In this order; the first that objects gives its name and its reason to the decision. Mode is the last one."""

ASKED_FOR: frozenset[str] = frozenset(
    {"paused", "blind", "job_changed", "not_possible", "storage", "busy", "exclusions"}
)
"""The guards that also hold against an operator who asks for a restart: those that protect the job itself."""


def _is_about(decision: Decision, situation: Situation) -> bool:
    fence, job = decision.fence, situation.job
    return fence is not None and job is not None and fence.job_id == job.job_id


def decide(incident: Incident, situation: Situation, limits: Limits, decision_id: str) -> Decision:
    """The decision about one incident that fires: allowed, suppressed by a named guard, or only observed."""
    action = action_for(incident.kind)
    job = situation.job
    asked = incident.kind is Kind.OPERATOR_RESTART
    verdict, by, reason = (
        Verdict.ALLOWED,
        str(incident.kind),
        "the evidence is clear and no guard holds it back",
    )
    if asked:
        reason = "a person asked for it and no guard holds it back"
    if action is Action.NONE:
        reason = WHY_NONE.get(incident.kind, "this kind of incident is told, and nothing is done about it")
    else:
        for name, guard in GUARDS:
            objection = None if asked and name not in ASKED_FOR else guard(incident, situation, limits)
            if objection is not None:
                verdict, by, reason = Verdict.SUPPRESSED, name, objection
                break
        else:
            if situation.mode != "act" and not asked:
                verdict, by = Verdict.OBSERVED, "mode"
                reason = f"the mode is {situation.mode}, not act"
    return Decision(
        id=decision_id,
        incident_id=incident.id,
        action=action,
        verdict=verdict,
        by=by,
        reason=reason,
        decided_at=situation.now_wall,
        fence=None if job is None else Fence(job_id=job.job_id, restarts=job.restarts, start_at=job.start_at),
        exclude=incident.exclude_nodes,
        nodes=() if job is None else job.nodes,
        step_at_decision=situation.step,
        wait_until_responding=incident.mounts,
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
