"""The stack vote: who stands outside the collective in which the others wait, and does anything move?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.stacks import waiting as wait
from slurm_watchdog.diagnose.stacks.places import RankPlace, call_of, is_gone, is_resolved, locate
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey, frames_key
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import ProcessView, StackSnapshot
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Role

BUSY_CPU_SHARE = 0.2
"""A rank outside the collective that uses more than this share of a core computes (compilation, data
preparation): it is slow, not stuck. A thread polling a queue with a time-out uses under 0.01."""

GONE = "has ended: no process was left to dump"
STARVED_LOOKS = 3  # Dumps that found a process running, one after the other.

MIN_APART_S = 2.0  # Two dumps closer than this say nothing about movement.


class VoteGroup(Struct):
    """Ranks that stand in the same frames."""

    place: Place
    frames: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]


class Vote(Struct):
    """What the stacks of all ranks say together."""

    groups: tuple[VoteGroup, ...] = ()  # Largest first.
    outside: tuple[Culprit, ...] = ()  # Ranks that are not where the others wait for them.
    waiting: int = 0  # Ranks that wait in a collective.
    undumped: tuple[Culprit, ...] = ()  # Ranks without a stack, each with the reason.
    missing: tuple[int, ...] = ()
    """Ranks of which nothing came at all: their node did not answer, or the dump was cut short."""
    elsewhere: int = 0  # Ranks that do not wait in a collective, named in `outside` or too many to be named.
    checkpointing: bool = False  # Whether any rank stands below a function that writes or reads a checkpoint.
    patient: bool = False
    """Whether every rank that stands outside, or the only rank there is, is in something that takes its time:
    an evaluation, a compilation, a data set."""
    in_own_code: bool = False
    """Whether every rank makes its samples itself: none waits for a data loader, and they may well be at work."""
    moving: bool | None = None  # Whether any rank moved or computed between the dumps; None if that cannot be said.


def vote(snapshots: Sequence[StackSnapshot], ranks: Sequence[ProcessView] = ()) -> Vote:
    """Groups the newest dump of the ranks, names who stands outside, and compares it with the earlier ones.

    `snapshots` are oldest first, all taken since the last step. No rank is identified unless the others wait: ranks
    that all compute, or all sit in the same place, are no evidence against any of them. `ranks`, where given, are the
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
    still = frozenset(p.key for p in dumped if _stands_still(p, history))
    waiting, outside, crowd = wait.sides(dumped, still)
    named = [
        _culprit(p, _what_it_does(p))
        for p in sorted([] if crowd and not _at_a_prompt(outside) else wait.suspects(outside), key=_order)
    ]
    odd = [] if named or crowd else _odd_one_in_another_collective(waiting, len(places))
    seen = {p.key for p in places}
    sole = dumped if len(places) == 1 else []
    return Vote(
        groups=_groups(dumped, {(c.node, c.rank, c.pid) for c in named}),
        outside=tuple(named or odd),
        waiting=len(waiting) - len(odd),
        elsewhere=len(dumped) - len(waiting),
        undumped=tuple(
            _culprit(p, GONE if is_gone(p.error) else f"could not be dumped: {p.error}")
            for p in sorted(places, key=_order)
            if p.error is not None
        ),
        missing=tuple(sorted({r.process.rank or 0 for key, r in wanted.items() if key not in seen and r.alive})),
        checkpointing=any(wait.is_unhurried(p) for p in dumped) and not _at_a_prompt(dumped),
        patient=bool(outside or sole) and all(wait.takes_its_time(p) for p in (outside or sole)),
        in_own_code=bool(dumped) and all(wait.makes_its_own_samples(p) for p in dumped),
        moving=_moving(places, {p.key for p in waiting}, history),
    )


def _culprit(p: RankPlace, reason: str) -> Culprit:
    return Culprit(node=p.node, rank=p.rank, pid=p.pid, reason=reason)


def _order(p: RankPlace) -> tuple[int, str, int]:
    return p.rank, p.node, p.pid


