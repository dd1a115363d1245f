"""Metrics of a process, as Prometheus would read them."""

from __future__ import annotations

from pathlib import Path


def read_metrics(file: Path) -> dict[str, float]:
    """The agent's own metrics by name and labels, as text; empty if there are none."""
    return parse_metrics(file.read_text()) if file.exists() else {}


def parse_metrics(text: str) -> dict[str, float]:
    """`name{labels} value` lines of the Prometheus text format, by all that stands before the value."""
    found = {}
    for line in text.splitlines():
        name, space, value = line.rpartition(" ")
        if space and not line.startswith("#"):
            found[name] = float(value)
    return found
