"""Which rank keeps the others waiting, from what all ranks recorded of their collectives. Pure.

A rank waits for each member of the communicator that has not entered the collective which it has. Who is waited for,
and waits for nobody itself, keeps the others waiting; so does one alone in another collective, or with another size,
than all the rest. A rank without a record is never named, and neither is anybody where half of the ranks would be.

Whom others only send to, or receive from, may have done its part: sending and receiving has no number that two ranks
share. It is named only if it is what everyone who waits waits for in the end, and all of these have a record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.collective_records import Call, CollectiveRecord, Communicator

MAX_ODD = 0.25
"""Share of the ranks of a communicator that may be called odd (as hang_proof.MAX_OUTSIDE); one in any case, beside
LEAST_AGREEING."""
LEAST_AGREEING = 2
LEAST_WAIT_S = 10.0
"""A rank that has not come so long after another one began to wait, by the records of both, is waited for: dumps are
written within seconds of one another, and the clocks of two nodes differ by less."""
MAX_NAMED = 32
MAX_FACTS = 8
MAX_NUMBERS = 4


class OddRank(Struct, frozen=True, kw_only=True):
    """A rank that keeps others waiting."""

    rank: int
    reason: str
    """`has not entered all_reduce 61 of default_pg`."""
    only_spoken_to: bool = False
    """No collective is known that it has not entered: others send to it, or receive from it, and it does neither."""


class CollectiveOrder(Struct, frozen=True, kw_only=True):
    """What the records of all ranks say together."""

    ranks: int
    """Of which there is a record."""
    waiting: tuple[int, ...] = ()
    """Ranks with a collective that they have not finished."""
    odd: tuple[OddRank, ...] = ()
    facts: tuple[str, ...] = ()
    """Communicator by communicator: how far all are, what each has finished last, who did not come, who called
    something else."""
    unclear: str = ""
    """Why nobody is named, although ranks wait."""
    missing: tuple[int, ...] = ()
    """Ranks of communicators in which others wait, and of which there is no record."""


class _Front(Struct, frozen=True, kw_only=True):
    """One collective in which ranks wait."""

    label: str
    calls: Mapping[int, Call]
    """By rank."""
    behind: tuple[int, ...]
    """Members that have not entered it, and had the time to."""
    early: bool
    """Whether there are others, who had not."""
    missing: tuple[int, ...]
    finished: Mapping[int, int]
    """The last collective of its communicator that each rank has finished, where that is known."""
    known: bool
    """Whether its members are known; several communicators may share a name otherwise, and accuse nobody."""

    @property
    def words(self) -> str:
        name, _ = Counter(call.name for call in self.calls.values()).most_common(1)[0]
        return f"{name} {next(iter(self.calls.values())).seq} of {self.label}"


def order_of(records: Sequence[CollectiveRecord]) -> CollectiveOrder:
    """The verdict of all records of one moment, one for each rank at most."""
    single = _single(records)
    old = _older(single)
    of_rank = {rank: record for rank, record in single.items() if rank not in old}
    fronts = _fronts(of_rank)
    waiting = {record.rank for record in of_rank.values() if _waits(record)}
    # Who has begun to talk to a rank that talks to nobody waits for it.
    spoken_to = {peer for record in of_rank.values() for peer in _awaited_peers(record, of_rank)}
    behind = {rank for front in fronts for rank in front.behind}
    roots = sorted((behind | spoken_to & of_rank.keys()) - waiting)
    odd = [odd for front in fronts if front.known for odd in _other_calls(front)]
    facts = [fact for front in fronts for fact in _facts(front)][:MAX_FACTS]
    facts += [f"the record of rank {_few(old)} is older than others, and does not count"] if old else []
    missing = tuple(sorted({rank for front in fronts for rank in front.missing} | spoken_to - of_rank.keys()))
    found = CollectiveOrder(
        ranks=len(of_rank), waiting=tuple(sorted(waiting)), facts=tuple(dict.fromkeys(facts)), missing=missing
    )
    if not waiting:
        return found
    if odd:
        return _with(found, odd[:MAX_NAMED])
    if len(roots) > max(1, MAX_ODD * len(of_rank)) or len(roots) >= len(waiting):
        few = _few(sorted(waiting))
        return _without(
            found, f"as many did not come as wait, or more: rank {few} may have called what others never do"
        )
    if lossy := [rank for rank in roots if of_rank[rank].lossy]:
        return _without(found, f"the buffer of rank {_few(lossy)} is too small to say that it waits for nobody")
    only_spoken_to = frozenset(roots) - behind
    certain = not missing and _explain(only_spoken_to, of_rank, fronts)
    named = [rank for rank in roots if certain or rank not in only_spoken_to]
    if named:
        return _with(found, [_odd(rank, fronts) for rank in named[:MAX_NAMED]])
    if missing:
        return _without(found, f"there is no record of rank {_few(missing)}")
    if roots:
        return _without(found, f"rank {_few(roots)} has nothing unfinished, and may have sent what others wait for")
    if any(not place.comparable and place.waits for record in of_rank.values() for place in record.communicators):
        return _without(found, "this release of PyTorch numbers the collectives of each rank differently")
    if not all(front.known for front in fronts):
        return _without(found, "who belongs to a communicator in which ranks wait is not known")
    if any(_disagree(front) for front in fronts):
        return _without(found, "ranks called different collectives, and no side has a clear majority")
    if _in_a_circle(of_rank, fronts):
        return _without(
            found, "ranks wait for one another in a circle: they use their communicators in different order"
        )
    if any(front.early for front in fronts) or any({*record.peers} - spoken_to for record in of_rank.values()):
        return _without(
            found, "what is unfinished was begun only seconds before one of these records was made, or after"
        )
    if behind or spoken_to:
        return _without(
            found,
            "who is waited for waits in what all have entered: it is the network, a GPU, or still under way",
        )
    return _without(found, "every rank has entered what it waits for: it is the network, a GPU, or still under way")


def words_of(order: CollectiveOrder) -> str:
    """One sentence."""
    recorded = f"{order.ranks} rank{'' if order.ranks == 1 else 's'}"
    if not order.waiting:
        return f"No collective is unfinished on any of {recorded} that left a record."
    wait = f"{len(order.waiting)} of {recorded} {'waits' if len(order.waiting) == 1 else 'wait'}"
    if not order.odd:
        return f"{wait}, and nobody is named: {order.unclear}."
    first, more = order.odd[0], len(order.odd) - 1
    return f"Rank {first.rank} {first.reason}{f', and so {more} more' if more else ''}; {wait}."


def _with(found: CollectiveOrder, odd: Sequence[OddRank]) -> CollectiveOrder:
    once = {each.rank: each for each in reversed(odd)}
    ordered = tuple(once[rank] for rank in sorted(once))
    return CollectiveOrder(
        ranks=found.ranks, waiting=found.waiting, odd=ordered, facts=found.facts, missing=found.missing
    )


def _without(found: CollectiveOrder, why: str) -> CollectiveOrder:
    return CollectiveOrder(
        ranks=found.ranks, waiting=found.waiting, facts=found.facts, unclear=why, missing=found.missing
    )


def _single(records: Iterable[CollectiveRecord]) -> dict[int, CollectiveRecord]:
    """By rank. Two records of one number are of two programs of the job, and nobody knows which is meant."""
    numbers = Counter(record.rank for record in records)
    return {record.rank: record for record in records if numbers[record.rank] == 1}


def _groups(of_rank: Mapping[int, CollectiveRecord]) -> dict[str, dict[int, Communicator]]:
    """The place of each rank in each communicator, by the communicator's key."""
    groups: dict[str, dict[int, Communicator]] = {}
    for rank, record in of_rank.items():
        for each in record.communicators:
            groups.setdefault(each.key, {})[rank] = each
    return groups


