"""Limits of a job that makes no step, as they are shipped: what `detectors.collective_hang` has where a configuration
says nothing, and what holds where there is none. The reasons are beside the keys (detect/collective_hang.py)."""

from __future__ import annotations

from typing import Final

from slurm_watchdog.base.structs import Struct


class PhaseLimits(Struct, frozen=True, kw_only=True):
    """Durations in seconds; see `learned_limit.LimitSettings` and `limit_by_stacks.LongPhases`."""

    floor: float = 60.0
    factor: float = 3.0
    ceiling: float = 0.0
    startup_grace: float = 3600.0
    warmup_steps: int = 5
    evaluation_floor: float = 1800.0
    checkpoint_floor: float = 1800.0
    stepless_limit: float = 600.0
    answer_limit: float = 300.0
    busy_limit: float = 1800.0


SHIPPED: Final = PhaseLimits()
NAN_STEPS = 3  # So many losses in a row are no number: mixed precision skips single steps.
