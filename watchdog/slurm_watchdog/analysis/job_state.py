"""How far one job is, and how its ranks ended: whether the last step is made, since when a rank is dead, its
last words. Pure."""

from __future__ import annotations

from slurm_watchdog.model.cluster_view import ErrorLine, JobView, ProcessView

FATAL = frozenset({"traceback", "python_exception", "cuda_oom", "cuda_error"})
"""Signatures of a line with which a training ends, if no step follows."""


def has_ended(job: JobView) -> bool:
    """Whether the training has made its last step, as far as its log says. A count that began again counts to
    the end of an epoch, and the last steps of all may be fewer than stand between two lines."""
    progress = job.progress
    if progress is None:
        return False
    if progress.phase == "finishing":
        return True
    if progress.total_steps is None or progress.begun_anew or progress.step <= 0:
        return False
    return progress.step + progress.stride > progress.total_steps


def had_steps_to_make(job: JobView) -> bool:
    """Whether it is known that the training is not over. A count that began again counts to the end of an epoch."""
    progress = job.progress
    if progress is None or progress.total_steps is None or progress.begun_anew:
        return False
    return progress.step + progress.stride <= progress.total_steps


def has_stepped_since(job: JobView, age_s: float) -> bool:
    """Whether it has made a step since then, however late its lines are read."""
    rose_s = None if job.progress is None else job.progress.last_increase_age_s
    return rose_s is not None and rose_s + job.read_later_s < age_s


def is_unseen(job: JobView) -> bool:
    """Whether nothing can be said of its ranks."""
    return job.job.state != "RUNNING" or not job.ranks or bool(job.silent_nodes)


def made_last_step(job: JobView) -> bool:
    """Whether its count has reached the number of steps that its log tells of."""
    progress = job.progress
    return progress is not None and progress.total_steps is not None and progress.step >= progress.total_steps


def last_error(job: JobView) -> ErrorLine | None:
    """The newest line since the last step with which a training ends."""
    if job.progress is None or job.progress.last_increase_age_s is None:
        return None
    since = [
        each
        for each in job.errors
        if each.event.pattern in FATAL and each.age_s <= min(job.progress.last_increase_age_s, job.progress.age_s)
    ]
    return min(since, key=lambda each: each.age_s, default=None)


def dead_for_s(rank: ProcessView) -> float:
    """Seconds since the rank was last known alive, 0 while it is."""
    if rank.alive:
        return 0.0
    return rank.seen_age_s if rank.gone_s is None else rank.gone_s


def last_words(job: JobView, first: ProcessView) -> list[str]:
    """Facts: error lines that name the dead rank, otherwise the last ones of its node."""
    named = [e for e in job.errors if e.event.rank is not None and e.event.rank == first.process.rank]
    nearby = [e for e in job.errors if e.event.rank is None]
    return [f"last words: {error.event.line}" for error in (named or nearby)[-3:]]


def has_trained(job: JobView) -> bool:
    """Whether an earlier run of the job was seen to make steps: that this one makes none is then no way of logging."""
    return any(run.start_s is not None for run in job.past)
