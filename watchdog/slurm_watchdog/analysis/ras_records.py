"""What NCCL's RAS says of a job, as records of its ranks. Pure.

RAS counts what each rank has called: who has called fewer than others of its communicator keeps them waiting. It names
ranks by communicator and process; the communicator of all ranks has the job's own numbers, in any other a rank is
known by its pid, where no other rank of the job has the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from slurm_watchdog.model.collective_records import (
    Call,
    CollectiveRecord,
    Communicator,
    RasAnswer,
    RasCommunicator,
    RasRank,
)

SNAKE = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "": "collective"}
"""Names of collectives as everybody else has them."""


def ras_records(answer: RasAnswer, pids: Mapping[int, int]) -> tuple[CollectiveRecord, ...]:
    """One record for each rank that RAS knows; `pids`: rank -> pid of all ranks of the job."""
    places: dict[int, list[Communicator]] = {}
    shared = Counter(pids.values())
    of_pid = {pid: rank for rank, pid in pids.items() if shared[pid] == 1}
    for each in answer.communicators:
        numbers = _numbers(each, pids, of_pid)
        for number, place in _places(each, numbers).items():
            places.setdefault(number, []).append(place)
    return tuple(
        CollectiveRecord(rank=rank, communicators=tuple(places[rank]), whole=False, point_to_point=False)
        for rank in sorted(places)
    )


def _numbers(communicator: RasCommunicator, pids: Mapping[int, int], of_pid: Mapping[int, int]) -> dict[int, int]:
    """Rank of the communicator -> rank of the job."""
    by_pid = {each.rank: of_pid[each.pid] for each in communicator.ranks if each.pid is not None and each.pid in of_pid}
    said = [pids.get(each.rank) == each.pid for each in communicator.ranks if each.pid is not None]
    agrees = 2 * sum(said) > len(said) and all(own == rank for own, rank in by_pid.items())
    if communicator.size == len(pids) and agrees:
        return {rank: rank for rank in pids}
    return by_pid


def _places(communicator: RasCommunicator, numbers: Mapping[int, int]) -> dict[int, Communicator]:
    kinds = max((len(each.counts) for each in communicator.ranks), default=0)
    known = [each for each in communicator.ranks if kinds and len(each.counts) == kinds and each.rank in numbers]
    if not known:
        return {}
    totals = {each.rank: sum(count for _, count in each.counts) for each in known}
    least, whole = min(totals.values()), len(numbers) == communicator.size
    fewest = {kind: min(dict(each.counts).get(kind, 0) for each in known) for kind, _ in known[0].counts}
    differ = len(set(totals.values())) > 1
    others = not differ and len({each.counts for each in known}) > 1
    members = tuple(sorted(numbers.values())) if whole else ()
    found = {}
    for each in known:
        seq = least + 1 if differ else least
        ahead = others or totals[each.rank] > least
        waits = (Call(seq=seq, name=_ahead_in(each, fewest)),) if ahead else ()
        found[numbers[each.rank]] = Communicator(
            key=communicator.key, label=f"communicator {communicator.key[:8]} of {communicator.size}",
            entered=totals[each.rank], waits=waits, members=members if waits else (),
        )  # fmt: skip
    return found


def _ahead_in(rank: RasRank, fewest: Mapping[str, int]) -> str:
    """The kind of collective of which it has called more than somebody else."""
    kinds = [kind for kind, count in rank.counts if count > fewest.get(kind, 0)]
    return SNAKE.get(kinds[0], kinds[0].lower()) if kinds else "collective"


def unreachable(answer: RasAnswer, pids: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks whose process does not answer the RAS threads of the others: stopped, or gone."""
    shared = Counter(pids.values())
    of_pid = {pid: rank for rank, pid in pids.items() if shared[pid] == 1}
    found: set[int] = set()
    for each in answer.communicators:
        numbers = _numbers(each, pids, of_pid)
        found |= {numbers[rank.rank] for rank in each.ranks if rank.unreachable and rank.rank in numbers}
    return tuple(sorted(found))
