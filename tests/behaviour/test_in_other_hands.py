"""Somebody else has the job in his hands while an action is under way: holds it, suspends it, requeues it, wants it
left alone, or has another job wait for its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.model.actions import Wish
from slurm_watchdog.model.incidents import IncidentKind
from tests.behaviour.story import QUICK, Story

OBSERVING = "mode: observe\n" + QUICK
SIGNALS = (
    "mode: act\n"
    + QUICK
    + "policy: {cooldown: 1s, kinds: {collective_hang: {ladder: [evidence, sigusr1, requeue], signal_limit: 60s}}}\n"
)
Tell = Callable[..., Story]


@pytest.mark.parametrize("held", [False, True])
def test_given_a_requeue_by_its_owner_in_the_moment_of_ours_then_it_stays_as_he_wants_it(
    story: Story, held: bool
) -> None:
    job = story.job(hangs=True)
    story.at("after intent requeue_hold", lambda: story.cluster.requeued(job, held=held))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert not story.done, "no requeue, and no release of what he holds"
    assert (job.state, job.held, job.restarts) == ("PENDING" if held else "RUNNING", held, 1)
    assert story.end(hang).needless and "without this action" in story.end(hang).detail
    assert ("stays held: `scontrol release`" in story.end(hang).detail) is held


def test_given_an_owner_who_cancels_before_anything_was_done_then_it_is_not_said_to_have_ended_by_itself(
    story: Story,
) -> None:
    job = story.job(hangs=True)
    story.at("after decision", lambda: story.cluster.end(job, "CANCELLED"))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert "ended outside the watchdog (CANCELLED) before anything was done" in story.end(hang).detail


@pytest.mark.parametrize("when", ["after decision", "after intent requeue_hold"])
def test_given_a_job_that_is_suspended_then_it_is_requeued_only_when_it_runs_again(story: Story, when: str) -> None:
    job = story.job(hangs=True)

    def suspended() -> None:
        job.state = "SUSPENDED"

    story.at(when, suspended)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=10)
    assert not story.done and not story.cluster.files
    job.state = "RUNNING"
    story.passes(minutes=5)
    assert story.end(hang).ok and job.restarts == 1


def test_given_a_hold_of_the_running_job_then_it_is_not_run_again(story: Story) -> None:
    job = story.job(hangs=True)
    job.reason = "JobHeldUser"
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(hang) == ("suppressed", "not_possible") and "JobHeldUser" in story.why(hang)
    other = story.job("8", hangs=True)
    story.at("after decision", lambda: setattr(other, "reason", "JobHeldUser"))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, other)
    story.passes(minutes=5)
    assert not story.done and (other.state, other.restarts) == ("RUNNING", 0)
    assert "the job is held by a user" in story.end(hang).detail


def test_given_a_hold_while_the_job_saves_then_it_stays_ended(tell: Tell) -> None:
    story = tell(OBSERVING)
    job = story.job(step=150, saved=100)
    story.at("after outcome write_kill_switch", lambda: setattr(job, "reason", "JobHeldUser"))
    asked = story.operator_restarts(job)
    story.passes(minutes=8)
    assert job.state == "COMPLETED" and job.restarts == 0 and not story.cluster.files
    assert "the job is held by a user" in story.end(asked).detail


def test_given_an_owner_who_wants_it_left_alone_after_the_signal_then_it_is_not_requeued(tell: Tell) -> None:
    story = tell(SIGNALS)
    job = story.job(hangs=True)
    story.at("after outcome signal_usr1", lambda: setattr(job, "comment", "watchdog: off"))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert [each for each in story.done if "requeue" in each] == [] and job.restarts == 0
    assert "its owner opted out" in story.end(hang).detail


def test_given_a_job_that_waits_for_its_end_then_no_restart_begins_that_would_start_both(tell: Tell) -> None:
    story = tell(OBSERVING)
    job = story.job(step=150, saved=100)
    behind = story.waiting_job("8", dependency="afterany:7")
    story.passes(minutes=1)
    refused = story.operator_restarts(job)
    assert (refused.verdict, refused.by) == ("suppressed", "chained")
    assert "job 8 waits for the end of this one" in refused.reason
    behind.held = True
    story.passes(minutes=1)
    assert story.operator_restarts(job).acts, "one that is held does not start"


def test_given_a_chain_then_a_hung_link_is_requeued_for_that_starts_nobody(story: Story) -> None:
    job = story.job(hangs=True)
    behind = story.waiting_job("8", dependency="afterany:7")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert story.end(hang).ok and (job.restarts, behind.state) == (1, "PENDING")


def test_given_a_job_that_is_to_wait_for_maintenance_and_one_behind_it_then_it_is_left_to_that_one(tell: Tell) -> None:
    story = tell(OBSERVING)
    job = story.job(step=150, saved=100)
    story.waiting_job("8", dependency="afterany:7")
    story.passes(minutes=1)
    asked = story.operator_restarts(job, wish=Wish.HOLD)
    story.passes(minutes=5)
    assert asked.acts and (job.state, job.restarts) == ("COMPLETED", 0)
    assert "job 8" in story.end(asked).detail and "continues where it stopped" in story.end(asked).detail
    assert not story.done and not story.cluster.files


@pytest.mark.parametrize("when", ["after intent resubmit", "after outcome resubmit"])
def test_given_an_owner_who_cancels_while_it_is_submitted_again_then_neither_runs(tell: Tell, when: str) -> None:
    story = tell("mode: act\n" + QUICK + "policy: {kinds: {collective_hang: {ladder: [evidence, resubmit]}}}\n")
    job = story.job(hangs=True)
    story.at(when, lambda: story.cluster.end(job, "CANCELLED"))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=8)
    assert job.state == "CANCELLED" and "ended outside the watchdog (CANCELLED)" in story.end(hang).detail
    assert [each.id for each in story.cluster.jobs.values() if each.state == "RUNNING"] == []
    new = [each for each in story.cluster.jobs.values() if each.id != job.id]
    assert all(each.held for each in new) and len(new) == (0 if when == "after intent resubmit" else 1)


def test_given_a_controller_that_died_before_it_could_end_what_was_asked_for_then_the_next_one_ends_it(
    story: Story,
) -> None:
    job = story.job()
    story.controller_dies("before decision")
    with pytest.raises(IndexError):  # nobody is left to answer
        story.operator_restarts(job)
    story.passes(minutes=1)
    (asked,) = story.judges()
    assert asked.kind == IncidentKind.OPERATOR_RESTART
    story.cluster.end(job, "COMPLETED")
    story.passes(minutes=1)
    assert story.judges() == []
