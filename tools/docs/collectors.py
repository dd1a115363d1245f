"""Writes the table of docs/evidence.md from the docstrings of the collectors: `python -m tools.docs collectors`.

The docstring of a collector's module has lines that begin with `Sees:`, `From:`, `How often:` and `Never:`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from slurm_watchdog.agent.collectors.collector import CollectorSpec
from slurm_watchdog.agent.collectors.registry import COLLECTORS
from tools.docs import marks

FILE = Path(__file__).parents[2] / "docs/evidence.md"
LABELS = ("Sees", "From", "How often", "Never")
HEAD = ("collector", "sees", "from where", "how often, and what bounds it")
_LABEL = re.compile(rf"^({'|'.join(LABELS)}): ", re.MULTILINE)


def facts(spec: CollectorSpec) -> tuple[str, ...]:
    """What the docstring says under each label, on one line. Raises ValueError for a collector that lacks one."""
    docstring = inspect.getdoc(inspect.getmodule(spec.make)) or ""
    _, *parts = _LABEL.split(docstring)
    said = dict(zip(parts[::2], (" ".join(part.split()) for part in parts[1::2]), strict=True))
    if missing := [label for label in LABELS if not said.get(label)]:
        raise ValueError(f"the docstring of the collector {spec.name} has no line {missing[0]!r}")
    return tuple(said[label] for label in LABELS)


def write() -> str:
    """The whole page."""
    rows = [HEAD, ("---",) * len(HEAD), *((f"`{spec.name}`", *facts(spec)[:3]) for spec in COLLECTORS)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows).replace(
        "| --- | --- | --- | --- |", "|---|---|---|---|"
    )
    return marks.between(FILE.read_text(encoding="utf-8"), "collectors", table)
