"""Random jobs of collectives, sends and batches, run step by step until nobody can go on, and dumped as NCCL's recorder would.

One rank may stop for ever at some place (it is at fault), or one operation may never end (the network: nobody is).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.builders.nccl_dumps import WORLD, Recorder

KINDS = ("all_reduce", "all_reduce", "_all_gather_base", "broadcast")
BEGAN, STUCK_S = 1e9, 60.0
"""The date of the first step, each of which takes a second; and how long after the last the dumps of a hang are made."""


@dataclass(frozen=True)
class Operation:
    """A collective of a group (`pairs` is empty), or sender and receiver: one pair, or several in a batch."""

    group: str
    name: str = ""
    pairs: tuple[tuple[int, int], ...] = ()
    members: tuple[int, ...] = ()

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.members) | {rank for pair in self.pairs for rank in pair}

    def waits_for(self, rank: int) -> frozenset[int]:
        """Who has to come before it ends on this rank."""
        if self.name == "broadcast":
            return frozenset(self.members[:1])
        return self.ranks if not self.pairs else frozenset(r for pair in self.pairs if rank in pair for r in pair)

    @property
    def stream(self) -> tuple[object, ...]:
        """What is on one of them ends in order: a group has one, and each pair of ranks that sends by itself."""
        return (self.group, *sorted(self.pairs[0])) if self.name == "send" else (self.group,)


@dataclass
class Rank:
    """How far one rank is: which operations it has begun, when, and which have ended."""

    program: Sequence[int]
    begun: dict[int, float] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def heads(self, operations: Sequence[Operation]) -> set[int]:
        """The first of each stream that has not ended."""
        found: dict[tuple[object, ...], int] = {}
        for at in self.begun:
            if at not in self.ended:
                found.setdefault(operations[at].stream, at)
        return set(found.values())

    def copy(self) -> Rank:
        return Rank(self.program, dict(self.begun), set(self.ended))


@dataclass(frozen=True)
class Job:
    """What was run: at each step the state of all ranks."""

    groups: Mapping[str, Sequence[int]]
    operations: Sequence[Operation]
    guilty: int | None
    history: Sequence[Sequence[Rank]]
    room: int

    def record(self, rank: int, step: int) -> Recorder:
        """What this rank had recorded by that step."""
        recorder, state = Recorder(rank, self.groups, room=self.room), self.history[step][rank]
        for at, recorder.now in state.begun.items():
            each, done = self.operations[at], at in state.ended
            if not each.pairs:
                recorder.collective(each.name, each.group, done=done)
            elif each.name == "send":
                (sender, receiver) = each.pairs[0]
                send = recorder.send if rank == sender else recorder.recv
                send(receiver if rank == sender else sender, each.group, done=done)
            else:
                parts = [("send", b) if a == rank else ("recv", a) for a, b in each.pairs if rank in (a, b)]
                recorder.batch(*parts, group=each.group, done=done)
        return recorder


def random_job(
    seed: int, *, stops: bool = False, breaks: bool = False, collectives: bool = True, batches: bool = True
) -> Job:
    """`stops`: one rank does, somewhere; `breaks`: one operation never ends. Without both it runs to its end."""
    rng = Random(seed)
    number = rng.choice([4, 4, 8])
    groups: dict[str, Sequence[int]] = {WORLD: tuple(range(number))}
    if rng.random() < 0.7:
        width = rng.choice([2, number // 2])
        groups |= {f"tp{first}": tuple(range(first, first + width)) for first in range(0, number, width)}
        groups |= {f"dp{first}": tuple(range(first, number, width)) for first in range(width)}
    operations = [each for _ in range(rng.randint(10, 80)) if (each := _operation(rng, groups, collectives, batches))]
    guilty = rng.randrange(number) if stops else None
    programs = [[at for at, each in enumerate(operations) if rank in each.ranks] for rank in range(number)]
    ends = [len(each) for each in programs]
    if guilty is not None:
        ends[guilty] = rng.randrange(ends[guilty] + 1)
    broken = rng.randrange(len(operations)) if breaks and operations else None
    ranks = [Rank(program[:end]) for program, end in zip(programs, ends, strict=True)]
    history = _run(rng, ranks, operations, broken)
    return Job(groups, operations, guilty, history, rng.choice([2000, 2000, 300, 12]))


def _operation(rng: Random, groups: Mapping[str, Sequence[int]], collectives: bool, batches: bool) -> Operation | None:
    group, kind = rng.choice(list(groups)), rng.random()
    members = tuple(groups[group])
    if collectives and (kind < 0.45 or len(members) < 2):
        return Operation(group, rng.choice(KINDS), members=members)
    if len(members) < 2:
        return None
    alone = kind < 0.8 or not batches
    pairs = {tuple(rng.sample(members, 2)) for _ in range(1 if alone else rng.randint(1, 3))}
    return Operation(group, "send" if alone else "batch", pairs=tuple(sorted((a, b) for a, b in pairs)))


def _run(rng: Random, ranks: Sequence[Rank], operations: Sequence[Operation], broken: int | None) -> list[list[Rank]]:
    ahead, buffered, history, moves = rng.choice([1, 2, 5]), rng.random() < 0.5, list[list[Rank]](), True
    while moves:
        moves = False
        for number in rng.sample(range(len(ranks)), len(ranks)):
            rank = ranks[number]
            if len(rank.begun) < len(rank.program) and len(rank.begun) - len(rank.ended) < ahead:
                moves = True
                if rng.random() < 0.7:
                    rank.begun[rank.program[len(rank.begun)]] = BEGAN + len(history)
            for at in rank.heads(operations) - {broken}:
                each = operations[at]
                sent = buffered and each.name == "send" and each.pairs[0][0] == number
                others = [ranks[other] for other in each.waits_for(number)]
                if sent or all(at in other.ended or at in other.heads(operations) for other in others):
                    rank.ended.add(at)
                    moves = True
        history.append([rank.copy() for rank in ranks])
    return history
