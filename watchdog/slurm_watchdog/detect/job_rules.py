"""Rows about values and deadlines of a job: its loss, its checkpoints, its end, its limits. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from slurm_watchdog.analysis.good_checkpoint import resumes_before
from slurm_watchdog.analysis.loss_spikes import LEAST, NEWEST, Spike, find_spikes
from slurm_watchdog.analysis.slurm_nodes import nodes_to_judge
from slurm_watchdog.base.averages import median
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.base.text import duration, size
from slurm_watchdog.detect.rule import Answer, Rule, Seen, Sign
from slurm_watchdog.knowledge.limits import NAN_STEPS, span_or_never
from slurm_watchdog.knowledge.remediation_hints import Hint, hints_for
from slurm_watchdog.model.cluster_view import ClusterView, JobView, LossPoint
from slurm_watchdog.model.incidents import Culprit, IncidentKind, Severity
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import Pressure, Resource, Usage

# ------------------------------------------------------------------------------------------------ the loss

LASTS_STEPS = 100  # Three times of what most spikes take to recover: before that nothing is done.


def _bad_loss(view: ClusterView, job: JobView, first: LossPoint, fact: str, clear: bool, **words: object) -> Seen:
    """A loss that went bad at `first`; `clear`: since when is certain, and that it does not recover."""
    resumes = resumes_before(job, first.step)
    fields = {
        "actionable": resumes.helps and clear,
        "good_checkpoint": resumes.good_path if clear else "",
    }
    signs = Sign(fact=fact, lasts_s=max(0.0, view.now - first.at)), Sign(fact=resumes.fact)
    return Seen(signs, {"step": first.step, **words}, fields)


def _spiked(view: ClusterView, job: JobView) -> Answer:
    points, spike = _spike(job.losses)
    if len(points) < LEAST + NEWEST:
        return None
    if spike is None:
        return f"the loss of job {job.job.job_id} is {points[-1].loss:.4g}"
    first = points[spike.begin]
    # In the first losses that are kept, where it began may have been forgotten.
    clear = spike.begin > LEAST and points[-1].step - first.step >= LASTS_STEPS
    fact = "most spikes recover within 30 steps; if not, go back to a checkpoint and skip the data"
    return _bad_loss(view, job, first, fact, clear, loss=points[-1].loss, usual=spike.usual)


@by_identity
def _spike(losses: tuple[LossPoint, ...]) -> tuple[tuple[LossPoint, ...], Spike | None]:
    """The losses that are numbers, and the spike that the newest ones are in."""
    points = tuple(point for point in losses if math.isfinite(point.loss))
    spikes = find_spikes([point.loss for point in points])
    return points, next((spike for spike in spikes if spike.end is None), None)


def _no_number(view: ClusterView, job: JobView) -> Answer:
    if not job.losses:
        return None
    bad = list(takewhile(lambda point: not math.isfinite(point.loss), reversed(job.losses)))
    if len(bad) < NAN_STEPS:
        return f"the loss of job {job.job.job_id} is a number"
    last = job.losses[-len(bad) - 1] if len(job.losses) > len(bad) else None
    good = f"; the last good one was {last.loss:.4g} at step {last.step}" if last is not None else ""
    fact = "what is trained from here on is lost: go back to a checkpoint before that step"
    return _bad_loss(view, job, bad[-1], fact, last is not None, times=len(bad), good=good)


LOSS_SPIKE = Rule(
    kind=IncidentKind.LOSS_SPIKE,
    signal=_spiked,
    says="The loss of job {job} jumped at step {step}: {loss:.4g} now, {usual:.4g} before.",
    sentence="The loss has jumped",
    site_may_act=True,
    asks=False,
    hint=hints_for("loss_spike", "")[0],
    doc="""
Fires: three losses in a row are 8 deviations and 10 % above the recent ones.
Names: no rank or node: since which step, and from which a restart resumes.
Acts: after 100 steps of it, where the newest complete checkpoint is older and none is being written; the job is not
asked to save.
""",
)
LOSS_NAN = Rule(
    kind=IncidentKind.LOSS_NAN,
    signal=_no_number,
    says="The loss of job {job} has been NaN or infinite since step {step}, {times} times in a row{good}.",
    severity=Severity.CRITICAL,
    sentence="The loss is NaN or infinite",
    site_may_act=True,
    asks=False,
    alerts=("SlurmWatchdogSlow",),
    doc="""
