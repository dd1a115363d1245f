"""A short accuracy matrix: every case and every healthy thing once. The whole one is `make accuracy`."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from lab.bench.figures import Figures
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState
from slurm_watchdog.parse.training_log.line import parse_line
from tests.accuracy.cases import CASES, Case
from tests.accuracy.healthy import THINGS, Thing
from tests.accuracy.logs import FORMATS, HARMLESS, Step, overflow_skip, pulse
from tests.accuracy.matrix import Healthy, Results, plan, rows, summary, table, write_figures
from tests.accuracy.run import run_case, run_thing
from tests.accuracy.scene import Expect
from tests.accuracy.score import Score, names, right_ones
from tools.docs.evaluation import accuracy

REGRESSIONS: tuple[tuple[str, int, int, str], ...] = (
    ("case_05_lingering_gone", 1, 2, "direct"),  # ten seconds are ten seconds, whenever it is looked
    ("healthy_day", 26, 0, ""),  # half of the ten steps after a change paused by chance: that is no change
    ("healthy_long_checkpoint", 68, 0, ""),  # half an hour of writing, and the steps around it, are no stall
    ("healthy_long_checkpoint", 25, 0, ""),  # only the disk told that it was saved
    ("healthy_maintenance", 33, 0, ""),  # two nodes that were just given back are no outage
    ("healthy_maintenance", 1, 0, ""),  # a node that was just given back has no agent yet
    ("healthy_end_of_training", 5, 0, ""),  # ranks that leave one by one while rank 0 saves are not dead
    (
        "case_18_wedged_teardown",
        0,
        2,
        "direct",
    ),  # a log without an end: the stacks are enough, in two minutes
)
"""(case or thing, seed, nodes, way): runs in which the matrix once found a defect."""


KNOWN: dict[str, str] = {}
"""Defects that are known and not mended yet."""


def each_of(found: Sequence[Case] | Sequence[Thing]) -> list[object]:
    """Parameters of a test, the known defects marked: a mended one fails here until it is taken from the list."""
    return [
        pytest.param(
            each,
            id=each.key,
            marks=[pytest.mark.xfail(reason=KNOWN[each.key], strict=True)] if each.key in KNOWN else [],
        )
        for each in found
    ]


@pytest.mark.parametrize("case", each_of(CASES))
def test_a_case_is_found_in_time_with_the_right_culprit_and_nothing_else_is_said(case: Case) -> None:
    result = run_case(case, 1, case.sizes[0], "direct")
    assert result.perfect, (result, result.command())


@pytest.mark.thorough
@pytest.mark.parametrize("case", each_of([case for case in CASES if case.by_frames][::4]))
def test_the_replay_of_a_recorded_case_says_the_same_at_the_same_times(case: Case) -> None:
    result = run_case(case, 2, case.sizes[0], "replay")
    assert result.perfect, (result, result.command())


@pytest.mark.parametrize("thing", each_of(THINGS))
def test_nothing_is_said_about_a_healthy_thing(thing: Thing) -> None:
    hours, said, failures, _ = run_thing(thing, 1, hours=0.75)
    assert hours > 0.5
    assert [f"{each.kind}: {each.summary}" for each in said] == []
    assert failures == []


@pytest.mark.parametrize("name, seed, nodes, way", REGRESSIONS)
def test_a_defect_that_the_matrix_found_stays_mended(name: str, seed: int, nodes: int, way: str) -> None:
    case = next((each for each in CASES if each.key == name), None)
    if case is not None:
        result = run_case(case, seed, nodes, way)
        assert result.perfect, (result, result.command())
        return
    thing = next(each for each in THINGS if each.key == name)
    _, said, failures, _ = run_thing(thing, seed)
    assert [f"{each.kind}: {each.summary}" for each in said] == []
    assert failures == []


def test_one_seed_is_one_run() -> None:
    case = next(each for each in CASES if each.name == "hang_in_a_step")
    first, again, other = (run_case(case, seed, 2, "direct").said for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_simulated_logs_are_read_as_progress_with_the_right_step(name: str) -> None:
    form = FORMATS[name]
    steps = [
        fact.step
        for line in form.step(Step(120, 1000, 10.2, 2.1, 256, 8, 1234.5))
        for part in line.split("\r")
        if (fact := parse_line(part)) is not None and fact.step is not None
    ]
    assert steps
    assert set(steps) <= {119, 120}  # NeMo counts from nought


@pytest.mark.parametrize("line", [*HARMLESS, pulse(3600.0, "7"), *overflow_skip(3, 5.0)])
def test_the_harmless_lines_say_nothing(line: str) -> None:
    assert parse_line(line) is None


# ------------------------------------------------------------------------------------ the measure itself


def incident(kind: IncidentKind, at: float | None = 100.0, **changes: object) -> Incident:
    given = {
        "id": f"i{kind}", "kind": kind, "subject": "job:7", "state": IncidentState.FIRING, "severity": "critical", "job_ids": ("7",),
        "opened_at": 90.0, "pending_mono": 90.0, "fired_at": at,
    }  # fmt: skip
    return Incident(**{**given, **changes})  # type: ignore[arg-type]


def test_an_incident_that_something_else_explains_is_no_verdict() -> None:
    expect = Expect(("collective_hang",))
    hang = incident(IncidentKind.COLLECTIVE_HANG, inhibited_by="x")
    outage = incident(IncidentKind.FILESYSTEM_OUTAGE, id="x")
    assert right_ones(expect, [hang, outage]) == []
    assert [i.id for i in right_ones(expect, [incident(IncidentKind.COLLECTIVE_HANG), outage])] == ["icollective_hang"]
    assert right_ones(expect, [incident(IncidentKind.COLLECTIVE_HANG, at=None)]) == []


def test_a_culprit_too_many_is_a_wrong_one() -> None:
    one = Culprit(node="n1", rank=3, gpu_uuid="GPU-3")
    two = Culprit(node="n2", rank=9)
    expect = Expect(("collective_hang",), nodes=frozenset({"n1"}), ranks=frozenset({3}), gpu="GPU-3")
    assert names(expect, incident(IncidentKind.COLLECTIVE_HANG, culprits=(one,)))
    assert not names(expect, incident(IncidentKind.COLLECTIVE_HANG, culprits=(one, two)))
    assert not names(expect, incident(IncidentKind.COLLECTIVE_HANG, culprits=()))
    assert not names(Expect(("collective_hang",), nobody=True), incident(IncidentKind.COLLECTIVE_HANG, culprits=(one,)))
    assert not names(
        Expect(("filesystem_outage",), exclude_nobody=True),
        incident(IncidentKind.FILESYSTEM_OUTAGE, exclude_nodes=("n1",)),
    )


def result(**changes: object) -> Score:
    given: dict[str, object] = {
        "case": "case_05_x", "seed": 1, "nodes": 2, "way": "direct", "found": True, "culprit": True, "seconds": 8.0, "bound_s": 10.0, "false": (),
    }  # fmt: skip
    return Score(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"found": False, "culprit": None, "seconds": None},
        {"culprit": False},
        {"seconds": 10.5},
        {"false": ("slow_job at 5 s",)},
    ],
)
def test_one_bad_run_among_many_misses_a_bound(bad: dict[str, object]) -> None:
    results = Results(scores=[result(seed=seed) for seed in range(9)] + [result(seed=9, **bad)])
    figures = Figures(io.StringIO())
    write_figures(figures, results)
    assert figures.missed
    assert any("--case case_05_x --seed 9" in line for line in table(results))
    good = Figures(io.StringIO())
    write_figures(good, Results(scores=results.scores[:9]))
    assert good.missed == []


def test_a_false_incident_in_a_healthy_hour_misses_a_bound() -> None:
    figures = Figures(io.StringIO())
    write_figures(figures, Results(healthy={"healthy_day": Healthy(500.0, 90, ["slow_job at 7 s"])}))
    assert figures.rows["accuracy.healthy.false_per_1000_job_hours"] == 2.0
    assert set(figures.missed) == {
        "accuracy.healthy_day.false_per_1000_job_hours",
        "accuracy.healthy.false_per_1000_job_hours",
    }


def test_the_plan_has_every_case_at_every_size_and_the_hours_that_were_asked_for() -> None:
    jobs = plan(1000.0)
    assert {(job.place, job.nodes) for job in jobs if job.is_case} == {
        (place, nodes) for place, case in enumerate(CASES) for nodes in case.sizes
    }
    assert sum(THINGS[job.place].hours(job.seed) for job in jobs if not job.is_case) >= 1000.0


def test_the_table_of_the_page_has_a_row_for_each_case_and_names_those_that_missed() -> None:
    results = Results(
        scores=[result(), result(case="case_06_y", found=False, culprit=None, seconds=None)],
        healthy={"healthy_day": Healthy(1500.0, 90, [])},
        seconds=120.0,
    )
    assert [row.case for row in rows(results.scores)] == ["case_05_x", "case_06_y"]
    lines = accuracy(summary(results, "2026-11-23", "4711abcd")).splitlines()
    assert (
        lines[0]
        == "2026-11-23, commit 4711abcd, `make accuracy` (2 min): 2 runs of 2 cases, not as they should be: 06 y; 1,500 healthy job-hours, 0 false incidents (2026-11-23, 4711abcd)."
    )
    assert lines[2].endswith(": 05 x 8 / 8; 06 y - / -; found 0 %, right culprit -.")
    assert lines[-1].endswith("for 1,500 hours; false: none.")
