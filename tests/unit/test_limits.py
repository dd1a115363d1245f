"""How long a job may stay on a step: the phase may widen what was learnt, and never narrows it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.unit import builders
from watchdog.detect import collective_hang
from watchdog.detect.limits import VERDICT, progress_limit, wants_stacks
from watchdog.detect.view import CollectiveTimeout, JobView
from watchdog.detector_config import Detectors
from watchdog.knowledge.progress_patterns import SIGNS
from watchdog.model import Truth


@dataclass(frozen=True)
class Settings:
    floor: float = 60.0
    factor: float = 3.0
    startup_grace: float = 3600.0
    warmup_steps: int = 5
    evaluation_floor: float = 1800.0
    checkpoint_floor: float = 1800.0


def limit_s(phase: str | None) -> float:
    progress = builders.progress(0.0, steps_seen=50, intervals_s=(30.0,) * 20, phase=phase)
    return progress_limit(builders.job(progress=progress), Settings()).seconds


def test_in_training_the_learnt_limit_holds() -> None:
    assert limit_s(None) == 90.0


@pytest.mark.parametrize(("phase", "at_least"), [("evaluating", 1800.0), ("checkpointing", 1800.0)])
def test_a_phase_with_a_floor_has_it_and_a_step(phase: str, at_least: float) -> None:
    assert limit_s(phase) == at_least + 30.0


@pytest.mark.parametrize("phase", ["starting", "finishing", "a phase of tomorrow"])
def test_a_phase_that_has_no_floor_has_the_widest_limit(phase: str) -> None:
    assert limit_s(phase) == 3600.0


@pytest.mark.parametrize("phase", sorted({row.phase for row in SIGNS if row.phase}))
def test_no_phase_that_a_log_can_say_narrows_the_limit(phase: str) -> None:
    assert limit_s(phase) >= 1800.0


def with_timeout(
    seconds: float, *, assumed: bool = False, interval_s: float = 30.0, phase: str | None = None
) -> JobView:
    """A job whose ranks name a time-out of collectives."""
    return builders.job(
        progress=builders.progress(0.0, steps_seen=50, intervals_s=(interval_s,) * 20, phase=phase),
        processes=tuple(
            builders.seen(rank, collective_timeout_s=seconds, collective_timeout_assumed=assumed)
            for rank in range(4)
        ),
    )


def test_in_training_the_limit_stays_below_a_time_out_that_the_job_names() -> None:
    limit = progress_limit(with_timeout(600.0, interval_s=240.0), Settings())
    assert limit.seconds == VERDICT * 600.0
    assert limit.reason == "collectives time out after 600 s"


def test_a_time_out_never_widens_what_was_learnt() -> None:
    assert progress_limit(with_timeout(3600.0), Settings()).seconds == 90.0


def test_a_time_out_makes_the_limit_no_shorter_than_the_floor_and_twice_the_slowest_step() -> None:
    assert progress_limit(with_timeout(20.0), Settings()).seconds == 60.0
    assert progress_limit(with_timeout(300.0, interval_s=240.0), Settings()).seconds == 480.0


def test_a_time_out_that_is_only_assumed_shortens_nothing() -> None:
    assert progress_limit(with_timeout(600.0, assumed=True, interval_s=240.0), Settings()).seconds == 720.0


@pytest.mark.parametrize("phase", ["evaluating", "checkpointing", "starting", "finishing"])
def test_an_evaluation_or_a_checkpoint_longer_than_the_time_out_keeps_its_limit(phase: str) -> None:
    """Ranks that evaluate for twelve minutes are in no collective that could time out after ten."""
    assert progress_limit(with_timeout(600.0, phase=phase), Settings()).seconds >= 1800.0


def test_a_start_keeps_its_grace_whatever_the_time_out() -> None:
    job = with_timeout(600.0)
    assert progress_limit(replace(job, progress=None), Settings()).seconds == 3600.0


@pytest.mark.parametrize("assumed", [True, False])
@pytest.mark.parametrize("phase", [None, "evaluating", "starting"])
def test_stacks_are_collected_before_the_ranks_give_up_whatever_the_limit(
    phase: str | None, assumed: bool
) -> None:
    job = with_timeout(600.0, assumed=assumed, interval_s=700.0, phase=phase)
    limit = progress_limit(job, Settings())
    assert limit.seconds > 1000.0
    assert next(age for age in (0, 300, 419, 420, 600, 1200) if wants_stacks(job, limit, age)) == 420


def test_when_the_time_out_is_long_over_the_limit_alone_asks_for_stacks() -> None:
    job = with_timeout(600.0, phase="evaluating")
    limit = progress_limit(job, Settings())
    assert wants_stacks(job, limit, 629.0)
    assert not wants_stacks(job, limit, 640.0)
    assert wants_stacks(job, limit, 0.5 * limit.seconds)


def test_without_a_time_out_stacks_are_collected_from_half_of_the_limit_on() -> None:
    job = builders.job(progress=builders.progress(0.0))
    limit = progress_limit(job, Settings())
    assert not wants_stacks(job, limit, 0.49 * limit.seconds)
    assert wants_stacks(job, limit, 0.5 * limit.seconds)


def test_the_shortest_time_out_that_a_rank_names_counts_and_one_that_is_said_before_one_that_is_assumed() -> (
    None
):
    job = builders.job(
        processes=(
            builders.seen(0, collective_timeout_s=600.0, collective_timeout_assumed=True),
            builders.seen(1, collective_timeout_s=1800.0),
            builders.seen(2, collective_timeout_s=900.0),
            builders.seen(3),
        )
    )
    assert job.collective_timeout == CollectiveTimeout(seconds=900.0, assumed=False)
    assert builders.job().collective_timeout is None


@pytest.mark.parametrize(("age_s", "asks"), [(300.0, False), (450.0, True), (700.0, False)])
def test_collective_hang_asks_for_stacks_before_the_time_out_and_accuses_nobody_by_it(
    age_s: float, asks: bool
) -> None:
    """An evaluation of twelve minutes by all ranks, under NCCL's ten."""
    job = with_timeout(600.0, phase="evaluating")
    job = replace(job, progress=replace(job.progress, age_s=age_s, rose_age_s=age_s), snapshots=builders.still(*[builders.RECV] * 3, builders.COMPUTE))  # fmt: skip
    finding = collective_hang.judge(job, 10_000.0, Detectors().collective_hang)
    assert bool(finding.wanted) is asks
    assert finding.truth is not Truth.BAD
