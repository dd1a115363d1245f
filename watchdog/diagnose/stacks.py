"""The stack vote: who stands outside the collective in which the others wait, and does anything move?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from watchdog.detect.view import ProcessView, StackSnapshot
from watchdog.knowledge.frames import FRAMES, SHORTENED_STANDARD_LIBRARY, STANDARD_LIBRARY, Place
from watchdog.model import Culprit, Frame, ProcessStack, Role, ThreadStack, Value

BUSY_CPU_SHARE = 0.2
"""A rank outside the collective that uses more than this share of a core computes (compilation, data
preparation): it is slow, not stuck. A thread polling a queue with a time-out uses under 0.01."""

MIN_APART_S = 2.0
"""Two dumps closer than this say nothing about movement."""

_INNER_FRAMES = 12
"""A collective is looked for this deep under library wrappers; the training loop itself lies deeper."""

TOGETHER_RANKS = 3
TOGETHER_SHARE = 0.7
"""Ranks in unknown code wait together if at least so many, and this share of all, stand motionless and idle in the
very same frames: three of four."""

UNHURRIED = frozenset({Place.CHECKPOINT, Place.NETWORK})
"""One rank may write or upload for half an hour while its stack stands still and the others wait in a barrier."""
MAYBE_WAITING = frozenset({Place.BACKWARD, Place.DEVICE})
"""Places where a rank may wait for its peers, or work. Rank by rank that cannot be told from the frames."""


class RankPlace(Value, frozen=True, kw_only=True):
    """Where one rank's main thread stands in one dump."""

    node: str
    rank: int
    pid: int
    place: Place
    frames: tuple[Frame, ...] = ()
    """From the innermost frame outside the interpreter's own library, outwards."""
    error: str | None = None
    key: tuple[str, int, int] = ("", 0, 0)
    """(node, pid, start ticks)."""


class Group(Value, frozen=True, kw_only=True):
    """Ranks that stand in the same frames."""

    place: Place
    frames: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]


class Vote(Value, frozen=True, kw_only=True):
    """What the stacks of all ranks say together."""

    groups: tuple[Group, ...] = ()
    """Largest first."""
    outside: tuple[Culprit, ...] = ()
    """Ranks that are not where the others wait for them."""
    waiting: int = 0
    """Ranks that wait in a collective."""
    undumped: tuple[Culprit, ...] = ()
    """Ranks without a stack, each with the reason."""
    missing: tuple[int, ...] = ()
    """Ranks of which nothing came at all: their node did not answer, or the dump was cut short."""
    elsewhere: int = 0
    """Ranks that do not wait in a collective, named in `outside` or too many to be named."""
    checkpointing: bool = False
    """Whether any rank stands below a function that writes or reads a checkpoint."""
    moving: bool | None = None
    """Whether any rank moved or computed between the dumps; None if that cannot be said."""


@lru_cache(maxsize=4096)
def place_of(function: str, file: str) -> Place:
    """Which known place one frame means. From Python 3.11 on py-spy prints `Class.method`: the last name counts."""
    function = function.rpartition(".")[2]
    for place, function_pattern, file_pattern in FRAMES:
        if re.fullmatch(function_pattern, function) and re.fullmatch(file_pattern, file):
            return place
    return Place.OTHER


@lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return bool(re.fullmatch(STANDARD_LIBRARY, file) or re.fullmatch(SHORTENED_STANDARD_LIBRARY, file))


def main_thread(stack: ProcessStack) -> ThreadStack | None:
    """The thread that runs the training loop: the one named MainThread, else the one whose id is the pid."""
    for thread in stack.threads:
        if thread.name == "MainThread":
            return thread
    by_id = [thread for thread in stack.threads if thread.thread_id == stack.pid]
    return by_id[0] if by_id else (stack.threads[0] if len(stack.threads) == 1 else None)


def locate(stack: ProcessStack) -> RankPlace:
    """Where a rank's main thread stands. The innermost known frame decides, lock and library frames last."""
    thread = main_thread(stack)
    rank = stack.rank if stack.rank is not None else -1
    key = _key(stack)
    if thread is None or not thread.frames:
        error = stack.error or "no Python frames"
        return RankPlace(node=stack.node, rank=rank, pid=stack.pid, place=Place.OTHER, error=error, key=key)
    frames = thread.frames
    outer = next((i for i, frame in enumerate(frames) if not _is_library(frame.file)), 0)
    place = Place.OTHER
    for frame in frames[outer : outer + _INNER_FRAMES]:
        place = place_of(frame.function, frame.file)
        if place is not Place.OTHER:
            break
    if place is Place.OTHER and outer > 0 and place_of(frames[0].function, frames[0].file) is Place.LOCK:
        place = Place.LOCK
    return RankPlace(node=stack.node, rank=rank, pid=stack.pid, place=place, frames=frames[outer:], key=key)


