"""Words and groups for a verdict on stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import fold as fold_names
from slurm_watchdog.base.text import listed, plural
from slurm_watchdog.diagnose.stacks.places import (
    RankPlace,
    call_of,
    frame_key,
    is_native,
    is_resolved,
    locate,
    thread_role,
)
from slurm_watchdog.diagnose.stacks.ranks import RankAssignment
from slurm_watchdog.diagnose.stacks.vote import VoteGroup
from slurm_watchdog.diagnose.stacks.waiting import frames_key
from slurm_watchdog.knowledge.stack_frames import CLASSES, Place
from slurm_watchdog.model.evidence import Frame, ProcessStack
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Role

MAX_FRAMES = 40


class StackGroup(Struct, frozen=True, kw_only=True):
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
    """`1 rank is in the backward pass`, `3 ranks (0, 2, 5 on n1, n2) wait in a collective`: what a group of
    equal stacks does."""
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
        members.sort(key=lambda p: (p.rank if p.rank >= 0 else 1 << 40, p.node, p.pid))
        shown = [tuple(map(frame_key, _shown(p.told_by or p.raw))) for p in members]
        who = tuple(
            Culprit(node=p.node or None, rank=p.rank if p.rank >= 0 else None, pid=p.pid or None) for p in members
        )
        threads = Counter(role for p in members if p.key in stacks for role in _roles(stacks[p.key]))
        groups.append(
            StackGroup(place=place, frames=min(shown)[:MAX_FRAMES], members=who, threads=tuple(sorted(threads.items())))
        )
    return tuple(sorted(groups, key=lambda group: (-len(group.members), group.place, group.frames)))


def _shown(frames: Sequence[Frame]) -> list[Frame]:
    """Those of Python; else those of compiled code that have a name; else all."""
    named = [frame for frame in frames if is_resolved(frame)]
    return [frame for frame in named if not is_native(frame.file)] or named or list(frames)


def _roles(stack: ProcessStack) -> list[str]:
    return [
        thread_role(thread) or "another thread"
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
            return f"; its worker {dump.pid} {place_words(seen.place)}, in {call_of(seen.frames[0])}"
    return ""
