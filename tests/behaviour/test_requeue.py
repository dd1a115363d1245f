"""A job whose loop does not turn: evidence, requeue held, exclude, release, first new step."""

from __future__ import annotations

import pytest

from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.slurm.client import Refusal, SlurmRefused
from tests.behaviour.story import Story


def test_given_a_job_that_hangs_then_it_is_requeued_without_the_node_and_the_loss_is_told(
    story: Story,
) -> None:
    job = story.job(step=150, saved=100, hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=3)
    assert story.done == ["requeue_hold 7", "exclude 7 n1", "release 7"]
    assert "n1" not in job.nodes
    end = story.end(hang)
    assert end.ok
    assert end.steps_lost is not None and 0 < end.steps_lost <= 50
    assert end.seconds_lost == pytest.approx(2.0 * end.steps_lost, rel=0.1)
    assert "without n1" in end.detail and "lost" in end.detail and "s of work" in end.detail


def test_given_a_job_that_hangs_then_evidence_is_waited_for_before_it_is_touched(story: Story) -> None:
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=3)
    assert [operation.split()[0] for operation in story.operations(hang)] == [
        "evidence",
        "requeue_hold",
        "release",
    ]


def test_given_a_dead_rank_among_waiting_ones_then_the_job_goes_on_from_its_last_checkpoint(
    story: Story,
) -> None:
    job = story.job(step=180, saved=100, hangs=True)
    dead = story.finds(IncidentKind.LINGERING_JOB, job)
    story.passes(minutes=3)
    assert story.end(dead).resumed_at_step == 101
    assert job.restarts == 1


def test_given_a_job_that_was_excluded_from_other_nodes_then_those_exclusions_stay(story: Story) -> None:
    job = story.job(hangs=True, excluded=("n4",))
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1", actionable=True)
    story.passes(minutes=3)
    assert set(job.excluded) >= {"n4"}


def test_given_a_job_that_makes_steps_again_while_the_decision_waits_then_it_is_left_alone(
    story: Story,
) -> None:
    job = story.job(hangs=True)

    def goes_on() -> None:
        story.cluster.away, job.hangs = True, False

    story.at("after decision", goes_on)
    hang = story.finds(IncidentKind.RANK_STOPPED, job)
    story.passes(minutes=1)
    story.cluster.away = False
    story.passes(minutes=1)
    assert not story.done
    assert "makes steps again" in story.end(hang).detail


def test_given_a_job_that_finishes_before_it_is_requeued_then_it_is_never_run_again(story: Story) -> None:
    job = story.job(hangs=True)
    story.cluster.when_asked["requeue_hold"] = lambda: story.cluster.end(job, "COMPLETED")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert not story.done
    assert "not run again" in story.end(hang).detail
    assert job.state == "COMPLETED"


def test_given_a_job_that_its_owner_cancels_then_it_is_not_run_again(story: Story) -> None:
    job = story.job(hangs=True)
    story.cluster.when_asked["requeue_hold"] = lambda: story.cluster.end(job, "CANCELLED")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert job.state == "CANCELLED" and not story.done
    assert not story.end(hang).ok


def test_given_a_job_that_somebody_requeues_first_then_there_is_nothing_left_to_do(story: Story) -> None:
    job = story.job(hangs=True)
    story.at("after decision", lambda: story.cluster.requeued(job, held=False))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert not story.done
    assert "requeued without this action" in story.end(hang).detail
    assert story.end(hang).needless


def test_given_a_job_that_was_submitted_with_no_requeue_then_it_is_told_what_to_change(story: Story) -> None:
    job = story.job(hangs=True, requeueable=False)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(hang) == ("suppressed", "not_possible")
    assert "#SBATCH --requeue" in story.why(hang)
    story.passes(minutes=5)
    assert not story.done


def test_given_a_job_that_was_started_by_srun_then_it_is_told_that_slurm_cannot_requeue_it(
    story: Story,
) -> None:
    job = story.job(hangs=True, is_batch=False)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(hang) == ("suppressed", "not_possible")
    assert "srun or salloc" in story.why(hang)


def test_given_a_watchdog_without_rights_then_the_job_stays_as_it_is_and_the_message_says_what_is_missing(
    story: Story,
) -> None:
    denied = "Access/permission denied; the controller's user has to be a Slurm operator"
    story.cluster.refuses["requeue_hold"] = SlurmRefused(denied, Refusal.NO_PERMISSION)
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=1)
    assert job.state == "RUNNING" and job.restarts == 0
    assert "has to be a Slurm operator" in story.end(hang).detail
    assert "failed" in story.told(hang)


