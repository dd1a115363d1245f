"""How long a job may stay on a step: the phase may widen what was learnt, and never narrows it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit import builders
from watchdog.detect.limits import progress_limit
from watchdog.knowledge.progress_patterns import SIGNS


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
