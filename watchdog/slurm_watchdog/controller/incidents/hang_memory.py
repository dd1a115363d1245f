"""Where jobs hung before: told with the next hang in the same place. Pure: the journal keeps what is in here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from slurm_watchdog.ledger.hang_place import REMEMBERED_S, hang_place, said_of, why_held
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.hang_place import HangPlace
from slurm_watchdog.model.incidents import Incident

MOST: Final = 5000
"""The newest: a cluster with fifty hangs a day has three months of them."""


class HangMemory:
    """`Judge` owns it."""

    def __init__(self, known: Iterable[HangPlace] = ()):
        """`known`: those that the journal has."""
        self._known = {each.incident_id: each for each in sorted(known, key=lambda each: each.at)}
        self._said = {key: said for key, each in self._known.items() if (said := said_of(each, self._known.values()))}
        """Incident -> the sentence that it is a repeat."""

    def note(self, incident: Incident, view: ClusterView, wall: float) -> str | None:
        """An incident has begun to fire: where its job hangs is kept, if stacks show it. Returns the sentence that it
        is a repeat; None if it is not, or nobody knows."""
        job = next((each for each in view.jobs if each.job.job_id in incident.jobs_now), None)
        if job is None or incident.id in self._known:
            return self._said.get(incident.id)
        found = hang_place(incident, job, f"{job.job.uid}/{job.job.name}", wall)
        if found is None:
            return None
        self._known[incident.id] = found
        said = said_of(found, self._known.values())
        if said is not None:
            self._said[incident.id] = said
        self._forget(wall)
        return said

    def place(self, incident_id: str) -> HangPlace | None:
        """Where this incident's job hangs, as it was kept."""
        return self._known.get(incident_id)

    def said(self, incident_id: str | None) -> tuple[str, ...]:
        """The sentence that an open incident is a repeat, if it is."""
        said = self._said.get(incident_id or "")
        return () if said is None else (said,)

    def why_held(self, incident_id: str) -> str | None:
        """Why a restart for this incident would end in the same place again; None if that is not known."""
        place = self._known.get(incident_id)
        return None if place is None else why_held(place, self._known.values())

    def _forget(self, wall: float) -> None:
        old = [key for key, each in self._known.items() if each.at < wall - REMEMBERED_S]
        for key in (*old, *list(self._known)[: max(0, len(self._known) - MOST)]):
            self._known.pop(key, None)
            self._said.pop(key, None)
