"""Step times and losses: five per cent are found within thirty steps, one per cent of drift never, and no
evaluation is a slowdown."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from slurm_watchdog.analysis.step_statistics import segments
from slurm_watchdog.detect import job_rules, slow_job
from slurm_watchdog.detect.slow_job import SlowJob
from slurm_watchdog.model.cluster_view import LossPoint, StepTime
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.observations import Checkpoint
from tests.builders.step_noise import noisy
from tests.builders.views import cluster, job

NOW = 10_000.0


def judged(seconds: Sequence[float], **changes: object) -> Finding:
    """Of a job that logged these step times, one after the other; `changes` hold for all of them."""
    times = tuple(
        StepTime(**{"step": number, "seconds": value, "at": float(number), "logged": True, **changes})  # type: ignore[arg-type]
        for number, value in enumerate(seconds)
    )
    (found,) = slow_job.detect(cluster(job(step_times=times)), SlowJob())
    return found


@pytest.mark.parametrize("seed", range(20))
def test_five_per_cent_are_found_within_thirty_steps_and_dated(seed: int) -> None:
    series = noisy([105.0] * 100 + [111.0] * 32, seed)
    found = next(f for end in range(100, 133) if (f := judged(series[:end])).truth is Truth.BAD)
    assert "slower since step" in found.summary
    since = int(found.summary.split("since step ")[1].split(":")[0])
    assert abs(since - 100) <= 6


@pytest.mark.parametrize("before", [60, 150, 400])
def test_of_a_hundred_jobs_that_become_five_per_cent_slower_all_but_two_are_found_within_36_steps(
    before: int,
) -> None:
    """Noise of two per cent. Twenty values have a mean that scatters by half a per cent: by chance a few look
    like three."""
    found = [judged(noisy([100.0] * before + [105.0] * 36, seed)).truth is Truth.BAD for seed in range(100)]
    assert found.count(True) >= 98


@pytest.mark.parametrize("seed", range(100))
def test_a_drift_of_one_per_cent_in_a_thousand_steps_is_never_told(seed: int) -> None:
    series = noisy([100.0 * (1 + 0.01 * n / 1000) for n in range(1000)], seed)
    looks = range(30, 1000, 97) if seed < 20 else (1000,)
    assert all(judged(series[:end]).truth is not Truth.BAD for end in looks)


KEPT = 600
"""Values of one series, as many as the progress clock keeps."""
PAUSES: dict[str, Callable[[random.Random], list[float]]] = {
    "now and then": lambda chance: [40.0 * (chance.random() < 0.02) for _ in range(KEPT)],
    "in every tenth step": lambda chance: [80.0 * chance.random() * (chance.random() < 0.1) for _ in range(KEPT)],
    "in every fourth step": lambda chance: [80.0 * chance.random() * (chance.random() < 0.25) for _ in range(KEPT)],
    "in every second step": lambda chance: [30.0 * chance.random() * (chance.random() < 0.5) for _ in range(KEPT)],
    "of one length": lambda chance: [20.0 * (chance.random() < 0.35) for _ in range(KEPT)],
    "at every third step": lambda chance: [30.0 * (n % 3 == 0) for n in range(KEPT)],
    "of six per cent": lambda chance: [6.0 * (chance.random() < 0.3) for _ in range(KEPT)],
}  # fmt: skip


@pytest.mark.parametrize("pauses", PAUSES)
@pytest.mark.parametrize("noise", [0.003, 0.02])
def test_pauses_that_a_job_has_always_made_are_no_slowdown(pauses: str, noise: float) -> None:
    for seed in range(12):
        extra = PAUSES[pauses](random.Random(f"{pauses}/{seed}"))
        series = [a + b for a, b in zip(noisy([100.0] * KEPT, seed, noise), extra, strict=True)]
        assert len(segments(tuple(series), 0.05)) == 1, seed
        assert all(judged(series[:end]).truth is not Truth.BAD for end in range(32, 200, 24)), seed


def test_pauses_that_come_by_chance_in_half_of_ten_steps_are_no_slowdown() -> None:
    """As in healthy_day, seed 26: four steps a line, a pause in every hundredth, checkpoints and evaluations
    that nobody announces."""
    quiet, some = [30.0 + 0.1 * (n * 7 % 10) for n in range(53)], [54.6, 35.2, 30.6, 30.2, 30.5, 35.9, 30.3, 40.9, 30.9, 35.8]  # fmt: skip
    for place in range(5, 53, 8):
        quiet[place] = 39.5
    for end in range(2, len(some) + 1):
        assert judged(quiet + some[:end]).truth is Truth.OK
    assert judged([*quiet, *some, 30.1, 30.3, 36.9, 36.1]).truth is Truth.OK


@pytest.mark.parametrize("seed", range(10))
def test_noise_with_a_memory_is_no_change(seed: int) -> None:
    chance, value, series = random.Random(seed), 0.0, []
    for _ in range(KEPT):
        value = 0.6 * value + chance.gauss(0, 0.016)
        series.append(100.0 * (1 + value))
    assert judged(series).truth is Truth.OK


def test_a_slowdown_of_a_job_that_pauses_in_every_tenth_step_is_found() -> None:
    found = 0
    for seed in range(20):
        chance = random.Random(seed)
        series = noisy([100.0] * 150 + [107.0] * 100, seed, 0.01)
        found += judged([v + 60.0 * (chance.random() < 0.1) for v in series]).truth is Truth.BAD
    assert found >= 19


def test_a_burst_of_ten_slow_steps_is_no_slowdown() -> None:
    series = noisy([100.0] * 100 + [130.0] * 10 + [100.0] * 40, 2)
    assert all(judged(series[:end]).truth is Truth.OK for end in range(100, 150))


def test_a_log_with_rounded_figures_has_no_memory_for_its_many_equal_ones() -> None:
    series = [round(v, 1) for v in noisy([10.0] * 80 + [10.6] * 110, 4, 0.002)]
    assert judged(series).truth is Truth.BAD


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.005])
def test_five_per_cent_are_found_in_a_log_that_hardly_scatters(noise: float) -> None:
    series = noisy([10.0] * 60 + [10.5] * 110, 1, noise)
    found = judged(series)
    assert found.truth is Truth.BAD
    assert "slower since step 6" in found.summary


@pytest.mark.parametrize("noise", [0.001, 0.02, 0.1, 0.3])
def test_noise_is_no_change(noise: float) -> None:
    assert all(judged(noisy([100.0] * 400, seed, noise)).truth is Truth.OK for seed in range(10))


def test_checkpoints_and_evaluations_that_the_log_does_not_announce_are_no_slowdown() -> None:
    series = noisy([105.0] * 300, 1)
    for place in range(10, 300, 25):
        series[place] += 40.0
    for place in range(99, 300, 100):
        series[place] += 720.0
    assert judged(series).truth is Truth.OK


def test_a_job_that_is_fast_again_is_well() -> None:
    series = noisy([100.0] * 60 + [110.0] * 40 + [100.0] * 40, 3)
    assert judged(series[:95]).truth is Truth.BAD
    assert judged(series).truth is Truth.OK


def test_a_job_that_becomes_faster_is_well() -> None:
    assert judged(noisy([100.0] * 60 + [80.0] * 60, 5)).truth is Truth.OK


def test_a_larger_batch_takes_longer_and_is_no_slowdown() -> None:
    times = tuple(
        StepTime(
            step=n,
            seconds=100.0 + (n >= 60) * 30 + n % 3,
            at=float(n),
            logged=True,
            batch=1024.0 + (n >= 60) * 512,
        )
        for n in range(120)
    )
    (found,) = slow_job.detect(cluster(job(step_times=times)), SlowJob())
    assert found.truth is Truth.OK


def test_short_steps_that_were_only_seen_in_reports_are_not_compared() -> None:
    chance = random.Random(1)
    assert judged([chance.choice([5.0, 10.0]) for _ in range(300)], logged=False).truth is Truth.UNKNOWN


def test_few_steps_say_nothing() -> None:
    assert judged([100.0] * 15 + [200.0] * 5).truth is Truth.UNKNOWN
    assert judged([]).truth is Truth.UNKNOWN


def test_equal_values_have_one_level() -> None:
    assert len(segments((1.0,) * 200, 0.05)) == 1


# ------------------------------------------------------------------------------------------------ losses


def points(losses: Sequence[float]) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(step=number, loss=loss, at=float(number)) for number, loss in enumerate(losses))


def spiked(losses: Sequence[float]) -> Finding:
    (found,) = job_rules.LOSS_SPIKE.detect(cluster(job(losses=points(losses))))
    return found


def test_a_spike_is_told_with_its_step_and_is_over_when_the_loss_is_back() -> None:
    usual, high = noisy([2.0] * 100, 1), [3.1, 3.4, 3.3, 3.0, 2.8]
    found = spiked(usual + high)
    assert found.truth is Truth.BAD
    assert "jumped at step 100" in found.summary
    assert spiked(usual + high + noisy([2.0] * 5, 2)).truth is Truth.OK


def test_a_long_spike_does_not_become_the_usual() -> None:
    assert spiked(noisy([2.0] * 60, 1) + noisy([3.0] * 80, 2)).truth is Truth.BAD


def test_one_bad_batch_and_the_fall_of_the_beginning_are_no_spike() -> None:
    assert spiked([*noisy([2.0] * 100, 1), 4.0, 2.0, 2.0]).truth is Truth.OK
    assert spiked([10.0 * math.exp(-n / 30) + 2 for n in range(120)]).truth is Truth.OK


def checkpoint(step: int | None, writing_step: int | None = None) -> Checkpoint:
    return Checkpoint(job_id="7", directory="/c", step=step, path=f"/c/{step}", writing_step=writing_step)


@pytest.mark.parametrize(
    ("on_disk", "acts", "word"),
    [
        ((checkpoint(90),), True, "keep that checkpoint (/c/90)"),
        ((), False, "no complete checkpoint is known"),
        ((checkpoint(90), checkpoint(101)), False, "--ckpt-step"),
        ((checkpoint(90, writing_step=110),), False, "a newer one is being written"),
    ],
)
def test_a_bad_loss_is_acted_on_only_where_a_restart_resumes_from_before(
    on_disk: tuple[Checkpoint, ...], acts: bool, word: str
) -> None:
    for detect, bad in (
        (job_rules.LOSS_NAN.detect, [math.nan] * 5),
        (job_rules.LOSS_SPIKE.detect, noisy([4.0] * 110, 2)),
    ):
        view = job(losses=points(noisy([2.0] * 100, 1) + bad), checkpoints_on_disk=on_disk)
        (found,) = detect(cluster(view))
        assert (found.truth, found.actionable, any(word in fact for fact in found.facts)) == (Truth.BAD, acts, True)


def test_a_bad_loss_whose_beginning_is_not_known_or_that_may_recover_is_reported_alone() -> None:
    known = {"checkpoints_on_disk": (checkpoint(1),)}
    (since_ever,) = job_rules.LOSS_NAN.detect(cluster(job(losses=points([math.nan] * 50)[2:], **known)))
    (short,) = job_rules.LOSS_SPIKE.detect(cluster(job(losses=points(noisy([2.0] * 100, 1) + [4.0] * 50), **known)))
    assert [(each.truth, each.actionable) for each in (since_ever, short)] == [(Truth.BAD, False)] * 2
