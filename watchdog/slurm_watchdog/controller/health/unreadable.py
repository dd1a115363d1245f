"""What of Slurm's listings cannot be read: counted each time, and logged when it begins."""

from __future__ import annotations

import logging

from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.model.slurm import SlurmView

log = logging.getLogger(__name__)


class UnreadableRows:
    """Remembers what of the newest listing could not be read."""

    def __init__(self, metrics: ControllerMetrics):
        self._metrics = metrics
        self._newest: frozenset[str] = frozenset()

    def count(self, view: SlurmView) -> None:
        """Takes a listing."""
        odd = {f"job {job.job_id}: {name}": name for job in view.jobs for name in job.unreadable}
        odd |= {f"node {node.name}: {name}": name for node in view.nodes for name in node.unreadable}
        odd |= dict.fromkeys(view.dropped, "row")
        odd |= {view.partial: "partial"} if view.partial and not view.dropped else {}
        for what, name in odd.items():
            self._metrics.slurm_unreadable.labels(name).inc()
            if what not in self._newest:
                log.warning("Slurm's listing: not known: %s", what[:300])
        self._newest = frozenset(odd)
