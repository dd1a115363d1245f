"""The sentences of a verdict on stacks: who does what, where all are, what to look at next. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.text import plural
from slurm_watchdog.diagnose.stacks.case import StackCase
from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, RankPlace, call_of, is_resolved, place_of
from slurm_watchdog.diagnose.stacks.ranks import RankAssignment
from slurm_watchdog.diagnose.stacks.waiting import collective_of
from slurm_watchdog.diagnose.stacks.wording import children_of, class_word, culprit_words, fold, people, place_words
from slurm_watchdog.knowledge.stack_frames import CLASSES, Place
from slurm_watchdog.model.evidence import Frame
from slurm_watchdog.model.incidents import Culprit

_DEBUGGER_FILES = late_regex(r"\b(pdb|bdb|cmd|ipdb|IPython|debugpy|pydev\w*)\b")


def who_does(case: StackCase, named: Sequence[RankPlace], *, lower: bool = False) -> str:
    """Whom the sentence is about, what he does, and who waits meanwhile."""
    culprits = [culprit_of(each, case.cast) for each in by_rank(named)]
    who = _they_do(by_rank(named), culprits)
    who = who if lower else who[:1].upper() + who[1:]
    return f"{who}, {waiters(case)}." if case.waiting else f"{who}."


def _they_do(named: Sequence[RankPlace], culprits: Sequence[Culprit]) -> str:
    first, places = culprits[0], {p.place for p in named}
    if len(named) == 1:
        return f"{culprit_words(first, False)} {first.reason}"
    if len(places) == 1 and not any(map(_evaluates, named)):
        where = first.reason.removeprefix(place_words(named[0].place))
        return f"{people(culprits)} {place_words(named[0].place, many=True)}: {culprit_words(first, False)}{where}"
    alike = {p.place: each for p, each in zip(reversed(named), reversed(culprits), strict=True)}
    said = [f"{culprit_words(each, False)} {each.reason}" for each in sorted(alike.values(), key=culprits.index)]
    return f"{people(culprits)} differ: {'; '.join(said[:3])}"


def waiters(case: StackCase) -> str:
    """How many wait, and in what: `and 6 ranks wait in all_reduce, 1 rank is in the backward pass`."""
    if len(case.waiting) == 1:
        alone = collective_of(case.waiting[0])
        does = f"waits in {alone}" if alone else place_words(case.waiting[0].place)
        others = len(case.places) > 1 or case.undumped or case.missing or case.gone
        return f"and the one other that was dumped {does}" if others else f"it {does}"
    in_a_call = [call for p in case.waiting if (call := collective_of(p))]
    names = sorted(set(in_a_call))
    parts = (
        [f"{plural(len(in_a_call), 'rank')} {'wait' if len(in_a_call) > 1 else 'waits'} in {_some(names)}"]
        if names
        else []
    )
    elsewhere = Counter(p.place for p in case.waiting if not collective_of(p))
    first = {p.place: p for p in reversed(case.waiting)}
    parts += [
        f"{plural(number, 'rank')} {_stands(first[place], many=number > 1)}"
        for place, number in sorted(elsewhere.items(), key=lambda item: (-item[1], item[0]))
    ]
    return f"and {', '.join(parts[:3])}{', others elsewhere' if len(parts) > 3 else ''}"


def _stands(p: RankPlace, *, many: bool) -> str:
    """What ranks do that wait in no known call: those in unknown code stand in one and the same function."""
    if p.place is not Place.OTHER or not any(map(is_resolved, p.frames)):
        return place_words(p.place, many=many)
    return f"{'stand' if many else 'stands'} in {call_of(_telling(p))}"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and elsewhere' if len(names) > 3 else ''}"


def where_all_are(case: StackCase, *, lower: bool = False) -> str:
    """Every rank's place, the largest group first; where peers wait in several collectives, which ranks in which."""
    counts: dict[Place, list[RankPlace]] = {}
    for p in case.places:
        counts.setdefault(p.place, []).append(p)
    parts = []
    for place, members in sorted(counts.items(), key=lambda item: (-len(item[1]), item[0])):
        many = len(members) > 1
        who = f"all {len(members)} dumped ranks" if len(counts) == 1 and many else plural(len(members), "rank")
        parts.append(f"{who} {place_words(place, many=many)}{_calls(members)}")
    if case.gone:
        parts.append(f"{plural(len(case.gone), 'rank')} had ended")
    if case.undumped:
        parts.append(f"{len(case.undumped)} could not be dumped")
    text = ", ".join(parts) + "."
    return text if lower else text[:1].upper() + text[1:]


