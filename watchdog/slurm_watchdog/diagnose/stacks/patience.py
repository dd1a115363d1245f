"""How long a rank may stand where it stands before that is no ordinary thing. Pure."""

from __future__ import annotations

from typing import Final

from slurm_watchdog.diagnose.stacks.case import StackCase
from slurm_watchdog.diagnose.stacks.places import RankPlace, place_of
from slurm_watchdog.diagnose.stacks.waiting import ENDLESS, LONG, UNHURRIED, is_unhurried
from slurm_watchdog.knowledge.stack_frames import Place

UNHURRIED_S: Final = 1800.0
UNHURRIED_STEPS: Final = 10.0
"""One rank may save or upload, and all may evaluate, for half an hour or ten steps: CASEBOOK, healthy things."""

STARTUP_S: Final = 3600.0
"""Start-up, compilation and the building of an index take minutes to an hour."""

NOT_SAVING: Final = ENDLESS - {Place.FILESYSTEM}
"""Where a rank writes nothing, though its peers wait in the middle of a checkpoint."""


def unhurried_s(case: StackCase) -> float:
    """Seconds since the last step that a rank may save or upload for, and all may evaluate."""
    return max(UNHURRIED_S, UNHURRIED_STEPS * (case.given.typical_step_s or 0.0))


def patience_is_over(case: StackCase, p: RankPlace) -> bool:
    """Whether more time has passed since the last step than such a place may take."""
    since_s = case.given.since_last_step_s
    if since_s is None or since_s < case.base_s:
        return False
    saving = any(place_of(f.function, f.file) in UNHURRIED for f in p.raw) or any(
        is_unhurried(each) for each in case.outside
    )
    saving = saving or (p.place not in NOT_SAVING and peers_save(case))
    if p.place in LONG or "startup" in p.contexts:
        return since_s >= max(STARTUP_S, unhurried_s(case))
    evaluates = "evaluation" in p.contexts and p.place not in ENDLESS
    if p.place in UNHURRIED or saving or evaluates:
        return since_s >= unhurried_s(case)
    return True


def peers_save(case: StackCase) -> bool:
    """Whether those who wait do so in the middle of a checkpoint, as a rule: who copies or starts something then may be
    writing it, whatever its function is called."""
    return 2 * sum(map(is_unhurried, case.waiting)) > len(case.waiting)
