"""What NCCL's RAS says of a job, as records of its ranks. Pure.

RAS counts what each rank has called: who has called fewer than others of its communicator keeps them waiting. It names
ranks by communicator and process, a process by the address of its node and by its pid there. The communicator of all
ranks has the job's own numbers; in any other, or where those differ, a rank is known by its process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from slurm_watchdog.base.text import listed
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
MAX_FACTS = 4


@dataclass(frozen=True)
class JobProcesses:
    """Where the ranks of a job are."""

    of_rank: Mapping[int, tuple[str, int]]  # Rank -> node and pid, as the process has it in its PID namespace.
    node_of: Mapping[str, str]  # Address -> the only node whose ranks have it.

    @cached_property
    def _ranks(self) -> Mapping[tuple[str, int], int]:
        return {process: rank for rank, process in self.of_rank.items()}

    @cached_property
    def _unknown_hosts(self) -> Mapping[int, list[int]]:
        """Pid -> ranks that have it, on nodes of which no address is known."""
        found: dict[int, list[int]] = {}
        known = set(self.node_of.values())
        for rank, (node, pid) in self.of_rank.items():
            if node not in known:
                found.setdefault(pid, []).append(rank)
        return found

    def rank_of(self, host: str | None, pid: int | None) -> int | None:
        """The rank of this process. Where no one knows the host, the only one with that pid; None: it is not known."""
        if pid is None:
            return None
        if host is not None and host in self.node_of:
            return self._ranks.get((self.node_of[host], pid))
        ranks = self._unknown_hosts.get(pid, [])
        return ranks[0] if len(ranks) == 1 else None

    def may_be(self, rank: int, member: RasRank) -> bool:
        """Whether what is known of that member does not speak against this rank of the job."""
        node, pid = self.of_rank.get(rank, ("", None))
        host = self.node_of.get(member.host or "")
        return pid == member.pid and (host is None or host == node)


def ras_records(answer: RasAnswer, processes: JobProcesses) -> tuple[CollectiveRecord, ...]:
    """One record for each rank that RAS knows; `processes`: of all ranks of the job."""
    places: dict[int, list[Communicator]] = {}
    for each in answer.communicators:
        for number, place in _places(each, _numbers(each, processes)).items():
            places.setdefault(number, []).append(place)
    return tuple(
        CollectiveRecord(rank=rank, communicators=tuple(places[rank]), whole=False, point_to_point=False)
        for rank in sorted(places)
    )


def _numbers(communicator: RasCommunicator, processes: JobProcesses) -> dict[int, int]:
    """Rank of the communicator -> rank of the job. Empty where one process is several of its ranks: no one knows which
    of these a thread of it would be."""
    known = [each for each in communicator.ranks if each.pid is not None]
    numbers = {each.rank: processes.rank_of(each.host, each.pid) for each in known}
    found = {own: rank for own, rank in numbers.items() if rank is not None}
    if len(set(found.values())) < len(found):
        return {}
    agree = 2 * sum(processes.may_be(each.rank, each) for each in known) > len(known)
    if communicator.size == len(processes.of_rank) and agree and all(own == rank for own, rank in found.items()):
        return {rank: rank for rank in processes.of_rank}
    return found


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
            key=communicator.key, label=_label(communicator),
            entered=totals[each.rank], waits=waits, members=members if waits else (),
        )  # fmt: skip
    return found


def _ahead_in(rank: RasRank, fewest: Mapping[str, int]) -> str:
    """The kind of collective of which it has called more than someone else."""
    kinds = [kind for kind, count in rank.counts if count > fewest.get(kind, 0)]
    return SNAKE.get(kinds[0], kinds[0].lower()) if kinds else "collective"


def unreachable(answer: RasAnswer, processes: JobProcesses) -> tuple[int, ...]:
    """Ranks whose process does not answer the RAS threads of the others: stopped, or gone."""
    found = {rank for each in answer.silent if (rank := processes.rank_of(*each)) is not None}
    for each in answer.communicators:
        numbers = _numbers(each, processes)
        found |= {numbers[rank.rank] for rank in each.ranks if rank.unreachable and rank.rank in numbers}
    return tuple(sorted(found))


def ras_facts(answer: RasAnswer, processes: JobProcesses) -> tuple[str, ...]:
    """What RAS says of ranks whose counts it does not have."""
    gone = unreachable(answer, processes)
    said = (
        [f"{listed(gone, 'rank')} {'does' if len(gone) == 1 else 'do'} not answer it: stopped, or gone"] if gone else []
    )
    for each in answer.communicators:
        numbers = _numbers(each, processes)
        apart = sorted(numbers[rank.rank] for rank in each.ranks if rank.apart and rank.rank in numbers)
        if 0 < len(apart) < len(numbers) - len(apart):
            who = f"{listed(apart, 'rank')} {'has' if len(apart) == 1 else 'have'}"
            said.append(
                f"{who} left {_label(each)}, or not come to it, and {'answers' if len(apart) == 1 else 'answer'}"
            )
    return tuple(said[:MAX_FACTS])


def _label(communicator: RasCommunicator) -> str:
    return f"communicator {communicator.key.partition(' ')[0][:8]} of {communicator.size}"
