"""Jobs that restart and die."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.model.past_runs import PastRun
from tests.builders.logged_runs import NOW, SEATS, logged
from tests.builders.views import slurm_job

ERROR = "[rank3]: FileNotFoundError: [Errno 2] No such file or directory: '/data/train.idx'"


def run(number: int, *lines: str, **changes: Any) -> PastRun:
    began_at = NOW - 1000.0 + 100.0 * number
    given: dict[str, Any] = {
        "restarts": number, "began_at": began_at, "ended_at": began_at + 40.0, "steps_seen": 0, "log_read": True,
        "errors": logged(*((NOW - began_at - 35.0, line) for line in lines)), "ranks": 4,
        "nodes": ("n1", "n2"), "seats": SEATS,
    }  # fmt: skip
    return PastRun(**{**given, **changes})


DEAD = tuple(run(number, ERROR) for number in range(3))


STARTING: dict[str, Any] = {
    "job": slurm_job(restarts=3),
    "progress": None,
    "processes": (),
    "run_age_s": 10.0,
}
