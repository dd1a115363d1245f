"""Who keeps the others waiting, from the records of all ranks: real dumps, and jobs of several communicators."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_watchdog.analysis.collective_order import CollectiveOrder, order_of, words_of
from slurm_watchdog.model.collective_records import Call, CollectiveRecord, Communicator
from slurm_watchdog.parse.flight_recorder import parse_flight_recorder

CAPTURES = Path(__file__).parents[2] / "captures" / "flight_recorder"
ALL = tuple(range(8))


def in_group(key: str, entered: int, members: tuple[int, ...], call: str = "", elements: int = 8) -> Communicator:
    """A rank that waits in `call`, its last one; without: it has finished that."""
    waits = (Call(seq=entered, name=call, elements=elements, types=("Float",)),) if call else ()
    return Communicator(key=key, label=key, entered=entered, waits=waits, members=members if call else ())


def rank(number: int, *groups: Communicator, peers: tuple[int, ...] = ()) -> CollectiveRecord:
    return CollectiveRecord(rank=number, communicators=groups, peers=peers, busy=bool(peers))


def named(found: CollectiveOrder) -> list[int]:
    return [each.rank for each in found.odd]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("missing", "Rank 2 has not entered all_reduce 7 of default_pg; 3 of 4 ranks wait."),
        ("other", "Rank 2 called broadcast where the others called all_reduce as number 7 of default_pg; 4 of 4 ranks wait."),
        ("groups", "3 of 4 ranks wait, and no rank is identified: who belongs to a communicator in which ranks wait is not known."),
    ],
)  # fmt: skip
def test_real_dumps_name_the_rank_that_torchfrtrace_names_where_members_are_known(job: str, words: str) -> None:
    files = sorted((CAPTURES / job).iterdir())
    assert words_of(order_of([parse_flight_recorder(f.read_bytes(), int(f.name[-1])) for f in files])) == words


def test_the_facts_have_the_last_number_that_each_rank_has_finished() -> None:
    files = sorted((CAPTURES / "missing").iterdir())
    found = order_of([parse_flight_recorder(f.read_bytes(), int(f.name[-1])) for f in files])
    assert found.facts == (
        "3 ranks wait in all_reduce 7 of default_pg; not entered by rank 2; last finished: number 6 on ranks 0, 1, 2 and 3",
    )


def test_the_first_cause_of_a_chain_is_named_and_not_those_in_between() -> None:
    tensor = [(n // 2 * 2, n // 2 * 2 + 1) for n in ALL]
    records = [rank(n, in_group("dp", 10, ALL, "all_reduce")) for n in ALL if n not in (4, 5)]
    records += [rank(4, in_group("dp", 9, ALL), in_group("tp4", 21, tensor[4], "all_gather"))]
    records += [rank(5, in_group("dp", 9, ALL), in_group("tp4", 20, tensor[5]))]
    found = order_of(records)
    assert named(found) == [5]
    assert found.odd[0].reason == "has not entered all_gather 21 of tp4"


def test_a_pipeline_that_waits_for_its_first_stage_names_that() -> None:
    found = order_of([rank(0), rank(1, peers=(0,)), rank(2, peers=(1,)), rank(3, peers=(2,))])
    assert named(found) == [0]


def test_who_gave_no_record_is_not_named_and_is_said() -> None:
    found = order_of([rank(n, in_group("dp", 10, ALL, "all_reduce")) for n in ALL if n != 6])
    assert (named(found), found.missing) == ([], (6,))
    assert "no record of rank 6" in words_of(found)


def test_ranks_that_wait_for_one_another_in_a_circle_are_not_named() -> None:
    records = [rank(n, in_group("a", 1, ALL, "all_reduce")) for n in ALL if n != 1]
    found = order_of([*records, rank(1, in_group("b", 1, ALL, "all_reduce"))])
    assert named(found) == []
    assert "circle" in found.unclear


def test_all_in_the_same_collective_is_the_network_and_nobody() -> None:
    found = order_of([rank(n, in_group("dp", 10, ALL, "all_reduce")) for n in ALL])
    assert (named(found), len(found.waiting)) == ([], 8)
    assert "every rank has entered" in found.unclear


def test_one_rank_alone_in_a_collective_does_not_accuse_the_seven_others() -> None:
    records = [rank(n, in_group("dp", 9, ALL)) for n in ALL if n]
    found = order_of([rank(0, in_group("dp", 10, ALL, "barrier")), *records])
    assert named(found) == []
    assert "as many did not come as wait, or more" in found.unclear


def test_one_with_another_size_is_named_and_half_of_them_are_not() -> None:
    def sizes(other: range) -> CollectiveOrder:
        return order_of([rank(n, in_group("dp", 3, ALL, "all_reduce", 9 if n in other else 8)) for n in ALL])

    assert named(sizes(range(1))) == [0]
    assert "with 9 elements where the others have 8" in sizes(range(1)).odd[0].reason
    assert named(sizes(range(4))) == []
    assert "no side has a clear majority" in sizes(range(4)).unclear


def test_a_rank_with_more_communicators_than_are_known_is_not_said_to_be_absent() -> None:
    records = [rank(n, in_group("dp", 10, ALL, "all_reduce")) for n in ALL if n != 6]
    found = order_of([*records, CollectiveRecord(rank=6, whole=False)])
    assert named(found) == []


def test_of_groups_that_share_a_name_and_whose_members_are_unknown_nobody_is_behind() -> None:
    records = [rank(n, in_group("tp", 9 if n == 6 else 10, (), "" if n == 6 else "all_reduce")) for n in ALL]
    assert named(order_of(records)) == []


def test_a_job_whose_collectives_are_finished_has_nothing_to_say() -> None:
    assert words_of(order_of([rank(n, in_group("dp", 10, ALL)) for n in ALL])).startswith("No collective is unfinished")
