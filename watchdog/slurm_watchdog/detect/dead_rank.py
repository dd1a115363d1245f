"""`dead_rank`: a rank has just exited while most of its peers are alive. Reported within seconds;
`lingering_job` follows if the job stays.

The end of a job looks alike for a moment: its ranks exit one after the other. So it is reported only while
the gone are few, before the last step, and if no step was made since. Nodes report one after the other: a
rank that was not seen GONE_FOR_S after the death was seen may have exited with it (Slurm ends a job on all
nodes at once; ranks need a moment each to exit), and does not count as alive.

Where nothing shows that there were steps left to make (the log knows no total, no error was logged, and no
GPU is seen to spin), a training that is over looks the same for as long as its ranks take to exit, and on a
busy machine they take long.

Fires: a rank has been gone for 3 s, most others have been seen alive since, and no step was made since. Where nothing
shows that there were steps left to make, after a minute.
Names: the rank, and its last log lines; what it wrote into torchelastic's error file, and of several the one that did
so first, or that failed first by the log.
"""

from __future__ import annotations

from slurm_watchdog.analysis.held_processes import not_ended
from slurm_watchdog.analysis.job_state import dead_for_s, had_steps_to_make, has_stepped_since, last_words
from slurm_watchdog.detect.spec import STORAGE, DetectorSpec, Subject
from slurm_watchdog.diagnose.logs.own_words import facts_of_ends
from slurm_watchdog.diagnose.logs.root_cause import failed_first, how_they_ended, last_error_before_end
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView, RankGpu
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity

MAX_DEAD_SHARE = 0.25  # At most this share of the ranks, and never half of them: more at once is an ending, or a node.
RESTING = 0.8  # Share of the survivors' GPUs.
UNSURE_S = 60.0
"""So long the others may take to leave where the training may be over: Slurm itself gives them as much (`srun
--wait=60`, as we advise)."""

GONE_FOR_S = 3.0  # Since the first report without it: the ends of a job that ends by itself are seen over some seconds.


def detect(view: ClusterView) -> list[Finding]:
    """One finding for each running job."""
    return [_job_finding(job, view.now) for job in view.jobs]


def _job_finding(job: JobView, now: float) -> Finding:
    job_id, ranks, progress = job.job.job_id, job.ranks, job.progress
    finding = SPEC.about_job(job_id)
    if job.job.state != "RUNNING" or not ranks or job.silent_nodes:
        return finding.unknown(f"job {job_id} is {job.job.state}, {len(job.silent_nodes)} nodes are silent")
    if job.touched_age_s is not None:
        return finding.unknown(f"slurm-watchdog is ending job {job_id} since {job.touched_age_s:.0f} s")
    dead = job.gone_ranks
    if not dead and not job.every_rank_known:
        return finding.unknown(f"not every rank of job {job_id} has been seen")
    if not dead:
        return finding.ok(f"no rank of job {job_id} is missing")
    if _are_many(len(dead), len(ranks)):
        return finding.unknown(f"{len(dead)} of {len(ranks)} ranks of job {job_id} have exited: it is ending")
    if progress is None or (progress.total_steps is not None and progress.step >= progress.total_steps):
        return finding.unknown(f"job {job_id} has not begun, or has made its last step")
    known = failed_first(job, dead, now)
    first = known or max(dead, key=dead_for_s)
    age_s = dead_for_s(first)
    if has_stepped_since(job, age_s):
        return finding.ok(f"job {job_id} makes steps without rank {first.process.rank}")
    unseen = sum(1 for rank in ranks if rank.alive and rank.seen_age_s > age_s - GONE_FOR_S)
    if _are_many(len(dead) + unseen, len(ranks)):
        waits = (
            f"{unseen} of {len(ranks)} ranks of job {job_id} were not seen for {GONE_FOR_S:.0f} s "
            f"since rank {first.process.rank} ended"
        )
        return finding.unknown(waits)
    if _survivors_rest(job):
        return finding.unknown(
            f"rank {first.process.rank} of job {job_id} has exited, and no rank waits for it: it is ending"
        )
    if age_s < GONE_FOR_S or (age_s < UNSURE_S and not _was_not_over(job, first)):
        return finding.unknown(f"rank {first.process.rank} of job {job_id} ended {age_s:.0f} s ago")
    named = (first,) if known else dead
    culprits = tuple(r.culprit(f"ended {dead_for_s(r):.0f} s ago") for r in named)
    kept = {each.process.rank: words for each in dead if (words := not_ended(each))}
    how = how_they_ended(job, [r.process.rank for r in named], now)
    followed = f", {len(dead) - 1} followed" if known and len(dead) > 1 else ""
    error = last_error_before_end(job, first, now)
    return finding.bad(
        f"Rank {first.process.rank} of job {job_id} on {first.node} (pid {first.process.pid}) "
        f"{'and ' + str(len(dead) - 1) + ' more ' if len(named) > 1 else ''}{how} {age_s:.0f} s ago"
        f"{followed}, after {progress.place}; "
        f"{len(ranks) - len(dead)} of {len(ranks)} are left.{f' It logged before: {error}.' if error else ''}"
        f"{''.join(f' Of rank {rank}: {words}.' for rank, words in list(kept.items())[:1])}",
        culprits=culprits,
        facts=(
            *facts_of_ends(job, dead),
            *(f"rank {rank}: {words}" for rank, words in list(kept.items())[:8]),
            *last_words(job, first),
        ),
        duration_s=age_s,
    )


def _are_many(gone: int, ranks: int) -> bool:
    return gone > max(1, MAX_DEAD_SHARE * ranks) or 2 * gone >= ranks


def _was_not_over(job: JobView, first: ProcessView) -> bool:
    """Whether anything tells that the training had not come to its end when this rank left."""
    if had_steps_to_make(job):
        return True
    if any(error.age_s <= dead_for_s(first) + job.read_later_s for error in job.errors):
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
    kind=IncidentKind.DEAD_RANK,
    detect=detect,
    subject=Subject.JOB,
    severity=Severity.WARNING,
    blames_node=0.9,
    sentence="A rank has ended",
    job_state="has lost a rank",
    explained_by=(
        *STORAGE,
        IncidentKind.LINGERING_JOB,
        IncidentKind.LOG_ERROR,
        IncidentKind.DISK_FULL,
        IncidentKind.GPU_FAULT,
        IncidentKind.NODE_DOWN,
    ),
    not_delayed_by=(IncidentKind.LINGERING_JOB,),
    wants_evidence=True,
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogRankLost"),
)
