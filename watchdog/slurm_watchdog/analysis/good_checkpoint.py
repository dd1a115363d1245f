"""Which checkpoint a restart would resume from, against the step at which a loss went bad. Pure."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import KeepRequest


class Resumes(Struct, frozen=True, kw_only=True):
    """What a restart now would do about a loss that went bad."""

    helps: bool
    """It is known to resume from before, and nothing newer is being written."""
    fact: str
    """A sentence."""
    keep: KeepRequest | None = None
    """The newest complete one from before that was seen on disk."""

    @property
    def good_path(self) -> str:
        """Where that lies, or lay; empty: none was seen."""
        return "" if self.keep is None else self.keep.path


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
    newest, keep = max(steps), _newest_before(job, bad_step)
    if newest >= bad_step:
        return Resumes(
            helps=False,
            fact=f"the newest checkpoint is of step {newest}, and so damaged: go back with the trainer's own option "
            "for an earlier one, such as Megatron's --ckpt-step",
            keep=keep,
        )
    path = f" ({keep.path})" if keep is not None and keep.step == newest else ""
    fact = f"a restart resumes from step {newest}, before it: keep that checkpoint{path}"
    newer = any(each.writing or (each.writing_step or 0) >= bad_step for each in disk)
    return Resumes(helps=not newer, fact=f"{fact}; a newer one is being written" if newer else fact, keep=keep)


def still_from(job: JobView, resumed_from: str) -> str:
    """The checkpoint that the next start resumes from, where the present one was made to resume from `resumed_from`;
    empty: what the trainer takes by itself is of this start. Until then its newest may be one of those from which
    it went back: some trainers take the highest step."""
    progress = job.progress
    saved = job.saved_age_s is not None and job.saved_age_s < job.run_age_s
    steps = [each.step for each in job.checkpoints_on_disk if each.step is not None]
    reached = None if progress is None else progress.known_step
    is_own = saved and reached is not None and all(step <= reached for step in steps)
    return "" if is_own else resumed_from


def _newest_before(job: JobView, bad_step: int) -> KeepRequest | None:
    """The newest one on disk that is from before, also if the trainer has made another one since."""
    found, best = None, -1
    for each in (*job.earlier_checkpoints, *job.checkpoints_on_disk):
        if each.path and each.step is not None and best <= each.step < bad_step:
            found, best = each, each.step
    if found is None or found.path is None:
        return None
    return KeepRequest(
        job_id=job.job.job_id, path=found.path, step=best, size_bytes=found.size_bytes, layout=found.layout
    )