def _older(of_rank: Mapping[int, CollectiveRecord]) -> tuple[int, ...]:
    """Ranks whose record was made before others': these have finished what nobody finishes before all have entered it,
    and there it is not entered. It says nothing of now."""
    found = set[int]()
    for places in _groups(of_rank).values():
        newest = max(place.together for place in places.values())
        if not newest or not all(place.comparable for place in places.values()):
            continue
        found |= {rank for rank, place in places.items() if place.entered < newest}
        members = next((place.members for place in places.values() if place.members), ())
        absent = [of_rank[rank] for rank in members if rank in of_rank and rank not in places]
        found |= {record.rank for record in absent if record.whole and record.since_start}
    return tuple(sorted(found))


def _explain(roots: Set[int], of_rank: Mapping[int, CollectiveRecord], fronts: Sequence[_Front]) -> bool:
    """Whether all that wait, wait for one of these in the end, and each is asked for by itself: an operation with
    several peers may wait for another of them."""
    sure = {
        peer
        for record in of_rank.values()
        for peer in _awaited_peers(record, of_rank)
        if peer not in record.unsure_peers
    }
    waiting = {rank for rank, record in of_rank.items() if _waits(record)}
    reached, before = set(roots), -1
    while len(reached) > before:
        before = len(reached)
        reached |= {rank for rank in waiting if reached.intersection(of_rank[rank].peers)}
        for front in fronts:
            if reached.intersection(front.behind) or not reached.isdisjoint(front.calls):
                reached |= front.calls.keys()
    return waiting <= reached and roots <= sure