def _calls(members: Sequence[RankPlace]) -> str:
    """` (all_reduce)`, ` (all_gather: 0-3; all_reduce: 4-7)`: what they wait in, and who in what if it differs."""
    by_call: dict[str, list[int]] = {}
    for p in members:
        if call := _short_call(p):
            by_call.setdefault(call, []).append(p.rank)
    calls = sorted(by_call)
    if not calls:
        return ""
    split = members[0].place in WAITS_FOR_PEERS and 1 < len(calls) <= 3 and all(p.rank >= 0 for p in members)
    shown = [f"{call}: {fold(by_call[call])}" if split else call for call in calls[:3]]
    return f" ({('; ' if split else ', ').join(shown)}{', …' if len(calls) > 3 else ''})"


def _short_call(p: RankPlace) -> str:
    if p.place in WAITS_FOR_PEERS and collective_of(p):
        return collective_of(p)
    return next((frame.function for frame in p.frames if is_resolved(frame)), "")


def why_no_hang(case: StackCase, outside: Sequence[RankPlace]) -> str:
    """What stands out, and why it convicts nobody."""
    if len(outside) > len(case.waiting):
        return "No rank differs: more ranks are outside the collective than wait in it."
    if len(outside) == len(case.waiting):
        return "No rank differs: as many ranks are outside the collective as wait in it."
    who = _they_do(by_rank(outside), [culprit_of(p, case.cast) for p in by_rank(outside)])
    if case.given.since_last_step_s is not None:
        return f"No hang yet: {who}, which may take longer than {case.given.since_last_step_s:g} s."
    return f"No hang is proven: {who}, which ends on its own as far as one snapshot shows."


def todo(case: StackCase, is_hang: bool, culprits: Sequence[Culprit]) -> tuple[str, ...]:
    """What to look at next, a sentence each."""
    if not case.places and not case.undumped:
        return ()
    found = []
    if case.gone:
        found.append(f"find out how {people(case.gone)} ended: the exit code by sacct, the last lines of the log")
    if culprits and culprits[0].node:
        pid = f" (pid {culprits[0].pid})" if culprits[0].pid else ""
        found.append(
            f"look at {culprits[0].node} first{pid}: /proc/PID/status, wchan and stack, the kernel's log, the mounts"
        )
    if case.missing:
        found.append(f"find out what became of rank {fold(case.missing)}: no dump of it is here")
    if is_hang and not culprits:
        found.append(
            "if no rank differs, it is the network, a GPU or a rank that is not here: NCCL's log, the "
            "fabric's counters, dmesg"
        )
    if not is_hang and case.given.since_last_step_s is None:
        found.append(
            "say how long ago the last step was: --since-last-step S --typical-step S, or add a second "
            "dump taken 20 s later"
        )
    return tuple(found)


def culprit_of(p: RankPlace | Culprit, found: RankAssignment) -> Culprit:
    """Who that is, with what he does as the reason."""
    if isinstance(p, Culprit):
        return p
    does = "evaluates" if _evaluates(p) else place_words(p.place)
    reason = f"{does}, in {call_of(_telling(p))}" if any(map(is_resolved, p.frames)) else does
    if p.holds_gil and p.place is Place.OTHER:
        reason += "; it holds the interpreter's lock"
    if p.gil_held_by and p.place not in WAITS_FOR_PEERS:
        reason += f"; the interpreter's lock is held by {p.gil_held_by}"
    reason += children_of(p, found)
    return Culprit(node=p.node or None, rank=p.rank if p.rank >= 0 else None, pid=p.pid or None, reason=reason)


def _evaluates(p: RankPlace) -> bool:
    """Whether nothing else is known of a rank than that it is in an evaluation."""
    return p.place is Place.OTHER and "evaluation" in p.contexts


def _telling(p: RankPlace) -> Frame:
    """The frame to show: the innermost of its own; at a debugger's prompt the one that is being debugged."""
    if p.place is Place.DEBUGGER:
        ends = [i for i, f in enumerate(p.frames) if place_of(f.function, f.file) is Place.DEBUGGER]
        beyond = (f for f in p.frames[ends[-1] + 1 :] if not _DEBUGGER_FILES.search(f.file)) if ends else ()
        return next(iter(beyond), p.frames[0])
    return next(filter(is_resolved, p.frames), p.frames[0])


def class_of(named: Sequence[RankPlace]) -> str:
    """The class that several share; the interpreter's lock, if all stand for it."""
    if all(p.place in (Place.OTHER, Place.LOCK) and (p.gil_held_by or p.holds_gil) for p in named):
        return CLASSES[Place.GIL]
    if named and all(_evaluates(p) for p in named):
        return "evaluation"
    return class_word(p.place for p in named)


def by_rank(places: Sequence[RankPlace]) -> list[RankPlace]:
    """In the order of ranks; who has none comes last."""
    return sorted(places, key=lambda p: (p.rank if p.rank >= 0 else 1 << 40, p.node, p.pid, p.place))