Fires: three losses in a row are NaN or infinite.
Names: no rank or node: since which step, and from which a restart resumes.
Acts: where the newest complete checkpoint is older than that step and none is being written; the job is not asked to
save.
""",
)

# ------------------------------------------------------------------------------------------------ its checkpoints

FACTOR = 3.0  # Of the usual time between its checkpoints.
FLOOR_S = 1800.0  # Never sooner than this after the last one: less work than that is lost by many a restart.
LONGEST = 2.0  # Of the longest recent interval: for a job that saves irregularly, or slows down while its batch grows.


def _unsaved(_: ClusterView, job: JobView) -> Answer:
    checkpoint, progress, intervals_s = job.checkpoint, job.progress, job.checkpoint_intervals_s
    if job.job.state != "RUNNING" or job.silent_nodes or progress is None or progress.last_increase_age_s is None:
        return None
    if checkpoint is None or any(each.error for each in job.checkpoints_on_disk):
        return None
    usual_s, longest_s = median(intervals_s), max(intervals_s)
    limit_s = max(FACTOR * usual_s, LONGEST * longest_s, FLOOR_S)
    newer = any(each.step is not None and each.step > checkpoint.step for each in job.checkpoints_on_disk)
    age_s = min(checkpoint.age_s, job.run_age_s)
    if checkpoint.age_s < limit_s:
        return f"job {job.job.job_id} saves as it used to"
    if age_s < limit_s or job.is_writing or newer:
        return None
    if not progress.step_known or progress.step <= checkpoint.step or progress.last_increase_age_s > usual_s:
        return None
    before = f"{len(intervals_s) + 1} checkpoints before, at most {longest_s:.0f} s apart"
    words = {"age_s": age_s, "saved": checkpoint.step, "usual_s": usual_s, "step": progress.step}
    return Seen((Sign(fact=before, lasts_s=max(0.0, age_s - limit_s)),), words)


CHECKPOINT_OVERDUE = Rule(
    kind=IncidentKind.CHECKPOINT_OVERDUE,
    signal=_unsaved,
    # That has saved twice in this run, or more often: the others have no rhythm.
    applies=lambda _, job: job.checkpoint is not None and bool(job.checkpoint_intervals_s),
    says="Job {job} has not completed a checkpoint for {age_s:.0f} s, since step {saved}; it used to save every "
    "{usual_s:.0f} s and is at step {step} now. A crash would lose all of that.",
    sentence="A checkpoint is overdue",
    alerts=("SlurmWatchdogSlow",),
    doc="""
Fires: steps continue, and nothing was saved for 3 × the usual time between checkpoints, at least 30 min.
Names: no rank or node.
""",
)

# ------------------------------------------------------------------------------------------------ its end

SPARE = 1.2  # Work is counted as done in time only if it may take so much longer than at the present pace.


@dataclass(frozen=True, kw_only=True)
class EndsSoon:
    """Maintenance or a time limit ends the job before its work is done. Acted on only where `except` has a
    ladder for it."""

    maintenance: float = span_or_never(
        3600.0, "A reservation with the flag MAINT takes a node of the job so soon; 0s = never reported."
    )
    time_limit: float = span_or_never(0.0, "The job's own time limit is over so soon; 0s = never reported.")


def _ends(view: ClusterView, job: JobView, settings: EndsSoon) -> Answer:
    slurm, date = job.job, view.date
    if slurm.state != "RUNNING" or date is None:
        return None
    limit_at = math.inf
    if slurm.time_limit_s is not None and slurm.start_at is not None:
        limit_at = slurm.start_at + slurm.time_limit_s
    ends = [
        (each.start_at, f"maintenance (reservation {each.name})", tuple(n for n in slurm.nodes if n in each.nodes))
        for each in view.reservations
        if each.is_maintenance and "TIME_FLOAT" not in each.flags and 0 < each.start_at - date <= settings.maintenance
        if each.start_at < limit_at and slurm.reservation != each.name and not set(slurm.nodes).isdisjoint(each.nodes)
    ]  # one that floats never begins; beside one that has begun the job may run on
    if slurm.time_limit_s is not None and limit_at - date <= settings.time_limit:
        ends.append((limit_at, f"its time limit of {duration(slurm.time_limit_s)}", ()))
    if not ends:
        return f"job {slurm.job_id} ends by nothing that is known"
    ends_at, what, nodes = min(ends)
    left_s, needs_s = max(0.0, ends_at - date), _needs_s(job)
    if needs_s is not None and SPARE * needs_s < left_s:
        return f"job {slurm.job_id} is done before: at its pace in {duration(needs_s)}"
    takes = f" takes {', '.join(nodes[:3])}{' and more' if len(nodes) > 3 else ''}" if nodes else " ends it"
    words = {
        "what": f"{what}{takes}, in {duration(left_s)}",
        "saved": "" if job.checkpoint is None else f" Its last complete checkpoint is of step {job.checkpoint.step}.",
    }
    need = "" if needs_s is None else f"at its pace it needs {duration(needs_s)} more"
    named = tuple(Culprit(node=node, reason="it is taken for maintenance") for node in nodes[:8])
    return Seen((Sign(fact=need),), words, {"culprits": named, "actionable": True})


def _needs_s(job: JobView) -> float | None:
    """How long the rest takes at the present pace; None: not known."""
    progress = job.progress
    if progress is None or progress.total_steps is None or progress.step_s is None or not progress.step_known:
        return None
    return None if progress.begun_anew else max(0, progress.total_steps - progress.step) * progress.step_s


ENDS_SOON = Rule(
    kind=IncidentKind.ENDS_SOON,
    signal=_ends,
    applies=lambda view, _: view.date is not None,
    settings=EndsSoon,
    says="Job {job} is not done when {what}.{saved}",
    sentence="Maintenance or a time limit ends the job soon",
    steps_continue=True,
    site_may_act=True,
    planned=True,
    why_no_action="as shipped it is reported only; an entry of `except` with a ladder has the job asked to save",
    hint=Hint(
        usually="Maintenance is announced, or the job is longer than its limit.",
        try_next="Have it save: slurm-watchdog restart --save-only --hold JOB; see docs/operating.md, Maintenance.",
    ),
    doc="""
