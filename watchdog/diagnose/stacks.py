"""The stack vote: who stands outside the collective in which the others wait, and does anything move?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from watchdog.detect.view import StackSnapshot
from watchdog.knowledge.frames import FRAMES, SHORTENED_STANDARD_LIBRARY, STANDARD_LIBRARY, Place
from watchdog.model import Culprit, Frame, ProcessStack, Role, ThreadStack, Value

BUSY_CPU_SHARE = 0.2
"""A rank outside the collective that uses more than this share of a core computes (compilation, data
preparation): it is slow, not stuck. A thread polling a queue with a time-out uses under 0.01."""

MIN_APART_S = 2.0
"""Two dumps closer than this say nothing about movement."""

_INNER_FRAMES = 12
"""A collective is looked for this deep under library wrappers; the training loop itself lies deeper."""


class RankPlace(Value, frozen=True, kw_only=True):
    """Where one rank's main thread stands in one dump."""

    node: str
    rank: int
    pid: int
    place: Place
    frames: tuple[Frame, ...] = ()
    """From the innermost frame outside the interpreter's own library, outwards."""
    error: str | None = None


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
    if thread is None or not thread.frames:
        error = stack.error or "no Python frames"
        return RankPlace(node=stack.node, rank=rank, pid=stack.pid, place=Place.OTHER, error=error)
    frames = thread.frames
    outer = next((i for i, frame in enumerate(frames) if not _is_library(frame.file)), 0)
    place = Place.OTHER
    for frame in frames[outer : outer + _INNER_FRAMES]:
        place = place_of(frame.function, frame.file)
        if place is not Place.OTHER:
            break
    if place is Place.OTHER and outer > 0 and place_of(frames[0].function, frames[0].file) is Place.LOCK:
        place = Place.LOCK
    return RankPlace(node=stack.node, rank=rank, pid=stack.pid, place=place, frames=frames[outer:])


def vote(snapshots: Sequence[StackSnapshot]) -> Vote:
    """Groups the newest dump of the ranks, names who stands outside, and compares it with the oldest one.

    `snapshots` are oldest first, all taken since the last step. Nobody is named unless somebody waits in a
    collective: ranks that all compute, or all sit in the same place, are no evidence against any of them.
    """
    if not snapshots:
        return Vote()
    newest = snapshots[-1]
    ranks = [s for s in newest.stacks if s.role is Role.RANK and s.rank is not None]
    places = [locate(stack) for stack in ranks]
    dumped = [p for p in places if p.error is None]
    undumped = tuple(
        Culprit(node=p.node, rank=p.rank, pid=p.pid, reason=f"could not be dumped: {p.error}")
        for p in places
        if p.error is not None
    )
    waiting = [p for p in dumped if p.place is Place.COLLECTIVE]
    outside = [p for p in dumped if p.place is not Place.COLLECTIVE] if waiting else []
    named = [
        Culprit(node=p.node, rank=p.rank, pid=p.pid, reason=f"{p.place}, in {_call(p)}")
        for p in sorted(outside, key=lambda p: p.rank)
    ] or _odd_one_in_another_collective(waiting, len(dumped))
    return Vote(
        groups=_groups(dumped),
        outside=tuple(named),
        waiting=len(waiting),
        undumped=undumped,
        moving=_moving(snapshots, {p.pid for p in outside}),
    )


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


def _odd_one_in_another_collective(waiting: Sequence[RankPlace], dumped: int) -> list[Culprit]:
    """One rank in another collective than all the others (at least three, unanimous): a mismatch."""
    if len(waiting) < 4 or len(waiting) != dumped:
        return []
    counts = Counter(_frames_key(p) for p in waiting)
    (common, many), *rest = counts.most_common()
    if len(rest) != 1 or rest[0][1] != 1 or many < 3:
        return []
    odd = next(p for p in waiting if _frames_key(p) != common)
    return [
        Culprit(
            node=odd.node, rank=odd.rank, pid=odd.pid, reason=f"waits in another collective: {_call(odd)}"
        )
    ]


def _moving(snapshots: Sequence[StackSnapshot], outside: set[int]) -> bool | None:
    """Whether any rank changed its place, or one outside the collective computed, between first and last dump."""
    first, last = snapshots[0], snapshots[-1]
    apart_s = first.age_s - last.age_s
    if apart_s < MIN_APART_S:
        return None
    before = {(s.node, s.pid, s.start_ticks): s for s in first.stacks if s.role is Role.RANK}
    compared = 0
    for stack in last.stacks:
        earlier = before.get((stack.node, stack.pid, stack.start_ticks))
        if stack.role is not Role.RANK or earlier is None:
            continue
        was, now = locate(earlier), locate(stack)
        if was.error is not None or now.error is not None:
            continue
        compared += 1
        if _frames_key(was) != _frames_key(now):
            return True
        if stack.pid in outside and _cpu_used_s(earlier, stack) > BUSY_CPU_SHARE * apart_s:
            return True
    return False if compared else None


def _cpu_used_s(earlier: ProcessStack, later: ProcessStack) -> float:
    if earlier.main_cpu_s is not None and later.main_cpu_s is not None:
        return later.main_cpu_s - earlier.main_cpu_s
    return later.cpu_s - earlier.cpu_s
