"""`slurm-watchdog restart` on a job that hangs: it is requeued at once when asked so, and nothing waits for a
checkpoint that cannot come."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.controller.incidents.judge import proves_stuck
from slurm_watchdog.model.incidents import IncidentKind
from tests.behaviour.story import QUICK, Story

OBSERVE = f"mode: observe\nladder: {{checkpoint_limit: 30min, step_limit: 30s}}\n{QUICK.split('ladder')[0]}"


def test_operator_restart_now_of_a_job_that_hangs_requeues_it_without_a_kill_switch(
    tell: Callable[..., Story],
) -> None:
    story = tell(OBSERVE)
    job = story.job(step=150, saved=100, hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert proves_stuck(story.controller.judge.incidents, job.id) is not None
    decision = story.operator_restarts(job, now=True)
    story.passes(minutes=5)
    assert story.end(decision).ok and job.restarts == 1
    assert not [operation for operation in story.operations(decision) if "kill_switch" in operation]
    assert str(story.decisions(hang)[0].verdict) == "observed"


def test_operator_restart_of_a_job_that_begins_to_hang_stops_waiting_for_its_checkpoint(
    tell: Callable[..., Story],
) -> None:
    story = tell(OBSERVE)
    job = story.job(step=150, saved=100, hears_switch=False, save_every=10_000)
    decision = story.operator_restarts(job)
    story.passes(minutes=2)
    waiting = story.controller.actions.waiting(decision.id)
    assert waiting is not None and waiting.what == "waiting for a complete checkpoint"
    assert waiting.until is not None and waiting.until > story.timeline.now
    job.hangs = True
    story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert story.end(decision).ok and job.restarts == 1
    assert not story.cluster.files


def test_operator_restart_that_is_cancelled_removes_its_kill_switch_and_leaves_the_job_running(
    tell: Callable[..., Story],
) -> None:
    story = tell(OBSERVE)
    job = story.job(step=150, saved=100, hears_switch=False, save_every=10_000)
    decision = story.operator_restarts(job)
    story.passes(minutes=1)
    assert story.cluster.files
    assert story.operator_cancels(job) is None
    story.passes(minutes=1)
    assert not story.end(decision).ok and "root cancelled the restart" in story.end(decision).detail
    assert (job.state, job.restarts) == ("RUNNING", 0) and not story.cluster.files
    assert story.operator_cancels(job) == f"no restart of job {job.id} that a person asked for is under way"


def test_operator_restart_cannot_be_cancelled_once_the_job_is_requeued(tell: Callable[..., Story]) -> None:
    story = tell(OBSERVE)
    job = story.job(step=150, saved=100, hangs=True)
    refused: list[str | None] = []
    story.cluster.when_asked["release"] = lambda: refused.append(story.operator_cancels(job))
    decision = story.operator_restarts(job, now=True)
    story.passes(minutes=1)
    assert refused == [f"job {job.id} is being ended or was requeued already: the restart cannot be cancelled any more"]
    story.passes(minutes=5)
    assert story.end(decision).ok and job.restarts == 1


@pytest.mark.parametrize("moment", ["before intent abandon", "after intent abandon", "after outcome abandon"])
def test_cancelled_restart_of_a_controller_that_dies_ends_without_touching_the_job(
    tell: Callable[..., Story], moment: str
) -> None:
    story = tell(OBSERVE)
    job = story.job(step=150, saved=100, hears_switch=False, save_every=10_000)
    decision = story.operator_restarts(job)
    story.passes(minutes=1)
    story.controller_dies(moment)
    assert story.operator_cancels(job) is None
    story.passes(minutes=1)
    if moment == "before intent abandon":  # it was never written: the operator asks again
        assert story.operator_cancels(job) is None
        story.passes(minutes=1)
    assert "cancelled the restart" in story.end(decision).detail
    assert (job.state, job.restarts) == ("RUNNING", 0) and not story.cluster.files


def test_graceful_action_of_the_watchdog_makes_room_for_the_hang_that_begins_meanwhile(
    tell: Callable[..., Story],
) -> None:
    story = tell(
        "mode: act\npolicy: {cooldown: 10s, budget_percent: 100, kinds: {slow_node: {ladder: [kill_switch, requeue], checkpoint_limit: 30min}}}\n"
        + QUICK
    )
    story.cluster.add_nodes("a1", "a2", "a3", "a4")
    for other in ("8", "9"):
        story.job(other)  # the budget is a share of the running jobs
    job = story.job(step=150, saved=100, hears_switch=False, save_every=10_000)
    slow = story.finds(IncidentKind.SLOW_NODE, job, blames="n1")
    story.passes(minutes=1)
    job.hangs = True
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert "hangs now" in story.end(slow).detail
    assert story.end(hang).ok and job.restarts == 1
