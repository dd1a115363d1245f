"""What a set of stacks says: a hang or none, of what class, who keeps the others waiting, in one sentence.

The same engine as the live vote (`stacks.sides`, `stack_places.locate`), for dumps that somebody sends:
mostly one of each rank, without a clock. So a hang is stated only if the time since the last step says so, or
several dumps that are alike, or the stacks themselves prove it: a debugger's prompt, a teardown, everybody in
a collective but a few in a place that does not end by itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.stacks.case import Options, StackCase, case_of
from slurm_watchdog.diagnose.stacks.places import (
    WAITS_FOR_PEERS,
    RankPlace,
    call_of,
    is_known_by_name_alone,
    is_native,
    is_of_kernel,
    place_of,
)
from slurm_watchdog.diagnose.stacks.ranks import RankAssignment, assign_ranks
from slurm_watchdog.diagnose.stacks.sentences import (
    by_rank,
    class_of,
    culprit_of,
    todo,
    waiters,
    where_all_are,
    who_does,
    why_no_hang,
)
from slurm_watchdog.diagnose.stacks.topology import late_replica, odd_in_tensor_group
from slurm_watchdog.diagnose.stacks.waiting import (
    ENDLESS,
    LONG,
    UNHURRIED,
    collective_of,
    is_unhurried,
    odd_one,
    suspects,
)
from slurm_watchdog.diagnose.stacks.wording import StackGroup, class_word, culprit_words, fold, group_places
from slurm_watchdog.knowledge.stack_frames import CLASSES, MOMENTARY, Place
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.parse.stacks.dump import Dump

UNHURRIED_S: Final = 1800.0
UNHURRIED_STEPS: Final = 10.0
"""One rank may save or upload, and all may evaluate, for half an hour or ten steps: CASEBOOK, healthy things."""

STARTUP_S: Final = 3600.0
"""Start-up, compilation and the building of an index take minutes to an hour."""

MAX_CULPRITS: Final = 3
"""So many ranks may stand in a place that does not end by itself for one snapshot to prove a hang; if they
share a node, any number that is a minority."""

NOT_SAVING: Final = ENDLESS - {Place.FILESYSTEM}
"""Where a rank writes nothing, though its peers wait in the middle of a checkpoint."""

_ROOTED: Final = re.compile(
    r"_?(broadcast|bcast|scatter|gather|reduce)(_object(_list)?|_data|_coalesced)?$", re.IGNORECASE
)


class StackVerdict(Struct, frozen=True, kw_only=True):
    """The answer."""

    ranks: int
    dumped: int
    missing: tuple[int, ...] = ()
    groups: tuple[StackGroup, ...] = ()
    is_hang: bool = False
    cls: str = "working"
    culprits: tuple[Culprit, ...] = ()
    summary: str = ""
    odd: tuple[Culprit, ...] = ()
    """Ranks that stand elsewhere than the others wait, where that convicts nobody."""
    undumped: tuple[Culprit, ...] = ()
    others: tuple[tuple[str, int], ...] = ()
    """Processes that hold no rank, by what they are."""
    todo: tuple[str, ...] = ()


_Ruling = tuple[bool, str, Sequence[RankPlace | Culprit], str]
"""(is it a hang, class, culprits, what the sentence says)."""


def diagnose_dumps(dumps: Sequence[Dump], given: Options | None = None) -> StackVerdict:
    """What the dumps say. Given every dump that could be read, in any order."""
    given = given or Options()
    case = case_of(assign_ranks(dumps, given.ranks), given, [dump.command for dump in dumps if dump.command])
    is_hang, cls, named, sentence = _rule(case)
    culprits = tuple(culprit_of(each, case.cast) for each in named) if is_hang else ()
    suspects = {(each.node, each.rank, each.pid) for each in culprits}
    odd = tuple(
        c for p in by_rank(case.outside) if (((c := culprit_of(p, case.cast)).node, c.rank, c.pid)) not in suspects
    )  # fmt: skip
    return StackVerdict(
        ranks=case.cast.world or len(case.cast.ranks),
        dumped=len(case.places),
        missing=case.missing,
        groups=group_places(case.places, case.cast),
        is_hang=is_hang,
        cls=cls,
        culprits=culprits,
        summary=sentence,
        odd=odd if not culprits and len(odd) <= len(case.waiting) else (),
        undumped=case.undumped,
        others=_count_others(case.cast),
        todo=todo(case, is_hang, culprits),
    )


def _rule(case: StackCase) -> _Ruling:
    if not case.places:
        return _nothing_dumped(case)
    ruling = _with_a_prompt(case) or (_with_waiting(case) if case.waiting else _without_waiting(case))
    is_hang, cls, _, _ = ruling
    evaluating = sum("evaluation" in p.contexts for p in case.places)
    if (
        not is_hang
        and cls in ("working", "device_wait", "backward", "collective")
        and 2 * evaluating > len(case.places)
    ):
        cls = "evaluation"
        ruling = (False, cls, ruling[2], ruling[3])
    if case.recent:
        since, base = case.given.since_last_step_s, case.base_s
        return (
            False, cls, (),
            f"No hang: the last step was {since:g} s ago, and below {base:g} s (60 s or three typical "
            "steps) nothing is one. "
            f"{where_all_are(case)}",
        )  # fmt: skip
    if case.repeated is False and not (is_hang and cls == "debugger"):
        return False, "working", (), f"No hang: ranks moved between the dumps. {where_all_are(case)}"
    return ruling


def _nothing_dumped(case: StackCase) -> _Ruling:
    many = len(case.undumped)
    if not many:
        whom = ", ".join(sorted({what for what, _ in case.cast.others}))
        return False, "undumpable", (), f"No process of a rank is among the dumps ({whom}): nobody is named."
    reasons = sorted({each.reason for each in case.undumped})
    return (
        False,
        "undumpable",
        (),
        f"None of {many} processes could be dumped ({'; '.join(reasons[:2])}): nobody is named.",
    )


def _with_a_prompt(case: StackCase) -> _Ruling | None:
    prompt = [p for p in case.places if p.place is Place.DEBUGGER]
    if not prompt:
        return None
    return True, "debugger", prompt, who_does(case, prompt)


def _with_waiting(case: StackCase) -> _Ruling:
    """Somebody waits for peers."""
    outside = list(case.outside)
    if not outside:
        return _nobody_outside(case)
    if 2 * sum(p.place is Place.TEARDOWN for p in case.places) > len(case.places):
        return _with_teardown(case)
    proven = suspects([p for p in outside if _proves_hang(case, p)])
    clocked = case.late or bool(case.repeated)
    few = len(outside) < len(case.waiting) or (clocked and not case.crowd)
    same = len({p.place for p in outside}) == 1
    if not few and not (same and case.late and outside[0].place in ENDLESS):
        proven = []
    if proven:
        return True, class_of(proven), proven, who_does(case, proven)
    hang = case.late and not few and all(_patience_is_over(case, p) for p in suspects(outside))
    cls = class_of(outside)
    if hang:
        return True, cls, (), f"Nobody can be named: {where_all_are(case, lower=True)}"
    return False, cls, (), f"{why_no_hang(case, outside)} {where_all_are(case)}"


def _proves_hang(case: StackCase, p: RankPlace) -> bool:
    """Whether one rank outside is to be named, by time, by dumps that are alike, or by its place alone."""
    if case.given.since_last_step_s is not None:
        return _patience_is_over(case, p)
    if case.repeated:
        return p.place not in UNHURRIED | LONG and "startup" not in p.contexts
    return _proves(case, p)


def _proves(case: StackCase, p: RankPlace) -> bool:
    """One snapshot, no clock: everybody else waits in a collective, and this place does not end by itself."""
    outside = case.outside
    if len(case.missing) > len(case.waiting):
        return False
    if any(each.place not in WAITS_FOR_PEERS or each.place is Place.RENDEZVOUS for each in case.waiting):
        return False
    together = len({each.node for each in outside}) == 1 and len({each.node for each in case.places}) > 1
    few = len(outside) < len(case.waiting) and (len(outside) <= MAX_CULPRITS or together)
    if not few or p.place not in ENDLESS or "startup" in p.contexts:
        return False
    if p.place is Place.DATALOADER:
        return p.raw[:1] != p.frames[:1]  # it waits in a queue; what loads in the process itself works
    if p.place is Place.FILESYSTEM and any(place_of(f.function, f.file) is Place.DATALOADER for f in p.raw):
        return False  # so does what reads or decodes a sample there
    if p.place in (Place.FILESYSTEM, Place.LOCK) and is_known_by_name_alone(p):
        return False
    if p.place is Place.FILESYSTEM and _peers_save(case):
        return False
    innermost = [f for f in p.raw if not is_native(f.file)][:4]
    return not any(_is_momentary(f.function, f.file) for f in innermost)


@lru_cache(maxsize=4096)
def _is_momentary(function: str, file: str) -> bool:
    name = function.rpartition(".")[2]
    return any(re.fullmatch(f, name) and re.fullmatch(p, file) for f, p in MOMENTARY)


def _patience_is_over(case: StackCase, p: RankPlace) -> bool:
    """Whether more time has passed since the last step than such a place may take."""
    since_s, typical_s = case.given.since_last_step_s, case.given.typical_step_s or 0.0
    if since_s is None or since_s < case.base_s:
        return False
    unhurried_s = max(UNHURRIED_S, UNHURRIED_STEPS * typical_s)
    saving = any(place_of(f.function, f.file) in UNHURRIED for f in p.raw) or any(
        is_unhurried(each) for each in case.outside
    )
    saving = saving or (p.place not in NOT_SAVING and _peers_save(case))
    if p.place in LONG or "startup" in p.contexts:
        return since_s >= max(STARTUP_S, unhurried_s)
    evaluates = "evaluation" in p.contexts and p.place not in ENDLESS
    if p.place in UNHURRIED or saving or evaluates:
        return since_s >= unhurried_s
    return True


def _peers_save(case: StackCase) -> bool:
    """Whether those who wait do so in the middle of a checkpoint, as a rule: who copies or starts something then may be
    writing it, whatever its function is called."""
    return 2 * sum(map(is_unhurried, case.waiting)) > len(case.waiting)


def _nobody_outside(case: StackCase) -> _Ruling:
    """All dumped ranks wait for each other."""
    all_dumped = 0 < case.cast.world <= len(case.places)
    alone = case.undumped[0] if len(case.undumped) == 1 and not all_dumped else None
    starting = all(p.place is Place.RENDEZVOUS or "startup" in p.contexts for p in case.waiting)
    cls = "rendezvous" if starting else class_word(p.place for p in case.waiting)
    late = any(_patience_is_over(case, p) for p in case.waiting)
    collective = all(p.place in WAITS_FOR_PEERS for p in case.waiting)
    if alone is not None and collective and not starting:
        named = replace(alone, reason=f"suspect: it alone could not be dumped ({alone.reason}), and all others wait")
        return (
            True,
            "undumpable",
            (named,),
            f"{culprit_words(named, True)} is suspect: it alone could not be dumped ({alone.reason}), {waiters(case)}.",
        )
    odd = odd_one(case.waiting, len(case.places) + len(case.undumped) + len(case.missing))
    if odd is not None and not starting and (case.late or case.repeated or not _may_be_ahead(case.waiting)):
        other = next(p for p in case.waiting if p is not odd)
        return _mismatch(case, odd, f"{len(case.waiting) - 1} others ({collective_of(other) or 'the backward pass'})")
    by_topology = _by_topology(case) if not starting else None
    if by_topology is not None:
        return by_topology
    sentence = f"No rank stands out: {where_all_are(case, lower=True)}"
    lost = _lost(case) if collective and not starting else None
    if lost is not None:
        sentence = f"{culprit_words(lost, True)} is suspect: {lost.reason.removeprefix('suspect: ')}, {waiters(case)}."
        return True, "missing_rank", (lost,), sentence
    if case.missing and collective and not starting:
        many = len(case.missing) > 1
        who = f"{'Ranks' if many else 'Rank'} {fold(case.missing)} {'are' if many else 'is'}"
        sentence = (
            f"{who} missing from the dumps, {waiters(case)}. "
            f"Nobody is named: look at the missing {'ones' if many else 'one'} first."
        )
        return (late or case.given.since_last_step_s is None, "missing_rank", (), sentence)
    if starting and case.missing:
        missing = f"Missing: {'ranks' if len(case.missing) > 1 else 'rank'} {fold(case.missing)}."
        sentence = f"Start-up: {where_all_are(case, lower=True)} {missing}"
    hang = late or (bool(case.repeated) and collective and not starting and case.given.since_last_step_s is None)
    return hang, cls, (), sentence


def _may_be_ahead(waiting: Sequence[RankPlace]) -> bool:
    """Whether ranks wait in a collective that its root, or all but its root, may leave before the others: for a moment
    one rank is in the next one then, in every healthy job. Or in what has a collective's name, and may be none."""
    return any(_ROOTED.match(collective_of(p)) or is_known_by_name_alone(p) for p in waiting)


