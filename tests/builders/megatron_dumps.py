"""Dumps of a mixture-of-experts training with tensor, pipeline, data and expert groups, as its ranks write them
(`onlyActive=True`): the CPUs run ahead of the GPUs, so that a rank has 10 to 25 calls scheduled in several groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tests.builders.nccl_dumps import WORLD, Recorder

RANKS, STAGES, AHEAD = 16, 4, 25
WIDTH = RANKS // STAGES
BEGAN, STUCK_S = 1e9, 60.0
BLIND = 12
"""Operations that a rank whose watchdog thread has died still counts as unfinished."""


@dataclass(frozen=True)
class Operation:
    """One that a rank calls: a collective of a group, or to or from a peer."""

    group: str
    name: str
    peer: int = -1


@dataclass
class Rank:
    """What a rank calls one after the other, how many it has called, and how many its GPU has finished."""

    program: list[Operation] = field(default_factory=list)
    called: int = 0
    done: int = 0


def groups() -> dict[str, tuple[int, ...]]:
    """In the order in which they are made."""
    every = range(RANKS)
    tensor = {f"tp{first}": (first, first + 1) for first in range(0, RANKS, 2)}
    data = {f"dp{first}": tuple(range(first, RANKS, WIDTH)) for first in range(WIDTH)}
    pipeline = {f"pp{first}": tuple(range(first, RANKS, WIDTH)) for first in range(WIDTH)}
    expert = {f"ep{first}": tuple(range(first, first + WIDTH)) for first in range(0, RANKS, WIDTH)}
    amax = {f"tp_dp{first}": tuple(range(first, first + WIDTH)) for first in range(0, RANKS, WIDTH)}
    return {WORLD: tuple(every), **data, **tensor, **pipeline, **amax, **expert}


def _program(rank: int, batches: int) -> list[Operation]:
    stage, tensor, pipeline = rank // WIDTH, f"tp{rank // 2 * 2}", f"pp{rank % WIDTH}"
    expert, amax = f"ep{rank // WIDTH * WIDTH}", f"tp_dp{rank // WIDTH * WIDTH}"
    found: list[Operation] = []
    for _ in range(batches):
        for ahead, there in ((rank - WIDTH, rank + WIDTH), (rank + WIDTH, rank - WIDTH)):
            if 0 <= ahead < RANKS:
                found.append(Operation(pipeline, "recv", ahead))
            if stage in (0, STAGES - 1):
                found.append(Operation(tensor, "broadcast"))
            found.append(Operation(tensor, "_all_gather_base"))
            found += [Operation(expert, "all_to_all")] * 3
            found += [Operation(tensor, "_reduce_scatter_base"), Operation(amax, "all_reduce")]
            if 0 <= there < RANKS:
                found.append(Operation(pipeline, "send", there))
    return found


def job(
    *, stopped: Collection[int] = (), broken: str = "", at: int = 60, turns: int = 10_000, batches: int = 12
) -> list[Rank]:
    """Run until nobody can go on, or for so many turns. `stopped`: ranks whose CPU stops before their call number `at`;
    `broken`: a group whose network fails then."""
    ranks = [Rank(_program(rank, batches)) for rank in range(RANKS)]
    partners = _partners(ranks)
    for _ in range(turns):
        moved = False
        for number, rank in enumerate(ranks):
            room = min(len(rank.program), rank.done + AHEAD, at if number in stopped else len(rank.program))
            moved |= room > rank.called
            rank.called = max(rank.called, room)
            if rank.done == rank.called or (rank.program[rank.done].group == broken and rank.done >= at):
                continue
            others = partners[number, rank.done]
            if all(ranks[peer].called > index and ranks[peer].done >= index for peer, index in others):
                for peer, index in others:
                    ranks[peer].done = max(ranks[peer].done, index + 1)
                rank.done, moved = rank.done + 1, True
        if not moved:
            break
    return ranks


def _partners(ranks: Sequence[Rank]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each call of each rank, which calls of others have to come together with it."""
    together: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for number, rank in enumerate(ranks):
        counts: dict[tuple[object, ...], int] = {}
        for index, each in enumerate(rank.program):
            pair = (number, each.peer) if each.name == "send" else (each.peer, number)
            stream = (each.group,) if each.peer < 0 else (each.group, *pair)
            counts[stream] = counts.get(stream, 0) + 1
            together.setdefault((*stream, counts[stream]), []).append((number, index))
    return {one: [other for other in all_of if other != one] for all_of in together.values() for one in all_of}


def recorders(ranks: Sequence[Rank], blind: Collection[int] = ()) -> list[Recorder]:
    """What each has recorded, long after its start. `blind`: whose watchdog thread has died."""
    names, found = groups(), []
    for number, rank in enumerate(ranks):
        mine = {name: members for name, members in names.items() if number in members}
        recorder = Recorder(number, names, first=79_000, counts={name: 10_000 + 7 * at for at, name in enumerate(mine)})
        done = rank.done - BLIND if number in blind else rank.done
        for index, each in enumerate(rank.program[: rank.called]):
            recorder.now = BEGAN + index * 0.01
            if each.peer < 0:
                recorder.collective(each.name, each.group, done=index < done)
            else:
                (recorder.send if each.name == "send" else recorder.recv)(each.peer, each.group, done=index < done)
        found.append(recorder)
    return found
