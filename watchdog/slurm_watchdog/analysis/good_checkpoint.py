"""Which checkpoint a restart would resume from, against the step at which a loss went bad. Pure."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.cluster_view import JobView


class Resumes(Struct, frozen=True, kw_only=True):
    """What a restart now would do about a loss that went bad."""

    helps: bool
    """It is known to resume from before, and nothing newer is being written."""
    fact: str
    """A sentence."""


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
    newest = max(steps)
    if newest >= bad_step:
        return Resumes(
            helps=False,
            fact=f"the newest checkpoint is of step {newest}, and so damaged: go back with the trainer's own option "
            "for an earlier one, such as Megatron's --ckpt-step",
        )
    path = next((each.path for each in disk if each.step == newest and each.path), None)
    fact = f"a restart resumes from step {newest}, before it: keep that checkpoint{f' ({path})' if path else ''}"
    newer = any(each.writing or (each.writing_step or 0) >= bad_step for each in disk)
    return Resumes(helps=not newer, fact=f"{fact}; a newer one is being written" if newer else fact)
