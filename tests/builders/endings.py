"""Jobs at their last step."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.model.cluster_view import JobView
from tests.builders.rank_activity import four
from tests.builders.views import progress


def done(age_s: float = 610.0, doing: str = "idles", cpu: float | None = 0.0, **changes: Any) -> JobView:
    """Four ranks that made the last of 1000 steps so long ago."""
    given = {"progress": progress(age_s, step=1000, total_steps=1000)}
    return four(doing, cpu, **{**given, **changes})
