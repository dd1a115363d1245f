"""Guards: each may take an action away, with its reason in words, and none may add one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec.structs import replace

from slurm_watchdog.base.hours import is_within
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.policy.by_user import (
    is_same_process,
    job_of,
    objection,
    orphan_for_s,
    orphans_at_once,
    over_budget,
    spent_on_jobs,
    spent_on_processes,
)
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.knowledge.rungs import ENDINGS, GENTLE, RUN_AGAIN
from slurm_watchdog.model.actions import Decision, Rung
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentKind
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import CAN_BE_HELD, RESTARTABLE
from slurm_watchdog.model.supervisor import SupervisorState, SupervisorStatus


class Moment(Struct):
    """What is the same for every incident of one look; `recent` grows with what is allowed meanwhile."""

    now_wall: float
    paused: str | None
    blind: str | None  # Why the controller cannot see well enough: just started, just woken, Slurm not answering.
    recent: list[Decision]  # Actions that were allowed within the longest window, newest last.
    running_jobs: int
    nodes_known: int
    nodes_silent: int
    drained_by_us: int = 0
    users_running: int = 1  # Users who have jobs that run.
    suspects: tuple[tuple[str, str], ...] = ()  # (node, sentence) of those that an open incident calls suspect.
    nodes: tuple[SlurmNode, ...] = ()  # All of the cluster, as Slurm listed them last.


class PolicyInput(Moment):
    """The world at the moment of a decision."""

    incident: Incident
    config: Config
    rule: Rule  # What the configuration and the job's owner say; see slurm_watchdog.controller.policy.rules.
    job: SlurmJob | None  # The job as Slurm has it now; None if Slurm does not know it.
    busy: bool  # Another action on this job has not ended.
    jobs_in_trouble: int  # Jobs of the same user with a firing incident of the same kind, this one included.
    mounts_stalled: tuple[str, ...]  # Filesystems with an open outage that this job is known to use.
    full: tuple[str, ...] = ()  # Filesystems without space left on which this job has failed to write.
    step: int | None = None
    step_s: float | None = None
    loop_turns: bool | None = None  # Whether the job makes steps within its limit; None: not known.
    crash_loop: str | None = None  # The sentence of an open incident that says that it restarts and dies again.
    storm_over_s: float | None = None  # Since when the last storm is over; None if there was none.
    process: GpuProcess | None = None  # What is decided about, of an incident about processes: this one, and no job.
    process_since: float | None = None  # Since when it has had no job, a date.
    process_objection: str | None = None  # Why it must not be touched now: see by_user.objection.
    process_job: SlurmJob | None = None  # The job that it came from, while Slurm remembers it.
    users_in_trouble: int = 0  # Users of jobs with a firing incident of the same kind, this one's included.
    jobs_with_orphans: int = 0  # Jobs of the same user with processes orphaned at about that time, this one included.
    users_with_orphans: int = 0
    hang: str | None = None  # The open incident that proves that the job's loop does not turn.
    why_held: str | None = None  # Why a restart would end in the same hang again, a sentence: see HangMemory.
    supervisor: SupervisorStatus | None = None  # The job's own, if one lives.
    resume_from: str = ""  # Checkpoint that a restart in place names to the command; empty: none, the trainer chooses.
    switch_of_others: str = ""  # Why the job's kill switch may end another job, too, a sentence.
    waits_behind: tuple[str, ...] = ()  # Jobs, not held, that wait for its end (--dependency): they start then.
    switch_unknown: str = ""  # Why it is not known yet where the job looks for its kill switch, a sentence.
    broken: tuple[tuple[str, str], ...] = ()  # (node, what broke there under this job): see `broken_under`.


def with_process(
    situation: PolicyInput, process: GpuProcess, node: NodeView | None, reports: bool, jobs: Collection[SlurmJob],
    incidents: Collection[Incident],
) -> PolicyInput:  # fmt: skip
    """The situation, with what is known of this process of the incident. `node`: its newest report."""
    crowd, orphan_s = orphans_at_once(situation.incident, process, incidents), orphan_for_s(process, node)
    return replace(
        situation,
        process=process,
        process_since=None if orphan_s is None else situation.now_wall - orphan_s,
        process_objection=objection(process, node, reports, jobs),
        process_job=job_of(process, jobs),
        jobs_with_orphans=crowd.own,
        users_with_orphans=crowd.users,
    )


OPT_OUT = "watchdog=off"  # A job with these words in its --comment is watched and never touched.
STORM_NODES_PERCENT = 20.0  # More silent nodes than this, and than one: it is the fabric or the power.
Guard = Callable[[PolicyInput], str | None]  # Returns the reason to take the action away, or None.


def _job_changed(s: PolicyInput) -> str | None:
    if s.process is not None:
        return None  # its job is over: that is what the incident says
    if s.job is None:
        return "Slurm does not know the job (any more)"
    if Rung.HOLD in s.rule.ladder:  # it restarts all the time: that is what it is held for
        return None if s.job.state in {*RESTARTABLE, *CAN_BE_HELD} else f"the job is {s.job.state}"
    runs = dict(s.incident.runs)
    if s.job.job_id not in runs:
        return "the job's run was not known when the incident fired"
    if s.job.restarts != runs[s.job.job_id]:
        return f"the job has restarted since (restart {s.job.restarts}, the incident is about {runs[s.job.job_id]})"
    if s.job.state not in RESTARTABLE:
        return f"the job is {s.job.state}"
    return None


def _opted_out(s: PolicyInput) -> str | None:
    job = s.job or s.process_job
    if job is not None and OPT_OUT in job.comment:
        return f"the job's comment says {OPT_OUT}"
    return s.rule.refused or None


NO_SUPERVISOR = "the job has no supervisor (`slurm-watchdog run` in its batch script)"


def _not_possible(s: PolicyInput) -> str | None:
    endings = [rung for rung in s.rule.ladder if rung in ENDINGS]
    reasons = [] if s.job is None else [why_not(rung, s.job, s.supervisor) for rung in endings]
    return "; ".join(dict.fromkeys(r for r in reasons if r)) if reasons and all(reasons) else None


def why_not_in_place(supervisor: SupervisorStatus | None) -> str | None:
    """Why the step cannot be started again in its allocation, as far as the supervisor says itself."""
    if supervisor is None:
        return NO_SUPERVISOR
    if supervisor.beside:
        return "several `slurm-watchdog run` are under way in this job side by side: none is started again in place"
    if supervisor.restarts_left <= 0:
        return f"the supervisor has started the command {supervisor.starts} times and may not again (--max-restarts)"
    if supervisor.state is SupervisorState.OVER:
        return "the supervisor's command has ended"
    return None if supervisor.step_id else "the supervisor does not know its step yet"


def why_not(ending: Rung, job: SlurmJob, supervisor: SupervisorStatus | None) -> str | None:
    """Why a job cannot be ended this way, known before it is tried; None if it may."""
    if ending is Rung.RESTART_STEP:
        return why_not_in_place(supervisor)
    if ending in RUN_AGAIN and job.kept_from_queue:
        return job.kept_from_queue
    if ending is Rung.REQUEUE and not job.is_batch:
        return "Slurm can requeue batch jobs only, and this one was started by srun or salloc"
    if ending is Rung.REQUEUE and job.requeueable is False:
        return "the job was submitted with --no-requeue; add #SBATCH --requeue"
    if ending is Rung.REQUEUE and job.not_requeueable:
        return job.not_requeueable
    if ending is Rung.RESUBMIT and job.het_job_id:
        return "a heterogeneous job is not submitted again: its components' options are not known"
    if ending is Rung.RESUBMIT and not job.is_batch:
        return "a job started by srun or salloc has no stored script"
    if ending is Rung.RESUBMIT and "_" in job.job_id:
        return "an element of an array is not submitted again alone"
    return None


def _disk_full(s: PolicyInput) -> str | None:
    if not s.full or spec_of(s.incident.kind).planned:
        return None
    return f"no space is left on {', '.join(s.full)}, where the job could not write: its restart would fail there, too"


def _job_hangs(s: PolicyInput) -> str | None:
    asks = any(rung in GENTLE for rung in s.rule.ladder)
    if s.hang is None or s.hang == s.incident.id or not asks or s.incident.kind == IncidentKind.OPERATOR_RESTART:
        return None
    return f"the job hangs, and cannot be asked to save: what is done is decided with incident {s.hang}"


def _writes_switch(s: PolicyInput) -> bool:
    return Rung.KILL_SWITCH in s.rule.ladder and s.loop_turns is not False


def _chained(s: PolicyInput) -> str | None:
    """What asks a job to end, or cancels it, starts what waits for its end, and its own restart beside that."""
    if s.job is None or not s.waits_behind or spec_of(s.incident.kind).planned or s.rule.planned:
        return None
    possible = [each for each in s.rule.ladder if each in ENDINGS and why_not(each, s.job, s.supervisor) is None]
    asks = any(rung in GENTLE and (rung is not Rung.KILL_SWITCH or s.loop_turns is not False) for rung in s.rule.ladder)
    if not possible or possible[0] not in RUN_AGAIN or (possible[0] is Rung.REQUEUE and not asks):
        return None
    return (
        f"job {s.waits_behind[0]} waits for the end of this one, and would start beside its restart: cancel this job "
        f"and let that one continue, or `scontrol hold {s.waits_behind[0]}` and release it once this one runs again"
    )


def _hours(s: PolicyInput) -> str | None:
    now = next((each for each in s.rule.no_action if is_within(each, s.now_wall)), None)
    return f"no automatic actions at this time (no_action: {now})" if now is not None else None


def _cooldown(s: PolicyInput) -> str | None:
    ago_s = s.now_wall - max((d.decided_at for d in s.recent if _is_about(d, s)), default=float("-inf"))
    if ago_s >= s.rule.cooldown:
        return None
    return f"the last action on this {_what(s)} was {ago_s / 60:.0f} min ago (cooldown {s.rule.cooldown / 60:.0f} min)"


def _budget(s: PolicyInput) -> str | None:
    """Jobs and processes have one each: an orphan's end is no reason to let a job hang, nor the other way
    round. A share is of the running jobs or, for processes, which have none, of the nodes; those that one job
    left on one node count as one. One user has half."""
    process, window_s = s.process, s.config.policy.budget_window
    if spec_of(s.incident.kind).planned:
        return None
    if process is None:
        spent, whole = spent_on_jobs(s.recent, s.now_wall, window_s), s.running_jobs
        uid, others = None if s.job is None else s.job.uid, s.users_running > 1
    else:
        spent, whole = spent_on_processes(s.recent, process, s.now_wall, window_s), s.nodes_known
        uid, others = process.uid, True
    allowed = min(s.config.restarts_per_hour, max(1, int(whole * s.config.policy.budget_percent / 100)))
    why = over_budget(spent, uid, allowed, s.config.restarts_per_hour, others)
    if why is None:
        return None
    done = spent.total()
    return f"{done} action{'s' if done != 1 else ''} in the last {window_s / 60:.0f} min, and {why}"


def _storm(s: PolicyInput) -> str | None:
    if s.users_in_trouble >= s.config.policy.storm_jobs:
        return f"jobs of {s.users_in_trouble} users have the same trouble at once: the fabric or storage is at fault"
    if s.jobs_in_trouble >= s.config.policy.storm_jobs:
        return f"{s.jobs_in_trouble} jobs have the same trouble at once, all of one user: what they share is at fault"
    if s.users_with_orphans >= s.config.policy.storm_jobs:
        return f"processes of {s.users_with_orphans} users outlived their jobs at once: it is Slurm, or an outage"
    if s.jobs_with_orphans >= s.config.policy.storm_jobs:
        return (
            f"processes of {s.jobs_with_orphans} jobs of one user outlived them at once: it is what they "
            f"share, or Slurm"
        )
    if _many_are_silent(s):
        return f"{s.nodes_silent} of {s.nodes_known} nodes are silent: it is the network or the controller"
    cooldown_s = s.config.policy.storm_cooldown
    if s.storm_over_s is not None and s.storm_over_s < cooldown_s:
        return f"a storm was over only {s.storm_over_s:.0f} s ago: all gets {cooldown_s:.0f} s to recover"
    return None


def is_storm(s: PolicyInput) -> bool:
    """Whether so much is wrong at once that it is no one's fault, at this moment."""
    return s.users_in_trouble >= s.config.policy.storm_jobs or _many_are_silent(s)


