"""`dead_rank`: a rank has just exited while most of its peers are alive; `lingering_job` follows if the job stays.

The end of a job looks alike for a moment, since its ranks exit one after the other and nodes report one after the
other: a rank that was not seen GONE_FOR_S after the death was seen does not count as alive.

Fires: a rank has been gone for 3 s, most others have been seen alive since, and no step was made since. Where nothing
shows that there were steps left to make, after a minute.
Names: the rank, and its last log lines; what it wrote into torchelastic's error file, and of several the one that did
so first, or that failed first by the log.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.analysis.job_state import (
    dead_for_s,
    had_steps_to_make,
    has_stepped_since,
    is_unseen,
    last_words,
    made_last_step,
    not_ended,
)
from slurm_watchdog.detect.spec import BROKEN, DetectorSpec, each_job
from slurm_watchdog.diagnose.logs.root_cause import facts_of_ends, failed_first, how_they_ended, last_error_before_end
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView, RankGpu
from slurm_watchdog.model.incidents import Finding, IncidentKind

MAX_DEAD_SHARE = 0.25  # At most this share of the ranks, and never half of them: more at once is an ending, or a node.
RESTING = 0.8  # Share of the survivors' GPUs.
UNSURE_S = 60.0  # So long others may take to leave where the training may be over, as with `srun --wait=60`.

GONE_FOR_S = 3.0  # Since the first report without it: the ends of a job that ends by itself are seen over some seconds.


@each_job
def detect(view: ClusterView, job: JobView) -> Finding:
    """One finding for each running job."""
    job_id, ranks, progress, now = job.job.job_id, job.ranks, job.progress, view.now
    finding, dead = SPEC.about_job(job_id), job.gone_ranks
    if is_unseen(job) or job.touched_age_s is not None or (not dead and not job.every_rank_known):
        return finding
    if not dead:
        return finding.ok(f"no rank of job {job_id} is missing")
    if _are_many(len(dead), len(ranks)) or progress is None or made_last_step(job):
        return finding
    known = failed_first(job, dead, now)
    first = known or max(dead, key=dead_for_s)
    age_s = dead_for_s(first)
    if has_stepped_since(job, age_s):
        return finding.ok(f"job {job_id} makes steps without rank {first.process.rank}")
    unseen = sum(1 for rank in ranks if rank.alive and rank.seen_age_s > age_s - GONE_FOR_S)
    if _are_many(len(dead) + unseen, len(ranks)) or _survivors_rest(job):
        return finding
    if age_s < GONE_FOR_S or (age_s < UNSURE_S and not _was_not_over(job, first)):
        return finding
    named = (first,) if known else dead
    how = how_they_ended(job, [r.process.rank for r in named], now)
    followed = f", {len(dead) - 1} followed" if known and len(dead) > 1 else ""
    return finding.bad(
        f"Rank {first.process.rank} of job {job_id} on {first.node} (pid {first.process.pid}) "
        f"{f'and {len(dead) - 1} more ' if len(named) > 1 else ''}{how} {age_s:.0f} s ago{followed}, after "
        f"{progress.place}; {len(ranks) - len(dead)} of {len(ranks)} are left.{last_sentences(job, first, dead, now)}",
        culprits=tuple(r.culprit(f"ended {dead_for_s(r):.0f} s ago") for r in named),
        facts=(
            *facts_of_ends(job, dead),
            *[f"rank {each.process.rank}: {words}" for each in dead if (words := not_ended(each))][:8],
            *last_words(job, first),
        ),
        duration_s=age_s,
    )


def last_sentences(job: JobView, first: ProcessView, dead: Iterable[ProcessView], now: float) -> str:
    """What the first one logged before it ended, and why a process of them is still there."""
    error = last_error_before_end(job, first, now)
    still = (f" Of rank {each.process.rank}: {words}." for each in dead if (words := not_ended(each)))
    return (f" It logged before: {error}." if error else "") + next(still, "")


def _are_many(gone: int, ranks: int) -> bool:
    return gone > max(1, MAX_DEAD_SHARE * ranks) or 2 * gone >= ranks


def _was_not_over(job: JobView, first: ProcessView) -> bool:
    """Whether anything tells that the training had not come to its end when this rank left."""
    if had_steps_to_make(job) or any(error.age_s <= dead_for_s(first) + job.read_later_s for error in job.errors):
        return True
    living, seats = _seats_of_survivors(job)
    busy = {each.rank for each in seats if each.view.busy_since is not None}
    return bool(busy) and len(busy) >= living / 2


def _survivors_rest(job: JobView) -> bool:
    """Whether the GPUs of the ranks that are left are known to do (nearly) nothing: a rank that waits in a
    collective spins at 100 %."""
    living, seats = _seats_of_survivors(job)
    idle = [each for each in seats if each.view.idle_since is not None]
    return bool(seats) and len({each.rank for each in seats}) >= living / 2 and len(idle) >= RESTING * len(seats)


def _seats_of_survivors(job: JobView) -> tuple[int, list[RankGpu]]:
    """How many ranks are left, and their GPUs as far as they are known."""
    living = {rank.process.rank for rank in job.living_ranks}
    return len(living), [each for each in job.gpus if each.rank in living]


SPEC = DetectorSpec(
    detect=detect,
    blames_node=0.9,
    sentence="A rank has ended",
    job_state="has lost a rank",
    explained_by=(*BROKEN, IncidentKind.LINGERING_JOB, IncidentKind.LOG_ERROR),
    not_delayed_by=(IncidentKind.LINGERING_JOB,),
    wants_evidence=True,
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogRankLost"),
)
