"""What the records of all ranks say together, and its words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import listed, plural
from slurm_watchdog.model.collective_records import Call

MAX_NUMBERS = 4
MAX_REASONS = 4  # Ranks, or sets of ranks with one reason, whose reasons a sentence has; the list below it has all.


class OddRank(Struct):
    """A rank that keeps others waiting."""

    rank: int
    reason: str  # `has not entered all_reduce 61 of default_pg`.
    only_spoken_to: bool = False
    """No collective is known that it has not entered: others send to it, or receive from it, and it does neither."""


class CollectiveOrder(Struct):
    """What the records of all ranks say together."""

    ranks: int  # Of which there is a record.
    waiting: tuple[int, ...] = ()  # Ranks with a collective that they have not finished.
    odd: tuple[OddRank, ...] = ()
    facts: tuple[str, ...] = ()
    """Communicator by communicator: how far all are, what each has finished last, who did not come, who called
    something else."""
    unclear: str = ""  # Why no rank is identified, although ranks wait.
    missing: tuple[int, ...] = ()  # Ranks of communicators in which others wait, and of which there is no record.


class Front(Struct):
    """One collective in which ranks wait."""

    label: str
    calls: Mapping[int, Call]  # By rank.
    behind: tuple[int, ...]  # Members that have not entered it, and had the time to.
    early: bool  # Whether there are others, who had not.
    missing: tuple[int, ...]
    finished: Mapping[int, int]
    """The last collective of its communicator that each rank has finished, where that is known."""
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
