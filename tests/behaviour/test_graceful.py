"""A job that turns: the kill switch, a complete checkpoint newer than it, the end of the run, and only then a
restart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.slurm.client import Refusal, SlurmRefused
from tests.behaviour.cluster import Job
from tests.behaviour.story import QUICK, Story

SHARED = "/shared/stop-{job_id}"


def rule(ladder: str, more: str = "") -> str:
    """A configuration that answers slow nodes with `ladder`."""
    return f"mode: act\npolicy: {{cooldown: 1min, kinds: {{slow_node: {{ladder: [{ladder}]{more}}}}}}}\n{QUICK}"


GRACEFUL = rule("kill_switch, requeue", ", checkpoint_limit: 2min")


def test_given_a_job_that_turns_but_is_slow_then_it_is_moved_and_no_step_is_lost(
    tell: Callable[..., Story],
) -> None:
    story = tell(GRACEFUL)
    job = story.job(step=150, saved=100)
    slow = story.finds(IncidentKind.SLOW_NODE, job, blames="n1")
    story.passes(minutes=5)
    assert story.end(slow).ok
    assert story.end(slow).steps_lost == 0
    assert "n1" not in job.nodes and job.restarts == 1


def test_given_a_kill_switch_on_a_shared_filesystem_then_it_is_gone_before_the_next_run_begins(
    tell: Callable[..., Story],
) -> None:
    story = tell(GRACEFUL + f"jobs: {{kill_switch: '{SHARED}', kill_switch_prefixes: [/shared]}}\n")
    job = story.job(listens_at="/shared/stop-7")
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert story.end(slow).ok
    assert not story.cluster.started_under_switch and not story.cluster.files
    operations = story.operations(slow)
    assert operations.index("remove_kill_switch done") < operations.index("release done")


ARRAY = GRACEFUL + "jobs: {kill_switch_prefixes: [/shared]}\n"
OF_ARRAY = {"comment": "watchdog: kill_switch=/shared/stop", "array": "100", "array_limit": 1, "wants": 2}
"""Of each element of an array that runs one at a time: all look for the same file."""


def an_array(story: Story, **more: object) -> tuple[Job, Job]:
    """Its element 3, which runs, and element 4, which waits for that."""
    running = story.job("100_3", step=150, saved=100, listens_at="/shared/stop", **{**OF_ARRAY, **more})
    waiting = story.waiting_job("100_4", listens_at="/shared/stop", **{**OF_ARRAY, **more})
    story.passes(seconds=15)
    return running, waiting


def test_given_one_kill_switch_for_an_array_then_the_next_element_is_held_until_it_is_gone(
    tell: Callable[..., Story],
) -> None:
    story = tell(ARRAY)
    job, waiting = an_array(story)
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert story.end(slow).ok and job.restarts == 1 and (job.state, waiting.state) == ("RUNNING", "PENDING")
    assert story.done == ["hold 100_4", "requeue_hold 100_3", "release 100_3", "release 100_4"]
    operations = story.operations(slow)
    assert operations.index("hold_others done") < operations.index("write_kill_switch done")
    assert operations.index("remove_kill_switch done") < operations.index("release done")
    assert not waiting.held and not story.cluster.started_under_switch and not story.cluster.files


def test_given_a_rule_that_only_asks_to_save_then_the_next_element_starts_after_the_switch_is_gone(
    tell: Callable[..., Story],
) -> None:
    story = tell(rule("kill_switch") + "jobs: {kill_switch_prefixes: [/shared]}\n")
    job, waiting = an_array(story)
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert story.end(slow).ok and (job.state, waiting.state) == ("COMPLETED", "RUNNING")
    assert story.done == ["hold 100_4", "release 100_4"]
    assert not story.cluster.started_under_switch and not story.cluster.files


def test_given_two_elements_that_run_at_once_or_a_job_of_its_name_that_waits_then_none_is_asked(
    tell: Callable[..., Story],
) -> None:
    story = tell(ARRAY)
    job, _ = an_array(story, array_limit=2, wants=1)
    story.passes(seconds=15)
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    assert story.decided(slow) == ("suppressed", "shared_switch")
    assert "job 100_4 would see the kill switch /shared/stop too" in story.why(slow)
    assert not story.done


def test_given_an_element_that_cannot_be_held_then_no_switch_is_written_and_the_job_runs_on(
    tell: Callable[..., Story],
) -> None:
    story = tell(ARRAY)
    story.cluster.refuses["hold"] = SlurmRefused("Access/permission denied", Refusal.NO_PERMISSION)
    job, waiting = an_array(story)
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert not story.end(slow).ok and "Slurm does not show 100_4 held" in story.end(slow).detail
    assert (job.state, job.restarts, waiting.state) == ("RUNNING", 0, "PENDING") and not story.cluster.files


def test_given_an_element_that_its_owner_holds_then_it_is_held_after_the_restart_too(
    tell: Callable[..., Story],
) -> None:
    story = tell(ARRAY)
    job, waiting = an_array(story)
    waiting.held = True
    story.passes(seconds=15)
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert story.end(slow).ok and job.restarts == 1 and waiting.held
    assert story.done == ["requeue_hold 100_3", "release 100_3"]


@pytest.mark.parametrize("moment", ["intent hold_others", "outcome hold_others", "intent write_kill_switch",
    "outcome write_kill_switch", "outcome wait_checkpoint", "intent remove_kill_switch", "outcome remove_kill_switch",
    "intent release_others", "outcome release_others", "end"])  # fmt: skip
@pytest.mark.parametrize("when", ["before", "after"])
def test_given_a_controller_that_dies_while_an_element_is_held_then_that_starts_once_the_switch_is_gone(
    tell: Callable[..., Story], when: str, moment: str
) -> None:
    story = tell(ARRAY)
    job, waiting = an_array(story)
    story.controller_dies(f"{when} {moment}")
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=8)
    assert story.end(slow).ok and job.restarts == 1 and not waiting.held
    assert not story.cluster.started_under_switch and not story.cluster.files


def test_given_a_trainer_that_does_not_look_for_its_kill_switch_then_it_is_left_running_and_the_switch_goes(
    tell: Callable[..., Story],
) -> None:
    story = tell(GRACEFUL)
    job = story.job(hears_switch=False, save_every=10_000)
    job.hears_switch = False
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=6)
    assert (job.state, job.restarts) == ("RUNNING", 0)
    assert not story.cluster.files
    assert "look whether the trainer looks for the kill switch" in story.end(slow).detail


def test_given_a_rule_that_accepts_lost_work_then_a_deaf_job_is_requeued_anyway(
    tell: Callable[..., Story],
) -> None:
    story = tell(rule("kill_switch, requeue", ", checkpoint_limit: 2min, lose_work: true"))
    job = story.job(save_every=10_000)
    job.hears_switch = False
    story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=6)
    assert job.restarts == 1


def test_given_a_job_that_saved_for_the_kill_switch_and_stays_then_it_is_requeued_after_a_moment(
    tell: Callable[..., Story],
) -> None:
    """Case 19: the new checkpoint is there, the process tree, too."""
    story = tell(GRACEFUL)
    job = story.job(exits_after_saving=False)
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert story.end(slow).ok and job.restarts == 1


def test_given_a_job_that_saved_and_stays_then_a_signal_comes_before_slurm_ends_it(
    tell: Callable[..., Story],
) -> None:
    story = tell(rule("kill_switch, sigterm, requeue", ""))
    job = story.job(exits_after_saving=False, on_term="exit")
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert story.done[:2] == ["signal 7 TERM steps", "requeue_hold 7"]
    assert story.end(slow).ok and job.restarts == 1


def test_given_a_job_that_makes_its_last_step_for_the_kill_switch_then_it_is_finished_and_not_run_again(
    tell: Callable[..., Story],
) -> None:
    story = tell(GRACEFUL)
    job = story.job(step=50, total_steps=60)
    job.hears_switch = False
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=5)
    assert (job.state, job.restarts) == ("COMPLETED", 0)
    assert "finished" in story.end(slow).detail
    assert not story.done


def test_given_a_job_that_its_owner_cancels_while_it_saves_then_it_is_not_run_again(
    tell: Callable[..., Story],
) -> None:
    story = tell(GRACEFUL)
    job = story.job(save_every=10_000)
    job.hears_switch = False
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.cluster.end(job, "CANCELLED")
    story.passes(minutes=5)
    assert "ended outside the watchdog (CANCELLED)" in story.end(slow).detail
    assert not story.done and not story.cluster.files


def test_given_a_loop_that_does_not_turn_then_no_kill_switch_is_written_and_it_says_so(
    tell: Callable[..., Story],
) -> None:
    story = tell("mode: act\npolicy: {kinds: {collective_hang: {ladder: [evidence, kill_switch, requeue]}}}\n" + QUICK)
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=3)
    assert "write_kill_switch done" not in story.operations(hang)
    assert "a loop that does not turn would not see it" in story.why(hang)
    assert story.end(hang).ok


def test_given_a_node_whose_agent_is_silent_then_the_switch_does_not_come_through_and_the_job_runs_on(
    tell: Callable[..., Story],
) -> None:
    story = tell(rule("kill_switch, requeue"))
    job = story.job(save_every=10_000)
    job.hears_switch = False
    story.cluster.silent.add(job.nodes[1])
    slow = story.finds(IncidentKind.SLOW_NODE, job)
    story.passes(minutes=10)
    assert job.restarts == 0 and job.state == "RUNNING"
    assert not story.end(slow).ok


def test_given_an_operator_who_asks_then_the_job_moves_although_the_mode_is_observe(
    tell: Callable[..., Story],
) -> None:
    story = tell("mode: observe\n" + QUICK)
    job = story.job(comment="watchdog=off")
    asked = story.operator_restarts(job, exclude="n1")
    story.passes(minutes=5)
    assert story.end(asked).ok and story.end(asked).steps_lost == 0
    assert "n1" not in job.nodes


def test_given_a_pause_then_an_operator_is_refused_as_well(story: Story) -> None:
    job = story.job()
    story.journal.pause("maintenance", "root", 0.0)
    asked = story.operator_restarts(job)
    assert (asked.verdict, asked.by) == ("suppressed", "paused")


@pytest.mark.parametrize("when", ["before intent write_kill_switch", "after intent write_kill_switch", "before outcome write_kill_switch",
    "after outcome write_kill_switch", "before outcome wait_checkpoint", "before intent requeue_hold", "after intent requeue_hold",
    "before outcome requeue_hold", "before outcome remove_kill_switch", "before outcome release", "before end"])  # fmt: skip
def test_given_a_controller_that_dies_there_then_the_graceful_restart_is_still_done_once_and_nothing_is_lost(
    tell: Callable[..., Story], when: str
) -> None:
    story = tell(GRACEFUL + f"jobs: {{kill_switch: '{SHARED}', kill_switch_prefixes: [/shared]}}\n")
    job = story.job(listens_at="/shared/stop-7")
    story.controller_dies(when)
    slow = story.finds(IncidentKind.SLOW_NODE, job, blames="n1")
    story.passes(minutes=8)
    assert story.done.count("requeue_hold 7") == 1 and story.done.count("release 7") == 1
    assert story.end(slow).ok and story.end(slow).steps_lost == 0
    assert not story.cluster.started_under_switch and not story.cluster.files
