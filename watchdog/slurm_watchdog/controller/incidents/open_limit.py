"""The open incidents, and how many may be open about one job and one node: what a node says, or a job does,
makes no list without end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.model.incidents import Finding, Incident, Truth

OF_ONE = 64  # Of one job or node. There are 26 kinds; a node has 16 GPUs at most, each with a fault and an orphan.


class OpenIncidents(Sequence[Incident]):
    """The incidents that are open, in the order of their opening. `Judge` owns them, and no one else edits
    them. A walk over them sees them as they were when the walk began."""

    def __init__(self, incidents: Iterable[Incident] = ()):
        self.renew(incidents)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Incident]:
        return iter(tuple(self._by_id.values()))

    def get(self, incident_id: str) -> Incident | None:
        """The open incident with this id."""
        return self._by_id.get(incident_id)

    def add(self, incident: Incident) -> None:
        """Opens one, or puts it in the place of the one with its id."""
        self._by_id[incident.id] = incident

    def close(self, incident_id: str) -> None:
        """It is not open any more; nothing happens if it was not."""
        self._by_id.pop(incident_id, None)

    def renew(self, incidents: Iterable[Incident]) -> None:
        """These, and no others, are open now."""
        self._by_id = {incident.id: incident for incident in incidents}


def within_room(findings: Sequence[Finding], incidents: Iterable[Incident], left_out: LeftOut) -> list[Finding]:
    """The findings without those that would open an incident too many. What is open already is updated and
    closed unchanged."""
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
    """The one job it is about, else the node. None: it is about several jobs, which no single one may hide,
    or Slurm's own word."""
    if about.job_ids:
        return f"job {about.job_ids[0]}" if len(about.job_ids) == 1 else None
    return next((each.node for each in about.culprits if each.node), None)