def _in_a_circle(of_rank: Mapping[int, CollectiveRecord], fronts: Sequence[_Front]) -> bool:
    """Whether some ranks wait for each other, and for nobody who waits for none of them."""
    awaited = {rank: {*_awaited_peers(record, of_rank)} & of_rank.keys() for rank, record in of_rank.items()}
    for front in fronts:
        for rank in front.calls:
            awaited[rank].update(front.behind)
    while free := [rank for rank, peers in awaited.items() if not peers & awaited.keys()]:
        for rank in free:
            del awaited[rank]
    return bool(awaited)


def _waited(since: float | None, *records: CollectiveRecord) -> bool:
    """Whether all of these were made long after `since`, as far as that is known."""
    return since is None or all(each.made_at is None or each.made_at - since >= LEAST_WAIT_S for each in records)


def _awaited_peers(record: CollectiveRecord, of_rank: Mapping[int, CollectiveRecord]) -> Iterable[int]:
    """Whom this rank sends to or receives from, for long enough; also ranks without a record."""
    since_of = dict(zip(record.peers, record.peers_since, strict=False))
    for peer in record.peers:
        if _waited(since_of.get(peer), record, *([of_rank[peer]] if peer in of_rank else [])):
            yield peer


def _waits(record: CollectiveRecord) -> bool:
    return record.busy or any(each.waits for each in record.communicators)


def _fronts(of_rank: Mapping[int, CollectiveRecord]) -> list[_Front]:
    """Every collective that is the first which a rank has not finished."""
    return [front for _, places in sorted(_groups(of_rank).items()) for front in _of_group(places, of_rank)]