def _many_are_silent(s: PolicyInput) -> bool:
    """More than one, and more than the share: a node that is lost alone is no storm, however small the cluster."""
    return s.nodes_silent > 1 and 100.0 * s.nodes_silent / s.nodes_known > STORM_NODES_PERCENT


def is_storm_of_one(s: PolicyInput) -> bool:
    """Whether so many jobs of this user have the same trouble: nothing is done about his, and others have
    nothing to do with it."""
    return s.jobs_in_trouble >= s.config.policy.storm_jobs


def _attempts(s: PolicyInput) -> str | None:
    done = sum(1 for d in s.recent if _is_about(d, s) and not d.asked_by)
    what = _what(s)
    return f"{done} actions on this {what} already: a person has to look" if done >= s.rule.attempts else None


def _crash_loop(s: PolicyInput) -> str | None:
    if s.crash_loop is None or s.incident.kind == IncidentKind.CRASH_LOOP:
        return None
    return f"the job is crash-looping, another restart would fail the same way: {s.crash_loop[:200]}"


def is_held(s: PolicyInput) -> bool:
    """Whether a job that a restart does not help is requeued and then stays held: it keeps no nodes any more, and runs
    again when a person releases it."""
    held = s.job if s.why_held is not None and Rung.REQUEUE in s.rule.ladder else None
    return held is not None and why_not(Rung.REQUEUE, held, s.supervisor) is None


