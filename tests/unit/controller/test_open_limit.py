"""What one job or node can open has an end; nobody else's incidents, and none that is open already, are lost for it."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.incidents.judge import OF_ONE, within_room
from slurm_watchdog.model.incidents import (
    Culprit,
    Finding,
    Incident,
    IncidentKind,
    IncidentState,
    Severity,
    Truth,
)


def finding(subject: str, jobs: tuple[str, ...] = (), node: str | None = None) -> Finding:
    culprits = (Culprit(node=node),) if node else ()
    return Finding(
        kind=IncidentKind.GPU_FAULT, subject=subject, truth=Truth.BAD, job_ids=jobs, culprits=culprits, summary="x", severity=Severity.WARNING,
    )  # fmt: skip


def incident(about: Finding) -> Incident:
    return Incident(
        id=about.subject, kind=about.kind, subject=about.subject, state=IncidentState.FIRING, severity=Severity.WARNING,
        job_ids=about.job_ids, culprits=about.culprits, opened_at=0.0, pending_mono=0.0, summary="x",
    )  # fmt: skip


def subjects(found: Iterable[Finding]) -> list[str]:
    return [each.subject for each in found]


FLOOD = [finding(f"gpu:{n}", node="n1") for n in range(1000)]


def test_a_node_that_reports_thousands_of_faults_opens_so_many_and_hides_no_other_node() -> None:
    left_out = LeftOut()
    found = within_room([*FLOOD, finding("gpu:other", node="n2"), finding("job:7", jobs=("7",))], [], left_out)
    assert subjects(found) == [*subjects(FLOOD[:OF_ONE]), "gpu:other", "job:7"]
    assert [(each.whose, each.what, each.count) for each in left_out.lately(0.0)] == [
        ("n1", "incidents", 1000 - OF_ONE)
    ]


def test_what_is_open_already_goes_on_where_there_is_no_room_for_more() -> None:
    open_ones = [incident(each) for each in FLOOD[: OF_ONE + 5]]
    found = within_room(FLOOD, open_ones, LeftOut())
    assert subjects(found) == subjects(FLOOD[: OF_ONE + 5])


def test_a_finding_about_several_jobs_cannot_be_hidden_by_one_of_them() -> None:
    flood = [finding(f"run:7.{n}", jobs=("7",)) for n in range(1000)]
    shared = finding("mount:/scratch", jobs=("7", "8"))
    assert shared in within_room([*flood, shared], [incident(each) for each in flood], LeftOut())
