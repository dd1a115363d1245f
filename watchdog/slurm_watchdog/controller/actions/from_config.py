"""The configuration as the values that policy and ladder take: they know no configuration."""

from __future__ import annotations

from slurm_watchdog.config.policy import Treatment
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.ladder.state import LadderLimits
from slurm_watchdog.controller.policy.policy_input import GuardLimits
from slurm_watchdog.controller.policy.rules import Match, Override, RuleBook, RuleChange
from slurm_watchdog.detect.registry import KINDS

RUNG_LIMITS = {
    "kill_switch_limit": "kill_switch_s",
    "checkpoint_limit": "checkpoint_s",
    "signal_limit": "signal_s",
    "exit_limit": "exit_s",
}
"""Key of a treatment -> field of LadderLimits."""


def limits_of(config: Config) -> GuardLimits:
    """The limits of the guards."""
    policy = config.policy
    return GuardLimits(
        cooldown_s=policy.cooldown,
        attempts=policy.attempts,
        budget=policy.budget,
        budget_percent=policy.budget_percent,
        budget_window_s=policy.budget_window,
        storm_jobs=policy.storm_jobs,
        storm_nodes_percent=policy.storm_nodes_percent,
        storm_cooldown_s=policy.storm_cooldown,
        max_excluded_nodes=policy.max_excluded_nodes,
        max_drained_nodes=policy.max_drained_nodes,
        drained_percent=policy.drained_percent,
        opt_out_comment=config.jobs.opt_out_comment,
    )


def ladder_limits_of(config: Config) -> LadderLimits:
    """The limits of the operations."""
    ladder = config.ladder
    return LadderLimits(
        kill_switch_s=ladder.kill_switch_limit,
        checkpoint_s=ladder.checkpoint_limit,
        exit_s=ladder.exit_limit,
        signal_s=ladder.signal_limit,
        end_s=ladder.end_limit,
        step_s=ladder.step_limit,
        mount_s=ladder.mount_limit,
        confirm_s=ladder.confirm_limit,
        term_s=ladder.term_limit,
        kill_s=ladder.kill_limit,
        evidence_s=ladder.evidence_limit,
        exclusion_s=config.policy.exclusion_lifetime,
        set_down_after_s=ladder.set_down_after,
        max_drained_nodes=config.policy.max_drained_nodes,
        drained_percent=config.policy.drained_percent,
    )


def rule_book_of(config: Config) -> RuleBook:
    """Which rule holds for which job."""
    policy = config.policy
    return RuleBook(
        modes={kind: config.mode_of(kind) for kind in KINDS},
        kinds={kind: _change(treatment, f"policy.kinds.{kind}") for kind, treatment in policy.kinds.items()},
        overrides=tuple(
            Override(
                match=Match(
                    partition=tuple(override.match.partition),
                    account=tuple(override.match.account),
                    user=tuple(override.match.user),
                    job_name=tuple(override.match.job_name),
                ),
                kinds=tuple(override.kinds),
                change=_change(override, f"policy.overrides[{index}]"),
            )
            for index, override in enumerate(policy.overrides)
        ),
    )


def _change(treatment: Treatment, source: str) -> RuleChange:
    limits = {field: value for key, field in RUNG_LIMITS.items() if (value := getattr(treatment, key)) is not None}
    return RuleChange(
        source=source,
        mode=treatment.mode,
        ladder=None if treatment.ladder is None else tuple(treatment.ladder),
        exclude_nodes=treatment.exclude_nodes,
        drain=treatment.drain,
        signal_to=treatment.signal_to,
        lose_work=treatment.lose_work,
        cooldown_s=treatment.cooldown,
        attempts=treatment.attempts,
        rung_limits=tuple(sorted(limits.items())),
    )
