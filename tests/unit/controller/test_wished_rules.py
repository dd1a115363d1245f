"""What a person asks for: its ladder, and whether work may be lost by it."""

from __future__ import annotations

import pytest

from slurm_watchdog.controller.policy.rules import Rule, wished
from slurm_watchdog.model.actions import Rung, Wish

SITES = Rule(acts=True, ladder=(Rung.KILL_SWITCH, Rung.CANCEL), source="the site's rule", lose_work=True)


@pytest.mark.parametrize(
    ("wish", "ladder", "lose_work"),
    [
        (Wish.RESTART, SITES.ladder, True),
        (Wish.SAVE, (Rung.KILL_SWITCH,), False),
        (Wish.HOLD, (Rung.KILL_SWITCH, Rung.REQUEUE), False),
    ],
)
def test_a_restart_has_the_sites_rule_and_a_save_never_loses_work(
    wish: Wish, ladder: tuple[Rung, ...], lose_work: bool
) -> None:
    rule = wished(SITES, wish, 30.0)
    assert (rule.ladder, rule.lose_work, rule.checkpoint_limit) == (ladder, lose_work, 30.0)
