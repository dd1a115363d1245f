"""Which rank keeps the others waiting, from what all ranks recorded of their collectives. Pure.

A rank waits for each member of the communicator that has not entered the collective which it has. Who is waited for,
and waits for no one itself, keeps the others waiting; so does one alone in another collective, or with another size,
than all the rest. A rank without a record is never named, and neither is anybody where half of the ranks would be.

A rank that others only send to or receive from may have done its part: these have no number that two ranks
share. It is named only if it is what everyone who waits waits for in the end, and all of these have a record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import listed, plural
from slurm_watchdog.knowledge.limits import most_odd
from slurm_watchdog.model.collective_records import Call, CollectiveRecord, Communicator

LEAST_AGREEING = 2
LEAST_WAIT_S = 10.0
"""A rank that has not come so long after another one began to wait, by the records of both, is waited for: dumps are
written within seconds of one another, and the clocks of two nodes differ by less."""
TOGETHER_S = 30.0  # Dumps of one moment were written within so long; what an older one waited for may have come since.
MAX_NAMED = 32
MAX_FACTS = 8
MAX_UNNAMED = 8
"""Calls that a rank may be behind while nothing says that they need it: of what is left out of a record only the number
is known, and the root of some broadcasts runs so far ahead."""
MAX_NUMBERS = 4
MAX_REASONS = 4  # Ranks, or sets of ranks with one reason, whose reasons a sentence has; the list below it has all.


class OddRank(Struct):
    """A rank that keeps others waiting."""

    rank: int
    reason: str  # `has not entered all_reduce 61 of default_pg`.
    only_spoken_to: bool = False  # It has entered all that is known: others send to it or receive from it.


class CollectiveOrder(Struct):
    """What the records of all ranks say together."""

    ranks: int  # Of which there is a record.
    waiting: tuple[int, ...] = ()  # Ranks with a collective that they have not finished.
    odd: tuple[OddRank, ...] = ()
    facts: tuple[str, ...] = ()  # Of each communicator: how far all are, who did not come or called something else.
    unclear: str = ""  # Why no rank is identified, although ranks wait.
    missing: tuple[int, ...] = ()  # Ranks of communicators in which others wait, and of which there is no record.


class Front(Struct):
    """One collective in which ranks wait."""

    label: str
    calls: Mapping[int, Call]  # By rank.
    behind: tuple[int, ...]  # Members that have not entered it, and had the time to.
    early: bool  # Whether there are others, who had not.
    missing: tuple[int, ...]
    finished: Mapping[int, int]  # The last collective that each rank has finished, where that is known.
    known: bool  # Whether its members are known; several communicators may share a name otherwise, and accuse no one.

    @property
    def words(self) -> str:
        name, _ = Counter(call.name for call in self.calls.values()).most_common(1)[0]
        return f"{name} {next(iter(self.calls.values())).seq} of {self.label}"

    @property
    def disagrees(self) -> bool:
        return len({signature(call) for call in self.calls.values()}) > 1


def signature(call: Call) -> tuple[str, int | None, tuple[str, ...]]:
    """What has to be the same on all ranks."""
    return call.name, call.elements, call.types


def order_of(records: Sequence[CollectiveRecord]) -> CollectiveOrder:
    """The verdict of all records of one moment, one for each rank at most."""
    numbers = Counter(record.rank for record in records)  # two records of one number are of two programs of the job
    single = {record.rank: record for record in records if numbers[record.rank] == 1}
    old = _older(single)
    of_rank = {rank: record for rank, record in single.items() if rank not in old}
    blind = _blind(of_rank)
    of_rank |= {rank: _without_waits(of_rank[rank]) for rank in blind}
    groups = sorted(
        _groups(of_rank).items()
    )  # of each every collective that is the first which a rank has not finished
    fronts = [front for _, places in groups for front in _of_group(places, of_rank)]
    waiting = {record.rank for record in of_rank.values() if _waits(record)}
    # Who has begun to talk to a rank that talks to no one waits for it.
    spoken_to = {peer for record in of_rank.values() for peer in _awaited_peers(record, of_rank)} - blind
    behind = {rank for front in fronts for rank in front.behind}
    roots = sorted((behind | spoken_to & of_rank.keys()) - waiting)
    odd = [odd for front in fronts if front.known for odd in _other_calls(front)]
    by_weight = sorted(fronts, key=lambda front: not front.behind)
    facts = [fact for front in by_weight for fact in facts_of(front)][:MAX_FACTS]
    facts += [f"the record of {listed(old, 'rank')} is older than others, and does not count"] if old else []
    facts += [blind_words(blind)] if blind else []
    missing = tuple(sorted({rank for front in fronts for rank in front.missing} | spoken_to - of_rank.keys()))
    found = CollectiveOrder(
        ranks=len(of_rank), waiting=tuple(sorted(waiting)), facts=tuple(dict.fromkeys(facts)), missing=missing
    )
    if not waiting:
        return found
    if odd:
        once = {each.rank: each for each in reversed(odd[:MAX_NAMED])}
        return replace(found, odd=tuple(once[rank] for rank in sorted(once)))
    if len(roots) > most_odd(len(of_rank)) or len(roots) >= len(waiting):
        few = listed(waiting, "rank")
        return replace(
            found, unclear=f"as many did not come as wait, or more: {few} may have called what others never do"
        )
    if lossy := [rank for rank in roots if of_rank[rank].lossy]:
        small = f"the buffer of {listed(lossy, 'rank')} is too small to show which rank it waits for"
        return replace(found, unclear=small)
    only_spoken_to = frozenset(roots) - behind
    certain = not missing and _explain(only_spoken_to, of_rank, fronts)
    named = [rank for rank in roots if certain or rank not in only_spoken_to]
    if named:
        return replace(found, odd=tuple(_odd(rank, fronts) for rank in named[:MAX_NAMED]))
    return replace(found, unclear=_unclear(of_rank, fronts, roots, spoken_to, missing, blind))


def _unclear(
    of_rank: Mapping[int, CollectiveRecord],
    fronts: Sequence[Front],
    roots: Sequence[int],
    spoken_to: Set[int],
    missing: Sequence[int],
    blind: Set[int],
) -> str:
    """Why no rank is identified."""
    if blind:
        return blind_words(blind)
    behind = any(front.behind for front in fronts)
    early = any(front.early for front in fronts)
    if missing:
        return f"there is no record of {listed(missing, 'rank')}"
    if roots:
        has = "has" if len(roots) == 1 else "have"
        return f"{listed(roots, 'rank')} {has} nothing unfinished, and may have sent what others wait for"
    if any(not place.comparable and place.waits for record in of_rank.values() for place in record.communicators):
        return "this release of PyTorch numbers the collectives of each rank differently"
    if not all(front.known for front in fronts):
        return "who belongs to a communicator in which ranks wait is not known"
    if any(front.disagrees for front in fronts):
        return "ranks called different collectives, and no side has a clear majority"
    if _in_a_circle(of_rank, fronts):
        return "ranks wait for one another in a circle: they use their communicators in different order"
    if early or any({*record.peers} - spoken_to for record in of_rank.values()):
        return "what is unfinished was begun only seconds before one of these records was made, or after"
    if behind or spoken_to:
        return "who is waited for waits in what all have entered: it is the network, a GPU, or still under way"
    return "every rank has entered what it waits for: it is the network, a GPU, or still under way"


def _groups(of_rank: Mapping[int, CollectiveRecord]) -> dict[str, dict[int, Communicator]]:
    """The place of each rank in each communicator, by the communicator's key."""
    groups: dict[str, dict[int, Communicator]] = {}
    for rank, record in of_rank.items():
        for each in record.communicators:
            groups.setdefault(each.key, {})[rank] = each
    for key, places in groups.items():
        if any(each.sends for each in places.values()):
            groups[key] = {rank: each for rank, each in places.items() if not each.by_status}
    return groups


