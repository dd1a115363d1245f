"""`lingering_job`: a rank is dead, the others wait for it without end, Slurm says RUNNING. Or no rank is left.

Fires: a rank has exited or is a zombie, others are alive, and no step was made for 30 s; not after the last step, and
not while the survivors' stacks move. Under a supervisor after 8 s where all survivors are seen to wait, after 3 s
(3 s) if srun has reported that a signal ended its task and the step is late. Or no rank is left for 10 min
in the middle of a training (30 min where its number of steps is not known), and nothing else of the job does anything.
Names: the dead rank, and its last log lines.
Acts: requeues the job, if survivors are *seen* to wait in a collective without moving. Otherwise it alerts:
at the limit of a step if their GPUs spin, else after 10 × `grace` and only if most ranks are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import (
    dead_for_s,
    had_steps_to_make,
    has_ended,
    has_stepped_since,
    is_unseen,
    last_words,
    made_last_step,
    not_ended,
)
from slurm_watchdog.analysis.lateness import is_late
from slurm_watchdog.analysis.memory_kills import how_killed, memory_kills
from slurm_watchdog.analysis.progress_limit import progress_limit
from slurm_watchdog.analysis.rank_activity import LoopState, is_quiet, loop_state
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.spec import BROKEN, STORAGE, DetectorSpec, each_job
from slurm_watchdog.diagnose.culprit_words import describe, describe_all
from slurm_watchdog.diagnose.logs.root_cause import facts_of_ends, failed_first, how_they_ended, last_error_before_end
from slurm_watchdog.diagnose.stacks.sentences import group_words
from slurm_watchdog.diagnose.stacks.vote import Vote, vote
from slurm_watchdog.knowledge.limits import PhaseLimits, most_odd, span
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView, RankGpu, StackSnapshot
from slurm_watchdog.model.incidents import Culprit, Finding, IncidentKind, Severity, StackRequest
from slurm_watchdog.model.observations import Role

STACKS_FROM_SHARE = 0.3  # From this share of the grace on, the survivors' stacks are collected.
SPACING, LEAST_APART_S = 0.25, 2.5  # Time between two dumps: a share of the grace, and at least: two before it ends.
EARLY_DUMPS = 2  # Before `grace` the newest two count: in the one before them the survivors may still hear of the end.
PATIENCE = 10.0  # So many times the grace before an alert where the survivors are not seen to wait for the dead.
NO_LAUNCHERS = frozenset({"bash", "sh", "dash", "srun", "slurm_script"})
"""Names (comm) of processes beside the ranks that start no rank again; any other may be a launcher."""
BY_SIGNAL = ("was killed", "died of")  # Beginnings of what `how_they_ended` says of a signal.

NOBODY_LEFT_S = 600.0
"""After the last rank of a training that had steps left to make: for so long a launcher waits for others
before it gives up (torchrun's `join_timeout` as it ships)."""
NOBODY_LEFT_UNSURE_S = 1800.0  # The same where no one knows how many steps there were to make: it may have been over.
NAMED = 16
TOGETHER_S = 10.0  # Ranks that ended within it of the first ended with it, or were seen late; later ones lost them.


KILLED_GRACE_S = 3.0  # The same where srun says that a signal ended the task, and the step is late by its own measure.

SUPERVISED_GRACE_S = 8.0  # In place of `grace` where `slurm-watchdog run` starts the step again and all survivors wait.


@dataclass(frozen=True, kw_only=True)
class LingeringJob:
    """A rank is dead, the others wait for it, Slurm says RUNNING."""

    grace: float = span(30.0, "Time Slurm and the launcher get to end the job (`--kill-on-bad-exit`).")


@each_job
def detect(view: ClusterView, job: JobView, settings: LingeringJob, limits: PhaseLimits) -> Finding:
    """One finding for each running job; `limits` are those of `collective_hang`."""
    job_id, now = job.job.job_id, view.now
    finding, dead = SPEC.about_job(job_id), sorted(job.gone_ranks, key=dead_for_s, reverse=True)
    if is_unseen(job) or job.touched_age_s is not None or (not dead and not job.every_rank_known):
        return finding
    if not dead:
        return finding.ok(f"no rank of job {job_id} is missing")
    known = failed_first(job, dead, now)
    if known is not None and dead_for_s(known) >= dead_for_s(dead[0]) - TOGETHER_S:
        dead.remove(known)
        dead.insert(0, known)
    first = dead[0]
    killed = how_killed(memory_kills(view), job, first, now)
    if not job.living_ranks:
        return _nobody_left(job, finding, dead, now, killed)
    if made_last_step(job):
        return finding
    if has_stepped_since(job, dead_for_s(first)):
        return finding.ok(f"job {job_id} makes steps without rank {first.process.rank}")
    age_s = min(dead_for_s(first), job.run_age_s)  # a grace that was granted counts here as well
    finding = replace(finding, duration_s=age_s)
    grace_s = soon_s = settings.grace
    if _ends_by_nobody(job):
        grace_s, soon_s = (min(grace_s, each) for each in (SUPERVISED_GRACE_S, KILLED_GRACE_S))
    if age_s >= STACKS_FROM_SHARE * soon_s:
        finding = replace(finding, wanted=(_stacks_wanted(job_id, age_s, grace_s, settings.grace),))
    # One whose task died of a signal, as Slurm says, does not come back; one that left by itself may be done.
    by_signal = is_late(job) and how_they_ended(job, [first.process.rank], now).startswith(BY_SIGNAL)
    if age_s < soon_s or (age_s < grace_s and not by_signal):
        return finding
    early = age_s < settings.grace
    waiting = _waiting(job, now, limits, job.snapshots[-EARLY_DUMPS:] if early else job.snapshots)
    if early and not waiting.all_wait:
        return finding
    return _bad_finding(job, finding, dead, waiting, settings.grace, now, killed)


def _stacks_wanted(job_id: str, age_s: float, grace_s: float, full_grace_s: float) -> StackRequest:
    """The survivors' stacks: as often until the full grace is over, however many dumps that takes, since they may hear
    of the end in the middle of it; then once in each grace; at last as rarely as of any job."""
    apart_s = max(LEAST_APART_S, SPACING * grace_s)
    later_s = apart_s if age_s < full_grace_s else grace_s if age_s < PATIENCE * grace_s else None
    return StackRequest(job_id=job_id, apart_s=apart_s, later_s=later_s)


def _ends_by_nobody(job: JobView) -> bool:
    """Whether no one but us would end the step, or start the rank again: it has a supervisor, and was not over."""
    steps = {each.process.step_id for each in job.ranks}
    beside = [each.process for each in job.processes if each.alive and each.process.role is Role.HELPER]
    return (
        job.supervised
        and had_steps_to_make(job)
        and not job.unlisted
        and all(each.comm in NO_LAUNCHERS or each.step_id not in steps for each in beside)
    )


class _Waiting(Struct):
    """Whether the survivors are seen to wait: by their stacks or, if there are none, by their GPUs beyond the limit of
    a step. Of a few that spin among many that rest it is not known what they wait for."""

    voted: Vote
    seen: LoopState
    by_stacks: bool
    all_wait: bool  # Every one of them is seen to wait in a collective.
    by_gpus: bool


def _waiting(job: JobView, now: float, limits: PhaseLimits, dumps: Sequence[StackSnapshot]) -> _Waiting:
    living = len(job.living_ranks)
    voted, limit_s = vote(dumps, job.living_ranks), progress_limit(job, limits).seconds
    blind = not voted.groups and job.progress is not None and job.progress.age_s >= limit_s
    seen = loop_state(job, now, limit_s) if blind else LoopState()
    by_stacks = voted.moving is False and voted.waiting > 0 and not voted.missing
    all_wait = by_stacks and voted.waiting == living and not voted.outside
    by_gpus = living <= 2 * seen.spinning and 2 * living >= len(job.ranks)
    return _Waiting(voted=voted, seen=seen, by_stacks=by_stacks, all_wait=all_wait, by_gpus=by_gpus)


def _bad_finding(
    job: JobView, finding: Finding, dead: Sequence[ProcessView], waiting: _Waiting, grace_s: float, now: float, how: str
) -> Finding:
    """The grace is over: BAD if the survivors are seen to wait without moving; acted on only if their stacks say so.

    At the end of a job the ranks leave one after the other, and the last one may still write for a long time: few
    survivors that wait for no one are an ending. If most are left, or the last step was known and is not made while no
    one does anything, there is an alert, after ten times the grace.
    """
    first, age_s, voted = dead[0], finding.duration_s, waiting.voted
    waits, left = waiting.by_stacks or waiting.by_gpus, len(job.living_ranks)
    left_over = left > len(dead) or (waiting.seen.stands and had_steps_to_make(job))
    if voted.moving or (not waits and (not left_over or age_s < PATIENCE * grace_s)):
        return finding
    with_it = [rank for rank in dead if dead_for_s(rank) >= dead_for_s(first) - TOGETHER_S]
    with_it = [first] if failed_first(job, dead, now) is first else with_it
    culprits, followed = _named(with_it), len(dead) - len(with_it)
    how = how or how_they_ended(job, [rank.process.rank for rank in with_it], now)
    others = f"{followed} followed, " if followed else ""
    others += "1 rank is left" if left == 1 else f"{left} ranks are left"
    if voted.waiting or waiting.seen.stands:
        others += f", {f'{voted.waiting} of them wait in a collective' if voted.waiting else waiting.seen.why}"
    return finding.bad(
        f"Job {job.job.job_id} is {job.job.state} but cannot continue: {describe_all(culprits)} {how} "
        f"{age_s:.0f} s ago, {others}.{last_sentences(job, first, [first], now)}",
        culprits=culprits,
        facts=(
            *(f"{describe(c)} {c.reason}" for c in culprits[:8]),
            *facts_of_ends(job, dead),
            *last_words(job, first),
            *(f"{group_words(g)}, {' < '.join(g.frames[:3])}" for g in voted.groups[:4]),
            "add --kill-on-bad-exit=1 and --wait=60 to srun, so that Slurm ends such a job",
        ),
        actionable=waiting.by_stacks,
    )


def _named(dead: Sequence[ProcessView]) -> tuple[Culprit, ...]:
    return tuple(
        rank.culprit(
            f"has been a zombie for {dead_for_s(rank):.0f} s{f'; {words}' if (words := not_ended(rank)) else ''}"
            if rank.process.state in ("Z", "X")
            else f"ended {dead_for_s(rank):.0f} s ago"
        )
        for rank in dead
    )


def _nobody_left(job: JobView, finding: Finding, dead: Sequence[ProcessView], now: float, killed: str) -> Finding:
    """Every rank is gone and Slurm says RUNNING. An interactive allocation may rest; so may who never counted
    a step."""
    job_id, progress = job.job.job_id, job.progress
    age_s = min(job.run_age_s, *(dead_for_s(rank) for rank in dead))
    finding = replace(finding, duration_s=age_s)
    if progress is None or not job.job.is_batch or has_ended(job):
        return finding
    if has_stepped_since(job, age_s):
        return finding.ok(f"job {job_id} makes steps without the ranks that are known")
    others = [each for each in job.processes if each.alive]
    counted = any(each.process.io_bytes_s is not None for each in others)
    patience_s = NOBODY_LEFT_S if had_steps_to_make(job) else NOBODY_LEFT_UNSURE_S
    if job.unlisted or age_s < patience_s or not all(is_quiet(each, counted=counted) for each in others):
        return finding
    first = dead[0]
    of = f" of {progress.total_steps}" if progress.total_steps is not None and progress.step_known else ""
    names = ", ".join(sorted({each.process.comm for each in others})[:4])
    rest = f"what is left of it ({names}) does nothing" if others else "no process of it is left"
    culprits = _named(dead)
    how = killed or how_they_ended(job, [rank.process.rank for rank in dead], now)
    return finding.bad(
        f"Job {job_id} is {job.job.state}, but no rank is left for {age_s:.0f} s: {describe_all(culprits)} {how} after "
        f"{progress.place}{of}, and {rest}.{last_sentences(job, first, [first], now)}",
        culprits=culprits[:NAMED],
        facts=(
            *(f"{describe(c)} {c.reason}" for c in culprits[:8]),
            *facts_of_ends(job, dead),
            *last_words(job, first),
            f"nothing runs in it any more: scancel {job_id} frees its nodes",
        ),
    )


SPEC = DetectorSpec(
    detect=detect,
    settings=LingeringJob,
    also=(CollectiveHang,),
    severity=Severity.CRITICAL,
    sentence="Processes of the job did not end with the others",
    job_state="cannot end",
    explained_by=STORAGE,
    explains=(IncidentKind.MEMORY_KILL,),
    has_aftermath=False,
    wants_evidence=True,
    ladder=(Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE),
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogRankLost"),
)


# ---------------------------------------------------------------------------------------- a rank that has just exited

RESTING = 0.8  # Share of the survivors' GPUs.
UNSURE_S = 60.0  # So long others may take to leave where the training may be over, as with `srun --wait=60`.

GONE_FOR_S = 3.0  # Since the first report without it: the ends of a job that ends by itself are seen over some seconds.


@each_job
def dead_rank(view: ClusterView, job: JobView) -> Finding:
    """One finding for each running job."""
    job_id, ranks, progress, now = job.job.job_id, job.ranks, job.progress, view.now
    finding, dead = DEAD_RANK.about_job(job_id), job.gone_ranks
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
    """More at once is an ending, or a node; so is half of them."""
    return gone > most_odd(ranks) or 2 * gone >= ranks


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


DEAD_RANK = DetectorSpec(
    kind=IncidentKind.DEAD_RANK,
    detect=dead_rank,
    blames_node=0.9,
    sentence="A rank has ended",
    job_state="has lost a rank",
    explained_by=(*BROKEN, IncidentKind.LINGERING_JOB, IncidentKind.LOG_ERROR),
    not_delayed_by=(IncidentKind.LINGERING_JOB,),
    wants_evidence=True,
    alerts=("SlurmWatchdogJobHangs", "SlurmWatchdogRankLost"),
    doc="""
Fires: a rank has been gone for 3 s, most others have been seen alive since, and no step was made since. Where nothing
shows that there were steps left to make, after a minute.
Names: the rank, and its last log lines; what it wrote into torchelastic's error file, and of several the one that did
so first, or that failed first by the log.
""",
)
