"""What a set of stacks says: a hang or none, of what class, who keeps the others waiting, in one sentence.

The same engine as the live vote (`stacks.sides`, `stack_places.locate`), for dumps that someone sends:
mostly one of each rank, without a clock. So a hang is stated only if the time since the last step says so, or
several dumps that are alike, or the stacks themselves prove it: a debugger's prompt, a teardown, everybody in
a collective but a few in a place that does not end by itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.stacks import places as where
from slurm_watchdog.diagnose.stacks import sentences as say
from slurm_watchdog.diagnose.stacks.case import Options, Ruling, StackCase, case_of, late_replica, odd_in_tensor_group
from slurm_watchdog.diagnose.stacks.nobody_waits import (
    alone_elsewhere,
    alone_in_its_call,
    patience_is_over,
    peers_save,
    with_teardown,
    without_waiting,
)
from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, RankPlace, locate
from slurm_watchdog.diagnose.stacks.ranks import RankAssignment, assign_ranks
from slurm_watchdog.diagnose.stacks.sentences import todo
from slurm_watchdog.diagnose.stacks.waiting import ENDLESS, LONG, UNHURRIED, collective_of, odd_one, suspects
from slurm_watchdog.knowledge.remediation_hints import Hint, hints_for
from slurm_watchdog.knowledge.stack_frames import CLASSES, MOMENTARY, Place
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.parse.stacks.headers import Dump

MAX_CULPRITS = 3
"""So many ranks may stand in a place that does not end by itself for one snapshot to prove a hang; if they
share a node, any number that is a minority."""
GROUPS_READ = 40  # For hints.

_ROOTED = late_regex(r"_?(broadcast|bcast|scatter|gather|reduce)(_object(_list)?|_data|_coalesced)?$", re.IGNORECASE)


class StackVerdict(Struct):
    """The answer."""

    ranks: int
    dumped: int
    missing: tuple[int, ...] = ()
    groups: tuple[say.StackGroup, ...] = ()
    is_hang: bool = False
    cls: str = "working"
    culprits: tuple[Culprit, ...] = ()
    summary: str = ""
    odd: tuple[Culprit, ...] = ()  # Ranks that stand elsewhere than the others wait, where that convicts no one.
    undumped: tuple[Culprit, ...] = ()
    gone: tuple[Culprit, ...] = ()  # Whose process had ended.
    others: tuple[tuple[str, int], ...] = ()  # Processes that hold no rank, by what they are.
    todo: tuple[str, ...] = ()


def diagnose_dumps(dumps: Sequence[Dump], given: Options | None = None) -> StackVerdict:
    """What the dumps say. Given every dump that could be read, in any order."""
    given = given or Options()
    case = case_of(assign_ranks(dumps, given.ranks), given, [dump.command for dump in dumps if dump.command])
    is_hang, cls, named, sentence = _rule(case)
    culprits = tuple(say.culprit_of(each, case.cast) for each in named) if is_hang else ()
    suspects = {(each.node, each.rank, each.pid) for each in culprits}
    apart = alone_in_its_call(case)
    elsewhere = [
        say.culprit_of(p, case.cast)
        for p in ([apart[0]] if apart is not None else say.by_rank(case.outside or alone_elsewhere(case)))
    ]
    odd = tuple(each for each in elsewhere if (each.node, each.rank, each.pid) not in suspects)
    return StackVerdict(
        ranks=case.cast.world or len(case.cast.ranks),
        dumped=len(case.places),
        missing=case.missing,
        groups=say.group_places(case.places, case.cast),
        is_hang=is_hang,
        cls=cls,
        culprits=culprits,
        summary=sentence,
        odd=odd if not culprits and len(odd) <= max(len(case.waiting), 1) else (),
        undumped=case.undumped,
        gone=case.gone,
        others=_count_others(case.cast),
        todo=todo(case, is_hang, culprits),
    )


def _rule(case: StackCase) -> Ruling:
    if not case.places:
        return _nothing_dumped(case)
    ruling = _with_a_prompt(case) or (_with_waiting(case) if case.waiting else without_waiting(case))
    is_hang, cls, _, _ = ruling
    evaluating = sum("evaluation" in p.contexts for p in case.places)
    if (
        not is_hang
        and cls in ("working", "device_wait", "backward", "collective")
        and 2 * evaluating > len(case.places)
    ):
        cls = "evaluation"
        ruling = (False, cls, *ruling[2:])
    if case.recent:
        since, base, limits = case.given.since_last_step_s, case.base_s, case.given.limits
        below = f"below {base:g} s ({limits.floor:g} s or {limits.factor:g} typical steps) nothing is one"
        return False, cls, (), f"No hang: the last step was {since:g} s ago, and {below}. {say.where_all_are(case)}"
    if case.repeated is False and not (is_hang and cls == "debugger"):
        return False, "working", (), f"No hang: ranks moved between the dumps. {say.where_all_are(case)}"
    return ruling


def _nothing_dumped(case: StackCase) -> Ruling:
    many = len(case.undumped)
    if not many and case.gone:
        return False, "undumpable", (), f"All {len(case.gone)} processes had ended: no rank is identified."
    if not many:
        kinds = ", ".join(sorted({what for what, _ in case.cast.others}))
        return False, "undumpable", (), f"No process of a rank is among the dumps ({kinds}): no rank is identified."
    reasons = sorted({each.reason for each in case.undumped})
    said = f"None of {many} processes could be dumped ({'; '.join(reasons[:2])}): no rank is identified."
    return False, "undumpable", (), said


def _with_a_prompt(case: StackCase) -> Ruling | None:
    prompt = [p for p in case.places if p.place is Place.DEBUGGER]
    if not prompt:
        return None
    return True, "debugger", prompt, say.who_does(case, prompt)


def _with_waiting(case: StackCase) -> Ruling:
    outside = list(case.outside)
    if not outside:
        return _nobody_outside(case)
    if 2 * sum(p.place is Place.TEARDOWN for p in case.places) > len(case.places):
        return with_teardown(case)
    proven = suspects([p for p in outside if _proves_hang(case, p)])
    clocked = case.late or bool(case.repeated)
    few = len(outside) < len(case.waiting) or (clocked and not case.crowd)
    same = len({p.place for p in outside}) == 1
    if not few and not (same and case.late and outside[0].place in ENDLESS):
        proven = []
    if proven:
        return True, say.class_of(proven), proven, say.who_does(case, proven)
    hang = case.late and not few and all(patience_is_over(case, p) for p in suspects(outside))
    cls = say.class_of(outside)
    if (apart := _alone(case)) is not None:
        return apart
    if hang:
        return True, cls, (), f"No rank can be identified: {say.where_all_are(case, lower=True)}"
    return False, cls, (), f"{say.why_no_hang(case, outside)} {say.where_all_are(case)}"


def _proves_hang(case: StackCase, p: RankPlace) -> bool:
    """Whether one rank outside is to be named, by time, by dumps that are alike, or by its place alone."""
    if case.given.since_last_step_s is not None:
        return patience_is_over(case, p)
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
    if p.place is Place.FILESYSTEM and any(where.place_of(f.function, f.file) is Place.DATALOADER for f in p.raw):
        return False  # so does what reads or decodes a sample there
    if p.place in (Place.FILESYSTEM, Place.LOCK) and where.is_known_by_name_alone(p):
        return False
    if p.place is Place.FILESYSTEM and peers_save(case):
        return False
    innermost = [f for f in p.raw if not where.is_native(f.file)][:4]
    return not any(_is_momentary(f.function, f.file) for f in innermost)


@lru_cache(maxsize=4096)
def _is_momentary(function: str, file: str) -> bool:
    name = function.rpartition(".")[2]
    return any(re.fullmatch(f, name) and re.fullmatch(p, file) for f, p in MOMENTARY)


def _nobody_outside(case: StackCase) -> Ruling:
    all_dumped = 0 < case.cast.world <= len(case.places)
    alone = case.undumped[0] if len(case.undumped) == 1 and not all_dumped else None
    starting = all(p.place is Place.RENDEZVOUS or "startup" in p.contexts for p in case.waiting)
    cls = "rendezvous" if starting else say.class_word(p.place for p in case.waiting)
    late = any(patience_is_over(case, p) for p in case.waiting)
    collective = all(p.place in WAITS_FOR_PEERS for p in case.waiting)
    if alone is not None and collective and not starting:
        named = replace(alone, reason=f"suspect: it alone could not be dumped ({alone.reason}), and all others wait")
        who = say.culprit_words(named, True)
        sentence = f"{who} is suspect: it alone could not be dumped ({alone.reason}), {say.waiters(case)}."
        return True, "undumpable", (named,), sentence
    if case.gone and collective and not starting:
        who = say.people(case.gone)
        has = "has" if len(case.gone) == 1 else "have"
        return True, "missing_rank", case.gone, f"{who[:1].upper()}{who[1:]} {has} ended, {say.waiters(case)}."
    if collective and (held := _without_its_interpreter(case)) is not None:
        sentence = f"{say.culprit_words(held, True)} cannot continue: {held.reason}, {say.waiters(case)}."
        return True, CLASSES[Place.GIL], (held,), sentence
    odd = odd_one(case.waiting, len(case.places) + len(case.undumped) + len(case.missing))
    if odd is not None and not starting and (case.late or case.repeated or not _may_be_ahead(case.waiting)):
        other = next(p for p in case.waiting if p is not odd)
        return _mismatch(case, odd, f"{len(case.waiting) - 1} others ({collective_of(other) or 'the backward pass'})")
    by_topology = _by_topology(case) if not starting else None
    if by_topology is not None:
        return by_topology
    apart = _alone(case) if not starting else None
    if apart is not None:
        return apart
    sentence = f"No rank differs: {say.where_all_are(case, lower=True)}"
    lost = _lost(case) if collective and not starting else None
    if lost is not None:
        who, why = say.culprit_words(lost, True), lost.reason.removeprefix("suspect: ")
        return True, "missing_rank", (lost,), f"{who} is suspect: {why}, {say.waiters(case)}."
    if case.missing and collective and not starting:
        many = len(case.missing) > 1
        who = f"{'Ranks' if many else 'Rank'} {say.fold(case.missing)} {'are' if many else 'is'}"
        sentence = (
            f"{who} missing from the dumps, {say.waiters(case)}. "
            f"No rank is identified: look at the missing {'ones' if many else 'one'} first."
        )
        return (late or case.given.since_last_step_s is None, "missing_rank", (), sentence)
    if starting and case.missing:
        missing = f"Missing: {'ranks' if len(case.missing) > 1 else 'rank'} {say.fold(case.missing)}."
        sentence = f"Start-up: {say.where_all_are(case, lower=True)} {missing}"
    hang = late or (bool(case.repeated) and collective and not starting and case.given.since_last_step_s is None)
    return hang, cls, (), sentence


def _without_its_interpreter(case: StackCase) -> Culprit | None:
    """The only rank of which another thread holds the interpreter's lock, the same in the same function in every dump:
    it waits like the others, and could not come back from that."""
    held = []
    for each in case.cast.ranks:
        holders = {locate(dump).gil_held_by for dump in each.dumps}
        if len(each.dumps) > 1 and len(holders) == 1 and (holder := holders.pop()) is not None:
            reason = f"its interpreter's lock is held by {holder}"
            held.append(Culprit(node=each.host or None, rank=each.rank, pid=each.pid or None, reason=reason))
    return held[0] if len(held) == 1 else None


def _alone(case: StackCase) -> Ruling | None:
    found = alone_in_its_call(case)
    if found is None:
        return None
    odd, others = found
    does = f"the {len(case.places) - 1} others {others if ' ' in others else f'in {others}'}"
    who = say.culprit_words(say.culprit_of(odd, case.cast), True)
    if (case.late or case.repeated) and odd.place is Place.COLLECTIVE and " " not in others:
        sentence = f"The calls do not match: {who[:1].lower()}{who[1:]} alone waits in {collective_of(odd)}, {does}."
        return True, "collective_mismatch", (), sentence
    hang = case.late and not case.outside
    more = "" if case.late or case.repeated else " A second dump 20 s later shows whether the calls match."
    return (hang, "collective", (), f"{who} alone waits in {collective_of(odd)}, {does}: that proves no fault.{more}")


def _may_be_ahead(waiting: Sequence[RankPlace]) -> bool:
    """Whether ranks wait in a collective that its root, or all but its root, may leave before the others: for a moment
    one rank is in the next one then, in every healthy job. Or in what has a collective's name, and may be none."""
    return any(_ROOTED.match(collective_of(p)) or where.is_known_by_name_alone(p) for p in waiting)


