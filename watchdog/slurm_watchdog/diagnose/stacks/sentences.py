"""The sentences of a verdict on stacks: who does what, where all are, what to look at next. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import fold as fold_names
from slurm_watchdog.base.text import listed, plural
from slurm_watchdog.diagnose.stacks import places as at
from slurm_watchdog.diagnose.stacks.case import StackCase
from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, RankPlace, is_resolved, locate
from slurm_watchdog.diagnose.stacks.ranks import RankAssignment
from slurm_watchdog.diagnose.stacks.vote import VoteGroup
from slurm_watchdog.diagnose.stacks.waiting import collective_of, frames_key
from slurm_watchdog.knowledge.stack_frames import CLASSES, Place
from slurm_watchdog.model.evidence import Frame, ProcessStack
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Role

# Ranks, places and calls in words.
MAX_FRAMES = 40


class StackGroup(Struct):
    """Ranks that stand in the same frames."""

    place: Place
    frames: tuple[str, ...]
    members: tuple[Culprit, ...]  # Who they are; `reason` is empty.
    threads: tuple[tuple[str, int], ...] = ()  # Other threads of these ranks by what they are for.


def place_words(place: Place, *, many: bool = False) -> str:
    """What a rank does, or several do, as the rest of a sentence."""
    words = "runs" if place is Place.OTHER else str(place)
    if not many:
        return words
    verb, _, rest = words.partition(" ")
    plural = "are" if verb == "is" else verb[:-1]
    rest = rest.replace("or reads", "or read").replace("its ", "their ").replace("it started", "they started")
    return f"{plural} {rest}".strip()


def group_words(group: VoteGroup, *, nodes: bool = False) -> str:
    """`1 rank is in the backward pass`, `3 ranks (0, 2, 5 on n1, n2) wait in a collective`: what a group does."""
    size = len(group.ranks)
    who = f" ({few(group.ranks)} on {few(group.nodes)})" if nodes else ""
    return f"{plural(size, 'rank')}{who} {place_words(group.place, many=size != 1)}"


def few(values: Sequence[object]) -> str:
    """The first six, and how many there are in all if that is more."""
    shown = ", ".join(str(value) for value in values[:6])
    return shown if len(values) <= 6 else f"{shown}, … {len(values)} in all"


def class_word(places: Iterable[Place]) -> str:
    """The class that most of these places have; of equals the first by name."""
    counts = Counter(CLASSES[place] for place in places)
    return min(counts, key=lambda word: (-counts[word], word)) if counts else CLASSES[Place.OTHER]


def culprit_words(culprit: Culprit, capital: bool) -> str:
    """`Rank 3 (pid 4711 on n1)`, or what of it is known."""
    rank = f"rank {culprit.rank}" if culprit.rank is not None else ""
    pid = f"pid {culprit.pid}" if culprit.pid else ""
    where = f"on {culprit.node}" if culprit.node else ""
    inner = " ".join(part for part in (pid, where) if part)
    text = (
        f"{rank} ({inner})"
        if rank and inner
        else rank or (f"the process with {inner}" if pid else f"a process {where}".rstrip())
    )
    return text[:1].upper() + text[1:] if capital else text


def people(culprits: Sequence[Culprit]) -> str:
    """`rank 3 (pid 4711 on n1)`, `ranks 9 and 14 (n1, n2)`: all of them."""
    ranks = [each.rank for each in culprits if each.rank is not None]
    if len(culprits) == 1 or len(ranks) < len(culprits):
        more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
        return culprit_words(culprits[0], False) + more
    nodes = fold_names(sorted({each.node for each in culprits if each.node}))
    return listed(ranks, "rank") + (f" ({', '.join(nodes[:4])}{', …' if len(nodes) > 4 else ''})" if nodes else "")


def fold(ranks: Sequence[int]) -> str:
    """`0-3,7`."""
    return ",".join(fold_names(map(str, ranks)))


def group_places(places: Sequence[RankPlace], found: RankAssignment) -> tuple[StackGroup, ...]:
    """Ranks that stand in the same functions, the largest group first."""
    by_key: dict[tuple[Place, tuple[str, ...]], list[RankPlace]] = {}
    for each in places:
        by_key.setdefault((each.place, frames_key(each)), []).append(each)
    stacks = {(d.node, d.pid, d.start_ticks): d for each in found.ranks for d in each.dumps[-1:]}
    groups: list[StackGroup] = []
    for (place, _), members in by_key.items():
        members = by_rank(members)
        shown = [tuple(map(at.frame_key, _shown(p.told_by or p.raw))) for p in members]
        who = tuple(map(_who, members))
        threads = Counter(role for p in members if p.key in stacks for role in _roles(stacks[p.key]))
        groups.append(
            StackGroup(place=place, frames=min(shown)[:MAX_FRAMES], members=who, threads=tuple(sorted(threads.items())))
        )
    return tuple(sorted(groups, key=lambda group: (-len(group.members), group.place, group.frames)))


def _shown(frames: Sequence[Frame]) -> list[Frame]:
    named = [frame for frame in frames if is_resolved(frame)]
    return [frame for frame in named if not at.is_native(frame.file)] or named or list(frames)


def _roles(stack: ProcessStack) -> list[str]:
    return [
        at.thread_role(thread) or "another thread"
        for thread in stack.threads
        if thread.name != "MainThread" and thread.thread_id != stack.pid and thread.frames
    ]


def children_of(place: RankPlace, found: RankAssignment) -> str:
    """Where the workers of a rank stand that waits for its data loader, if they were dumped and say whose they are."""
    if place.place is not Place.DATALOADER or not place.pid:
        return ""
    for what, dump in found.others:
        if what != "a data loader's worker" or dump.parent != place.pid or dump.header.host not in ("", place.node):
            continue
        stack = ProcessStack(
            node=place.node, pid=dump.pid, start_ticks=0, job_id="", role=Role.WORKER, threads=dump.threads
        )
        seen = locate(stack)
        if seen.error is None and seen.frames and seen.place is not Place.DATALOADER:
            return f"; its worker {dump.pid} {place_words(seen.place)}, in {at.call_of(seen.frames[0])}"
    return ""


_DEBUGGER_FILES = late_regex(r"\b(pdb|bdb|cmd|ipdb|IPython|debugpy|pydev\w*)\b")


def who_does(case: StackCase, named: Sequence[RankPlace], *, lower: bool = False) -> str:
    """The rank that the sentence is about, what it does, and which ranks wait meanwhile."""
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
    return f"{'stand' if many else 'stands'} in {at.call_of(_telling(p))}"


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
    """What stands out, and why it convicts no one."""
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
    reason = f"{does}, in {at.call_of(_telling(p))}" if any(map(is_resolved, p.frames)) else does
    if p.holds_gil and p.place is Place.OTHER:
        reason += "; it holds the interpreter's lock"
    if p.gil_held_by and p.place not in WAITS_FOR_PEERS:
        reason += f"; the interpreter's lock is held by {p.gil_held_by}"
    reason += children_of(p, found)
    return _who(p, reason)


def _who(p: RankPlace, reason: str = "") -> Culprit:
    return Culprit(node=p.node or None, rank=p.rank if p.rank >= 0 else None, pid=p.pid or None, reason=reason)


def _evaluates(p: RankPlace) -> bool:
    return p.place is Place.OTHER and "evaluation" in p.contexts


def _telling(p: RankPlace) -> Frame:
    """The frame to show: the innermost of its own; at a debugger's prompt the one that is being debugged."""
    if p.place is Place.DEBUGGER:
        ends = [i for i, f in enumerate(p.frames) if at.place_of(f.function, f.file) is Place.DEBUGGER]
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
