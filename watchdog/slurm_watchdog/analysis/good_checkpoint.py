"""Which checkpoint a restart would resume from, against the step at which a loss went bad. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Incident, IncidentState
from slurm_watchdog.model.observations import Checkpoint


class Resumes(Struct):
    """What a restart now would do about a loss that went bad."""

    helps: bool  # It is known to resume from before, and nothing newer is being written.
    fact: str  # A sentence.
    good_path: str = ""  # The newest complete one from before that was seen on disk; empty: none of its owner was.


def resumes_before(job: JobView, bad_step: int) -> Resumes:
    """Trainers resume from the newest complete checkpoint: where that is from `bad_step` or later, or is not known, a
    restart does not help."""
    disk = job.checkpoints_on_disk
    steps = [each.step for each in disk if each.step is not None]
    steps += [job.checkpoint.step] if job.checkpoint is not None else []
    if not steps:
        return Resumes(
            helps=False, fact="no complete checkpoint is known: which one a restart resumes from is not either"
        )
    newest, good = max(steps), _newest_before(job, bad_step)
    good_path = "" if good is None or good.path is None else good.path
    if newest >= bad_step:
        last_good = "" if good is None else f"; the last good one that was seen is {good_path}, of step {good.step}"
        return Resumes(
            helps=False,
            fact=f"the newest checkpoint is of step {newest}, and so damaged: go back with the trainer's own option "
            f"for an earlier one, such as Megatron's --ckpt-step{last_good}",
            good_path=good_path,
        )
    path = f" ({good_path})" if good is not None and good.step == newest else ""
    fact = f"a restart resumes from step {newest}, before it: keep that checkpoint{path}"
    newer = any(each.writing or (each.writing_step or 0) >= bad_step for each in disk)
    return Resumes(
        helps=not newer, fact=f"{fact}; a newer one is being written" if newer else fact, good_path=good_path
    )


def resume_from(job: JobView, incidents: Iterable[Incident], before: str) -> str:
    """The checkpoint to name to the job's next start: the last good one of an open incident about its loss, else
    `before`, which was named to the present start, as `_still_from` says; empty: none."""
    job_id = job.job.job_id
    good = (
        each.good_checkpoint
        for each in incidents
        if each.state is IncidentState.FIRING and each.good_checkpoint and job_id in each.job_ids
    )
    return next(good, "") or _still_from(job, before)


def _still_from(job: JobView, before: str) -> str:
    """`before`, until the newest checkpoint is of the present start: until then it may be one of those from which the
    job went back, and some trainers take the highest step."""
    progress = job.progress
    saved = job.saved_age_s is not None and job.saved_age_s < job.run_age_s
    steps = [each.step for each in job.checkpoints_on_disk if each.step is not None]
    reached = None if progress is None else progress.known_step
    is_own = saved and reached is not None and all(step <= reached for step in steps)
    return "" if is_own else before


def _newest_before(job: JobView, bad_step: int) -> Checkpoint | None:
    """The newest one on disk that is from before and the owner's, also if the trainer has made another one since."""
    found, best = None, -1
    for each in (*job.earlier_checkpoints, *job.checkpoints_on_disk):
        if each.path and not each.foreign and each.step is not None and best <= each.step < bad_step:
            found, best = each, each.step
    return found
