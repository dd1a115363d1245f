"""How a section is exported to Prometheus, as values: rendered elsewhere. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from slurm_watchdog.model.report import Report

JOB_ID = re.compile(r"\d{1,12}(_\d{1,12})?")


Series = tuple[tuple[str, ...], float]  # Values of the labels, in their order, and the value.


class Family(NamedTuple):
    """One metric with its series. No label holds a pid or a user's text."""

    name: str  # Without the prefix that all metrics have; ends in its unit.
    help: str
    labels: tuple[str, ...] = ()
    series: Iterable[Series] = ()

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


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
