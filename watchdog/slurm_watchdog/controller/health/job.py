"""How one job is, in a word with its reason: what every surface shows of it. Pure.

No one is shown "training" of a job that hangs, or of one whose progress cannot be read: that one is *not judged*, with
the reason and what its owner, or an administrator, can do. No word here comes from a user: everybody may read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.progress_limit import RHYTHM
from slurm_watchdog.analysis.rank_motion import is_proven
from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration, fold, plural, to_show
from slurm_watchdog.controller.policy.access import public_sentence
from slurm_watchdog.detect.log_error import RISES
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.knowledge.frameworks import title_of, what_to_do
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.documents import Delivery, JobHealth, Level
from slurm_watchdog.model.incidents import NOBODY, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.supervisor import SupervisorState


class NotJudged(StrEnum):
    """Why nothing can be said of a job; a label of metrics."""

    SLURM_UNREACHABLE = "slurm_unreachable"
    NO_AGENT = "no_agent"
    AGENT_SILENT = "agent_silent"
    SYSTEM_ACCOUNT = "system_account"
    NO_PROCESSES = "no_processes"
    LOG_UNREAD = "log_unread"
    NO_STEP = "no_step"


MAX_SYSTEM_UID = 999  # SYS_UID_MAX of login.defs: agents look into no one's processes but ordinary users'.
FIRST_LOOK_S = 60.0  # A job that runs for so long should have been seen by its nodes' agents.
TRAINING = "training"
TRAINING_UNREAD = "training, steps unread"  # Its ranks are seen to move, or it saves in a rhythm: it is judged by that.
STARTING = "starting"
RESTARTING = "restarting"
BEYOND = "beyond its limit"
NO_TRAINING = "no training seen"
NO_TRAINING_WHY = (
    "it holds no GPU, its log names no framework, and it has not several Python ranks: it is not expected to make steps"
)
OF_A_TRAINING = frozenset({NotJudged.LOG_UNREAD, NotJudged.NO_STEP})
"""What is amiss only with a job that trains: a node full of other jobs (compilers, preprocessing) needs
no one's attention."""
PYTHON = ("python", "pt_main_thread", "ray::")  # Names of ranks in the kernel: the interpreter, PyTorch's, Ray's.


class HealthInputs(Struct):
    """All that the judgement is made of, at one moment."""

    view: ClusterView
    limits_s: Mapping[str, float]
    incidents: Collection[Incident]  # Open ones.
    mode: str  # In words, with what the policy does otherwise.
    tick_age_s: float | None  # Since the last complete tick; None: there was none.
    journal_error: str | None = None
    slurm_error: str | None = None
    slurm_patience_s: float = 60.0  # A listing older than this says nothing about now.
    slurm_notes: Sequence[str] = ()
    patience_s: tuple[float, float] | None = None  # Time without a step after which a job is reported: all idle; any.
    paused: tuple[str, str] | None = None  # (reason, by).
    warming_up: bool = False
    acting: Mapping[str, str] = {}  # Job -> what the action on it waits for, or that it is under way.
    restarting: frozenset[str] = frozenset()  # Jobs that an action starts again, and that are not seen to train yet.
    deliveries: Sequence[Delivery] = ()
    busy_share: float | None = None  # See `busy`; None: not known.
    personal: bool = False  # A `run` or `attach`: agents look into their own user's processes; its job is a training.


class JobContext(Struct):
    """What is the same for every job of one look."""

    seen: HealthInputs
    reporting: frozenset[str]  # Nodes seen to report lately: not those that a stall of the controller excuses.
    incidents: Mapping[str, tuple[Incident, ...]]  # Job -> its open incidents.
    blind: JobHealth | None


