"""`slow_job`: the job makes steps, but they take longer than they did.

Fires: the step time rose by 5 % or more and stays so for 30 steps and 5 minutes at least; in a noisier log only
larger changes, and of a rise over hours what the hour of the day does not explain.
Names: no rank or node: since which step, by how much. Where processes on one node wait for the processor, memory or
storage, or its links are congested, unlike all others of the job, that is a fact, and suspects none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.analysis.level_shift import Rise, comparable, find_creep, find_rise, quantum
from slurm_watchdog.analysis.links import facts_of
from slurm_watchdog.analysis.slow_node_suspects import is_first_run, present_speed, search_facts
from slurm_watchdog.base.averages import median
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.knowledge.limits import option
from slurm_watchdog.knowledge.remediation_hints import hints_for
from slurm_watchdog.model.cluster_view import ClusterView, JobView, StepTime
from slurm_watchdog.model.incidents import Finding, IncidentKind, Truth
from slurm_watchdog.model.past_runs import SlowSearch

LEAST_STEPS = 30  # Steps that were slow before it is reported.
BASELINE = 20  # Steps without which a job's speed is not known.
BATCH, WINDOW = 10, 160  # Recent steps of one batch, and at most to both sides of a change.
WINDOW_BLOCKS = 48  # The same of the history's blocks.
CREEP_BLOCKS = 24  # Of the history, whose means are compared where nothing changed at once.
HARDLY = 0.55  # Of the change that is looked for: newest steps that are slower by less need no closer look.
NEWEST = 10  # Steps of which the median is compared so.


@dataclass(frozen=True, kw_only=True)
class SlowJob:
    """The steps of a job take longer than they did. Never acted on."""

    percent: float = option(
        5.0,
        "Change of the step time that is looked for; in a noisier log only larger ones are reported.",
        ge=2,
        le=1000,
    )
    lasts: float = 300.0  # So long it has to be slower: what jobs share is slow for some minutes now and then.


@each_job
def detect(view: ClusterView, job: JobView, settings: SlowJob) -> Finding:
    """One finding for each running job."""
    finding = slowdown_finding(job, view.now, settings.percent / 100, settings.lasts)
    search = next((each for each in view.searches if each.job_id == job.job.job_id), None)
    finding = finding if search is None else _with_search(finding, job, search)
    if finding.truth is not Truth.BAD:
        return finding
    mine = {*job.job.nodes} - {*job.silent_nodes}
    seen = facts_of([node for node in view.nodes if node.name in mine], job.job.process_id)
    return replace(finding, facts=(*finding.facts, *seen))


def slowdown_finding(job: JobView, now: float, shift: float, least_s: float) -> Finding:
    """What the step times of one job say; `shift` is the change that is looked for, 0.05 for 5 %, and has to have
    lasted for `least_s`."""
    job_id = job.job.job_id
    finding = SPEC.about_job(job_id)
    recent = _recent(job.step_times, shift) if job.job.state == "RUNNING" else None
    if recent is None:
        return finding
    found = list(_slowdowns(job, recent, shift))
    slow = next((each for each in found if _is_long(each, least_s)), None)
    if slow is None:  # of slower steps that are too few yet nothing is said
        return finding if found else finding.ok(f"the steps of job {job_id} take {recent.step_s:.3g} s, as they did")
    percent = 100 * (slow.after_s / slow.before_s - 1)
    return finding.bad(
        f"Job {job_id} is {percent:.1f} % slower since step {slow.first.step}: {slow.before_s:.4g} s a step before, "
        f"{slow.after_s:.4g} s now.",
        facts=(f"{slow.steps} steps since, {slow.compared} before to compare with",),
        duration_s=max(0.0, now - slow.first.at),
    )


def _with_search(finding: Finding, job: JobView, search: SlowSearch) -> Finding:
    """The same; a run that has not become slow itself is compared with the job as it was."""
    job_id, speed = job.job.job_id, present_speed(search, job)
    if finding.truth is Truth.BAD:
        # A run that was fast and has become slow is another matter: see controller/slow_nodes.py.
        facts = search_facts(search) if is_first_run(search, job) else ()
        return replace(finding, facts=(*finding.facts, *facts))
    if speed is None:  # the run in which it became slow, or one that cannot be told yet
        return finding if is_first_run(search, job) else finding.unknown()
    is_slow, words = speed
    if not is_slow:
        return finding.ok(f"job {job_id} is as fast as it was before step {search.step}: {words}")
    return finding.bad(
        f"Job {job_id} is still slower than before step {search.step}: {words}.",
        facts=search_facts(search),
        duration_s=job.run_age_s,
    )


class Slowdown(Struct, kw_only=False):
    """A change to slower steps that lasts: measured, in seconds a step."""

    first: StepTime
    before_s: float
    after_s: float
    steps: int  # That were slower for sure: of the newest ones some may be missing.
    compared: int  # Steps of the level before.


class Recent(Struct, kw_only=False):
    """What the recent steps say."""

    step_s: float  # Median of the newest ones.
    quantum_s: float
    newest: StepTime
    slowdown: Slowdown | None


def slowdown_of(job: JobView, shift: float, least_s: float) -> Slowdown | None:
    """The change to slower steps that is reported of this run; None: there is none."""
    recent = _recent(job.step_times, shift)
    found = () if recent is None else _slowdowns(job, recent, shift)
    return next((slow for slow in found if _is_long(slow, least_s)), None)


def _slowdowns(job: JobView, recent: Recent, shift: float) -> Iterator[Slowdown]:
    """By its recent steps, then by its whole history: newer changes first."""
    if recent.slowdown is not None:
        yield recent.slowdown
    lasting = _lasting(job.step_history, recent, shift)
    if lasting is not None:
        yield lasting


def _is_long(slow: Slowdown, least_s: float) -> bool:
    return slow.steps >= LEAST_STEPS and slow.steps * slow.after_s >= least_s


@by_identity
def _recent(step_times: tuple[StepTime, ...], shift: float) -> Recent | None:
    """What the recent steps say; None: they are too few."""
    times = comparable(step_times)
    if len(times) < BASELINE:
        return None
    values = [time.seconds for time in times]
    digit, newest = quantum(values), median(values[-NEWEST:])
    blocks = (values[begin : begin + BASELINE] for begin in range(0, len(values) - BASELINE + 1, BASELINE))
    fastest = min(median(block) for block in blocks)
    as_ever = newest < fastest * (1 + HARDLY * shift)
    rise = None if as_ever else find_rise(values, [time.at for time in times], shift, BATCH, WINDOW, digit)
    return Recent(newest, digit, times[-1], _slowdown(times, rise))


def _lasting(history: tuple[StepTime, ...], recent: Recent, shift: float) -> Slowdown | None:
    """A slow-down that began before the recent times, or crept in over hours; `history` has the mean of each
    block of steps of the whole run, oldest first. None: there is none, or no one can tell."""
    if not history or recent.step_s < (1 + HARDLY * shift) * min(block.seconds for block in history):
        return None
    return _rise_of_blocks(history, shift, recent.quantum_s, (recent.newest.batch, recent.newest.logged))


@by_identity
def _rise_of_blocks(
    history: tuple[StepTime, ...], shift: float, quantum_s: float, alike: tuple[float | None, bool]
) -> Slowdown | None:
    same = [block for block in history if (block.batch, block.logged) == alike]
    values, times = [block.seconds for block in same], [block.at for block in same]
    rise = find_rise(values, times, shift, 1, WINDOW_BLOCKS, quantum_s)
    return _slowdown(same, rise or find_creep(values, times, shift, CREEP_BLOCKS, quantum_s))


def _slowdown(times: Sequence[StepTime], rise: Rise | None) -> Slowdown | None:
    if rise is None:
        return None
    first, before, last = times[rise.begin], times[rise.compared], times[rise.last]
    compared = first.step - before.step
    return Slowdown(first, rise.before_s, rise.after_s, last.step - first.step + 1, max(1, compared))


SPEC = DetectorSpec(
    detect=detect,
    settings=SlowJob,
    sentence="The job is slower than it was",
    steps_continue=True,
    explained_by=(IncidentKind.SLOW_NODE,),
    wants_evidence=True,
    why_no_action="no restart is made for it: those that happen anyway narrow down which node it is",
    alerts=("SlurmWatchdogSlow",),
    hint=hints_for("slow_job", "")[0],
)