def _of_group(places: Mapping[int, Communicator], of_rank: Mapping[int, CollectiveRecord]) -> Iterable[_Front]:
    """Those of one communicator. Where its members are not known, several may share its name: nobody is behind."""
    comparable = all(each.comparable for each in places.values())
    members = next((each.members for each in places.values() if each.members and comparable), ())
    first: dict[int, dict[int, Call]] = {}
    for rank, place in places.items():
        if place.waits:
            first.setdefault(place.waits[0].seq, {})[rank] = place.waits[0]
    entered = {
        rank: places[rank].entered if rank in places else 0
        for rank in members
        if rank in places or (rank in of_rank and of_rank[rank].whole)
    }
    label = next(iter(places.values())).label
    missing = tuple(rank for rank in members if rank not in of_rank)
    for seq in sorted(first):
        calls = [(call.since, of_rank[rank]) for rank, call in first[seq].items()]
        away = [rank for rank, at in entered.items() if at < seq]
        behind = tuple(r for r in away if any(_waited(since, caller, of_rank[r]) for since, caller in calls))
        yield _Front(
            label=label, calls=first[seq], behind=behind, early=len(behind) < len(away), missing=missing,
            finished={rank: place.finished for rank, place in places.items() if place.finished is not None},
            known=bool(members),
        )  # fmt: skip


def _signature(call: Call) -> tuple[str, int | None, tuple[str, ...]]:
    return call.name, call.elements, call.types


def _disagree(front: _Front) -> bool:
    return len({_signature(call) for call in front.calls.values()}) > 1


def _other_calls(front: _Front) -> list[OddRank]:
    """The few that called something else than all the rest."""
    sides = Counter(_signature(call) for call in front.calls.values()).most_common()
    usual, agreeing = sides[0]
    others = len(front.calls) - agreeing
    if len(sides) < 2 or agreeing < LEAST_AGREEING or others > max(1, MAX_ODD * len(front.calls)):
        return []
    return [
        OddRank(rank=rank, reason=f"called {_call_words(call, usual)} as number {call.seq} of {front.label}")
        for rank, call in sorted(front.calls.items())
        if _signature(call) != usual
    ]


def _call_words(call: Call, usual: tuple[str, int | None, tuple[str, ...]]) -> str:
    name, elements, types = usual
    if call.name != name:
        return f"{call.name} where the others called {name}"
    if call.elements != elements:
        return f"{call.name} with {call.elements} elements where the others have {elements}"
    return f"{call.name} of {'/'.join(call.types)} where the others have {'/'.join(types)}"


def _odd(rank: int, fronts: Sequence[_Front]) -> OddRank:
    front = min((each for each in fronts if rank in each.behind), key=lambda each: len(each.behind), default=None)
    if front is None:
        reason = "does not answer a rank that sends to it or receives from it"
        return OddRank(rank=rank, reason=reason, only_spoken_to=True)
    return OddRank(rank=rank, reason=f"has not entered {front.words}")


def _facts(front: _Front) -> Iterable[str]:
    ranks = len(front.calls)
    yield (
        f"{ranks} rank{' waits' if ranks == 1 else 's wait'} in {front.words}"
        + (f"; not entered by rank {_few(front.behind)}" if front.behind else "")
        + (f"; no record of rank {_few(front.missing)}" if front.missing else "")
        + (f"; last finished: {_numbers(front.finished)}" if front.finished else "")
    )
    if _disagree(front):
        sides: dict[str, list[int]] = {}
        for rank, call in sorted(front.calls.items()):
            what = call.name if call.elements is None else f"{call.name} of {call.elements} {'/'.join(call.types)}"
            sides.setdefault(what, []).append(rank)
        yield f"{front.label} {next(iter(front.calls.values())).seq}: " + ", ".join(
            f"{what} on rank {_few(sides[what])}" for what in sorted(sides)
        )


def _numbers(finished: Mapping[int, int]) -> str:
    """`number 7 on rank 0, 1, 3, number 6 on rank 2`: the highest first, with the ranks of each."""
    ranks: dict[int, list[int]] = {}
    for rank, number in sorted(finished.items()):
        ranks.setdefault(number, []).append(rank)
    shown = [f"number {number} on rank {_few(ranks[number])}" for number in sorted(ranks, reverse=True)[:MAX_NUMBERS]]
    return ", ".join(shown) + (f" and {len(ranks) - MAX_NUMBERS} other numbers" if len(ranks) > MAX_NUMBERS else "")


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
