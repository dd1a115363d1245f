"""What stacks say where no one is seen to wait for a peer: ranks end, compute, or stand still together. Pure."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from slurm_watchdog.diagnose.stacks import waiting as wait
from slurm_watchdog.diagnose.stacks.case import Ruling, StackCase
from slurm_watchdog.diagnose.stacks.places import RankPlace, is_of_kernel, place_of
from slurm_watchdog.diagnose.stacks.sentences import class_of, class_word, place_words, where_all_are, who_does
from slurm_watchdog.diagnose.stacks.waiting import ENDLESS, LONG, UNHURRIED, is_unhurried
from slurm_watchdog.knowledge.stack_frames import Place

# How long a rank may stand where it stands before that is no ordinary thing.
NOT_SAVING = ENDLESS - {Place.FILESYSTEM}
"""Where a rank writes nothing, though its peers wait in the middle of a checkpoint."""


def with_a_step_s(case: StackCase, seconds: float) -> float:
    """`seconds` and a step, as `progress_limit.with_a_step`; never below the limit of a job that trains."""
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


LEAST_ALIKE = 3  # So many ranks in one place make the only one in another place worth a look.


def without_waiting(case: StackCase) -> Ruling:
    """No one is seen to wait for a peer."""
    places = case.places
    cls = class_word(p.place for p in places)
    if any(p.place is Place.TEARDOWN for p in places):
        return with_teardown(case)
    if len(places) == 1 and case.cast.world <= 1:
        only = places[0]
        hang = only.place in ENDLESS and (patience_is_over(case, only) if case.late else bool(case.repeated))
        return hang, cls, [only] if hang else [], f"{who_does(case, [only])}"
    stuck = [p for p in places if p.place in (Place.FILESYSTEM, Place.DEVICE)]
    if 0 < 2 * len(stuck) < len(places) and all(is_of_kernel(p.raw) for p in places):
        over = [p for p in stuck if _waits_too_long_in_kernel(case, p)]
        if over:
            return True, class_of(over), over, who_does(case, over)
    alike = len({p.place for p in places}) == 1 and places[0].place is not Place.OTHER
    hang = case.late and alike and all(patience_is_over(case, p) for p in places)
    if any(p.place in LONG or "startup" in p.contexts for p in places) and not hang:
        cls = cls if cls != "working" else "startup"
        return False, cls, (), f"No hang is shown: {where_all_are(case, lower=True)}"
    first = "No hang is proven" if alone_elsewhere(case) else "No rank differs"
    return hang, cls, (), f"{first}: {where_all_are(case, lower=True)}"


def alone_elsewhere(case: StackCase) -> list[RankPlace]:
    """The only rank that is not where all others are, at least LEAST_ALIKE of them, while no one is seen to wait for a
    peer: they may wait within the backward pass or for their GPU, whose kernels wait. It proves nothing by itself."""
    counts = Counter(p.place for p in case.places)
    if case.waiting or len(counts) != 2 or len(case.places) <= LEAST_ALIKE or min(counts.values()) > 1:
        return []
    return [p for p in case.places if counts[p.place] == 1]


def alone_in_its_call(case: StackCase) -> tuple[RankPlace, str] | None:
    """The only rank that waits in another call than all the others, and what these do. One dump of each rank proves
    nothing: in a healthy job, too, one rank may be ahead for a moment."""
    if len(case.places) < LEAST_ALIKE or case.missing or case.undumped or case.gone:
        return None
    calls = {p.key: wait.collective_of(p) or place_words(p.place, many=True) for p in case.places}
    counts = Counter(calls.values())
    if len(counts) != 2 or min(counts.values()) > 1:
        return None
    odd = next(p for p in case.places if counts[calls[p.key]] == 1)
    usual = next(p for p in case.places if p is not odd)
    waits = odd.place is Place.COLLECTIVE and usual.place in wait.MAYBE_WAITING | {Place.COLLECTIVE}
    if not waits or wait.is_within(odd, usual) or "startup" in odd.contexts | usual.contexts:
        return None
    return odd, wait.collective_of(usual) or place_words(usual.place, many=True)


def _waits_too_long_in_kernel(case: StackCase, p: RankPlace) -> bool:
    """What a rank writes cannot be seen there: it may be a checkpoint."""
    since_s = case.given.since_last_step_s or 0.0
    return case.late and (p.place is Place.DEVICE or since_s >= saves_for_s(case))


def with_teardown(case: StackCase) -> Ruling:
    """Ranks end, and these wait for each other, too: the few that still do something else are behind."""
    teardown = [p for p in case.places if p.place is Place.TEARDOWN]
    rest = [p for p in case.places if p.place is not Place.TEARDOWN]
    stuck = [p for p in rest if p.place in ENDLESS or (case.late and patience_is_over(case, p))]
    named = stuck if rest and len(rest) < len(teardown) else []
    if not rest and len(teardown) == 1 and case.cast.world > 1:
        named = teardown
    if named:
        alone = replace(case, waiting=())
        return True, "teardown", named, f"The ranks end, and {who_does(alone, named, lower=True)}"
    hang = len(teardown) * 2 > len(case.places)
    return hang, "teardown", (), f"No rank differs: {where_all_are(case, lower=True)}"