def _what_it_does(p: RankPlace) -> str:
    held = f"; the interpreter's lock is held by {p.gil_held_by}" if p.gil_held_by else ""
    frame = next(filter(is_resolved, p.frames), None)
    return f"{p.doing}{f', in {call_of(frame)}' if frame is not None else ''}{held}"


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


def _stands_still(place: RankPlace, history: History) -> bool:
    """Whether a rank was seen in the same frames all the time, and did not compute. Waiting for a GPU may spin."""
    seen = [(age_s, stacks[place.key]) for age_s, stacks in history if place.key in stacks]
    (first_age_s, first), (last_age_s, last) = seen[0], seen[-1]
    apart_s = first_age_s - last_age_s
    if apart_s < MIN_APART_S or any(frames_key(locate(stack)) != frames_key(place) for _, stack in seen):
        return False
    if place.place is Place.DEVICE:
        return True
    return _cpu_used_s(first, last) <= BUSY_CPU_SHARE * apart_s and not _is_starved([each for _, each in seen])


def _is_starved(seen: Sequence[ProcessStack]) -> bool:
    """Whether a process that was found running, or waiting for a core, each time has used some: it computes,
    on a machine that has too few cores. One that waits for something sleeps nearly always."""
    if len(seen) < STARVED_LOOKS or any(stack.state != "R" for stack in seen):
        return False
    return _cpu_used_s(seen[0], seen[-1]) > 0.0


def _at_a_prompt(places: Sequence[RankPlace]) -> bool:
    return any(p.place is Place.DEBUGGER for p in places)


def _groups(
    places: Sequence[RankPlace], named: Collection[tuple[str | None, int | None, int | None]]
) -> tuple[VoteGroup, ...]:
    """Who stands in the same frames, the most first; of the `named` with what their system call tells besides."""
    found: dict[tuple[str, ...], list[RankPlace]] = {}
    for place in places:
        found.setdefault(frames_key(place), []).append(place)
    return tuple(
        VoteGroup(
            place=members[0].doing if all((p.node, p.rank, p.pid) in named for p in members) else members[0].place,
            frames=key,
            ranks=tuple(sorted(p.rank for p in members)),
            nodes=tuple(sorted({p.node for p in members})),
        )
        for key, members in sorted(found.items(), key=lambda item: -len(item[1]))
    )


def _odd_one_in_another_collective(waiting: Sequence[RankPlace], ranks: int) -> list[Culprit]:
    odd = wait.odd_one(waiting, ranks)
    if odd is None:
        return []
    reason = f"waits in another collective: {call_of(odd.frames[0])}"
    return [_culprit(odd, reason)]


def _moving(places: Sequence[RankPlace], waiting: set[ProcessKey], history: History) -> bool | None:
    """Whether any rank changed its place, or one that does not wait computed, while the dumps were taken.

    None if that cannot be said of every rank: one whose earlier dump is missing may well be moving.
    """
    compared = 0
    for place in places:
        seen = [(age_s, stacks[place.key]) for age_s, stacks in history if place.key in stacks]
        located = [(age_s, stack, locate(stack)) for age_s, stack in seen]
        if len({frames_key(p) for _, _, p in located if p.error is None}) > 1:
            return True
        alike = [(age_s, stack) for age_s, stack, p in located if (p.error is None) is (place.error is None)]
        (first_age_s, first), (last_age_s, last) = alike[0], alike[-1]
        apart_s = first_age_s - last_age_s
        starved = _is_starved([stack for _, stack in alike])
        computed = starved or _cpu_used_s(first, last) > BUSY_CPU_SHARE * apart_s
        # Who waits for a GPU may spin; without anybody who is known to wait, that says nothing.
        may_spin = not waiting and place.place is Place.DEVICE
        if apart_s >= MIN_APART_S and place.key not in waiting and computed and not may_spin:
            return True
        if apart_s >= MIN_APART_S:
            compared += 1
    return False if places and compared == len(places) else None


def _cpu_used_s(earlier: ProcessStack, later: ProcessStack) -> float:
    if earlier.main_cpu_s is not None and later.main_cpu_s is not None:
        return later.main_cpu_s - earlier.main_cpu_s
    return later.cpu_s - earlier.cpu_s
