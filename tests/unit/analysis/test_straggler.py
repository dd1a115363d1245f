"""Who keeps the others waiting: found within minutes where one rank or node is late, and no rank is identified in what looks
similar. Times of ranks are simulated; what agents see of them goes through the real tally."""

from __future__ import annotations

from functools import lru_cache
from statistics import fmean

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect.straggler import Lateness, dumped, lateness
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.past_runs import WaitDump
from tests.builders.stragglers import Training, Work, late, turns

CHANGE_S = 900.0
SEEDS = range(3)


@lru_cache(maxsize=128)
def trained(seed: int, work: Work, after_s: float = 600.0, **kind: float) -> Training:
    training = Training(seed, work, **kind)  # type: ignore[arg-type]
    training.run(CHANGE_S, after_s)
    return training


def added(training: Training) -> float:
    before = fmean(each.seconds for each in training.times if each.at < CHANGE_S)
    return fmean(each.seconds for each in training.times if each.at > CHANGE_S + training.step_s) / before - 1


def judged(training: Training) -> Lateness:
    return lateness(training.blocks(), CHANGE_S, added(training), training.ranks)


def ranks(found: Lateness) -> list[int]:
    return [each.key.rank for each in found.late]


ONE = late({5}, 0.12)
NODE = late({4, 5, 6, 7}, 0.12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("work", "named"), [(ONE, [5]), (NODE, [4, 5, 6, 7]), (late({5}, 0.3), [5])])
@pytest.mark.parametrize("step_s", [0.7, 5.0])
def test_who_is_late_is_named_within_ten_minutes(seed: int, work: Work, named: list[int], step_s: float) -> None:
    found = judged(trained(seed, work, step_s=step_s))
    assert (found.truth, ranks(found)) == (Truth.BAD, named)
    assert found.confidence > 0.9999
    assert found.peers_wait == pytest.approx(1.0, abs=0.25)
    assert max(each.waits for each in found.late) < 0.5


HEALTHY: dict[str, Work] = {
    "all ranks work longer": late(set(range(16)), 0.1),
    "another rank in each step": turns(16, 0.3),
    "rank 0 alone, which logs and saves": late({0}, 0.2),
    "half of the ranks: a stage of a pipeline": late(set(range(8)), 0.1),
    "one rank of each node": late({0, 4, 8, 12}, 0.1),
    "all but one": late(set(range(15)), 0.1),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize("name", HEALTHY)
def test_nobody_is_named_in(name: str, gpus: bool, seed: int) -> None:
    found = judged(trained(seed, HEALTHY[name], gpus=gpus, spins=gpus))
    assert found.truth is not Truth.BAD, (name, ranks(found))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_has_always_done_more_is_compared_with_itself(seed: int) -> None:
    """Stages of a pipeline work 60 to 100 % of the time; then all work a tenth longer, or one rank alone does."""
    stage = {rank: 0.6 + 0.1 * (rank // 4 + 1) for rank in range(16)}
    everybody = trained(seed, lambda rank, step, changed: stage[rank] * (1 + 0.1 * changed))
    assert judged(everybody).truth is not Truth.BAD
    one = trained(seed, lambda rank, step, changed: stage[rank] * (1 + 0.2 * (changed and rank == 13)))
    assert ranks(judged(one)) == [13]


def test_others_that_become_faster_themselves_wait_for_more_than_the_added_time() -> None:
    """As under a quota: who waits at the end of a step has more of its node at the next one's beginning."""
    found = judged(trained(1, lambda rank, step, changed: 1 + changed * (0.3 if rank == 5 else -0.06)))
    assert ranks(found) == [5]
    assert found.peers_wait > 1.2


def test_a_gpu_that_idles_while_those_of_the_others_wait_names_its_rank() -> None:
    found = judged(trained(1, late({5}, 0.3), 3600.0, gpus=True, spins=True, host_share=0.02))
    assert (found.truth, ranks(found), found.by_gpu) == (Truth.BAD, [5], True)


def test_ranks_that_spin_while_they_wait_show_nothing_without_a_gpu() -> None:
    assert judged(trained(1, ONE, spins=True)).truth is not Truth.BAD


def test_what_is_missing_names_nobody() -> None:
    training = trained(1, ONE)
    blocks, share = training.blocks(), added(training)
    assert lateness(blocks, CHANGE_S, share, 16).truth is Truth.BAD
    assert lateness(blocks, CHANGE_S, share, 17).truth is Truth.UNKNOWN  # a rank was never seen
    assert lateness(blocks, CHANGE_S, share, 3).truth is Truth.UNKNOWN
    assert lateness((), CHANGE_S, share, 16).truth is Truth.UNKNOWN
    assert lateness(blocks[:17], CHANGE_S, share, 16).truth is Truth.UNKNOWN  # too little since
    assert lateness(blocks[14:], CHANGE_S, share, 16).truth is Truth.UNKNOWN  # and before
    unseen = tuple(replace(each, seconds=bytes(16)) for each in blocks)
    assert lateness(unseen, CHANGE_S, share, 16).truth is Truth.UNKNOWN


def test_stacks_confirm_that_the_others_wait_for_ranks_or_contradict_it() -> None:
    training = trained(1, ONE)
    found = judged(training).late
    yes = dumped(training.dumps(CHANGE_S), CHANGE_S, found)
    assert (yes.others_wait, yes.late_waits) == (Truth.OK, False)
    assert yes.place.startswith("augment (data.py:31): ")
    no = dumped(training.dumps(CHANGE_S, others_wait=False), CHANGE_S, found)
    assert no.others_wait is Truth.BAD
    assert dumped((), CHANGE_S, found).others_wait is Truth.UNKNOWN
    # Where they are seldom found asleep, three of three suffice, and neither two nor two of three.
    sleepers = [
        replace(rank, asleep=True, with_peers=True)
        for rank in training.dumps(CHANGE_S, 1)[0].ranks
        if rank.key not in {each.key for each in found}
    ][:3]
    one_else = (*sleepers[:2], replace(sleepers[2], with_peers=False))
    for ranks, others_wait in ((sleepers, Truth.OK), (sleepers[:2], Truth.UNKNOWN), (one_else, Truth.UNKNOWN)):
        few = (WaitDump(at=CHANGE_S, ranks=tuple(ranks)),)
        assert dumped(few, CHANGE_S, found).others_wait is others_wait
    everywhere = tuple(
        replace(each, ranks=tuple(replace(rank, with_peers=True) for rank in each.ranks))
        for each in training.dumps(CHANGE_S)
    )
    assert dumped(everywhere, CHANGE_S, found).late_waits