def _by_topology(case: StackCase) -> _Ruling | None:
    """All wait, and which ranks wait together is known: a rank that left its tensor-parallel group, or a pipeline
    that has not finished.

    Ranks that train look so for a moment, too: time, or dumps that are alike, have to say that they do not.
    """
    if case.topology is None or not (case.late or case.repeated):
        return None
    odd = odd_in_tensor_group(case.waiting, case.topology)
    if odd is not None:
        peers = next(
            collective_of(p)
            for p in case.waiting
            if p is not odd and case.topology.tensor_group(p.rank) == case.topology.tensor_group(odd.rank)
        )
        return _mismatch(case, odd, f"{case.topology.tensor - 1} others of its tensor-parallel group ({peers})")
    late = late_replica(case.waiting, case.topology)
    if late:
        ranks = ", ".join(str(p.rank) for p in late[:16])
        sentence = (
            "Nobody can be named: the pipeline of one copy of the model has not finished, and all other "
            f"copies wait for it. Ranks {ranks} of it "
            f"wait for each other: look at the links between these first. {where_all_are(case)}"
        )
        return True, CLASSES[Place.P2P], (), sentence
    return None


def _mismatch(case: StackCase, odd: RankPlace, others: str) -> _Ruling:
    sentence = (
        f"{culprit_words(culprit_of(odd, case.cast), True)} waits in another collective ({collective_of(odd)}) than "
        f"the {others}: the calls do not match, in {call_of(odd.frames[0])}."
    )
    return True, "collective_mismatch", (odd,), sentence


