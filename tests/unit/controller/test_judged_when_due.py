"""A job is judged again when something of it has come, or when a comparison with a time comes out differently: what is
said at each tick is what would be said if all were judged at each tick."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.base.text import duration
from slurm_watchdog.base.ticking import Clock, plain, ticking
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.incidents.judge import RANKS_AT_ONCE, Judge
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.accuracy.cases import CASES, Case
from tests.accuracy.drive import Drive
from tests.accuracy.healthy import THINGS, Thing
from tests.accuracy.run import case_scene, quiet, thing_scene
from tests.accuracy.scene import Scene
from tests.builders.judged_twice import JudgedTwice
from tests.builders.views import process, slurm_job

EACH = 7  # One in so many kinds of trouble, and of healthy things.
MOST_S = 420.0  # Of simulated time for each.


def judged_twice(scene: Scene) -> JudgedTwice:
    """Each tick of a scene, judged in both ways."""
    drive = Drive(scene.world, Config(), calm_s=Config().controller.tick, judge=JudgedTwice)
    with quiet():
        story = drive.run(min(scene.until_s, MOST_S))
    assert story.failures == []
    assert isinstance(drive.judge, JudgedTwice)
    return drive.judge


@pytest.mark.parametrize("case", CASES[::EACH], ids=lambda case: case.key)
def test_trouble_is_found_at_the_same_tick(case: Case) -> None:
    assert judged_twice(case_scene(case, 3, 2)).kept > 0


@pytest.mark.parametrize("thing", THINGS[::EACH], ids=lambda thing: thing.key)
def test_a_healthy_job_is_said_to_be_well_as_long(thing: Thing) -> None:
    judged_twice(thing_scene(thing, 3))


AGES = st.floats(-100, 100).map(lambda each: round(each, 2))


@given(AGES, AGES, AGES, st.sampled_from([0.25, 1.0, 3.0]))
def test_a_comparison_holds_until_the_clock_says_so(age_s: float, limit_s: float, since: float, later_s: float) -> None:
    def asked(now: float) -> tuple[object, ...]:
        age = now - since + age_s
        return age < limit_s, limit_s <= age, max(0.0, age), min(age, limit_s) == limit_s, bool(age), limit_s - age > 5

    clock = Clock()
    before = asked(ticking(50.0, clock))
    assert [plain(each) for each in before] == [plain(each) for each in asked(50.0)]  # type: ignore[arg-type]
    if later_s < clock.holds_s - 1e-6:
        after = asked(50.0 + later_s)
        assert [bool(each) for each in after[:2]] == [bool(each) for each in before[:2]]
        assert after[3:] == before[3:]


def test_what_is_not_followed_holds_for_no_time() -> None:
    for use in (round, int, hash, abs, math.floor, lambda each: each * 2, math.ceil):
        clock = Clock()
        use(ticking(5.5, clock))  # type: ignore[operator]
        assert clock.holds_s == 0.0


def test_a_text_that_shows_an_age_says_that_it_is_shown_and_decides_nothing() -> None:
    for show in (str, repr, duration, lambda each: f"{each:.0f}", lambda each: f"{each - 2:g}"):
        clock = Clock()
        show(ticking(5.5, clock))
        assert clock.is_shown and clock.holds_s == math.inf


def test_what_comes_between_two_jobs_is_judged_with_the_second_one() -> None:
    state = ClusterState(silent_after_s=30, report_lifetime_s=60)
    judge = Judge(Config(), state, [], new_id=iter("abc").__next__)

    def listed(at: float, *job_ids: str) -> None:
        jobs = tuple(slurm_job(job_id=each, nodes=(f"n{each}",)) for each in job_ids)
        nodes = tuple(SlurmNode(name=f"n{each}", address="", state="ALLOCATED") for each in "123")
        state.apply_slurm(SlurmView(jobs=jobs, nodes=nodes), at)

    listed(1000.0, "1", "2", "3")
    ranks = tuple(process(rank, job_id="1") for rank in range(RANKS_AT_ONCE))
    state.apply_report(Report(node="n1", boot_id="b", agent_id="a", sequence=1, processes=ranks), 1099.0)
    judge.detect(1000.0)
    state.runs.judge_all()
    before, times = judge.view, iter((1100.0, 1100.5))
    detecting = judge.detecting(lambda: next(times))
    next(detecting)
    assert judge.view is before, "until the end readers see the judgement before"
    listed(1100.2, "1", "3")  # the second one has ended
    report = Report(node="n3", boot_id="b", agent_id="a", sequence=1, processes=(process(job_id="3"),))
    state.apply_report(report, 1100.2)
    with pytest.raises(StopIteration):
        while True:
            next(detecting)
    assert [each.job.job_id for each in judge.view.jobs] == ["1", "3"]
    (seen,) = judge.view.jobs[1].processes
    assert seen.seen_age_s == pytest.approx(0.3), "as of the moment at which its job is judged"
    assert judge.view.now == 1100.5


def test_what_was_seen_of_a_run_is_not_said_of_the_next_one_that_begins_while_others_are_judged() -> None:
    state = ClusterState(silent_after_s=30, report_lifetime_s=60)
    judge = Judge(Config(), state, [], new_id=iter("abc").__next__)

    def listed(at: float, restarts: int) -> None:
        job = slurm_job(job_id="1", nodes=("n1",), restarts=restarts)
        state.apply_slurm(SlurmView(jobs=(job,), nodes=(SlurmNode(name="n1", address="", state="ALLOCATED"),)), at)

    listed(1000.0, 0)
    listed(1055.0, 0)
    ranks = (process(0, job_id="1", state="T", state_age_s=500.0), process(1, job_id="1"))
    state.apply_report(Report(node="n1", boot_id="b", agent_id="a", sequence=1, processes=ranks), 1059.0)
    bad = [each for each in judge.detect(1060.0) if each.truth is Truth.BAD]
    assert [each.job_ids for each in bad] == [("1",)], bad
    state.runs.judge_all()
    detecting = judge.detecting(lambda: 1060.5)
    next(detecting)  # its job was judged
    listed(1060.4, 1)
    with pytest.raises(StopIteration) as end:
        while True:
            next(detecting)
    found = end.value.value
    assert not any("1" in each.job_ids for each in found)
    assert judge.conclude(found, 1060.5, 0.0) == []
