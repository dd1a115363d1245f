"""Guards: each takes the action away alone, says so in a line, in a counter and in what `explain` shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.model.incidents import Incident, IncidentKind
from tests.behaviour.story import ACT, QUICK, Story

Tell = Callable[..., Story]


def acting(policy: str = "", more: str = "") -> str:
    return f"mode: act\npolicy: {{cooldown: 0s{', ' + policy if policy else ''}}}\n{QUICK}{more}"


def refused(story: Story, incident: Incident, guard: str, *words: str) -> None:
    """By this guard; told in its timeline, counted, and nothing was asked of Slurm."""
    assert story.decided(incident) == ("suppressed", guard), story.why(incident)
    for word in words:
        assert word in story.why(incident)
    assert f"suppressed by {guard}: {story.why(incident)}" in story.told(incident)
    assert story.counted(guard) >= 1
    assert not story.done


def test_given_a_pause_then_nothing_is_done_until_resume_and_then_it_is(story: Story) -> None:
    job = story.job(hangs=True)
    story.journal.pause("maintenance", "root", 0.0)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    refused(story, hang, "paused", "maintenance")
    story.passes(minutes=12)
    assert not story.done
    story.journal.resume("root", 1.0)
    story.passes(minutes=2)
    assert job.restarts == 1


def test_given_a_pause_while_the_job_is_held_then_it_stays_held_until_resume(story: Story) -> None:
    job = story.job(hangs=True)
    story.at("after outcome requeue_hold", lambda: story.journal.pause("stop", "root", 0.0))
    story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=10)
    assert job.held and story.done == ["requeue_hold 7"]
    story.journal.resume("root", 1.0)
    story.passes(minutes=1)
    assert job.state == "RUNNING"


def test_given_a_controller_that_has_just_started_then_it_looks_on_first(tell: Tell) -> None:
    story = tell(ACT.replace("warm_up: 0s", "warm_up: 2min"))
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    refused(story, hang, "blind", "just started")
    story.passes(minutes=3)
    assert job.restarts == 1


def test_given_a_slurm_that_does_not_answer_then_nothing_is_decided_but_to_wait(story: Story) -> None:
    job = story.job(hangs=True)
    story.cluster.away = True
    story.passes(minutes=2)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    refused(story, hang, "blind", "Slurm has not answered")


def test_given_a_journal_on_a_full_disk_then_nothing_is_done_and_the_watch_goes_on(story: Story) -> None:
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, when=lambda: setattr(story.journal, "full", True))
    story.passes(minutes=3)
    assert not story.done
    assert "disk is full" in str(story.controller.blind(0.0))
    story.journal.full = False
    story.controller.writer.add_note(hang, "somebody made room")
    story.passes(minutes=3)
    assert job.restarts == 1


def test_given_a_job_that_was_restarted_since_the_incident_fired_then_the_new_run_is_left_alone(
    tell: Tell,
) -> None:
    story = tell(acting("storm_cooldown: 0s"))
    job = story.job(hangs=True)
    story.journal.pause("x", "root", 0.0)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.cluster.requeued(job, held=False)
    story.passes(minutes=1)
    story.journal.resume("root", 1.0)
    story.passes(minutes=1)
    refused(story, hang, "job_changed", "restarted since")


@pytest.mark.parametrize("comment", ["watchdog=off", "x, watchdog: off", "Watchdog:OFF", "watchdog: off; nice"])
def test_given_a_job_that_opted_out_then_it_is_watched_and_never_touched(story: Story, comment: str) -> None:
    job = story.job(hangs=True, comment=comment)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    refused(story, hang, "opted_out")


def test_given_evidence_that_is_only_good_enough_to_tell_then_nothing_is_done(story: Story) -> None:
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, actionable=False)
    refused(story, hang, "evidence")


def test_given_an_action_that_goes_on_then_a_second_incident_of_the_job_waits_for_it(story: Story) -> None:
    job = story.job(hangs=True)
    story.at("after decision", lambda: setattr(story.cluster, "away", True))
    story.finds(IncidentKind.COLLECTIVE_HANG, job)
    dead = story.finds(IncidentKind.LINGERING_JOB, job)
    assert story.decided(dead) == ("suppressed", "busy")


def test_given_an_action_a_moment_ago_then_the_same_job_is_left_in_peace_for_the_cooldown(tell: Tell) -> None:
    story = tell(ACT.replace("cooldown: 1min", "cooldown: 15min, budget_window: 1s"))
    job = story.job(hangs=True)
    story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=3)
    job.hangs = True
    again = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(again) == ("suppressed", "cooldown")
    story.passes(minutes=15)
    assert job.restarts == 2


def jobs_that_hang(story: Story, count: int) -> list[Incident]:
    found = []
    for number in range(count):
        story.cluster.add_nodes(f"m{number}")
        job = story.job(str(20 + number), wants=1, hangs=True)
        found.append(story.finds(IncidentKind.COLLECTIVE_HANG, job))
        story.passes(minutes=2)
    return found


def test_given_a_budget_of_two_in_a_window_then_the_third_action_has_to_wait(tell: Tell) -> None:
    story = tell(acting("budget: 2, budget_percent: 100, budget_window: 10min"))
    third = jobs_that_hang(story, 3)[2]
    assert story.decided(third) == ("suppressed", "budget")
    assert "the budget is 2" in story.why(third)
    story.passes(minutes=12)
    assert story.end(third).ok


def test_given_a_budget_of_a_share_of_the_running_jobs_then_few_jobs_have_a_budget_of_one(tell: Tell) -> None:
    story = tell(acting("budget: 10, budget_percent: 20"))
    second = jobs_that_hang(story, 2)[1]
    assert story.decided(second) == ("suppressed", "budget")
    assert "the budget is 1" in story.why(second)


def test_given_three_jobs_with_the_same_trouble_at_once_then_it_is_the_fabric_and_none_is_touched(
    tell: Tell,
) -> None:
    story = tell(acting("budget_percent: 100"))
    story.journal.pause("until all three are there", "root", 0.0)
    hangs = []
    for number in range(3):
        story.cluster.add_nodes(f"m{number}")
        hangs.append(story.finds(IncidentKind.COLLECTIVE_HANG, story.job(str(20 + number), wants=1, hangs=True)))
    story.journal.resume("root", 1.0)
    story.passes(seconds=10)
    for hang in hangs:
        refused(story, hang, "storm", "3 jobs have the same trouble")


def test_given_half_of_the_nodes_silent_then_nothing_is_done_anywhere_nor_right_after(
    tell: Tell,
) -> None:
    story = tell(acting("storm_cooldown: 5min"))
    job = story.job(hangs=True, wants=2)
    story.cluster.silent |= {"n3", "n4"}
    story.passes(minutes=1)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    refused(story, hang, "storm", "2 of 4 nodes are silent")
    story.cluster.silent.clear()
    story.passes(minutes=3)
    assert not story.done, "much recovers by itself after a storm"
    story.passes(minutes=4)
    assert job.restarts == 1


def test_given_three_restarts_that_did_not_help_then_a_person_has_to_look(tell: Tell) -> None:
    story = tell(acting("attempts: 2, budget_window: 1s"))
    job = story.job(hangs=True)
    for _ in range(2):
        story.finds(IncidentKind.COLLECTIVE_HANG, job)
        story.passes(minutes=2)
        job.hangs = True
    third = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(third) == ("suppressed", "attempts")
    assert "a person has to look" in story.why(third)
    assert job.restarts == 2


def test_given_a_job_with_many_exclusions_then_it_gets_no_more_than_the_limit(tell: Tell) -> None:
    story = tell(acting("max_excluded_nodes: 1"))
    job = story.job(hangs=True, excluded=("n4",))
    job.excluded = ("n4",)
    story.passes(seconds=5)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    decision = story.decisions(hang)[-1]
    # The listing does not know exclusions; the look at the job does.
    assert decision.by in ("exclusions", "collective_hang")


def test_given_what_is_shipped_then_it_says_what_it_would_do_and_does_nothing(tell: Tell) -> None:
    story = tell(QUICK)
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=12)
    assert story.decided(hang) == ("observed", "mode")
    assert story.decisions(hang)[-1].exclude == ("n1",)
    assert not story.done and job.restarts == 0


@pytest.mark.parametrize("when", ["before decision", "after decision", "before intent requeue_hold", "after intent requeue_hold",
    "before outcome requeue_hold", "after outcome requeue_hold", "after intent exclude", "before outcome exclude", "after intent release",
    "before outcome release", "before end"])  # fmt: skip
def test_given_a_controller_that_dies_there_then_the_job_is_requeued_once_and_the_action_ends_in_writing(
    story: Story, when: str
) -> None:
    job = story.job(hangs=True)
    story.controller_dies(when)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=6)
    assert story.done.count("requeue_hold 7") == 1 and job.restarts == 1
    assert story.end(hang).ok
