"""Findings, second by second, and the incidents that they become."""

from __future__ import annotations

from itertools import count
from typing import Any

from slurm_watchdog.controller.incidents.correlate import CorrelateContext, correlate
from slurm_watchdog.model.incidents import (
    Finding,
    Incident,
    IncidentKind,
    IncidentState,
    Truth,
)

FIRING, PENDING, RESOLVED = IncidentState.FIRING, IncidentState.PENDING, IncidentState.RESOLVED


class Story:
    """Feeds findings second by second."""

    def __init__(self, hold_s: float = 0.0):
        self.open: list[Incident] = []
        self.now = 100.0
        self.ids = count(1)
        self.hold_s = dict.fromkeys(IncidentKind, hold_s)
        self.world: dict[str, Any] = {"restarts": {"7": 0, "8": 0}}

    def after(self, seconds: float, *findings: Finding) -> list[tuple[IncidentKind, IncidentState]]:
        self.now += seconds
        moment = CorrelateContext(mono=self.now, wall=self.now + 1e6, hold_s=self.hold_s, **self.world)
        found = correlate(self.open, findings, moment, lambda: str(next(self.ids)))
        self.open = [i for i in found if i.state is not RESOLVED]
        self.last = found
        return [(i.kind, i.state) for i in found]


def says(truth: Truth, kind: IncidentKind = IncidentKind.COLLECTIVE_HANG, **changes: Any) -> Finding:
    given = {
        "subject": "job:7",
        "summary": str(truth),
        "job_ids": ("7",),
        "duration_s": 70.0,
        "actionable": truth == "bad",
    }
    return Finding(**{"kind": kind, "truth": truth, **given, **changes})
