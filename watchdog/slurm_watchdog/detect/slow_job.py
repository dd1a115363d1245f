"""`slow_job`: the job makes steps, but they take longer than they did. Reports since which step, and by how
much.

Fires: the step time changed by 5 % or more and stays so for 30 steps and a minute at least, or crept up
over hours; in a noisier log only larger changes.
Names: no rank or node: since which step, by how much.
Note: step times alone name no node.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import median

from slurm_watchdog.analysis.memo import by_identity
from slurm_watchdog.analysis.step_statistics import BASELINE, MAD_TO_SIGMA, NEARLY, Segment, segments
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.detect.spec import DetectorSpec, Subject, option
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView, StepTime
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity

LEAST_UNLOGGED_S = 30.0
"""Times that the log does not say itself are as exact as the agent's interval of 5 s: shorter steps cannot be
compared so."""
SKIPPED = 3
"""First steps of a run, which compile, warm caches and fill pipelines."""
NORMAL_SHARE = 0.9
"""Of the smallest change that is reported: so much the newest steps may be slower than the fastest BASELINE, of
which chance has chosen the fastest."""
CONFIRMED = 12
"""Slower times that the log has to give before the statistics are believed: a burst of slow ones is over by then."""
LEAST_STEPS, LEAST_S = 30, 60.0
"""Steps that were slow, and how long they took together, before it is reported: a dozen on a busy machine are
not worth a message."""
LASTING = 3
"""Blocks of the history that have one level, before the present one is compared with it
(slurm_watchdog.controller.state.step_history)."""
SURE_BLOCKS = 5.0
"""Standard deviations of a block by which the present has to differ from the fastest of all: chance has
chosen that one."""


@dataclass(frozen=True, kw_only=True)
class SlowJob:
    """The steps of a job take longer than they did. Never acted on: the times alone name no node."""

    percent: float = option(
        5.0,
        "Change of the step time that is looked for; in a noisier log only larger ones are reported.",
        ge=2,
        le=1000,
    )


def detect(view: ClusterView, settings: SlowJob) -> list[Finding]:
    """One finding for each running job."""
    return [slowdown_finding(job, view.now, settings.percent / 100) for job in view.jobs]


def comparable(times: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
    """The steps of which one may be compared with another: training, of the present batch size, exact enough."""
    usable = [
        t for t in times[SKIPPED:] if t.phase is None and t.seconds > 0 and (t.logged or t.seconds >= LEAST_UNLOGGED_S)
    ]
    if not usable:
        return ()
    last = usable[-1]
    return tuple(t for t in usable if t.batch == last.batch and t.logged == last.logged)


def slowdown_finding(job: JobView, now: float, shift: float) -> Finding:
    """What the step times of one job say; `shift` is the change that is looked for, 0.05 for 5 %."""
    job_id = job.job.job_id
    finding = SPEC.about_job(job_id, f"too few steps of job {job_id} were seen")
    times, found = _stretches(job.step_times, shift) if job.job.state == "RUNNING" else ((), ())
    if len(times) < BASELINE:
        return finding
    now_slow = _slowdown(found, shift)
    if now_slow is None:
        lasting = find_lasting(job.step_history, times, shift)
        if lasting is not None:
            return _slow_finding(finding, job, now, lasting)
        return finding.ok(f"the steps of job {job_id} take {found[-1].level:.3g} s, as they did")
    before, after = now_slow
    first = times[after.begin]
    steps = max(after.end - after.begin, times[-1].step - first.step + 1)
    if steps < LEAST_STEPS or steps * after.level < LEAST_S:
        return finding.unknown(f"job {job_id} has made {steps} slower steps: too few to judge its speed")
    compared = max(before.end - before.begin, times[before.end - 1].step - times[before.begin].step + 1)
    return _slow_finding(finding, job, now, Slowdown(first, before.level, after.level, steps, compared))


class Slowdown(Struct, frozen=True):
    """A change to slower steps that lasts: measured, in seconds a step."""

    first: StepTime
    before_s: float
    after_s: float
    steps: int
    """Since `first`."""
    compared: int
    """Steps of the level before."""


def _slow_finding(finding: Finding, job: JobView, now: float, slow: Slowdown) -> Finding:
    percent = 100 * (slow.after_s / slow.before_s - 1)
    return finding.bad(
        f"Job {job.job.job_id} is {percent:.1f} % slower since step {slow.first.step}: "
        f"{slow.before_s:.4g} s a step before, "
        f"{slow.after_s:.4g} s now.",
        facts=(
            f"{slow.steps} steps since, {slow.compared} before to compare with",
            *_bisection(job.job.nodes),
        ),
        duration_s=max(0.0, now - slow.first.at),
    )


@by_identity
def find_lasting(history: tuple[StepTime, ...], times: tuple[StepTime, ...], shift: float) -> Slowdown | None:
    """A slow-down that began before the recent `times`, or crept in over hours; `history` has the median of
    each block of steps of the whole run, oldest first. None: the present is about as fast as the fastest
    stretch, or nobody can tell."""
    if not times:
        return None
    same = [b for b in history if b.batch == times[-1].batch and b.logged == times[-1].logged]
    if len(same) < 3 * LASTING:
        return None
    values = [block.seconds for block in same]
    scatter = MAD_TO_SIGMA * median(abs(b - a) for a, b in pairwise(values)) / sqrt(2)
    levels = [median(values[at : at + LASTING]) for at in range(len(values) - LASTING + 1)]
    present, best = levels[-1], min(levels[:-LASTING])
    limit = max(best * (1 + NORMAL_SHARE * shift), best + SURE_BLOCKS * scatter)
    if present < limit:
        return None
    fast = max(at for at, level in enumerate(levels) if level < limit)  # from the block after it on all are slow
    first = next((block for block in same[fast:] if block.seconds >= limit), same[-1])
    begin = same.index(first)
    if begin == 0 or len(same) - begin < LASTING:
        return None
    steps = times[-1].step - first.step + 1
    if steps < LEAST_STEPS or steps * present < LEAST_S:
        return None
    return Slowdown(first, best, present, steps, max(1, first.step - same[0].step))


@by_identity
def _stretches(step_times: tuple[StepTime, ...], shift: float) -> tuple[tuple[StepTime, ...], tuple[Segment, ...]]:
    """The steps that can be compared, and the stretches of one level among them."""
    times = comparable(step_times)
    values = tuple(round(t.seconds, 6) for t in times)
    if len(values) < BASELINE:
        return times, ()
    level = _as_ever(values, shift)
    if level is not None:
        return times, (Segment(begin=0, end=len(values), level=level),)
    return times, segments(values, shift, CONFIRMED)


def _as_ever(values: tuple[float, ...], shift: float) -> float | None:
    """What the newest steps take, where they are hardly slower than those of any time before: then nothing
    has to be cut up, and nearly always that is so. None: it has to be looked at closely."""
    newest = median(values[-CONFIRMED:])
    blocks = (values[begin : begin + BASELINE] for begin in range(0, len(values) - BASELINE + 1, BASELINE))
    fastest = min(median(block) for block in blocks)
    return newest if newest < fastest * (1 + NORMAL_SHARE * NEARLY * shift) else None


def _bisection(nodes: tuple[str, ...]) -> tuple[str, ...]:
    """How to find the node where no signal names one: the times alone never do."""
    if len(nodes) < 2:
        return ()
    half = nodes[: len(nodes) // 2]
    return (
        "the times name no node. Where no signal does either: at the next restart leave out half of the "
        "nodes (other ones in their "
        f"place), {' '.join(half[:16])}{' …' if len(half) > 16 else ''}. Is it fast again, the slow one "
        "is among these, else among the "
        "others; then half of those. Or a benchmark on each, for compute, memory and links",
    )


def _slowdown(found: tuple[Segment, ...], shift: float) -> tuple[Segment, Segment] | None:
    """(fastest stretch before, the present stretch) if the present one is slower by about `shift`, and there
    was one to compare."""
    present = found[-1]
    earlier = [each for each in found[:-1] if each.end - each.begin >= BASELINE]
    if not earlier:
        return None
    best = min(earlier, key=lambda each: each.level)
    if present.level < best.level * (1 + NEARLY * shift):
        return None
    # Where several stretches are slow one after the other, the slowness began with the first of them.
    later = [each for each in found if each.begin > best.begin and each.level >= best.level * (1 + NEARLY * shift)]
    begin = present.begin
    for each in reversed(later[:-1] if later else []):
        if each.end != begin:
            break
        begin = each.begin
    return best, Segment(begin=begin, end=present.end, level=present.level)


SPEC = DetectorSpec(
    kind=IncidentKind.SLOW_JOB,
    detect=detect,
    settings=SlowJob,
    subject=Subject.JOB,
    severity=Severity.WARNING,
    sentence="The job is slower than it was",
    steps_continue=True,
    explained_by=(IncidentKind.SLOW_NODE,),
    wants_evidence=True,
    alerts=("SlurmWatchdogSlow",),
    hint=Hint(
        usually="One GPU, link or node is slower than the rest, and the rest waits for it; or the storage is.",
        try_next="Compare clocks and link widths of all nodes; else leave out a few nodes at each "
        "restart that happens anyway until the speed is back.",
    ),
)