def _lost(case: StackCase) -> Culprit | None:
    """The only rank of which there is no dump: its number is missing, or one node has one dump less than all
    the others."""
    if len(case.missing) == 1:
        return Culprit(rank=case.missing[0], reason="suspect: there is no dump of it")
    numbered = any(each.rank is not None for each in case.cast.ranks)
    if numbered or case.undumped or case.cast.world != len(case.cast.ranks) + 1:
        return None
    counts = Counter(each.host for each in case.cast.ranks)
    fewest, most = min(counts.values()), max(counts.values())
    short = [host for host, number in counts.items() if number == fewest]
    if len(counts) < 3 or "" in counts or len(short) != 1 or most != fewest + 1:
        return None
    reason = f"suspect: there is no dump of it, {fewest} from that node and {most} from every other"
    return Culprit(node=short[0], reason=reason)


def _without_waiting(case: StackCase) -> _Ruling:
    """Nobody is seen to wait for a peer."""
    places = case.places
    cls = class_word(p.place for p in places)
    if any(p.place is Place.TEARDOWN for p in places):
        return _with_teardown(case)
    if len(places) == 1 and case.cast.world <= 1:
        only = places[0]
        hang = (
            (case.late or bool(case.repeated))
            and only.place in ENDLESS
            and (not case.late or _patience_is_over(case, only))
        )
        return hang, cls, [only] if hang else [], f"{who_does(case, [only])}"
    stuck = [p for p in places if p.place in (Place.FILESYSTEM, Place.DEVICE)]
    if 0 < 2 * len(stuck) < len(places) and all(is_of_kernel(p.raw) for p in places):
        over = [p for p in stuck if _waits_too_long_in_kernel(case, p)]
        if over:
            return True, class_of(over), over, who_does(case, over)
    alike = len({p.place for p in places}) == 1 and places[0].place is not Place.OTHER
    hang = case.late and alike and all(_patience_is_over(case, p) for p in places)
    if any(p.place in LONG or "startup" in p.contexts for p in places) and not hang:
        return (
            False,
            cls if cls != "working" else "startup",
            (),
            f"No hang is shown: {where_all_are(case, lower=True)}",
        )
    return hang, cls, (), f"No rank stands out: {where_all_are(case, lower=True)}"