def test_given_element_3_of_an_array_that_allows_one_at_a_time_then_element_4_may_go_first_and_is_not_touched(
    story: Story,
) -> None:
    three = story.job("100_3", array="100", array_limit=1, hangs=True, wants=2)
    four = story.waiting_job("100_4", array="100", array_limit=1, wants=2)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, three)
    story.passes(minutes=2)
    assert all("100_4" not in deed for deed in story.done)
    assert (four.state, four.restarts) == ("RUNNING", 0)
    assert three.state == "PENDING" and three.reason == "JobArrayTaskLimit"
    driver = next(iter(story.controller.actions._drivers.values()))
    assert "another element of its array runs" in driver.waiting_for
    story.cluster.end(four, "COMPLETED")
    story.passes(minutes=2)
    assert story.end(hang).ok


def test_given_two_jobs_of_the_same_name_then_only_the_one_that_hangs_is_requeued(story: Story) -> None:
    ill = story.job("7", hangs=True, wants=2)
    well = story.job("8", wants=2)
    story.finds(IncidentKind.COLLECTIVE_HANG, ill)
    story.passes(minutes=3)
    assert well.restarts == 0 and ill.restarts == 1


def test_given_a_node_that_cannot_be_excluded_then_the_job_is_not_kept_held_for_it(story: Story) -> None:
    story.cluster.refuses["exclude"] = SlurmRefused("Access/permission denied", Refusal.NO_PERMISSION)
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=3)
    assert job.state == "RUNNING" and not job.held
    assert "without" not in story.end(hang).detail


def test_given_a_filesystem_that_is_away_then_nothing_is_restarted_onto_it(story: Story) -> None:
    job = story.job(hangs=True)
    story.finds(IncidentKind.FILESYSTEM_OUTAGE, job, mounts=("/shared",))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    assert story.decided(hang) == ("suppressed", "storage")
    story.passes(minutes=10)
    assert not story.done


def test_given_a_full_filesystem_on_which_the_job_has_failed_then_it_is_restarted_once_there_is_room(
    story: Story,
) -> None:
    job = story.job(hangs=True)
    full = story.finds(IncidentKind.DISK_FULL, job, mounts=("/shared",))
    dead = story.finds(IncidentKind.LINGERING_JOB, job)
    assert story.decided(dead) == ("suppressed", "disk_full")
    story.passes(minutes=10)
    assert not story.done
    story.resolves(full)
    story.passes(minutes=5)
    assert job.restarts == 1


def test_given_a_full_filesystem_then_a_person_may_restart_the_job_all_the_same(story: Story) -> None:
    job = story.job(hangs=True)
    story.finds(IncidentKind.DISK_FULL, job, mounts=("/shared",))
    story.operator_restarts(job, now=True)
    story.passes(minutes=5)
    assert job.restarts == 1


def test_given_an_outage_then_it_is_told_and_no_job_is_touched(story: Story) -> None:
    job = story.job(hangs=True)
    outage = story.finds(IncidentKind.FILESYSTEM_OUTAGE, job, mounts=("/shared",))
    story.passes(minutes=10)
    assert story.decisions(outage)[-1].action == "none"
    assert "restarting would not help" in story.why(outage)


def test_given_a_restart_that_dies_at_once_then_the_action_has_failed_and_says_so(story: Story) -> None:
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    job.hangs_again = True
    story.passes(seconds=25)
    story.cluster.end(job, "FAILED")
    story.passes(minutes=1)
    assert not story.end(hang).ok
    assert "without a new step" in story.end(hang).detail


def test_given_a_requeue_of_which_nobody_answers_but_it_was_done_then_it_is_not_sent_again(
    story: Story,
) -> None:
    story.cluster.loses["requeue_hold"] = ["done"]
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert story.done.count("requeue_hold 7") == 1 and job.restarts == 1
    assert story.end(hang).ok


def test_given_a_requeue_that_got_lost_then_it_is_sent_again_and_the_job_runs_once_more(story: Story) -> None:
    story.cluster.loses["requeue_hold"] = ["not done", "not done"]
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=5)
    assert story.done.count("requeue_hold 7") == 1 and job.restarts == 1
    assert story.end(hang).ok


def test_given_a_slurm_that_is_away_for_long_then_nothing_happens_meanwhile_and_the_action_goes_on_after(
    story: Story,
) -> None:
    job = story.job(hangs=True)
    story.at("after decision", lambda: setattr(story.cluster, "away", True))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=15)
    assert not story.done
    story.cluster.away = False
    story.passes(minutes=3)
    assert story.end(hang).ok and job.restarts == 1
