"""How many GPU-seconds jobs have held without making a step: what an incident costs while it lasts. No I/O
and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Incident, IncidentState

LONGEST_TICK_S = 60.0
"""A longer time between two looks was a stall of the controller: of what happened in it nothing is known."""


class GpuTime:
    """Adds up, look by look. A job with two incidents is counted once."""

    def __init__(self) -> None:
        self._gpus: dict[str, int] = {}
        """Job -> the most GPUs that its ranks were seen to hold: a rank that died holds none, and Slurm keeps
        the card for it."""
        self._still: frozenset[str] = frozenset()
        self._looked_at: float | None = None

    def gpus_of(self, job_id: str) -> int:
        """How many GPUs a job has; 0 if unknown."""
        return self._gpus.get(job_id, 0)

    def add(self, view: ClusterView, incidents: Iterable[Incident]) -> float:
        """GPU-seconds that jobs have been stalled since the call before, and how long each had when that was
        found out."""
        here = {job.job.job_id: len(job.gpu_uuids) for job in view.jobs}
        late_s: dict[str, float] = {}
        kept = set(here)
        for incident in incidents:
            kept.update(incident.job_ids)
            if incident.state is IncidentState.FIRING and spec_of(incident.kind).stops_steps:
                for job_id in incident.job_ids:
                    late_s[job_id] = max(late_s.get(job_id, 0.0), incident.detected_after_s or 0.0)
        known: Mapping[str, int] = self._gpus
        self._gpus = {job_id: max(here.get(job_id, 0), known.get(job_id, 0)) for job_id in kept}
        since_s = 0.0 if self._looked_at is None else min(LONGEST_TICK_S, max(0.0, view.now - self._looked_at))
        still = frozenset(late_s) & here.keys()
        lost = sum(self._gpus[job_id] * since_s for job_id in still & self._still)
        lost += sum(self._gpus[job_id] * late_s[job_id] for job_id in still - self._still)
        # One that is queued again holds no GPU, and has not come back yet.
        self._still = still | (self._still & late_s.keys())
        self._looked_at = view.now
        return lost
