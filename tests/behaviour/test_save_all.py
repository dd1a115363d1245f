"""`save-all`: jobs are asked to save, each checkpoint is seen, and with --hold they wait in the queue afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.model.actions import Action, Wish
from slurm_watchdog.model.incidents import IncidentKind
from tests.behaviour.story import QUICK, Story

OBSERVING = "mode: observe\n" + QUICK
Tell = Callable[..., Story]


def test_given_a_job_that_is_asked_to_save_then_it_saves_and_its_kill_switch_goes(tell: Tell) -> None:
    story = tell(OBSERVING)
    job = story.job(step=150, saved=100)
    asked = story.operator_restarts(job, wish=Wish.SAVE)
    story.passes(minutes=5)
    assert (asked.action, story.end(asked).ok, job.restarts) == (Action.ASK_TO_SAVE, True, 0)
    assert "the job has saved" in story.end(asked).detail
    assert not story.cluster.files and not story.done, "nothing was asked of Slurm"


def test_given_hold_then_the_job_waits_in_the_queue_with_no_step_lost_until_somebody_releases_it(tell: Tell) -> None:
    story = tell(OBSERVING)
    job = story.job(step=150, saved=100)
    asked = story.operator_restarts(job, wish=Wish.HOLD)
    story.passes(minutes=5)
    end = story.end(asked)
    assert end.ok and "held: `scontrol release 7` lets it run" in end.detail
    assert (job.state, job.restarts, job.held) == ("PENDING", 1, True)
    assert not story.cluster.files
    story.passes(hours=2)
    assert job.held and story.done == ["requeue_hold 7"]


def test_given_a_trainer_that_does_not_see_its_kill_switch_then_it_is_given_up_in_time_and_left_running(
    tell: Tell,
) -> None:
    story = tell(OBSERVING)
    job = story.job(hears_switch=False, save_every=10_000)
    job.hears_switch = False
    asked = story.operator_restarts(job, wish=Wish.HOLD, within_s=60.0)
    story.passes(minutes=3)
    assert "look whether the trainer looks for the kill switch" in story.end(asked).detail
    assert (job.state, job.restarts, story.cluster.files) == ("RUNNING", 0, {})


def test_given_a_job_that_cannot_be_requeued_then_hold_is_refused_and_save_is_not(tell: Tell) -> None:
    story = tell(OBSERVING)
    job = story.job(is_batch=False)
    refused = story.operator_restarts(job, wish=Wish.HOLD)
    assert (refused.verdict, refused.by) == ("suppressed", "not_possible")
    assert story.operator_restarts(job, wish=Wish.SAVE).acts


@pytest.mark.parametrize("when", ["after intent write_kill_switch", "before outcome wait_checkpoint",
    "after intent requeue_hold", "before outcome remove_kill_switch", "before end"])  # fmt: skip
def test_given_a_controller_that_dies_there_then_the_job_is_held_once_all_the_same(tell: Tell, when: str) -> None:
    story = tell(OBSERVING)
    job = story.job(step=150, saved=100)
    story.controller_dies(when)
    story.operator_restarts(job, wish=Wish.HOLD)
    story.passes(minutes=8)
    (run,) = [run for each in story.journal.incidents() for run in story.journal.actions(each.id)]
    assert run.end is not None and run.end.ok, run
    assert (job.restarts, job.held, story.done) == (1, True, ["requeue_hold 7"])


def test_given_maintenance_for_many_jobs_then_all_of_them_save_in_time_and_the_budget_is_left_for_hangs(
    tell: Tell,
) -> None:
    policy = "policy: {cooldown: 1min, budget: 1, storm_jobs: 2, kinds: {ends_soon: {ladder: [kill_switch]}}}\n"
    story = tell("mode: act\n" + policy + QUICK)
    jobs = [story.job(str(number), step=150, saved=100, user=f"u{number}", wants=1) for number in (7, 8, 9)]
    planned = [story.finds(IncidentKind.ENDS_SOON, job) for job in jobs]
    story.passes(minutes=4)
    assert [story.decided(each) for each in planned] == [("allowed", "ends_soon")] * 3
    assert all("the job has saved" in story.end(each).detail for each in planned)
    hung = story.job("10", hangs=True, wants=1)
    assert story.decided(story.finds(IncidentKind.COLLECTIVE_HANG, hung)) == ("allowed", "collective_hang")
