"""The configuration as the values that policy and ladder take: they know no configuration."""

from __future__ import annotations

from slurm_watchdog.config.policy import Policy, Treatment
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.ladder.state import LadderLimits
from slurm_watchdog.controller.policy.placement import Suspects
from slurm_watchdog.controller.policy.policy_input import GuardLimits
from slurm_watchdog.controller.policy.rules import Override, RuleBook, RuleChange
from slurm_watchdog.detect.registry import KINDS

LADDER_LIMITS = {
    "checkpoint_limit": "checkpoint_s", "signal_limit": "signal_s",
    "exit_limit": "exit_s",
    "step_limit": "step_s",
    "confirm_limit": "confirm_s",
    "set_down_after": "set_down_after_s",
}  # fmt: skip
"""Key of `ladder`, of which a treatment has some, too -> field of LadderLimits."""
SAME_IN_A_RULE = ("mode", "exclude_nodes", "drain", "signal_to", "lose_work", "attempts")


def limits_of(config: Config) -> GuardLimits:
    """The limits of the guards."""
    policy = config.policy
    return GuardLimits(
        cooldown_s=policy.cooldown,
        attempts=policy.attempts,
        budget=config.restarts_per_hour,
        budget_percent=policy.budget_percent,
        budget_window_s=policy.budget_window,
        storm_jobs=policy.storm_jobs,
        storm_cooldown_s=policy.storm_cooldown,
        max_excluded_nodes=policy.max_excluded_nodes,
        max_drained_nodes=policy.max_drained_nodes,
        drained_percent=policy.drained_percent,
        suspects=Suspects(policy.suspects),
        opt_out_comment=config.jobs.opt_out_comment,
    )


def ladder_limits_of(config: Config) -> LadderLimits:
    """The limits of the operations."""
    policy = config.policy
    return LadderLimits(
        **{field: getattr(config.ladder, key) for key, field in LADDER_LIMITS.items()},
        evidence=True,
        exclusion_s=policy.exclusion_lifetime,
        max_drained_nodes=policy.max_drained_nodes,
        drained_percent=policy.drained_percent,
    )


def rule_book_of(config: Config) -> RuleBook:
    """Which rule holds for which job."""
    policy = config.policy
    return RuleBook(
        modes={kind: config.mode_of(kind) for kind in KINDS},
        kinds=_kinds(policy),
        overrides=tuple(
            Override(
                match=override.match,
                kinds=override.kinds,
                change=_change(override, f"expert.policy.overrides[{index}]"),
            )
            for index, override in enumerate(policy.overrides)
        ),
        no_action=policy.no_action,
    )


def _kinds(policy: Policy) -> dict[str, RuleChange]:
    kinds = {kind: _change(treatment, f"expert.policy.kinds.{kind}") for kind, treatment in policy.kinds.items()}
    return kinds


def _change(treatment: Treatment, source: str) -> RuleChange:
    limits = {
        field: value for key, field in LADDER_LIMITS.items() if (value := getattr(treatment, key, None)) is not None
    }
    return RuleChange(
        source=source,
        **{name: getattr(treatment, name) for name in SAME_IN_A_RULE},
        ladder=treatment.ladder,
        cooldown_s=treatment.cooldown,
        no_action=treatment.no_action,
        rung_limits=tuple(sorted(limits.items())),
    )
