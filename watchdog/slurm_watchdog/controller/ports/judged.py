"""What was judged, to be read by others than its owner."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Reversible
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slurm_watchdog.analysis.limit_by_stacks import LongPhases
    from slurm_watchdog.model.cluster_view import ClusterView, JobView
    from slurm_watchdog.model.incidents import Incident


class Incidents(Collection["Incident"], Reversible["Incident"], Protocol):
    """The open incidents, to be read: their owner alone edits them."""

    def get(self, incident_id: str) -> Incident | None:
        """The open incident with this id."""


class Judgement(Protocol):
    """What the newest look at everything gave."""

    @property
    def incidents(self) -> Incidents: ...

    @property
    def limits_s(self) -> Mapping[str, float]:
        """Job -> the longest time without a step that is normal for it now."""

    def hang_limits(self, job: JobView) -> LongPhases:
        """The limits that `collective_hang` has for this job."""

    def why_held(self, incident_id: str) -> str | None:
        """Why a restart for this incident would end in the same place again; None if that is not known."""

    @property
    def slurm_patience_s(self) -> float:
        """An older listing says nothing about now."""


class JudgedView(Judgement, Protocol):
    """The same, with what it was about."""

    @property
    def view(self) -> ClusterView: ...