def _by_topology(case: StackCase) -> Ruling | None:
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
            "No rank can be identified: the pipeline of one copy of the model has not finished, and all other "
            f"copies wait for it. Ranks {ranks} of it "
            f"wait for each other: look at the links between these first. {say.where_all_are(case)}"
        )
        return True, CLASSES[Place.P2P], (), sentence
    return None


def _mismatch(case: StackCase, odd: RankPlace, others: str) -> Ruling:
    who = say.culprit_words(say.culprit_of(odd, case.cast), True)
    differs = f"waits in another collective ({collective_of(odd)}) than the {others}"
    sentence = f"{who} {differs}: the calls do not match, in {where.call_of(odd.frames[0])}."
    return True, "collective_mismatch", (odd,), sentence


def _lost(case: StackCase) -> Culprit | None:
    """The only rank of which there is no dump: its number is missing, or a node has one dump less than all others."""
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


def _count_others(found: RankAssignment) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for what, _ in found.others:
        counts[what] = counts.get(what, 0) + 1
    return tuple(sorted(counts.items()))


def document_of(verdict: StackVerdict) -> dict[str, Any]:
    """In the shape of `group-stacks --json`."""

    def person(each: Culprit, *more: str) -> dict[str, Any]:
        return {"rank": each.rank, "host": each.node, "pid": each.pid, **{key: getattr(each, key) for key in more}}

    groups = [
        {
            "frames": group.frames,
            "ranks": [m.rank for m in group.members if m.rank is not None],
            "hosts": sorted({m.node for m in group.members if m.node}),
            "count": len(group.members),
            "place": str(group.place),
            "class": CLASSES[group.place],
            "members": [person(each) for each in group.members],
            "threads": dict(group.threads),
        }
        for group in verdict.groups
    ]
    people = ("culprits", "odd", "undumped", "gone")
    return {
        **{key: getattr(verdict, key) for key in ("ranks", "dumped", "missing", "is_hang", "summary", "todo")},
        **{key: [person(each, "reason") for each in getattr(verdict, key)] for key in people},
        "class": verdict.cls,
        "groups": groups,
        "others": dict(verdict.others),
        "hints": [hint.as_json() for hint in hints_of(verdict)],
    }


def hints_of(verdict: StackVerdict) -> tuple[Hint, ...]:
    """What this usually is and what to try next, from the knowledge of the house. May be wrong for the case,
    and the text says that."""
    if not verdict.is_hang:
        return ()
    text = "\n".join([verdict.summary, *(frame for group in verdict.groups[:GROUPS_READ] for frame in group.frames)])
    return hints_for(verdict.cls, text)