def _older(of_rank: Mapping[int, CollectiveRecord]) -> tuple[int, ...]:
    """Ranks whose record was made before others': these have finished what no one finishes before all have entered it,
    and there it is not entered. It says nothing of now."""
    found = set[int]()
    for places in _groups(of_rank).values():
        newest = max(
            max(place.together, (place.finished or 0) - MAX_UNNAMED if of_rank[rank].active_only else 0)
            for rank, place in places.items()
        )
        if newest <= 0 or not all(place.comparable for place in places.values()):
            continue
        found |= {rank for rank, place in places.items() if place.entered < newest}
        members = next((place.members for place in places.values() if place.members), ())
        absent = [of_rank[rank] for rank in members if rank in of_rank and rank not in places]
        found |= {record.rank for record in absent if record.whole and record.since_start}
        found |= {record.rank for record in absent if record.active_only and (_at_most(record) or newest) < newest}
    return tuple(sorted(found))


def _at_most(record: CollectiveRecord) -> int | None:
    """The highest number that a rank may have entered in a communicator that is not in its record; None: any."""
    return 0 if record.whole and not record.active_only else record.elsewhere


def _blind(of_rank: Mapping[int, CollectiveRecord]) -> Set[int]:
    """Ranks that count as unfinished what they must have finished: others have finished the collective behind it, which
    needs all. What they say of their own waiting is not so; what they have entered is."""
    found = set[int]()
    for places in _groups(of_rank).values():
        done = max((place.finished or 0 for place in places.values() if place.comparable), default=0)
        found |= {
            rank
            for rank, place in places.items()
            if place.comparable and any(call.needs_all and call.seq <= done for call in place.waits[1:])
        }
    return found


