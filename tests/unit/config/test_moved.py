"""Options that have another place now: a file with the old ones loads and warns, and mistakes are where they are."""

from __future__ import annotations

import pytest

from slurm_watchdog.config.loading import ConfigError, parse_config

OLD = """\
mode: act
agent: {controller_url: 'http://m1:1', standby_urls: ['http://m2:1'], interval: 4s}
controller: {listen: '0.0.0.0:9765'}
policy: {budget: 2, cooldown: 1h}
"""
NEW = """\
restart: all
controller: [http://m1:1, http://m2:1]
restarts_per_hour: 2
expert:
  agent: {interval: 4s}
  controller: {listen: 0.0.0.0:9765}
  policy: {cooldown: 1h}
"""


def test_what_stands_at_its_old_place_holds_and_each_warning_names_the_new_one() -> None:
    old, new = parse_config(OLD, "f"), parse_config(NEW, "f")
    assert new.warnings == ()
    assert [line.partition("; ")[0] for line in old.warnings] == [
        "f:2: agent: is now 'expert.agent'",
        "f:3: controller: is now 'expert.controller'",
        "f:4: policy: is now 'expert.policy'",
        "f:1: mode: is now 'restart'",
        "f:2: agent.controller_url: is now 'controller'",
        "f:2: agent.standby_urls: is now 'controller'",
        "f:4: policy.budget: is now 'restarts_per_hour'",
    ]
    assert (old.restart, old.controller_urls, old.restarts_per_hour) == ("all", ("http://m1:1", "http://m2:1"), 2)
    assert (old.agent, old.controller, old.policy) == (new.agent, new.controller, new.policy)


def test_a_mistake_at_an_old_place_has_that_place_and_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("policy:\n  cooldown: 5\n  budget: many\nagent: {interval: 1s}\nexpert: {agent: {interval: 2s}}")
    assert [(each.line, each.path) for each in caught.value.problems] == [
        (2, "policy.cooldown"),
        (3, "policy.budget"),
        (4, "agent.interval"),
    ]
    assert "also as expert.agent.interval" in caught.value.problems[2].message
