"""Who waits and who stands outside: the core of every vote on stacks, live or on dumps that someone sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from slurm_watchdog.diagnose.stacks import places as at
from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, RankPlace, is_native, place_of
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.evidence import Frame

_INNER_FRAMES = 12  # A collective is looked for this deep under library wrappers.

_NATIVE_FRAMES = 40

TOGETHER_RANKS = 3
TOGETHER_SHARE = 0.7
"""Ranks in unknown code wait together if so many, and this share, are motionless and idle in the very same frames."""

UNHURRIED = frozenset({Place.CHECKPOINT, Place.NETWORK})
"""One rank may write or upload for half an hour while its stack does not move and the others wait in a barrier."""
ENDLESS = frozenset({Place.DATALOADER, Place.LOCK, Place.QUEUE, Place.FILESYSTEM, Place.DEBUGGER, Place.TEARDOWN})
"""A rank that does not move in there for minutes never will."""
LONG = frozenset({Place.COMPILATION, Place.PREPARATION, Place.IMPORT, Place.RENDEZVOUS})
"""What may take half an hour by its nature."""
OF_THEIR_OWN = frozenset(Place) - WAITS_FOR_PEERS - {Place.OTHER, Place.BACKWARD, Place.DEVICE}
"""Places that have nothing to do with peers: many ranks in the same one don't wait for the few that are not."""
MAYBE_WAITING = frozenset({Place.BACKWARD, Place.DEVICE})
"""Places where a rank may wait for its peers, or work. Rank by rank that cannot be told from the frames."""

_REDUCING = frozenset({Place.COLLECTIVE, Place.BACKWARD})

ProcessKey = tuple[str, int, int]  # (node, pid, start ticks).


def sides(dumped: Sequence[RankPlace], still: frozenset[ProcessKey]) -> tuple[list[RankPlace], list[RankPlace], bool]:
    """(who waits, who stands outside, whether too many stand outside for anybody to be named).

    `still` are the ranks that are known to stand where they stood, and not to compute.
    """
    waiting = [p for p in dumped if p.place in WAITS_FOR_PEERS]
    maybe = [p for p in dumped if p.place in MAYBE_WAITING and p.key in still]
    if waiting:
        # One rank that alone is in the backward pass is behind; several may well wait there for each other.
        if len(dumped) > len(waiting) + len(maybe) or len(maybe) > 1 or 3 * len(maybe) > len(waiting):
            waiting = waiting + maybe
    elif 2 * len(maybe) > len(dumped) or _wait_for_the_others(maybe, dumped, still):
        waiting = maybe
    else:
        waiting = _together(dumped, still)
    those = {p.key for p in waiting}
    outside = [p for p in dumped if p.key not in those] if waiting else []
    return waiting, outside, len(outside) > len(waiting)


def suspects(outside: Sequence[RankPlace]) -> list[RankPlace]:
    """Of the ranks that stand outside, those to be named: who sits at a debugger's prompt; else who is in
    nothing that takes its time, for the others may well be busy because of that one; else all of them."""
    prompt = [p for p in outside if p.place is Place.DEBUGGER]
    return prompt or [p for p in outside if not (is_unhurried(p) or takes_its_time(p))] or list(outside)


def is_unhurried(place: RankPlace) -> bool:
    """Whether a rank saves, restores or uploads."""
    return any(place_of(frame.function, frame.file) in UNHURRIED for frame in place.frames)


def takes_its_time(place: RankPlace) -> bool:
    """In an evaluation a rank that waits for data, a lock or a file is as stuck as anywhere."""
    if place.place in LONG:
        return True
    stuck = {place.place, place.doing} & ENDLESS and not makes_its_own_samples(place)
    return "evaluation" in place.contexts and not stuck


def makes_its_own_samples(place: RankPlace) -> bool:
    """Whether a rank is in code that makes a sample, below a data loader without workers: it waits for no one."""
    inner = next(iter(place.frames), None)
    made = place.place is Place.DATALOADER and inner is not None
    return made and inner is not None and place_of(inner.function, inner.file) is not Place.DATALOADER


