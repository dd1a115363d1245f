"""Options that were removed: a file that has them loads and warns, and the warning has the place and the alternative."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
import yaml

from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.config.moved import REMOVED, take_removed

ROWS = {
    "notify.mail.server": "use A",
    "ladder.paper": "use B",
    "mode.loud": "use C",
    "policy.kinds.node_down.x": "use D",
}
TEXT = """mode: loud
notify: {mail: {server: a:1}}
policy: {kinds: {node_down: {x: 1, drain: true}}}
"""


def test_removed_options_are_taken_out_and_each_is_named_with_its_place() -> None:
    data = yaml.safe_load(TEXT)
    assert take_removed(data, ROWS) == [
        ("notify.mail.server", "was removed and has no effect; use A"),
        ("policy.kinds.node_down.x", "was removed and has no effect; use D"),
    ]
    assert data == {"mode": "loud", "notify": {"mail": {}}, "policy": {"kinds": {"node_down": {"drain": True}}}}


def test_an_option_that_some_jobs_had_otherwise_is_taken_out_too() -> None:
    some = "{match: {user: a}, detectors: {driver_stall: {blocked_for: 5min}}}"
    config = parse_config(
        f"detectors: {{driver_stall: {{blocked_for: 3min}}}}\nthresholds: [{some}, {some}]\n", "f.yaml"
    )
    assert [line.split(": ")[:2] for line in config.warnings if "was removed" in line] == [
        ["f.yaml:1", "detectors.driver_stall.blocked_for"],
        ["f.yaml:2", "thresholds[0].detectors.driver_stall.blocked_for"],
        ["f.yaml:2", "thresholds[1].detectors.driver_stall.blocked_for"],
    ]
    assert config.exceptions[0].settings(config.detectors.settings()) == config.detectors.settings()


def test_what_was_never_an_option_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match=r"notify\.mial: unknown key"):
        parse_config("notify: {mial: {server: a}}")


@pytest.mark.parametrize("text", ["notify: 3", "policy: {overrides: 3}", "policy: {overrides: [3]}", "policy: []"])
def test_a_section_that_is_no_section_stays_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)


def test_the_example_of_the_release_before_loads_with_a_warning_for_each_option_that_left() -> None:
    example = Path(__file__).parents[2] / "captures/config/example-0.1.0.yaml"
    warnings = parse_config(example.read_text(), "f.yaml").warnings
    warned = {line.split(": ")[1] for line in warnings if "was removed" in line}
    missed = {path for path in REMOVED if not fnmatch.filter(warned, path)}
    assert all(path.startswith(("policy.kinds.", "policy.overrides.", "security.may.")) for path in missed)


def test_the_warning_about_a_constant_has_its_value_wherever_the_option_stood() -> None:
    text = (
        "policy: {overrides: [{match: {user: ann}, mode: act, kill_switch_limit: 2min}]}\nagent: {spool_bytes: 1MiB}\n"
    )
    warnings = parse_config(text, "f.yaml").warnings
    assert "f.yaml:2: agent.spool_bytes: was removed and has no effect; it is always 8MiB" in warnings
    assert (
        "f.yaml:1: policy.overrides[0].kill_switch_limit: was removed and has no effect; it is always 1min" in warnings
    )