def _exclusions(s: PolicyInput) -> str | None:
    if s.job is None or not s.rule.exclude_nodes or not s.incident.exclude_nodes:
        return None
    total, most = len({*s.job.excluded_nodes, *s.incident.exclude_nodes}), s.config.policy.max_excluded_nodes
    return f"the job would have {total} excluded nodes, at most {most} are allowed" if total > most else None


GUARDS: tuple[tuple[str, Guard], ...] = (
    ("paused", lambda s: f"actions are paused ({s.paused})" if s.paused is not None else None),
    ("blind", lambda s: s.blind),
    ("unsure", lambda s: s.job.unsure or None if s.job is not None else None),
    ("job_changed", _job_changed),
    ("process_changed", lambda s: s.process_objection if s.process is not None else None),
    ("opted_out", _opted_out),
    ("not_possible", _not_possible),
    (
        "evidence",
        lambda s: None if s.incident.actionable else "the evidence is strong enough to report it, and not to act on it",
    ),
    (
        "storage",
        lambda s: (
            f"{', '.join(s.mounts_stalled)} does not answer: a restart would hang as well" if s.mounts_stalled else None
        ),
    ),
    ("disk_full", _disk_full),
    ("busy", lambda s: "another action on this job has not ended yet" if s.busy else None),
    ("job_hangs", _job_hangs),
    ("switch_unknown", lambda s: s.switch_unknown or None if _writes_switch(s) else None),
    ("shared_switch", lambda s: s.switch_of_others or None if _writes_switch(s) else None),
    ("chained", _chained),
    ("hours", _hours),
    ("cooldown", _cooldown),
    ("budget", _budget),
    ("storm", _storm),
    ("attempts", _attempts),
    ("crash_loop", _crash_loop),
    ("same_hang", lambda s: None if s.why_held is None or is_held(s) else s.why_held),
    ("exclusions", _exclusions),
)  # In this order; the first that objects gives its name and its reason to the decision. Mode is the last one.
ASKED_FOR: frozenset[str] = frozenset(
    {
        "paused",
        "blind",
        "unsure",
        "job_changed",
        "not_possible",
        "storage",
        "busy",
        "switch_unknown",
        "shared_switch",
        "chained",
        "exclusions",
    }
)  # The guards that also hold against an operator who asks for a restart: those that protect the job itself.


def _what(situation: PolicyInput) -> str:
    return "job" if situation.process is None else "process"


def _is_about(decision: Decision, situation: PolicyInput) -> bool:
    if situation.process is not None:
        return is_same_process(decision.process, situation.process)
    fence, job = decision.fence, situation.job
    return fence is not None and job is not None and fence.job_id == job.job_id