def _wait_for_the_others(maybe: Sequence[RankPlace], dumped: Sequence[RankPlace], still: frozenset[ProcessKey]) -> bool:
    """Whether one of two ranks stands idle in the backward pass, or before its GPU, and the other stands just
    as still in something of its own, such as a data loader. Were the one at fault, the other would soon be
    beside it: it fetches its data and comes there, too. (Of more ranks a majority is asked for.)"""
    if len(dumped) != 2 or len(maybe) != 1:
        return False
    (other,) = (place for place in dumped if place.key != maybe[0].key)
    return other.place in OF_THEIR_OWN and other.key in still


def _together(dumped: Sequence[RankPlace], still: frozenset[ProcessKey]) -> list[RankPlace]:
    """The large majority that stands motionless and idle in the very same frames, if a few others do not."""
    by_frames: dict[tuple[str, ...], list[RankPlace]] = {}
    for place in dumped:
        by_frames.setdefault(frames_key(place), []).append(place)
    most = max(by_frames.values(), key=len, default=[])
    enough = len(most) >= TOGETHER_RANKS and TOGETHER_SHARE * len(dumped) <= len(most) < len(dumped)
    if not enough or most[0].place in OF_THEIR_OWN:
        return []
    return most if all(place.key in still for place in most) else []


def frames_key(place: RankPlace) -> tuple[str, ...]:
    """The functions a rank stands in, without lines and what differs between machines."""
    return _keys_of(place.frames)


@lru_cache(maxsize=4096)
def _keys_of(frames: tuple[Frame, ...]) -> tuple[str, ...]:
    return tuple(at.frame_key(frame) for frame in frames)


def odd_one(waiting: Sequence[RankPlace], ranks: int) -> RankPlace | None:
    """The only rank in another collective than all the others (at least three, unanimous): a mismatch.

    The collective's own name counts: the same barrier is often called from two places. The backward pass, in
    which gradients are reduced, is such a collective for ranks that do not move in it; one rank alone in there
    is behind, and no mismatch. One rank alone that makes a group, or joins one (`new_group`), waits for all others.
    """
    if len(waiting) < 4 or len(waiting) != ranks:
        return None
    joining = sum(p.place is Place.RENDEZVOUS for p in waiting)
    if joining > 1 or any(p.place not in _REDUCING and p.place is not Place.RENDEZVOUS for p in waiting):
        return None
    if sum(1 for p in waiting if p.place is Place.BACKWARD) not in (0, len(waiting) - 1):
        return None
    counts = Counter("" if p.place is Place.BACKWARD else collective_of(p) for p in waiting)
    (common, many), *rest = counts.most_common()
    if len(rest) != 1 or rest[0][1] != 1 or many < 3:
        return None
    odd = next(p for p in waiting if ("" if p.place is Place.BACKWARD else collective_of(p)) != common)
    usual = next(p for p in waiting if p is not odd)
    return None if is_within(odd, usual) else odd


def is_within(one: RankPlace, other: RankPlace) -> bool:
    """Whether a call of a library makes the other one in it: the same collective, further on."""
    return collective_of(other) in _collectives_of(one) or collective_of(one) in _collectives_of(other)


def collective_of(place: RankPlace) -> str:
    """The name of the collective: innermost, but not a library's `wrapper` around it."""
    return next(iter(_collectives_of(place)), "")


def _collectives_of(place: RankPlace) -> list[str]:
    """The names of collectives, from the innermost: of one that a library makes out of others several."""
    names = [
        frame.function.rpartition(".")[2]
        for frame in place.frames[:_INNER_FRAMES]
        if place_of(frame.function, frame.file) in WAITS_FOR_PEERS
    ]
    return [name for name in names if name not in ("wrapper", "log_wrapper", "func_wrapper")] or [
        frame.function
        for frame in place.raw[:_NATIVE_FRAMES]
        if is_native(frame.file) and at.native_place_of(frame.function) in WAITS_FOR_PEERS
    ][-1:]