def _waits_too_long_in_kernel(case: StackCase, p: RankPlace) -> bool:
    """What a rank writes cannot be seen there: it may be a checkpoint."""
    since_s = case.given.since_last_step_s or 0.0
    unhurried_s = max(UNHURRIED_S, UNHURRIED_STEPS * (case.given.typical_step_s or 0.0))
    return case.late and (p.place is Place.DEVICE or since_s >= unhurried_s)


def _with_teardown(case: StackCase) -> _Ruling:
    """Ranks end, and these wait for each other, too: the few that still do something else are behind."""
    teardown = [p for p in case.places if p.place is Place.TEARDOWN]
    rest = [p for p in case.places if p.place is not Place.TEARDOWN]
    stuck = [p for p in rest if p.place in ENDLESS or (case.late and _patience_is_over(case, p))]
    named = stuck if rest and len(rest) < len(teardown) else []
    if not rest and len(teardown) == 1 and case.cast.world > 1:
        named = teardown
    if named:
        alone = replace(case, waiting=())
        return True, "teardown", named, f"The ranks end, and {who_does(alone, named, lower=True)}"
    return (
        len(teardown) * 2 > len(case.places),
        "teardown",
        (),
        f"No rank stands out: {where_all_are(case, lower=True)}",
    )


def _count_others(found: RankAssignment) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for what, _ in found.others:
        counts[what] = counts.get(what, 0) + 1
    return tuple(sorted(counts.items()))
