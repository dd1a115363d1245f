"""Runs of a job with the error lines that agents reported."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.diagnose.logs.root_cause import logged_error
from slurm_watchdog.model.cluster_view import ErrorLine
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.past_runs import LoggedError, PastRun, RankLocation
from slurm_watchdog.parse.training_log.line import parse_line

NOW = 10_000.0


def event(line: str) -> Event:
    fact = parse_line(line)
    assert fact is not None and fact.kind is EventKind.ERROR, line
    return Event(kind=EventKind.ERROR, job_id="7", age_s=0, source="l", line=line, pattern=fact.pattern, rank=fact.rank)


def errors(*lines: tuple[float, str], node: str = "n1") -> tuple[ErrorLine, ...]:
    return tuple(ErrorLine(node=node, age_s=age_s, event=event(line)) for age_s, line in lines)


SEATS = tuple(RankLocation(rank, "n1" if rank < 2 else "n2", 100 + rank) for rank in range(4))


def logged(*lines: tuple[float, str]) -> tuple[LoggedError, ...]:
    return tuple(logged_error(event(line), "n1", NOW - age_s) for age_s, line in lines)


def past(*lines: tuple[float, str], **changes: Any) -> PastRun:
    given: dict[str, Any] = {
        "restarts": 0, "began_at": 1000.0, "ended_at": NOW - 20.0, "steps_seen": 49, "first_step": 401, "last_step": 450,
        "rose_at": NOW - 60.0, "step_s": 105.0, "checkpoint_step": 400, "ranks": 4, "log_read": True,
        "nodes": ("n1", "n2"), "batch_host": "n1", "seats": SEATS,
    }  # fmt: skip
    return PastRun(**{**given, "errors": logged(*lines), **changes})
