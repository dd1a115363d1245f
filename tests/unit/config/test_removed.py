"""Options that were removed: a file that has them loads and warns, and the warning has the place and the alternative."""

from __future__ import annotations

import pytest

from slurm_watchdog.config import removed
from slurm_watchdog.config.loading import ConfigError, parse_config

ROWS = {
    "notify.mail.server": "use A",
    "policy.overrides[].sender": "use B",
    "policy.overrides[].mode=pigeon": "use C",
    "policy.kinds.*.paper": "use D",
    "mode=loud": "use E",
}
TEXT = """mode: loud
notify:
  mail:
    server: a:1
policy:
  overrides:
    - {match: {user: a}, mode: pigeon, sender: x}
    - {match: {user: b}, mode: act, sender: y}
  kinds:
    node_down: {paper: true}
"""


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "REMOVED", ROWS)


def test_a_file_with_removed_options_loads_with_a_warning_for_each() -> None:
    config = parse_config(TEXT.replace("notify:\n  mail:\n    server: a:1\n", ""), "f.yaml")
    assert config.mode == "observe"
    assert [each.match.user for each in config.policy.overrides] == [["b"]]
    assert config.warnings == (
        "f.yaml:4: policy.overrides[0].sender: was removed and has no effect; use B",
        "f.yaml:5: policy.overrides[1].sender: was removed and has no effect; use B",
        "f.yaml:4: policy.overrides[0]: pigeon was removed; use C",
        "f.yaml:7: policy.kinds.node_down.paper: was removed and has no effect; use D",
        "f.yaml:1: mode: loud was removed; use E",
    )


def test_what_was_never_an_option_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match=r"notify\.mial: unknown key"):
        parse_config("notify: {mial: {server: a}}")


@pytest.mark.parametrize("text", ["notify: 3", "policy: {overrides: 3}", "policy: {overrides: [3]}", "policy: []"])
def test_a_section_that_is_no_section_stays_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(text)
