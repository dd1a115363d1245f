"""How many incidents may be open about one job and one node: what a node says, or a job does, makes no list without end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from watchdog.controller.capped import LeftOut
from watchdog.model.incidents import Finding, Incident, Truth

OF_ONE: Final = 64
"""Of one job or node. There are 26 kinds; a node has 16 GPUs at most, each with a fault and an orphan."""


def within_room(
    findings: Sequence[Finding], incidents: Iterable[Incident], left_out: LeftOut
) -> list[Finding]:
    """The findings without those that would open an incident too many. What is open already is updated and closed unchanged."""
    known, used = set(), Counter[str | None]()
    for incident in incidents:
        known.add((incident.kind, incident.subject))
        used[_whose(incident)] += 1
    kept = []
    for finding in findings:
        if finding.truth is Truth.BAD and (finding.kind, finding.subject) not in known:
            whose = _whose(finding)
            if whose is not None and used[whose] >= OF_ONE:
                left_out.note("incidents", whose)
                continue
            known.add((finding.kind, finding.subject))
            used[whose] += 1
        kept.append(finding)
    return kept


def _whose(about: Finding | Incident) -> str | None:
    """The one job it is about, else the node. None: it is about several jobs, which no single one may hide, or Slurm's own word."""
    if about.job_ids:
        return f"job {about.job_ids[0]}" if len(about.job_ids) == 1 else None
    return next((each.node for each in about.culprits if each.node), None)