def vote(snapshots: Sequence[StackSnapshot], ranks: Sequence[ProcessView] = ()) -> Vote:
    """Groups the newest dump of the ranks, names who stands outside, and compares it with the earlier ones.

    `snapshots` are oldest first, all taken since the last step. Nobody is named unless the others wait: ranks that
    all compute, or all sit in the same place, are no evidence against any of them. `ranks`, where given, are the
    processes that count: a side step of the job (a shell, a profiler) is none of them, and one of them that is not
    in the newest dump is missing.
    """
    if not snapshots:
        return Vote()
    wanted = {(r.node, r.process.pid, r.process.start_ticks): r for r in ranks}
    newest = _stacks_of_ranks(snapshots[-1], wanted)
    history = [(s.age_s, {_key(stack): stack for stack in _stacks_of_ranks(s, wanted)}) for s in snapshots]
    places = [locate(stack) for stack in newest]
    dumped = [p for p in places if p.error is None]
    waiting, outside, crowd = _sides(dumped, history)
    named = [
        Culprit(node=p.node, rank=p.rank, pid=p.pid, reason=f"{p.place}, in {_call(p)}")
        for p in sorted(outside, key=lambda p: (p.rank, p.node, p.pid))
    ] or ([] if crowd else _odd_one_in_another_collective(waiting, len(places)))
    seen = {p.key for p in places}
    return Vote(
        groups=_groups(dumped),
        outside=tuple(named),
        waiting=len(waiting),
        elsewhere=len(dumped) - len(waiting),
        undumped=tuple(
            Culprit(node=p.node, rank=p.rank, pid=p.pid, reason=f"could not be dumped: {p.error}")
            for p in sorted(places, key=lambda p: (p.rank, p.node, p.pid))
            if p.error is not None
        ),
        missing=tuple(
            sorted({r.process.rank or 0 for key, r in wanted.items() if key not in seen and r.alive})
        ),
        checkpointing=any(_is_unhurried(p) for p in dumped),
        moving=_moving(places, {p.key for p in waiting}, history),
    )


ProcessKey = tuple[str, int, int]
History = Sequence[tuple[float, Mapping[ProcessKey, ProcessStack]]]
"""(age in seconds, stacks of the ranks) of each snapshot, oldest first."""


def _key(stack: ProcessStack) -> ProcessKey:
    return (stack.node, stack.pid, stack.start_ticks)


def _stacks_of_ranks(snapshot: StackSnapshot, wanted: Mapping[ProcessKey, ProcessView]) -> list[ProcessStack]:
    return [
        stack
        for stack in snapshot.stacks
        if stack.role is Role.RANK and stack.rank is not None and (not wanted or _key(stack) in wanted)
    ]


def _sides(dumped: Sequence[RankPlace], history: History) -> tuple[list[RankPlace], list[RankPlace], bool]:
    """(who waits, who is named as standing outside, whether too many stand outside for anybody to be named)."""
    waiting = [p for p in dumped if p.place is Place.COLLECTIVE]
    maybe = [p for p in dumped if p.place in MAYBE_WAITING and _stands_still(p, history)]
    if waiting:
        if len(dumped) > len(waiting) + len(maybe) or 3 * len(maybe) > len(waiting):
            waiting = waiting + maybe
    elif 2 * len(maybe) > len(dumped):
        waiting = maybe
    else:
        waiting = _together(dumped, history)
    those = {p.key for p in waiting}
    outside = [p for p in dumped if p.key not in those] if waiting else []
    crowd = len(outside) > len(waiting)
    return waiting, ([] if crowd else outside), crowd


def _together(dumped: Sequence[RankPlace], history: History) -> list[RankPlace]:
    """The large majority that stands motionless and idle in the very same frames, if a few others do not."""
    by_frames: dict[tuple[str, ...], list[RankPlace]] = {}
    for place in dumped:
        by_frames.setdefault(_frames_key(place), []).append(place)
    most = max(by_frames.values(), key=len, default=[])
    enough = len(most) >= TOGETHER_RANKS and TOGETHER_SHARE * len(dumped) <= len(most) < len(dumped)
    return most if enough and all(_stands_still(place, history) for place in most) else []