Fires: a reservation with the flag MAINT takes a node of the job within an hour (`maintenance`), or the end of its
time limit is nearer than `time_limit`, where that is set; and at its pace the job is not finished before.
Names: the nodes that are taken; of a time limit none.
Acts: `[kill_switch]`, or `[kill_switch, requeue]`: the job is asked to save in time. Storms and budgets do not count
such jobs.
""",
)

# ------------------------------------------------------------------------------------------------ its limits

WAITS_SHARE = 0.2  # Of a minute in which all processes waited for memory.
RECENT_S = 600.0  # A refusal is reported for so long.
RESOURCES = {
    Resource.MEMORY: "memory",
    Resource.PIDS: "processes and threads",
    Resource.FILES: "open files",
    Resource.SHARED_MEMORY: "/dev/shm",
}
NEAR = 0.95  # Of a limit: Linux begins to reclaim long before, so less is usual.
BYTES = (Resource.MEMORY, Resource.SHARED_MEMORY)


def _near_limits(view: ClusterView, job: JobView) -> Answer:
    nodes = {node.name: node for node in nodes_to_judge(view)}
    near = sorted(
        (
            each
            for name in job.job.nodes
            if name in nodes and name not in job.silent_nodes
            for each in _near(nodes[name], job.job.process_id, view.now)
        ),
        reverse=True,
    )
    if not near:
        known = {node.name for node in view.nodes if node.usages}
        if job.silent_nodes or not known.issuperset(job.job.nodes):
            return None
        return f"job {job.job.job_id} is not seen near a limit"
    words = {"what": near[0][1], "others": f" (and {len(near) - 1} more)" if len(near) > 1 else ""}
    severity = Severity.WARNING if near[0][0] >= 1.0 else Severity.INFO
    return Seen(tuple(Sign(fact=text) for _, text in near), words, {"severity": severity})


def _near(node: NodeView, process_job: str, now: float) -> Iterator[tuple[float, str]]:
    """(how near, sentence) of all that is near: 1 and more where someone went without."""
    for seen in node.usages:
        usage = seen.usage
        if usage.job_id not in (None, process_job) or seen.at < node.reported_at:
            continue
        refused = usage.resource is Resource.PIDS and seen.refused_at is not None and now - seen.refused_at <= RECENT_S
        if refused or usage.ratio >= NEAR:
            number = size if usage.resource in BYTES else str
            who = f"rank {usage.rank} on {node.name}" if usage.rank is not None else _whose(node, usage)
            of = f"{number(usage.used)} of {number(usage.limit or 0)} ({usage.ratio:.0%})"
            were = "; some were refused" if refused else ""
            yield 1.0 if refused else usage.ratio, f"{RESOURCES[usage.resource]} of {who}: {of}{were}"
    for pressure in node.pressures:
        waited = pressure.full_ratio
        if pressure.resource == "memory" and pressure.job_id in (None, process_job) and waited >= WAITS_SHARE:
            yield waited, f"{_whose(node, pressure)} waited for memory {waited:.0%} of the last minute"


def _whose(node: NodeView, of: Usage | Pressure) -> str:
    return f"all of {node.name}" if of.job_id is None else f"its processes on {node.name}"


NEAR_LIMIT = Rule(
    kind=IncidentKind.NEAR_LIMIT,
    signal=_near_limits,
    says="Job {job} is near a limit: {what}{others}.",
    hold_s=60.0,
    sentence="The job is near a limit of memory, processes or open files",
    steps_continue=True,
    has_aftermath=False,
    explained_by=(IncidentKind.MEMORY_KILL,),
    why_no_action="nothing has failed yet",
    hint=Hint(
        usually="Data loader workers that keep what they read, a leak, files in /dev/shm of jobs before, sockets "
        "that are never closed.",
        try_next="Fewer workers or a smaller prefetch_factor; more --mem; ls -l /dev/shm; ulimit -n in the script.",
        documented="cgroup.conf, ConstrainRAMSpace; slurm.conf, PropagateResourceLimits",
    ),
    doc="""
Fires: 95 % of a limit are in use for a minute (of memory: without the cache of files), a process or thread was
refused within 10 min, or for a fifth of a minute all processes of the job or node waited for memory.
Names: no rank: node, limit, and what is in use; of open files the rank.
""",
)
