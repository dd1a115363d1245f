"""Writes the kinds of incidents into deploy/prometheus/alerts.yaml: `python -m tools.docs alerts`.

Each detector names the rules that ask for its kind (`alerts` of its SPEC).
"""

from __future__ import annotations

import re
from pathlib import Path

from slurm_watchdog.detect.registry import SPECS

FILE = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
_RULE = re.compile(r"- alert: (\w+)")
_KINDS = re.compile(r'\bkind=~?"[^"]*"')


def write() -> str:
    """The text of the file, with the kinds of each rule as SPECS has them now."""
    rule, lines = "", []
    for line in FILE.read_text(encoding="utf-8").splitlines(keepends=True):
        found = _RULE.search(line)
        rule = found[1] if found else rule
        lines.append(_KINDS.sub(lambda _, rule=rule: selector(rule), line))  # type: ignore[misc]
    return "".join(lines)


def selector(rule: str) -> str:
    """The label of a rule: its kinds, causes before consequences."""
    kinds = [spec.kind for spec in SPECS if rule in spec.alerts]
    return f'kind{"=~" if len(kinds) > 1 else "="}"{"|".join(kinds)}"'
