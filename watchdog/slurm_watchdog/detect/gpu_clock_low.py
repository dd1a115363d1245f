"""`gpu_clock_low`: a GPU under load runs slower than its peers in the job, and slower than it used to.

Both have to hold, of averages over a minute under load: slower than the median of the job's busy GPUs of the same
model, and slower than its own past where that is known. Where it is not, only a single card is suspected: a node, or
more than a few cards, that runs as slowly may be another model, or capped.

Fires: under load 10 % below the median of the job's busy GPUs of its model, *and* 7 % below its own past,
or throttled by its own report, for a minute.
Names: rank, node, GPU, throttle reasons.
Acts: the job is asked to save first; each card's own past, or its own report, has to be evidence against it.
"""

from __future__ import annotations

from slurm_watchdog.base.averages import median
from slurm_watchdog.detect.gpu_idle_rank import gpu_values
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.diagnose.culprit_words import and_more
from slurm_watchdog.model.cluster_view import ClusterView, JobView, RankGpu
from slurm_watchdog.model.incidents import Finding, IncidentKind

MAX_ODD_SHARE = 0.25  # More of a group than this share are no odd ones.
CHOSEN = frozenset({"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"})
"""Throttle reasons that someone chose, or that are none."""


PEERS_SHARE = 0.1  # Slower than the median of the job's busy GPUs by more than this.
OWN_SHARE = 0.07  # And slower than its own past by more than this, unless the card says what holds it back.

PEERS = 3  # Busy GPUs of the same model to compare with, at least: a median of fewer is one of them.


@each_job
def detect(view: ClusterView, job: JobView) -> Finding | None:
    """One finding for each job with GPUs."""
    job_id = job.job.job_id
    if not job.gpus:
        return None
    finding = SPEC.about_job(job_id)
    groups: dict[str, list[tuple[RankGpu, float]]] = {}
    for each in job.gpus:
        clock_hz = each.view.gpu.recent_sm_clock_hz
        if each.view.busy_since is not None and clock_hz is not None:
            groups.setdefault(each.view.gpu.name, []).append((each, clock_hz))
    compared = [group for group in groups.values() if len(group) > PEERS]
    if job.silent_nodes or not compared:
        return finding
    slow: list[tuple[RankGpu, float, float]] = []
    for group in compared:
        usual_hz = median(clock_hz for _, clock_hz in group)
        least_hz = usual_hz * (1 - PEERS_SHARE)
        low = [(each, hz, usual_hz) for each, hz in group if hz < least_hz and _is_low(each, hz)]
        slow += [each for each in low if _has_a_past(each[0]) or _is_odd(each[0], each[1], group)]
    if not slow or 2 * len(slow) > sum(len(group) for group in groups.values()):
        return finding.ok(f"the busy GPUs of job {job_id} run alike")
    slow.sort(key=lambda each: each[1] / each[2])
    culprits = tuple(
        each.culprit(f"{clock_hz / 1e6:.0f} MHz under load, its peers {usual_hz / 1e6:.0f} MHz{_why(each)}")
        for each, clock_hz, usual_hz in slow
    )
    first, more = culprits[0], and_more(len(culprits))
    return finding.bad(
        f"The GPU of rank {first.rank} on {first.node} ({first.gpu_uuid}){more} of job {job_id} is slower than its "
        f"peers: {first.reason}.",
        culprits=culprits,
        facts=tuple(_facts(each) for each, _, _ in slow[:8]),
        exclude_nodes=tuple(dict.fromkeys(each.view.node for each, _, _ in slow)),
        actionable=all(_has_a_past(each) for each, _, _ in slow),
    )


def _is_low(each: RankGpu, clock_hz: float) -> bool:
    """Whether a clock that is low for its peers is low for this GPU, too."""
    own_hz = each.view.gpu.usual_sm_clock_hz
    return own_hz is None or clock_hz < own_hz * (1 - OWN_SHARE) or _is_held_back(each)


def _has_a_past(each: RankGpu) -> bool:
    """Whether more than its peers speaks against it."""
    return each.view.gpu.usual_sm_clock_hz is not None or _is_held_back(each)


def _is_odd(each: RankGpu, clock_hz: float, group: list[tuple[RankGpu, float]]) -> bool:
    """Whether few of the group run about as slowly, and others on its node, if there are any, do not."""
    beside = sum(1 for other, _ in group if other.view.node == each.view.node)
    alike = [other for other, hz in group if hz * (1 - OWN_SHARE) <= clock_hz]
    alike_beside = sum(1 for other in alike if other.view.node == each.view.node)
    return len(alike) <= max(1, MAX_ODD_SHARE * len(group)) and (beside == 1 or alike_beside < beside)


def _is_held_back(each: RankGpu) -> bool:
    """Whether the card itself says that something no one chose holds its clock down."""
    return bool(set(each.view.gpu.throttle or ()) - CHOSEN - {"sw_power_cap"})


def _why(each: RankGpu) -> str:
    reasons = [reason for reason in each.view.gpu.throttle or () if reason not in CHOSEN]
    return f", held back by {', '.join(reasons)}" if reasons else ""


def _facts(each: RankGpu) -> str:
    shares = [
        f", {share:.0%} of five minutes held back by {why}"
        for why, share in each.view.gpu.throttled
        if why not in CHOSEN
    ]
    usual_hz = each.view.gpu.usual_sm_clock_hz
    usual = "" if usual_hz is None else f", usually {usual_hz / 1e6:.0f} MHz under load"
    return f"{gpu_values(each)}{''.join(shares)}{usual}"


SPEC = DetectorSpec(
    detect=detect,
    hold_s=60.0,
    blames_node=0.5,
    sentence="A GPU runs at a low clock",
    site_may_act=True,
    asks=True,
    steps_continue=True,
    explained_by=(IncidentKind.SLOW_NODE,),
    wants_evidence=True,
    alerts=("SlurmWatchdogSlow",),
)
