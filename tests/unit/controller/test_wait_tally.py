"""wait_tally: how long ranks slept and how much their GPUs idled, block by block, and nothing of what is not known."""

from __future__ import annotations

from slurm_watchdog.controller.state.reported_processes import on_gpus
from slurm_watchdog.controller.state.wait_tally import (
    BLOCK_S,
    LEAST_KEPT,
    LONGEST_S,
    Idle,
    WaitTally,
    kept_blocks,
)
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.past_runs import WHOLE, RankKey, WaitBlock

ONE, TWO = RankKey(0, "n1", 100, 5), RankKey(1, "n1", 101, 5)


def note(
    tally: WaitTally, key: RankKey, at: float, ran_s: float | None = None, age_s: float = 0.0, idle: Idle | None = None
) -> None:
    tally.note((key.node, key.pid, key.start_ticks), key.rank, at, ran_s, age_s, idle)


def run(tally: WaitTally, until_s: float, sleeps: float, *, every_s: float = 12.0, from_s: float = 0.0) -> None:
    at = from_s
    while at <= until_s:
        for key in (TWO, ONE):
            note(tally, key, at, 1000 + at * (1 - sleeps if key is ONE else 1.0))
        at += every_s


def shares(block: WaitBlock) -> list[float]:
    return [round(each / WHOLE, 2) for each in block.asleep]


def test_each_block_has_the_share_in_which_each_rank_slept() -> None:
    tally = WaitTally()
    run(tally, 3 * BLOCK_S, 0.25)
    blocks = tally.blocks()
    assert [each.ranks for each in blocks] == [(ONE, TWO)] * 3
    assert blocks[0].ranks is blocks[1].ranks
    assert [shares(each) for each in blocks] == [[0.25, 0.0]] * 3
    assert list(blocks[1].seconds) == [60, 60]
    assert tally.blocks() is blocks


def test_a_gap_and_an_interruption_are_no_sleep() -> None:
    tally = WaitTally()
    run(tally, 24.0, 0.0)
    note(tally, ONE, 24.0 + LONGEST_S + 1, 1024.0)
    (block,) = tally.blocks()
    assert shares(block) == [0.0, 0.0]
    tally = WaitTally()
    run(tally, 24.0, 0.0)
    tally.interrupt(("n1", 100, 5))
    note(tally, ONE, 48.0, 1024.0)
    note(tally, ONE, 84.0, 1060.0)
    assert shares(tally.blocks()[0]) == [0.0, 0.0]


def test_the_idle_share_of_gpus() -> None:
    tally = WaitTally()
    for look in range(13):
        note(tally, ONE, 5.0 * look, idle=(0.5, 1) if look % 2 else (0.0, 1))
    (block,) = tally.blocks()
    assert (list(block.gpu_looks), round(block.gpu_idle[0] / WHOLE, 2)) == ([12], 0.25)
    assert list(block.seconds) == [0]


def test_a_reading_that_is_reported_again_counts_once() -> None:
    tally = WaitTally()
    for at, ran_s in ((0.0, 100.0), (5.0, 100.0), (30.0, 100.0), (60.0, 130.0), (61.0, 130.0)):
        note(tally, ONE, at, ran_s, at - (0.0 if at < 60.0 else 60.0))
    assert [list(each.seconds) for each in tally.blocks()] == [[0]]
    note(tally, ONE, 125.0, 190.0, 5.0)
    assert [(list(each.seconds), shares(each)) for each in tally.blocks()][1] == ([60], [0.5])


def test_of_several_gpus_the_least_busy_one_counts_and_one_that_says_nothing_makes_it_unknown() -> None:
    gpus = (
        Gpu(uuid="a", index=0, idle_ratio=0.0, looks=6, pids=(7, 8)),
        Gpu(uuid="b", index=1, idle_ratio=0.75, looks=6, pids=(7,)),
        Gpu(uuid="c", index=2, pids=(8,)),
    )
    assert on_gpus(gpus) == {7: (("a", "b"), (0.75, 6)), 8: (("a", "c"), None)}


def test_of_very_many_ranks_less_of_the_past_is_kept() -> None:
    assert [kept_blocks(ranks) for ranks in (0, 8, 30_000, 80_000, 1_000_000)] == [180, 180, 180, 78, LEAST_KEPT]
    tally = WaitTally()
    run(tally, 20 * BLOCK_S, 0.5)
    assert len(tally.blocks()) >= 19
    newest = tally.blocks()[-1]
    tally.kept = 5
    run(tally, 21 * BLOCK_S, 0.5, from_s=20 * BLOCK_S)
    assert len(tally.blocks()) == 5
    assert tally.blocks()[0].begin_at >= newest.begin_at - 4 * BLOCK_S
