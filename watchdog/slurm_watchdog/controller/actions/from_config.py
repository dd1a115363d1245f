"""The configuration as the values that policy and ladder take: they know no configuration."""

from __future__ import annotations

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.ladder.state import LadderLimits
from slurm_watchdog.controller.policy.decision import RUNG_LIMITS

LADDER_LIMITS = {
    "exit_limit": "exit_s",
    "step_limit": "step_s",
    "confirm_limit": "confirm_s",
    "set_down_after": "set_down_after_s",
}
"""Key of `ladder` -> field of LadderLimits."""


def ladder_limits_of(config: Config) -> LadderLimits:
    """The limits of the operations."""
    policy = config.policy
    return LadderLimits(
        **{field: getattr(config.ladder, key) for key, field in LADDER_LIMITS.items()},
        **{field: getattr(policy, key) for field, key in RUNG_LIMITS},
        evidence=True,
        exclusion_s=policy.exclusion_lifetime,
        max_drained_nodes=policy.max_drained_nodes,
        drained_percent=policy.drained_percent,
    )
