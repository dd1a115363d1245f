"""lingering_job: a rank is dead and the others wait for it; ranks that leave at the end are none."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit.builders import COMPUTE, RECV, cluster, job, progress, seen, slurm_job, snapshot, stack
from watchdog.detect.lingering_job import detect
from watchdog.detect.view import ErrorLine
from watchdog.model import Event, EventKind, Finding, Truth


@dataclass(frozen=True)
class Settings:
    grace: float = 30.0


def left(*ranks: int, lines=RECV):
    return tuple(snapshot(age, [stack(r, lines) for r in ranks]) for age in (20, 10))


THREE_LEFT = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=40.0))
LINGERS = {"processes": THREE_LEFT, "progress": progress(45.0), "snapshots": left(0, 1, 2)}


def judge(**changes) -> Finding:
    (finding,) = detect(cluster(job(**changes)), Settings())
    return finding


def test_the_dead_rank_is_named_with_its_last_words_and_the_job_may_be_requeued() -> None:
    words = ErrorLine(
        node="n1",
        age_s=41,
        event=Event(kind=EventKind.ERROR, job_id="7", age_s=0, source="l", rank=3, line="boom"),
    )
    finding = judge(**LINGERS, errors=(words,))
    assert (finding.truth, finding.actionable) == (Truth.BAD, True)
    assert [(c.node, c.rank, c.pid) for c in finding.culprits] == [("n2", 3, 103)]
    assert "last words: boom" in finding.facts
    assert "3 of them wait in a collective" in finding.summary


def test_a_zombie_is_dead_since_it_became_one() -> None:
    zombie = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=40.0, state="Z"))
    finding = judge(**{**LINGERS, "processes": zombie})
    assert (finding.truth, finding.culprits[0].reason) == (Truth.BAD, "has been a zombie for 40 s")


def test_after_a_grace_the_steps_before_the_death_are_still_before_it() -> None:
    assert (
        judge(**{**LINGERS, "progress": progress(31.0, rose_age_s=45.0), "run_age_s": 31.0}).truth
        is Truth.BAD
    )


HEALTHY = {
    "all ranks are there": {},
    "the job goes on without the rank": {**LINGERS, "progress": progress(3.0)},
    "an elastic launcher started the rank again": {
        **LINGERS,
        "processes": (seen(3, gone_s=40.0, pid=77), *(seen(r) for r in range(4))),
    },
    "the others still work": {
        **LINGERS,
        "snapshots": (*left(0, 1, 2)[:1], *left(0, 1, 2, lines=COMPUTE)[1:]),
    },
    "the last step was made": {**LINGERS, "progress": progress(45.0, total_steps=500)},
    "the grace is not over": {**LINGERS, "processes": (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=29.0))},
    "all ranks ended": {**LINGERS, "processes": tuple(seen(r, gone_s=90.0) for r in range(4))},
    "the last rank uploads what the others have left to it": {
        **LINGERS,
        "processes": (seen(0), *(seen(r, gone_s=3000.0) for r in (1, 2, 3))),
        "snapshots": left(0, lines=("send (requests/adapters.py)", "upload (t.py)")),
        "progress": progress(4000.0),
    },
    "the job is suspended": {**LINGERS, "job": slurm_job(state="SUSPENDED")},
    "no ranks are known": {**LINGERS, "processes": ()},
    "a node is silent": {**LINGERS, "silent_nodes": ("n2",)},
    "no dump came": {**LINGERS, "snapshots": ()},
    "the dump of a survivor is missing": {**LINGERS, "snapshots": left(0, 1)},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_no_incident_if(name: str) -> None:
    assert judge(**HEALTHY[name]).truth is not Truth.BAD


def test_without_any_stack_there_is_an_alert_in_the_end_and_nothing_is_done() -> None:
    late = (*(seen(r) for r in (0, 1, 2)), seen(3, gone_s=301.0))
    finding = judge(processes=late, progress=progress(400.0))
    assert (finding.truth, finding.actionable) == (Truth.BAD, False)
