"""A job of eight ranks."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.model.cluster_view import JobView
from tests.builders.views import job, progress, seen


def eight(*dead: tuple[int, float], **changes: Any) -> JobView:
    """Eight ranks; of `dead` (rank, seconds) are gone."""
    gone = dict(dead)
    processes = tuple(seen(rank, gone_s=gone.get(rank)) for rank in range(8))
    return job(**{"processes": processes, "progress": progress(20.0, total_steps=1000), **changes})
