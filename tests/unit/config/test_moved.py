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
        "f:2: agent: is now expert.agent",
        "f:3: controller: is now expert.controller",
        "f:4: policy: is now expert.policy",
        "f:1: mode: is now restart",
        "f:2: agent.controller_url: is now controller",
        "f:2: agent.standby_urls: is now controller",
        "f:4: policy.budget: is now restarts_per_hour",
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


LISTS = """\
policy:
  kinds: {slow_node: {mode: observe, cooldown: 1h}, node_down: {}}
  overrides:
  - {match: {user: ann}, kinds: [collective_hang], mode: off}
  - {match: {user: b}, mode: act}
thresholds: [{match: {partition: debug}, detectors: {collective_hang: {floor: 2min}}}]
notify: {slack: {mentions: {default: here, 'user:ann': U123, 'partition:x': S123}}}
detectors: {lingering_job: {mode: act}, near_limit: {mode: off}}
except: [{match: {user: eve}, restart: never}]
"""


def test_what_was_in_four_lists_is_in_one_behind_what_is_there() -> None:
    config = parse_config(LISTS)
    assert [each.match.words for each in config.exceptions] == [
        "except (user: eve)",
        "except (user: ann, kind: collective_hang)",
        "except (user: b)",
        "except (kind: slow_node)",
        "except (kind: lingering_job)",
        "except (partition: debug)",
        "except (user: ann)",
        "except (partition: x)",
    ]
    assert [each.given() for each in config.exceptions[1:5]] == [
        {"ladder": ()},
        {"restart": "all"},
        {"restart": "never", "cooldown": 3600.0},
        {"restart": "all"},
    ]
    assert (config.notify.slack.mention, config.detectors.is_enabled("near_limit")) == ("here", False)
    assert len(config.warnings) == 8


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("policy: {kinds: {slow_node: {mode: obey}}}", "policy.kinds.slow_node.mode", "must be never, hangs or all"),
        (
            "policy: {overrides: [{match: {user: a}, kinds: [x]}]}",
            "policy.overrides[0].kinds",
            "not a kind of incident",
        ),
        ("jobs: {opt_out_comment: hands off}", "jobs.opt_out_comment", "would be acted on"),
        ("thresholds: [{match: {user: a}, detectors: {x: {}}}]", "thresholds[0].detectors.x", "judges no single job"),
        ("notify: {slack: {mentions: {ann: U123}}}", "notify.slack.mentions.ann.match.ann", "unknown key"),
        (
            "policy: {overrides: [{match: {user: a}, cooldown: 1h}, {match: {user: b}, mode: act}]}",
            "policy.overrides[0]",
            "give it a mode, too",
        ),
    ],
)
def test_a_mistake_in_an_old_list_is_where_the_user_wrote_it(text: str, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert [each.message for each in caught.value.problems if each.path == path and words in each.message], caught.value
    assert {each.line for each in caught.value.problems} == {1}


@pytest.mark.parametrize(
    "text",
    [
        "policy: {kinds: {slow_node: 3}}\ndetectors: {slow_node: {mode: act}}",
        "except: 3\nthresholds: [{match: {user: a}}]",
        "except: null\nthresholds: [1]",
        "policy: {overrides: [{match: 3, kinds: 3, mode: 3}, 3, {mode: {a: 1}}]}",
        "policy: 3\nladder: {checkpoint_limit: 3}\nmode: [a]",
        "agent: {controller_url: {a: 1}, standby_urls: 3}",
        "notify: {slack: {mentions: {3: [x]}}}",
        "detectors: 3\npatience: 2min",
        "except: [{match: {user: a}, detectors: 3, patience: 2min}]",
        "jobs: {opt_out_comment: [a]}",
    ],
)
def test_what_has_another_shape_is_an_error_and_nothing_breaks(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)
