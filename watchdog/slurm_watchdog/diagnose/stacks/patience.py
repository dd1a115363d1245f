"""How long a rank may stand where it stands before that is no ordinary thing. Pure."""

from __future__ import annotations

from slurm_watchdog.diagnose.stacks.case import StackCase
from slurm_watchdog.diagnose.stacks.places import RankPlace, place_of
from slurm_watchdog.diagnose.stacks.waiting import ENDLESS, LONG, UNHURRIED, is_unhurried
from slurm_watchdog.knowledge.stack_frames import Place

NOT_SAVING = ENDLESS - {Place.FILESYSTEM}
"""Where a rank writes nothing, though its peers wait in the middle of a checkpoint."""


def with_a_step_s(case: StackCase, seconds: float) -> float:
    """`seconds` between two steps, and the step after them, as `progress_limit.with_a_step`; never below the limit of a
    job that trains."""
    return max(case.base_s, seconds + (case.given.typical_step_s or 0.0))


def saves_for_s(case: StackCase) -> float:
    """Seconds since the last step that a rank may save or upload for."""
    return with_a_step_s(case, case.given.limits.checkpoint_floor)


def patience_is_over(case: StackCase, p: RankPlace) -> bool:
    """Whether more time has passed since the last step than such a place may take: as `limit_by_stacks` has it."""
    since_s, limits = case.given.since_last_step_s, case.given.limits
    if since_s is None or since_s < case.base_s:
        return False
    saving = any(place_of(f.function, f.file) in UNHURRIED for f in p.raw) or any(
        is_unhurried(each) for each in case.outside
    )
    saving = saving or (p.place not in NOT_SAVING and peers_save(case))
    if p.place in UNHURRIED or saving:
        return since_s >= saves_for_s(case)
    if p.place in LONG or ("evaluation" in p.contexts and p.place not in ENDLESS):
        return since_s >= with_a_step_s(case, limits.evaluation_floor)
    if "startup" in p.contexts:
        return since_s >= with_a_step_s(case, limits.startup_grace)
    return True


def peers_save(case: StackCase) -> bool:
    """Whether those who wait do so in the middle of a checkpoint, as a rule: who copies or starts something then may be
    writing it, whatever its function is called."""
    return 2 * sum(map(is_unhurried, case.waiting)) > len(case.waiting)