def _stands_still(place: RankPlace, history: History) -> bool:
    """Whether a rank was seen in the same frames all the time, and did not compute. Waiting for a GPU may spin."""
    seen = [(age_s, stacks[place.key]) for age_s, stacks in history if place.key in stacks]
    (first_age_s, first), (last_age_s, last) = seen[0], seen[-1]
    apart_s = first_age_s - last_age_s
    if apart_s < MIN_APART_S or any(_frames_key(locate(stack)) != _frames_key(place) for _, stack in seen):
        return False
    return place.place is Place.DEVICE or _cpu_used_s(first, last) <= BUSY_CPU_SHARE * apart_s


def _is_unhurried(place: RankPlace) -> bool:
    return any(place_of(frame.function, frame.file) in UNHURRIED for frame in place.frames)


def _call(place: RankPlace) -> str:
    frame = place.frames[0]
    return f"{frame.function} ({frame.file}:{frame.line})"


def _frames_key(place: RankPlace) -> tuple[str, ...]:
    return tuple(f"{frame.function} ({frame.file})" for frame in place.frames)


def _groups(places: Sequence[RankPlace]) -> tuple[Group, ...]:
    found: dict[tuple[str, ...], list[RankPlace]] = {}
    for place in places:
        found.setdefault(_frames_key(place), []).append(place)
    return tuple(
        Group(
            place=members[0].place,
            frames=key,
            ranks=tuple(sorted(p.rank for p in members)),
            nodes=tuple(sorted({p.node for p in members})),
        )
        for key, members in sorted(found.items(), key=lambda item: -len(item[1]))
    )


def _odd_one_in_another_collective(waiting: Sequence[RankPlace], ranks: int) -> list[Culprit]:
    """One rank in another collective than all the others (at least three, unanimous): a mismatch.

    The collective's own name counts: the same barrier is often called from two places.
    """
    if len(waiting) < 4 or len(waiting) != ranks or any(p.place is not Place.COLLECTIVE for p in waiting):
        return []
    counts = Counter(_collective(p) for p in waiting)
    (common, many), *rest = counts.most_common()
    if len(rest) != 1 or rest[0][1] != 1 or many < 3:
        return []
    odd = next(p for p in waiting if _collective(p) != common)
    return [
        Culprit(
            node=odd.node, rank=odd.rank, pid=odd.pid, reason=f"waits in another collective: {_call(odd)}"
        )
    ]


def _collective(place: RankPlace) -> str:
    """The name of the collective: innermost, but not a library's `wrapper` around it."""
    names = [
        frame.function.rpartition(".")[2]
        for frame in place.frames[:_INNER_FRAMES]
        if place_of(frame.function, frame.file) is Place.COLLECTIVE
    ]
    return next((name for name in names if name != "wrapper"), "")


def _moving(places: Sequence[RankPlace], waiting: set[ProcessKey], history: History) -> bool | None:
    """Whether any rank changed its place, or one that does not wait computed, while the dumps were taken.

    None if that cannot be said of every rank: one whose earlier dump is missing may well be moving.
    """
    compared = 0
    for place in places:
        seen = [(age_s, stacks[place.key]) for age_s, stacks in history if place.key in stacks]
        located = [(age_s, stack, locate(stack)) for age_s, stack in seen]
        if len({_frames_key(p) for _, _, p in located if p.error is None}) > 1:
            return True
        alike = [(age_s, stack) for age_s, stack, p in located if (p.error is None) is (place.error is None)]
        (first_age_s, first), (last_age_s, last) = alike[0], alike[-1]
        apart_s = first_age_s - last_age_s
        computed = _cpu_used_s(first, last) > BUSY_CPU_SHARE * apart_s
        if apart_s >= MIN_APART_S and place.key not in waiting and waiting and computed:
            return True
        if apart_s >= MIN_APART_S:
            compared += 1
    return False if places and compared == len(places) else None


def _cpu_used_s(earlier: ProcessStack, later: ProcessStack) -> float:
    if earlier.main_cpu_s is not None and later.main_cpu_s is not None:
        return later.main_cpu_s - earlier.main_cpu_s
    return later.cpu_s - earlier.cpu_s
