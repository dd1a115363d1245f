"""How a section is shown to a person (`agent --once`) and exported to Prometheus, as values: rendered
elsewhere. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from slurm_watchdog.model.report import Report

BAD = "bold red"  # Style of a row that shows something wrong.
JOB_ID = re.compile(r"\d{1,12}(_\d{1,12})?")


class Row(NamedTuple):
    """One row of a table. A cell of None is a question mark."""

    cells: tuple[object, ...]
    style: str = ""


class Table(NamedTuple):
    """A table for a terminal; one without rows is not shown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


Series = tuple[tuple[str, ...], float]  # Values of the labels, in their order, and the value.


class Family(NamedTuple):
    """One metric with its series. No label holds a pid or a user's text."""

    name: str  # Without the prefix that all metrics have; ends in its unit.
    kind: str  # `gauge` or `counter`.
    help: str
    labels: tuple[str, ...] = ()
    series: Iterable[Series] = ()


class Counters(Protocol):
    """What adds up, or stays, over the reports of one agent, for the metrics of one collector."""

    def update(self, report: Report) -> None:
        """Takes over one report; called once a tick."""

    def families(self, report: Report) -> Iterable[Family]:
        """Every metric, without series too; `report` is the last one. May run in any thread."""


def job_label(job_id: str) -> str:
    """A job's number as a label; `other` for what is none, for a process may claim anything in its environment."""
    return job_id if JOB_ID.fullmatch(job_id) else "other"


def largest(pairs: Iterable[tuple[tuple[str, ...], float]]) -> list[Series]:
    """One series for each combination of labels: its largest value."""
    found: dict[tuple[str, ...], float] = {}
    for labels, value in pairs:
        found[labels] = max(found.get(labels, 0.0), value)
    return sorted(found.items())


def with_unit(value: float | None, form: str) -> str | None:
    """`value` in this format; None stays None."""
    return None if value is None else form.format(value)


def number(value: float | None) -> str:
    """A number, or a question mark."""
    return "?" if value is None else str(value)


def seconds(value: float) -> str:
    """`7 s`, `12 min`, `3.4 h`, `2.1 d`: as exact as a glance needs."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / unit:.1f} {name}" if unit == 3600 else f"{value / unit:.0f} {name}"
    return f"{value / 86_400:.1f} d"
