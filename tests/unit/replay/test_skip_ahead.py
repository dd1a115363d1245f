"""Until when a replay need not look again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.model.cluster_view import ErrorLine, JobView
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.past_runs import EndedJob
from slurm_watchdog.replay.skip_ahead import PAUSE_S, skip_ahead_s
from tests.builders.views import blocked, cluster, job, progress, seen, slurm_job, snapshot, stack

NOW = 10_000.0
LIMITS = {"7": 60.0}
SAID = Event(kind=EventKind.ERROR, job_id="7", age_s=0, source="l", pattern="traceback", line="Traceback")


def calm(view: JobView, **changes: Any) -> float:
    nodes = tuple(NodeView(name=name, reported_at=NOW - 2, quiet=True) for name in ("n1", "n2"))
    given: dict[str, Any] = {"nodes": nodes, "silent_after_s": 40.0}
    return skip_ahead_s(replace(cluster(view), **{**given, **changes}), LIMITS)


def test_a_job_that_trains_needs_no_look_for_two_reports() -> None:
    assert calm(job()) == PAUSE_S


@pytest.mark.parametrize(
    "view",
    [
        job(progress=None),
        job(progress=progress(21.0)),
        job(progress=progress(5.0, step=1000, total_steps=1000)),
        job(processes=(seen(0), seen(1, gone_s=1.0))),
        job(processes=(seen(0), seen(1, state="Z"))),
        job(processes=(seen(0), seen(1, state="D"))),
        job(processes=(seen(0), seen(1, blocked=blocked(3.0)))),
        job(snapshots=(snapshot(1, [stack(0, ())]),)),
        job(errors=(ErrorLine(node="n1", age_s=3.0, event=SAID),)),
    ],
    ids=["before its first step", "half the limit is near", "over", "gone", "zombie", "in D", "in a call", "asked", "an error"],
)  # fmt: skip
def test_a_job_that_is_not_as_ever_is_looked_at_again_at_once(view: JobView) -> None:
    assert calm(view) == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"silent_nodes": ("n3",)},
        {"nodes": (NodeView(name="n1", reported_at=NOW - 2),)},
        {"ended": (EndedJob(job=slurm_job(), ended_at=NOW - 5),)},
        {"waiting": (job(),)},
        {"jobs": ()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_skip_ahead_is_zero_when_anything_is_unusual(changes: dict[str, Any]) -> None:
    assert calm(job(), **changes) == 0.0


def test_the_next_look_is_due_when_the_first_node_would_count_as_silent() -> None:
    nodes = (NodeView(name="n1", reported_at=NOW - 36, quiet=True),)
    assert calm(job(), nodes=nodes) == pytest.approx(4.0)