def restarting_jobs(view: ClusterView) -> frozenset[str]:
    """Jobs whose command `slurm-watchdog run` starts again by itself, until they are seen to make steps."""
    ended, jobs = {each.job.job_id for each in view.ended if each.job.starts_again}, view.ageless_jobs
    again = {job.job.job_id for job in (*jobs, *view.waiting) if job.past and job.past[-1].started_again}
    trains = {job.job.job_id for job in jobs if job.progress is not None and job.progress.rises >= RISES}
    in_place = {job.job.job_id: job.supervisor.state for job in jobs if job.supervisor and job.supervisor.failed}
    between = (SupervisorState.STARTING, SupervisorState.ENDING)
    ended |= {job_id for job_id, state in in_place.items() if state in between}
    over = {job_id for job_id, state in in_place.items() if state is SupervisorState.OVER}
    return frozenset(ended | ((again | in_place.keys()) - trains - over))


def job_context(seen: HealthInputs, blind: JobHealth | None) -> JobContext:
    """The surroundings of the jobs of its view; `blind`: why no job at all can be judged."""
    view, by_job = seen.view, dict[str, list[Incident]]()
    for incident in seen.incidents:
        if incident.kind != IncidentKind.OPERATOR_RESTART:
            for job_id in incident.jobs_now or incident.job_ids:
                by_job.setdefault(job_id, []).append(incident)
    return JobContext(
        seen=seen,
        reporting=frozenset(view.reporting_nodes).difference(view.excused_nodes, view.silent_nodes),
        incidents={job_id: tuple(found) for job_id, found in by_job.items()},
        blind=blind,
    )


def job_health(view: JobView, sight: JobContext) -> JobHealth:
    """What is to be shown of a running job: what is wrong first, then what cannot be seen, then how it trains."""
    job_id = view.job.job_id
    open_ones = sight.incidents.get(job_id, ())
    firing = [each for each in open_ones if each.state is IncidentState.FIRING]
    pending = len(firing) < len(open_ones)
    waits = sight.seen.acting.get(job_id, "")
    if job_id in sight.seen.restarting:
        return JobHealth(
            job_id=job_id, state=RESTARTING, level=Level.WARNING, by_incident=bool(firing),
            reason=waits.partition(" (for ")[0] or "its command ended, and is started again",
        )  # fmt: skip
    stuck = min((each for each in firing if spec_of(each.kind).delays_steps), key=_first_cause, default=None)
    if stuck is not None:
        under_way = f"; {waits}" if waits else ""
        return JobHealth(
            job_id=job_id, state=spec_of(stuck.kind).job_state, level=Level.CRITICAL,
            reason=f"{public_sentence(stuck)[:-1]}{under_way}",
            todo=to_show(stuck.id), by_incident=True,
        )  # fmt: skip
    if waits:
        return JobHealth(job_id=job_id, state="an action is under way", level=Level.WARNING, reason=waits)
    unseen = sight.blind or _unseen(view, sight)
    if (
        unseen is not None
        and unseen.not_judged in OF_A_TRAINING
        and not (open_ones or sight.seen.personal or _may_train(view))
    ):
        return JobHealth(job_id=job_id, state=NO_TRAINING, level=Level.OK, reason=NO_TRAINING_WHY)
    if unseen is not None:
        return replace(unseen, job_id=job_id)
    return _as_it_trains(view, sight, firing, pending)


def _first_cause(incident: Incident) -> tuple[bool, bool]:
    return incident.inhibited_by is not None, incident.severity is not Severity.CRITICAL


def _may_train(view: JobView) -> bool:
    """Whether anything shows a training: a GPU that it holds, a framework's words in its log, or several
    ranks that are Python."""
    named = view.log is not None and view.log.framework is not None
    python = [rank for rank in view.ranks if rank.process.comm.lower().startswith(PYTHON)]
    return bool(view.gpus) or named or len(python) > 1


