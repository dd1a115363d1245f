"""Jobs that have ended, with and without a successor."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.model.past_runs import EndedJob
from tests.builders.logged_runs import NOW, past
from tests.builders.views import slurm_job


def ended(state: str = "FAILED", **changes: Any) -> EndedJob:
    given: dict[str, Any] = {
        "job": slurm_job(job_id="9", state=state, name="m4", user="u"), "ended_at": NOW - 400.0, "last_step": 450,
        "total_steps": 1000, "preceded_by": ("7", "8"), "run": past(restarts=0),
    }  # fmt: skip
    return EndedJob(**{**given, **changes})
