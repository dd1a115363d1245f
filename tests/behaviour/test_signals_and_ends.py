"""Signals to the application, and ways to end a run where it cannot be requeued: submit again, leave to the
chain, cancel, hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.slurm.client import Refusal, SlurmRefused
from tests.behaviour.cluster import Job
from tests.behaviour.story import QUICK, Story

Tell = Callable[..., Story]


def rule(kind: str, ladder: str, more: str = "") -> str:
    return f"mode: act\npolicy: {{cooldown: 1min, kinds: {{{kind}: {{ladder: [{ladder}]{more}}}}}}}\n{QUICK}"


# ------------------------------------------------------------------------------------------------ signals


def test_given_a_job_that_saves_and_ends_on_sigusr1_then_no_step_is_lost(tell: Tell) -> None:
    story = tell(rule("slow_node", "sigusr1, requeue"))
    job = story.job(on_usr1="save and exit")
    slow = story.finds(IncidentKind.SLOW_NODE, job, blames="n1")
    story.passes(minutes=5)
    assert story.done[:2] == ["signal 7 USR1 steps", "requeue_hold 7"]
    assert story.end(slow).ok and story.end(slow).steps_lost == 0


def test_given_a_job_that_saves_on_sigusr1_and_goes_on_then_it_is_requeued_after_a_moment(tell: Tell) -> None:
    story = tell(rule("slow_node", "sigusr1, requeue").replace("ladder: {", "ladder: {exit_limit: 10s, ", 1))
    job = story.job(on_usr1="save")
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    end = story.end(slow)
    assert end.ok and end.steps_lost is not None and end.steps_lost <= 15


def test_given_a_hung_job_that_ignores_sigusr1_then_sigterm_ends_it_and_it_goes_on_from_its_checkpoint(
    tell: Tell,
) -> None:
    story = tell(rule("collective_hang", "evidence, sigusr1, sigterm, requeue", ", signal_limit: 1min"))
    job = story.job(step=150, saved=100, hangs=True, on_term="exit")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=6)
    assert story.done == ["signal 7 USR1 steps", "signal 7 TERM steps", "requeue_hold 7", "release 7"]
    assert story.end(hang).resumed_at_step == 101


def test_given_a_turning_job_that_ignores_every_signal_then_it_runs_on_and_loses_nothing(tell: Tell) -> None:
    story = tell(rule("slow_node", "sigusr1, sigterm, requeue", ", signal_limit: 1min"))
    job = story.job(save_every=10_000)
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert (job.state, job.restarts) == ("RUNNING", 0)
    assert "ending it would lose its work" in story.end(slow).detail


@pytest.mark.parametrize(("words", "slurm"), [("steps", "steps"), ("batch", "batch"), ("all", "full")])
def test_given_a_rule_that_says_who_gets_the_signal_then_they_get_it(tell: Tell, words: str, slurm: str) -> None:
    story = tell(rule("slow_node", "sigterm, requeue", f", signal_to: {words}"))
    job = story.job(on_term="save and exit")
    story.finds(IncidentKind.SLOW_NODE, job)
    assert story.done[0] == f"signal 7 TERM {slurm}"


def test_given_a_signal_of_which_nobody_knows_whether_it_was_sent_then_it_is_not_sent_again(
    tell: Tell,
) -> None:
    story = tell(rule("collective_hang", "evidence, sigterm, requeue", ", signal_limit: 1min"))
    story.cluster.loses["signal"] = ["done"]
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=4)
    assert sum(deed.startswith("signal") for deed in story.done) == 1
    assert story.end(hang).ok


@pytest.mark.parametrize("when", ["after intent signal_term", "before outcome signal_term"])
def test_given_a_controller_that_dies_over_a_signal_then_it_is_sent_once_at_most(tell: Tell, when: str) -> None:
    story = tell(rule("collective_hang", "evidence, sigterm, requeue", ", signal_limit: 1min"))
    job = story.job(hangs=True)
    story.controller_dies(when)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert sum(deed.startswith("signal") for deed in story.done) <= 1
    assert story.end(hang).ok and job.restarts == 1


def test_given_a_signal_that_slurm_refuses_then_the_next_rung_is_tried(tell: Tell) -> None:
    story = tell(rule("collective_hang", "evidence, sigterm, requeue"))
    story.cluster.refuses["signal"] = SlurmRefused("Access/permission denied", Refusal.NO_PERMISSION)
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    assert "signal_term failed" in story.operations(hang)
    assert story.end(hang).ok


def test_given_a_pause_in_between_then_no_signal_is_sent_until_resume(tell: Tell) -> None:
    story = tell(rule("slow_node", "sigterm, requeue"))
    job = story.job(on_term="save and exit")
    story.at("after decision", lambda: story.journal.pause("stop", "root", 0.0))
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert not story.done
    story.journal.resume("root", 1.0)
    story.passes(minutes=3)
    assert story.end(slow).ok


def test_given_a_job_that_completes_without_saving_after_a_signal_then_it_is_not_run_again(
    tell: Tell,
) -> None:
    story = tell(rule("slow_node", "sigterm, requeue"))
    job = story.job()
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.cluster.end(job, "COMPLETED")
    story.passes(minutes=5)
    assert (job.state, job.restarts) == ("COMPLETED", 0)
    assert "without showing a complete checkpoint" in story.end(slow).detail


def test_given_a_rule_that_only_asks_then_the_job_saves_and_nothing_else_is_done(tell: Tell) -> None:
    story = tell(rule("slow_node", "kill_switch"))
    job = story.job(exits_after_saving=False)
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=3)
    assert story.decisions(slow)[-1].action == "ask_to_save"
    assert not story.done and job.state == "RUNNING" and not story.cluster.files
    assert story.end(slow).ok


# -------------------------------------------------------------------------------------------------- ends


def test_given_a_job_that_sits_in_its_teardown_then_it_is_cancelled_and_nothing_is_waited_for(
    tell: Tell,
) -> None:
    """Case 18: the last step is made, no checkpoint will come."""
    story = tell(rule("wedged_teardown", "evidence, cancel"))
    job = story.job(hangs=True)
    wedged = story.finds(IncidentKind.WEDGED_TEARDOWN, job)
    story.passes(minutes=2)
    assert story.done == ["cancel 7"] and job.state == "CANCELLED"
    assert story.end(wedged).ok


def test_given_a_process_that_cannot_be_killed_then_the_cancelled_job_is_told_as_stuck(tell: Tell) -> None:
    story = tell(rule("wedged_teardown", "evidence, cancel"))
    job = story.job(hangs=True, unkillable=True)
    wedged = story.finds(IncidentKind.WEDGED_TEARDOWN, job)
    story.passes(minutes=8)
    assert not story.end(wedged).ok
    assert "cannot be killed" in story.end(wedged).detail


def test_given_a_job_that_was_not_started_by_sbatch_then_of_all_ways_only_cancel_is_left(tell: Tell) -> None:
    story = tell(rule("collective_hang", "evidence, requeue, resubmit, cancel"))
    job = story.job(hangs=True, is_batch=False)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    assert story.done == ["cancel 7"]
    assert "no requeue" in story.why(hang) and "no resubmit" in story.why(hang)


def test_given_a_job_that_cannot_be_requeued_then_its_script_is_submitted_again_and_runs_after_it(
    tell: Tell,
) -> None:
    story = tell(rule("collective_hang", "evidence, requeue, resubmit"))
    job = story.job(step=150, saved=100, hangs=True, requeueable=False)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=4)
    assert story.done == ["submit", "cancel 7", "release 9001"]
    new = story.cluster.jobs["9001"]
    assert new.state == "RUNNING" and new.excluded == ("n1",) and new.dependency == "afterany:7"
    end = story.end(hang)
    assert end.ok and "job 9001 runs in its place" in end.detail and end.resumed_at_step in (101, 102, 103)


def test_given_a_requeue_that_slurm_refuses_for_good_then_the_next_way_is_taken(tell: Tell) -> None:
    story = tell(rule("collective_hang", "evidence, requeue, resubmit"))
    story.cluster.refuses["requeue_hold"] = SlurmRefused(
        "Requested operation is presently disabled", Refusal.NOT_REQUEUEABLE
    )
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=4)
    assert "requeue_hold failed" in story.operations(hang)
    assert story.cluster.jobs["9001"].state == "RUNNING"


def test_given_an_sbatch_whose_answer_is_lost_then_the_new_job_is_known_by_its_comment(tell: Tell) -> None:
    story = tell(rule("collective_hang", "evidence, resubmit"))
    story.cluster.loses["submit"] = ["done"]
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=6)
    running = [each.id for each in story.cluster.jobs.values() if each.state == "RUNNING"]
    assert len(running) == 1 and running[0] != job.id
    assert story.end(hang).ok


def test_given_an_sbatch_that_is_refused_then_the_old_job_is_not_cancelled(tell: Tell) -> None:
    story = tell(rule("collective_hang", "evidence, resubmit"))
    story.cluster.refuses["submit"] = SlurmRefused("Invalid account", Refusal.UNSATISFIABLE)
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    assert job.state == "RUNNING"
    assert "resubmit was refused" in story.end(hang).detail


@pytest.mark.parametrize("when", ["after intent resubmit", "before outcome resubmit", "after outcome resubmit", "after intent cancel",
    "before outcome cancel", "before outcome release"])  # fmt: skip
def test_given_a_controller_that_dies_there_then_exactly_one_new_job_runs(tell: Tell, when: str) -> None:
    story = tell(rule("collective_hang", "evidence, resubmit"))
    job = story.job(hangs=True)
    story.controller_dies(when)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=8)
    running = [each for each in story.cluster.jobs.values() if each.state == "RUNNING"]
    assert len(running) == 1 and running[0].id != job.id
    assert job.state == "CANCELLED" and story.end(hang).ok


def test_given_a_chain_then_the_hung_link_is_ended_and_the_next_one_goes_on(tell: Tell) -> None:
    story = tell(rule("collective_hang", "evidence, chain"))
    job = story.job(hangs=True)
    behind = story.waiting_job("8", dependency="afterany:7")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    assert story.done == ["cancel 7"]
    assert behind.state == "RUNNING"
    assert "job 8" in story.end(hang).detail and story.end(hang).ok


def test_given_nothing_behind_a_job_then_it_is_not_left_to_a_chain(tell: Tell) -> None:
    story = tell(rule("collective_hang", "evidence, chain"))
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    assert job.state == "RUNNING" and not story.done
    assert "no chain to leave it to" in story.end(hang).detail


def test_given_the_first_element_of_an_array_one_at_a_time_then_the_second_goes_on_where_it_stopped(
    tell: Tell,
) -> None:
    story = tell(rule("collective_hang", "evidence, chain, requeue"))
    job = story.job("100_1", array="100", array_limit=1, hangs=True)
    second = story.waiting_job("100_2", array="100", array_limit=1)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    assert (second.state, second.restarts) == ("RUNNING", 0)
    assert story.end(hang).ok and story.done == ["cancel 100_1"]


def looping(story: Story) -> Job:
    job = story.waiting_job("7", restarts=4)
    job.eligible_at = 1e9
    story.passes(seconds=5)
    return job


def test_given_a_job_that_restarts_and_dies_again_and_again_then_it_is_held_where_the_rule_says_so(
    tell: Tell,
) -> None:
    story = tell(rule("crash_loop", "hold"))
    job = looping(story)
    loop = story.finds(IncidentKind.CRASH_LOOP, job)
    story.passes(minutes=1)
    assert story.done == ["hold 7"] and job.held
    assert "scontrol release" in story.end(loop).detail


def test_given_a_crash_loop_then_nothing_is_done_unless_a_rule_says_so(story: Story) -> None:
    loop = story.finds(IncidentKind.CRASH_LOOP, looping(story))
    assert story.decisions(loop)[-1].action == "none"
    assert "a person has to look" in story.why(loop)


def test_given_a_looping_job_that_runs_just_now_then_it_is_held_when_it_is_in_the_queue_again(
    tell: Tell,
) -> None:
    story = tell(rule("crash_loop", "hold"))
    job = story.job(hangs=True)
    story.finds(IncidentKind.CRASH_LOOP, job)
    story.passes(minutes=1)
    assert not story.done
    story.cluster.requeued(job, held=False)
    story.passes(seconds=15)
    assert story.done == ["hold 7"]


def test_given_a_job_in_a_crash_loop_that_hangs_then_it_is_not_restarted_once_more(story: Story) -> None:
    job = story.job(hangs=True)
    story.finds(IncidentKind.CRASH_LOOP, job)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(hang) == ("suppressed", "crash_loop")
    assert not story.done
