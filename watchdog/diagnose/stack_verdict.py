"""What a set of stacks says: a hang or none, of what class, who keeps the others waiting, in one sentence.

The same engine as the live vote (`stacks.sides`, `stack_places.locate`), for dumps that somebody sends: mostly one of each rank, without a
clock. So a hang is stated only if the time since the last step says so, or several dumps that are alike, or the stacks
themselves prove it: a debugger's prompt, a teardown, everybody in a collective but a few in a place that does not end by itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from watchdog.diagnose.stack_places import WAITS_FOR_PEERS, RankPlace, call_of, is_native, locate, place_of
from watchdog.diagnose.stack_ranks import Cast, RankProcess, cast
from watchdog.diagnose.stack_sides import ENDLESS, LONG, UNHURRIED, collective_of, frames_key, odd_one, sides
from watchdog.diagnose.stack_text import Dump
from watchdog.diagnose.stack_words import (
    children_of,
    class_word,
    count_words,
    fold,
    group_places,
    place_words,
    whom,
)
from watchdog.knowledge.frames import CLASSES, MOMENTARY, Place
from watchdog.model import Culprit, Frame, Value

FLOOR_S: Final = 60.0
TYPICAL_STEPS: Final = 3.0
"""Below max(60 s, three typical steps) since the last step nothing is a hang: the interface says so."""

UNHURRIED_S: Final = 1800.0
UNHURRIED_STEPS: Final = 10.0
"""One rank may save or upload, and all may evaluate, for half an hour or ten steps: CASEBOOK, healthy things."""

STARTUP_S: Final = 3600.0
"""Start-up, compilation and the building of an index take minutes to an hour."""

FEW: Final = 3
"""So many ranks may stand in a place that does not end by itself for one snapshot to prove a hang; if they share a node, any number that is a minority."""


_DEBUGGER_FILES: Final = re.compile(r"\b(pdb|bdb|cmd|ipdb|IPython|debugpy|pydev\w*)\b")


class Given(Value, frozen=True, kw_only=True):
    """What the caller knows besides the stacks."""

    ranks: int | None = None
    since_last_step_s: float | None = None
    typical_step_s: float | None = None


class StackGroup(Value, frozen=True, kw_only=True):
    """Ranks that stand in the same frames."""

    place: Place
    frames: tuple[str, ...]
    members: tuple[Culprit, ...]
    """Who they are; `reason` is empty."""
    threads: tuple[tuple[str, int], ...] = ()
    """Other threads of these ranks by what they are for."""


class Verdict(Value, frozen=True, kw_only=True):
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


class _Case(Value, frozen=True, kw_only=True):
    """All that the rules look at."""

    given: Given
    cast: Cast
    places: tuple[RankPlace, ...]
    undumped: tuple[Culprit, ...]
    missing: tuple[int, ...]
    repeated: bool | None
    """True if several dumps of every rank are alike, False if a rank moved, None if there is one dump of each."""
    waiting: tuple[RankPlace, ...]
    outside: tuple[RankPlace, ...]

    @property
    def base_s(self) -> float:
        return max(FLOOR_S, TYPICAL_STEPS * (self.given.typical_step_s or 0.0))

    @property
    def late(self) -> bool:
        return self.given.since_last_step_s is not None and self.given.since_last_step_s >= self.base_s

    @property
    def recent(self) -> bool:
        return self.given.since_last_step_s is not None and self.given.since_last_step_s < self.base_s


_Ruling = tuple[bool, str, Sequence[RankPlace | Culprit], str]
"""(is it a hang, class, culprits, what the sentence says)."""


def judge(dumps: Sequence[Dump], given: Given | None = None) -> Verdict:
    """What the dumps say. Given every dump that could be read, in any order."""
    given = given or Given()
    case = _case(cast(dumps, given.ranks), given)
    groups = group_places(case.places, case.cast)
    is_hang, cls, named, sentence = _rule(case)
    culprits = tuple(_culprit(each, case.cast) for each in named) if is_hang else ()
    accused = {(each.node, each.rank, each.pid) for each in culprits}
    odd = tuple(
        c for p in _by_rank(case.outside) if (((c := _culprit(p, case.cast)).node, c.rank, c.pid)) not in accused
    )  # fmt: skip
    return Verdict(
        ranks=case.cast.world or len(case.cast.ranks),
        dumped=len(case.places),
        missing=case.missing,
        groups=tuple(StackGroup(place=g[0], frames=g[1], members=g[2], threads=g[3]) for g in groups),
        is_hang=is_hang,
        cls=cls,
        culprits=culprits,
        summary=sentence,
        odd=odd if not culprits and len(odd) <= len(case.waiting) else (),
        undumped=case.undumped,
        others=_count_others(case.cast),
        todo=_todo(case, is_hang, culprits),
    )


def _case(found: Cast, given: Given) -> _Case:
    placed = [(each, locate(each.dumps[-1])) for each in found.ranks if each.dumps]
    places = [place for _, place in placed if place.error is None]
    undumped = [
        Culprit(node=each.host, rank=each.rank, pid=each.pid or None, reason=each.error or "no Python frames")
        for each in found.ranks
        if each.error is not None or any(each is process and p.error for process, p in placed)
    ]
    repeated = _repeated([each for each, place in placed if place.error is None])
    case = _Case(
        given=given, cast=found, places=tuple(places), undumped=tuple(undumped), missing=_missing(found),
        repeated=repeated, waiting=(), outside=(),
    )  # fmt: skip
    still = frozenset(p.key for p in places) if case.late or repeated else frozenset()
    waiting, outside, _ = sides(places, still)
    return replace(case, waiting=tuple(waiting), outside=tuple(outside))


def _missing(found: Cast) -> tuple[int, ...]:
    known = {each.rank for each in found.ranks if each.rank is not None}
    if not known or len(known) < len(found.ranks):
        return ()
    return tuple(sorted(set(range(found.world or max(known) + 1)) - known))[:100_000]


def _repeated(processes: Sequence[RankProcess]) -> bool | None:
    """Whether the dumps of a rank are alike. A wait that is polled may show other frames of the same wait."""
    if any(_moved(each) for each in processes):
        return False
    return True if processes and all(len(each.dumps) > 1 for each in processes) else None


def _moved(process: RankProcess) -> bool:
    seen = [locate(each) for each in process.dumps]
    seen = [each for each in seen if each.error is None]
    if len({each.place for each in seen}) > 1:
        return True
    if not seen or seen[0].place in ENDLESS | UNHURRIED | {Place.DEVICE, Place.SUBPROCESS, Place.SLEEP}:
        return False
    lines = (tuple(f.line for f in p.frames if not is_native(f.file)) for p in seen)
    working = seen[0].place not in WAITS_FOR_PEERS
    return len({frames_key(p) for p in seen}) > 1 or (working and len(set(lines)) > 1)


def _rule(case: _Case) -> _Ruling:
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
            f"No hang: the last step was {since:g} s ago, and below {base:g} s (60 s or three typical steps) nothing is one. "
            f"{_where_all_are(case)}",
        )  # fmt: skip
    if case.repeated is False and not (is_hang and cls == "debugger"):
        return False, "working", (), f"No hang: ranks moved between the dumps. {_where_all_are(case)}"
    return ruling


def _nothing_dumped(case: _Case) -> _Ruling:
    many = len(case.undumped)
    reasons = sorted({each.reason for each in case.undumped})
    return (
        False,
        "undumpable",
        (),
        f"None of {many} processes could be dumped ({'; '.join(reasons[:2])}): nobody is named.",
    )


def _with_a_prompt(case: _Case) -> _Ruling | None:
    prompt = [p for p in case.places if p.place is Place.DEBUGGER]
    if not prompt:
        return None
    return True, "debugger", prompt, _who_does(case, prompt)


def _with_waiting(case: _Case) -> _Ruling:
    """Somebody waits for peers."""
    outside = list(case.outside)
    if not outside:
        return _nobody_outside(case)
    proven = [p for p in outside if _convicts(case, p)]
    few = len(outside) < len(case.waiting)
    same = len({p.place for p in outside}) == 1
    if not few and not (same and case.late and outside[0].place in ENDLESS):
        proven = []
    if proven:
        return True, _class_of(proven), proven, _who_does(case, proven)
    hang = case.late and not few and all(_patience_is_over(case, p) for p in outside)
    cls = _class_of(outside)
    if hang:
        return True, cls, (), f"Nobody can be named: {_where_all_are(case, lower=True)}"
    return False, cls, (), f"{_why_no_hang(case, outside)} {_where_all_are(case)}"


def _convicts(case: _Case, p: RankPlace) -> bool:
    """Whether one rank outside is to be named, by time, by dumps that are alike, or by its place alone."""
    if case.given.since_last_step_s is not None:
        return _patience_is_over(case, p)
    if case.repeated:
        return p.place not in UNHURRIED | LONG and "startup" not in p.contexts
    return _proves(case, p)


def _proves(case: _Case, p: RankPlace) -> bool:
    """One snapshot, no clock: everybody else waits in a collective, and this place does not end by itself."""
    outside = case.outside
    if len(case.missing) > len(case.waiting):
        return False
    if any(each.place not in WAITS_FOR_PEERS or each.place is Place.RENDEZVOUS for each in case.waiting):
        return False
    together = len({each.node for each in outside}) == 1 and len({each.node for each in case.places}) > 1
    few = len(outside) < len(case.waiting) and (len(outside) <= FEW or together)
    if not few or p.place not in ENDLESS or "startup" in p.contexts:
        return False
    if p.place is Place.DATALOADER:
        return p.raw[:1] != p.frames[:1]  # it waits in a queue; what loads in the process itself works
    innermost = [f for f in p.raw if not is_native(f.file)][:4]
    return not any(_is_momentary(f.function, f.file) for f in innermost)


@lru_cache(maxsize=4096)
def _is_momentary(function: str, file: str) -> bool:
    name = function.rpartition(".")[2]
    return any(re.fullmatch(f, name) and re.fullmatch(p, file) for f, p in MOMENTARY)


def _patience_is_over(case: _Case, p: RankPlace) -> bool:
    """Whether more time has passed since the last step than such a place may take."""
    since_s, typical_s = case.given.since_last_step_s, case.given.typical_step_s or 0.0
    if since_s is None or since_s < case.base_s:
        return False
    unhurried_s = max(UNHURRIED_S, UNHURRIED_STEPS * typical_s)
    saving = any(place_of(f.function, f.file) in UNHURRIED for f in p.raw)
    if p.place in LONG or "startup" in p.contexts:
        return since_s >= max(STARTUP_S, unhurried_s)
    evaluates = "evaluation" in p.contexts and p.place not in ENDLESS
    if p.place in UNHURRIED or saving or evaluates:
        return since_s >= unhurried_s
    return True


def _nobody_outside(case: _Case) -> _Ruling:
    """All dumped ranks wait for each other."""
    alone = case.undumped[0] if len(case.undumped) == 1 and len(case.waiting) >= 1 else None
    starting = all(p.place is Place.RENDEZVOUS or "startup" in p.contexts for p in case.waiting)
    cls = "rendezvous" if starting else class_word(p.place for p in case.waiting)
    late = any(_patience_is_over(case, p) for p in case.waiting)
    collective = all(p.place in WAITS_FOR_PEERS for p in case.waiting)
    if alone is not None and collective and not starting:
        named = replace(
            alone, reason=f"suspect: it alone could not be dumped ({alone.reason}), and all others wait"
        )
        return (
            True,
            "undumpable",
            (named,),
            f"{whom(named, True)} is suspect: it alone could not be dumped ({alone.reason}), {_waiters(case)}.",
        )
    odd = odd_one(case.waiting, len(case.places) + len(case.undumped) + len(case.missing))
    if odd is not None and not starting:
        others = next(
            collective_of(p) for p in case.waiting if p is not odd and collective_of(p) != collective_of(odd)
        )
        sentence = (
            f"{whom(_culprit(odd, case.cast), True)} waits in another collective ({collective_of(odd)}) than the {len(case.waiting) - 1} "
            f"others ({others}): the calls do not match, in {call_of(odd.frames[0])}."
        )
        return True, "collective_mismatch", (odd,), sentence
    sentence = f"Nobody is odd: {_where_all_are(case, lower=True)}"
    lost = _lost(case) if collective and not starting else None
    if lost is not None:
        sentence = (
            f"{whom(lost, True)} is suspect: {lost.reason.removeprefix('suspect: ')}, {_waiters(case)}."
        )
        return True, "missing_rank", (lost,), sentence
    if case.missing and collective and not starting:
        sentence = (
            f"Rank {fold(case.missing)} {'is' if len(case.missing) == 1 else 'are'} missing from the dumps, {_waiters(case)}. "
            f"Nobody is named: look at the missing {'one' if len(case.missing) == 1 else 'ones'} first."
        )
        return (late or case.given.since_last_step_s is None, "missing_rank", (), sentence)
    if starting and case.missing:
        sentence = f"Start-up: {_where_all_are(case, lower=True)} Rank {fold(case.missing)} missing."
    hang = late or (
        bool(case.repeated) and collective and not starting and case.given.since_last_step_s is None
    )
    return hang, cls, (), sentence


def _lost(case: _Case) -> Culprit | None:
    """The only rank of which there is no dump: its number is missing, or one node has one dump less than all the others."""
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


def _without_waiting(case: _Case) -> _Ruling:
    """Nobody is seen to wait for a peer."""
    places = case.places
    cls = class_word(p.place for p in places)
    teardown = [p for p in places if p.place is Place.TEARDOWN]
    if teardown:
        rest = [p for p in places if p.place is not Place.TEARDOWN]
        named = [p for p in rest if p.place in ENDLESS] if rest and len(rest) < len(teardown) else []
        if not rest and len(teardown) == 1 and case.cast.world > 1:
            named = teardown
        if named:
            return True, "teardown", named, f"The ranks end, and {_who_does(case, named, lower=True)}"
        return (
            len(teardown) * 2 > len(places),
            "teardown",
            (),
            f"Nobody is odd: {_where_all_are(case, lower=True)}",
        )
    if len(places) == 1 and case.cast.world <= 1:
        only = places[0]
        hang = (
            (case.late or bool(case.repeated))
            and only.place in ENDLESS
            and (not case.late or _patience_is_over(case, only))
        )
        return hang, cls, [only] if hang else [], f"{_who_does(case, [only])}"
    alike = len({p.place for p in places}) == 1 and places[0].place is not Place.OTHER
    hang = case.late and alike and all(_patience_is_over(case, p) for p in places)
    if any(p.place in LONG or "startup" in p.contexts for p in places) and not hang:
        return (
            False,
            cls if cls != "working" else "startup",
            (),
            f"No hang is shown: {_where_all_are(case, lower=True)}",
        )
    return hang, cls, (), f"Nobody is odd: {_where_all_are(case, lower=True)}"


# ------------------------------------------------------------------------------------------- words


def _who_does(case: _Case, named: Sequence[RankPlace], *, lower: bool = False) -> str:
    ordered = _by_rank(named)
    first = _culprit(ordered[0], case.cast)
    more = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
    who = f"{whom(first, not lower)}{more} {first.reason}"
    return f"{who}, {_waiters(case)}." if case.waiting else f"{who}."


def _waiters(case: _Case) -> str:
    waiting = case.waiting
    names = sorted({collective_of(p) or place_words(p.place) for p in waiting})
    where = f" in {', '.join(names[:3])}{' and elsewhere' if len(names) > 3 else ''}"
    if len(waiting) == 1:
        return (
            f"and the one other that was dumped waits{where}"
            if len(case.places) > 1 or case.undumped or case.missing
            else f"it waits{where}"
        )
    return f"and {len(waiting)} ranks wait{where}"


def _where_all_are(case: _Case, *, lower: bool = False) -> str:
    counts: dict[Place, list[RankPlace]] = {}
    for p in case.places:
        counts.setdefault(p.place, []).append(p)
    parts = []
    for place, members in sorted(counts.items(), key=lambda item: (-len(item[1]), item[0])):
        calls = sorted({call for p in members if (call := _short_call(p))})
        shown = f" ({', '.join(calls[:3])}{', …' if len(calls) > 3 else ''})" if calls else ""
        many = len(members) > 1
        who = (
            f"all {len(members)} dumped ranks"
            if len(counts) == 1 and many
            else count_words(len(members), "rank")
        )
        parts.append(f"{who} {place_words(place, many=many)}{shown}")
    if case.undumped:
        parts.append(f"{len(case.undumped)} could not be dumped")
    text = ", ".join(parts) + "."
    return text if lower else text[:1].upper() + text[1:]


def _short_call(p: RankPlace) -> str:
    if p.place in WAITS_FOR_PEERS and collective_of(p):
        return collective_of(p)
    return p.frames[0].function if p.frames else ""


def _why_no_hang(case: _Case, outside: Sequence[RankPlace]) -> str:
    first = _culprit(_by_rank(outside)[0], case.cast)
    if len(outside) >= len(case.waiting):
        return "Nobody is odd: more ranks stand outside the collective than wait in it."
    who = f"{whom(first, False)} {first.reason}" + (
        f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
    )
    if case.given.since_last_step_s is not None:
        return f"No hang yet: {who}, which may take longer than {case.given.since_last_step_s:g} s."
    return f"No hang is proven: {who}, which ends by itself as far as one snapshot can tell."


def _todo(case: _Case, is_hang: bool, culprits: Sequence[Culprit]) -> tuple[str, ...]:
    if not case.places and not case.undumped:
        return ()
    found = []
    if culprits and culprits[0].node:
        pid = f" (pid {culprits[0].pid})" if culprits[0].pid else ""
        found.append(
            f"look at {culprits[0].node} first{pid}: /proc/PID/status, wchan and stack, the kernel's log, the mounts"
        )
    if case.missing:
        found.append(f"find out what became of rank {fold(case.missing)}: no dump of it is here")
    if is_hang and not culprits:
        found.append(
            "if nobody is odd, it is the network, a GPU or a rank that is not here: NCCL's log, the fabric's counters, dmesg"
        )
    if not is_hang and case.given.since_last_step_s is None:
        found.append(
            "say how long ago the last step was: --since-last-step S --typical-step S, or add a second dump taken 20 s later"
        )
    return tuple(found)


def _culprit(p: RankPlace | Culprit, found: Cast) -> Culprit:
    if isinstance(p, Culprit):
        return p
    reason = f"{place_words(p.place)}, in {call_of(_telling(p))}" if p.frames else place_words(p.place)
    if p.holds_gil and p.place is Place.OTHER:
        reason += "; it holds the interpreter's lock"
    if p.gil_held_by and p.place not in WAITS_FOR_PEERS:
        reason += f"; the interpreter's lock is held by {p.gil_held_by}"
    reason += children_of(p, found)
    return Culprit(
        node=p.node or None, rank=p.rank if p.rank >= 0 else None, pid=p.pid or None, reason=reason
    )


def _telling(p: RankPlace) -> Frame:
    """The frame to show: the innermost of its own; at a debugger's prompt the one that is being debugged."""
    if p.place is Place.DEBUGGER:
        ends = [i for i, f in enumerate(p.frames) if place_of(f.function, f.file) is Place.DEBUGGER]
        beyond = (f for f in p.frames[ends[-1] + 1 :] if not _DEBUGGER_FILES.search(f.file)) if ends else ()
        return next(iter(beyond), p.frames[0])
    return p.frames[0]


def _class_of(named: Sequence[RankPlace]) -> str:
    if all(p.place in (Place.OTHER, Place.LOCK) and (p.gil_held_by or p.holds_gil) for p in named):
        return CLASSES[Place.GIL]
    return class_word(p.place for p in named)


def _by_rank(places: Sequence[RankPlace]) -> list[RankPlace]:
    return sorted(places, key=lambda p: (p.rank if p.rank >= 0 else 1 << 40, p.node, p.pid, p.place))


def _count_others(found: Cast) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for what, _ in found.others:
        counts[what] = counts.get(what, 0) + 1
    return tuple(sorted(counts.items()))
