"""Jobs with many groups, whose ranks have many calls scheduled at once: who stopped is named, with all who did."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from slurm_watchdog.analysis.collective_order import CollectiveOrder, order_of, words_of
from tests.builders.megatron_dumps import BEGAN, STUCK_S, Rank, job, recorders


def judged(
    ranks: Sequence[Rank], blind: Collection[int] = (), *, only_active: bool = True, without: Collection[int] = (), later_s: float = STUCK_S
) -> CollectiveOrder:  # fmt: skip
    records = recorders(ranks, blind)
    return order_of(
        [each.record(BEGAN + later_s, only_active=only_active) for each in records if each.rank not in without]
    )


def named(found: CollectiveOrder) -> set[int]:
    return {each.rank for each in found.odd}


@pytest.mark.parametrize("only_active", [True, False])
@pytest.mark.parametrize("at", [37, 60, 73, 90])
@pytest.mark.parametrize("stopped", [(12,), (9, 14), (10, 15), (3,), (0, 5)])
def test_ranks_whose_cpu_stops_are_named_and_nobody_else(stopped: tuple[int, ...], at: int, only_active: bool) -> None:
    """As with NVRx's LOCK_GIL: of what they have called everything ends, so that nothing of theirs is left."""
    found = judged(job(stopped=stopped, at=at), only_active=only_active)
    assert named(found) <= set(stopped)
    assert named(found) or "circle" not in found.unclear


@pytest.mark.parametrize("stopped", [(12,), (9, 11), (12, 13), (1, 3)])
def test_all_who_stopped_are_in_the_sentence(stopped: tuple[int, ...]) -> None:
    found = judged(job(stopped=stopped))
    assert named(found) == set(stopped)
    sentence = words_of(found)
    assert all(str(rank) in sentence.partition(";")[0] for rank in stopped), sentence
    assert sentence.endswith(f"; {16 - len(stopped)} of 16 ranks wait.")


@pytest.mark.parametrize("stopped", [(12,), (9, 11)])
def test_a_rank_that_no_longer_notices_what_has_finished_does_not_wait(stopped: tuple[int, ...]) -> None:
    """As with NVRx's GPU_ERROR: the watchdog thread has died, and what its peers have finished with it stays open."""
    found = judged(job(stopped=stopped), blind=stopped)
    assert named(found) == set(stopped)
    assert any("no longer notice" in fact for fact in found.facts)


def test_a_rank_that_no_longer_notices_and_has_entered_everything_is_said_and_not_named() -> None:
    found = judged(job(stopped=(12,)), blind=(12, 14))
    assert named(found) == {12}
    assert any(fact.startswith("ranks 12 and 14 no longer notice what has finished") for fact in found.facts)


@pytest.mark.parametrize("broken", ["tp8", "ep4", "pp1", "tp_dp12"])
def test_of_a_network_that_fails_nobody_is_named(broken: str) -> None:
    found = judged(job(broken=broken))
    assert (named(found), bool(found.waiting)) == (set(), True)
    assert "circle" not in found.unclear


@pytest.mark.parametrize("turns", range(20, 140, 10))
def test_of_a_job_that_runs_nobody_is_named(turns: int) -> None:
    """All dumps are of one moment, at which calls are seconds old."""
    assert named(judged(job(turns=turns), later_s=2.0)) == set()


@pytest.mark.parametrize("without", range(16))
def test_without_the_dump_of_any_one_rank_nobody_else_is_named(without: int) -> None:
    assert named(judged(job(stopped=(9, 14)), without=(without,))) <= {9, 14}


@pytest.mark.parametrize("old", range(16))
def test_with_an_old_dump_of_any_one_rank_nobody_else_is_named(old: int) -> None:
    then, now = recorders(job(stopped=(9, 14), turns=20)), recorders(job(stopped=(9, 14), at=150))
    mixed = [(then if rank == old else now)[rank].record(only_active=True) for rank in range(16)]
    assert named(order_of(mixed)) <= {9, 14}