def _without_waits(record: CollectiveRecord) -> CollectiveRecord:
    places = tuple(replace(each, waits=()) for each in record.communicators)
    return replace(record, communicators=places, peers=(), peers_since=(), unsure_peers=(), busy=False)


def _explain(roots: Set[int], of_rank: Mapping[int, CollectiveRecord], fronts: Sequence[Front]) -> bool:
    """Whether all that wait, wait for one of these in the end, and each is asked for by itself: an operation with
    several peers may wait for another of them."""
    sure = {
        peer
        for record in of_rank.values()
        for peer in _awaited_peers(record, of_rank)
        if peer not in record.unsure_peers and (peer not in of_rank or _of_one_moment(record, of_rank[peer]))
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


def _in_a_circle(of_rank: Mapping[int, CollectiveRecord], fronts: Sequence[Front]) -> bool:
    """Whether some ranks wait for each other, and for no one who waits for none of them. Of one with calls in several
    communicators, as NCCL's ranks begin them ahead, only the first is waited for, and no one knows which that is."""
    awaited = {rank: {*_awaited_peers(record, of_rank)} & of_rank.keys() for rank, record in of_rank.items()}
    places = Counter(rank for front in fronts for rank in front.calls)
    for front in fronts:
        for rank in front.calls:
            awaited[rank].update(front.behind)
    for rank in [rank for rank in awaited if places[rank] + of_rank[rank].busy > 1]:
        del awaited[rank]
    while free := [rank for rank, peers in awaited.items() if not peers & awaited.keys()]:
        for rank in free:
            del awaited[rank]
    return bool(awaited)


def _waited(since: float | None, *records: CollectiveRecord) -> bool:
    """Whether all of these were made long after `since`, as far as that is known."""
    return since is None or all(each.made_at is None or each.made_at - since >= LEAST_WAIT_S for each in records)


def _of_one_moment(one: CollectiveRecord, other: CollectiveRecord) -> bool:
    """Whether neither was made long before the other, as far as that is known."""
    return one.made_at is None or other.made_at is None or abs(one.made_at - other.made_at) <= TOGETHER_S


def _awaited_peers(record: CollectiveRecord, of_rank: Mapping[int, CollectiveRecord]) -> Iterable[int]:
    """The ranks that this rank sends to or receives from, for long enough; also ranks without a record."""
    since_of = dict(zip(record.peers, record.peers_since, strict=False))
    for peer in record.peers:
        if _waited(since_of.get(peer), record, *([of_rank[peer]] if peer in of_rank else [])):
            yield peer


def _waits(record: CollectiveRecord) -> bool:
    return record.busy or any(each.waits for each in record.communicators)


def _of_group(places: Mapping[int, Communicator], of_rank: Mapping[int, CollectiveRecord]) -> Iterable[Front]:
    """Those of one communicator. Where its members are not known, several may share its name: no one is behind."""
    comparable = all(each.comparable for each in places.values())
    members = next((each.members for each in places.values() if each.members and comparable), ())
    first: dict[int, dict[int, Call]] = {}
    for rank, place in places.items():
        if place.waits:
            first.setdefault(place.waits[0].seq, {})[rank] = place.waits[0]
    entered = {rank: places[rank].entered for rank in members if rank in places}
    for rank in members:
        if rank not in places and rank in of_rank and (most := _at_most(of_rank[rank])) is not None:
            entered[rank] = most
    label = next(iter(places.values())).label
    missing = tuple(rank for rank in members if rank not in of_rank)
    for seq in sorted(first):
        calls = [(call.since, of_rank[rank]) for rank, call in first[seq].items()]
        away = [rank for rank, at in entered.items() if at < seq]
        behind = tuple(r for r in away if any(_waited(since, caller, of_rank[r]) for since, caller in calls))
        yield Front(
            label=label, calls=first[seq], behind=behind, early=len(behind) < len(away), missing=missing,
            finished={rank: place.finished for rank, place in places.items() if place.finished is not None},
            known=bool(members),
        )  # fmt: skip


def _other_calls(front: Front) -> list[OddRank]:
    """The few that called something else than all the rest."""
    sides = Counter(signature(call) for call in front.calls.values()).most_common()
    usual, agreeing = sides[0]
    others = len(front.calls) - agreeing
    if len(sides) < 2 or agreeing < LEAST_AGREEING or others > most_odd(len(front.calls)):
        return []
    return [
        OddRank(rank=rank, reason=f"called {_call_words(call, usual)} as number {call.seq} of {front.label}")
        for rank, call in sorted(front.calls.items())
        if signature(call) != usual
    ]


def _call_words(call: Call, usual: tuple[str, int | None, tuple[str, ...]]) -> str:
    name, elements, types = usual
    if call.name != name:
        return f"{call.name} where the others called {name}"
    if call.elements != elements:
        return f"{call.name} with {call.elements} elements where the others have {elements}"
    return f"{call.name} of {'/'.join(call.types)} where the others have {'/'.join(types)}"


def _odd(rank: int, fronts: Sequence[Front]) -> OddRank:
    front = min((each for each in fronts if rank in each.behind), key=lambda each: len(each.behind), default=None)
    if front is None:
        reason = "does not answer a rank that sends to it or receives from it"
        return OddRank(rank=rank, reason=reason, only_spoken_to=True)
    return OddRank(rank=rank, reason=f"has not entered {front.words}")


# ------------------------------------------------------------------------------------------ in sentences


def words_of(order: CollectiveOrder) -> str:
    """One sentence."""
    recorded = plural(order.ranks, "rank")
    if not order.waiting:
        return f"No collective is unfinished on any of {recorded} that left a record."
    wait = f"{len(order.waiting)} of {recorded} {'waits' if len(order.waiting) == 1 else 'wait'}"
    if not order.odd:
        return f"{wait}, and no rank is identified: {order.unclear}."
    who = who_and_why({each.rank: each.reason for each in order.odd})
    return f"{who[:1].upper()}{who[1:]}; {wait}."


def who_and_why(reasons: Mapping[int, str]) -> str:
    """`ranks 9 and 14 have not entered all_reduce 7 of dp`: every rank, and the reasons of the first."""
    alike: dict[str, list[int]] = {}
    for rank, reason in sorted(reasons.items()):
        alike.setdefault(reason, []).append(rank)
    said = [f"{listed(ranks, 'rank')} {_they(reason, ranks)}" for reason, ranks in alike.items()]
    if len(said) == 1:
        return said[0]
    more = "" if len(said) <= MAX_REASONS else f", and {len(said) - MAX_REASONS} reasons more"
    return f"{listed(reasons, 'rank')} keep the others waiting: {', '.join(said[:MAX_REASONS])}{more}"


def _they(reason: str, ranks: Sequence[int]) -> str:
    """A reason begins with a verb, of one rank."""
    verb, space, rest = reason.partition(" ")
    several = {"has": "have", "does": "do", "is": "are"}
    return f"{several.get(verb, verb)}{space}{rest}" if len(ranks) > 1 else reason


def blind_words(blind: Set[int]) -> str:
    """Of ranks that do not know what they have finished."""
    its, notice = ("its", "notices") if len(blind) == 1 else ("their", "notice")
    what = f"{listed(blind, 'rank')} no longer {notice} what has finished, as the records of {its} peers show"
    return f"{what}: {its} NCCL watchdog thread or GPU may have failed"


def facts_of(front: Front) -> Iterable[str]:
    """What is known of one collective in which ranks wait."""
    ranks = len(front.calls)
    yield (
        f"{ranks} rank{' waits' if ranks == 1 else 's wait'} in {front.words}"
        + (f"; not entered by {listed(front.behind, 'rank')}" if front.behind else "")
        + (f"; no record of {listed(front.missing, 'rank')}" if front.missing else "")
        + (f"; last finished: {_numbers(front.finished)}" if front.finished else "")
    )
    if front.disagrees:
        sides: dict[str, list[int]] = {}
        for rank, call in sorted(front.calls.items()):
            what = call.name if call.elements is None else f"{call.name} of {call.elements} {'/'.join(call.types)}"
            sides.setdefault(what, []).append(rank)
        yield f"{front.label} {next(iter(front.calls.values())).seq}: " + ", ".join(
            f"{what} on {listed(sides[what], 'rank')}" for what in sorted(sides)
        )


def _numbers(finished: Mapping[int, int]) -> str:
    """`number 7 on ranks 0, 1 and 3, number 6 on rank 2`: the highest first, with the ranks of each."""
    ranks: dict[int, list[int]] = {}
    for rank, number in sorted(finished.items()):
        ranks.setdefault(number, []).append(rank)
    shown = [
        f"number {number} on {listed(ranks[number], 'rank')}" for number in sorted(ranks, reverse=True)[:MAX_NUMBERS]
    ]
    return ", ".join(shown) + (f" and {len(ranks) - MAX_NUMBERS} other numbers" if len(ranks) > MAX_NUMBERS else "")