def _as_it_trains(view: JobView, sight: JobContext, firing: list[Incident], pending: bool) -> JobHealth:
    job_id, progress = view.job.job_id, view.progress
    limit_s = sight.seen.limits_s.get(job_id)
    age_s = view.run_age_s if progress is None else progress.age_s
    if progress is not None and limit_s is not None and age_s > limit_s:
        reason = f"no step for {duration(age_s)}, and {duration(limit_s)} is its limit"
        todo = _until_reported(job_id, sight.seen.patience_s)
        return JobHealth(job_id=job_id, state=BEYOND, level=Level.WARNING, reason=reason, todo=todo)
    begun = TRAINING_UNREAD if _is_followed(view) else STARTING
    state = (view.phase or begun) if progress is None else (progress.phase or TRAINING)
    alone = [each for each in firing if each.inhibited_by is None]
    worst = min(alone, key=_first_cause, default=None)
    if worst is not None:
        level = Level.CRITICAL if worst.severity is Severity.CRITICAL else Level.WARNING
        return JobHealth(
            job_id=job_id, state=state, level=level, reason=public_sentence(worst)[:-1],
            todo=to_show(worst.id),
            by_incident=True,
        )  # fmt: skip
    return JobHealth(
        job_id=job_id, state=state, level=Level.WARNING if pending else Level.OK,
        reason="something is suspected, see: slurm-watchdog incidents" if pending else "",
        by_incident=pending,
    )  # fmt: skip


def _until_reported(job_id: str, patience_s: tuple[float, float] | None) -> str:
    """What can be done about a job beyond its limit while no incident names anybody yet, and until when."""
    look = f"slurm-watchdog diagnose {job_id}"
    if patience_s is None:
        return f"{look}. It is reported as soon as its stacks show what it waits for"
    still, any_case = (duration(each) for each in patience_s)
    return (
        f"{look}. It is reported as soon as its stacks show what it waits for, after {still} if nothing moves, "
        f"after {any_case} otherwise (later while it saves)"
    )


def _is_followed(view: JobView) -> bool:
    """Whether a run whose steps cannot be read is judged by how its ranks move, or by when it saves."""
    return is_proven(view.motion) or (view.saved_age_s is not None and len(view.save_intervals_s) >= RHYTHM)


def _unseen(view: JobView, sight: JobContext) -> JobHealth | None:
    """Why this job's progress cannot be read; None if it can, or may be soon."""
    job, progress = view.job, view.progress
    missing = [node for node in job.nodes if node not in sight.reporting]
    where = ",".join(fold(missing[:8])) + (" and more" if len(missing) > 8 else "")
    look = f"on {where}: systemctl status slurm-watchdog-agent"
    if sight.seen.personal:
        look = "see agent.log in the directory of this `run`"
    if job.nodes and len(missing) == len(job.nodes):
        why = NotJudged.AGENT_SILENT if set(missing) & set(view.silent_nodes) else NotJudged.NO_AGENT
        return JobHealth(
            not_judged=why, reason=f"no agent reports from its {plural(len(missing), 'node')} {where}", todo=look
        )
    if job.batch_host in missing:
        return JobHealth(
            not_judged=NotJudged.AGENT_SILENT,
            reason=f"the agent of {job.batch_host}, which reads its log, does not report",
            todo=look,
        )
    if progress is not None or _is_followed(view):
        return None
    if not view.processes and NOBODY < job.uid <= MAX_SYSTEM_UID and not sight.seen.personal:
        who = "root" if job.uid == 0 else "a system account"
        return JobHealth(
            not_judged=NotJudged.SYSTEM_ACCOUNT, reason=f"it belongs to {who}, whose processes are not looked into",
            todo="submit it as an ordinary user",
        )  # fmt: skip
    if view.run_age_s < FIRST_LOOK_S:
        return None
    if not view.processes:
        return JobHealth(
            not_judged=NotJudged.NO_PROCESSES, reason="no process of it was found on its nodes",
            todo=f"on {','.join(fold(job.nodes[:1])) or 'its node'}: slurm-watchdog agent --once",
        )  # fmt: skip
    if view.log is None:
        return JobHealth(
            not_judged=NotJudged.LOG_UNREAD, reason="no agent could read its log",
            todo=(
                "see that its --output is a file on a filesystem that its first node can read, or name one in "
                "jobs.progress_files"
            ),
        )  # fmt: skip
    limit_s = sight.seen.limits_s.get(job.job_id)
    if limit_s is None or view.run_age_s <= limit_s:
        return None
    title = title_of(view.log.framework)
    of = f" of {title}" if title else ""
    return JobHealth(
        not_judged=NotJudged.NO_STEP, reason=f"no step could be read from its log{of} for {duration(view.run_age_s)}",
        todo=what_to_do(view.log.framework),
    )  # fmt: skip
