"""The search for a slow node: what restarts that happen anyway do for it, and what they never risk."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.policy.search_restart import EXCLUDED_WHY
from slurm_watchdog.model.incidents import Incident, IncidentKind
from tests.behaviour.cluster import Job
from tests.behaviour.story import QUICK, Story
from tests.builders.slow_clusters import job_search


def hangs(story: Story, job: Job) -> Incident:
    """The job hangs, and is restarted for it."""
    job.hangs = True
    found = story.finds(IncidentKind.COLLECTIVE_HANG, job)
    story.passes(minutes=2)
    return found


def searched(story: Story) -> Job:
    """A slow node is searched for among n1 and n2, on which job 7 runs; n3 and n4 are free."""
    job = story.job()
    story.journal.slow_searches.save(job_search("n1 n2"))
    story.controller_is_killed()
    story.passes(seconds=15)
    return job


def test_given_a_restart_for_a_hang_then_it_leaves_out_half_of_the_suspects_once(story: Story) -> None:
    job = searched(story)
    hang = hangs(story, job)
    (left_out,) = job.excluded
    assert left_out in ("n1", "n2") and left_out not in job.nodes and job.state == "RUNNING"
    assert f"{left_out} left out once, to find the node that makes the job slow" in story.why(hang)
    assert [each.reason for each in story.journal.node_entries("excluded", "7")] == [EXCLUDED_WHY]


def test_given_the_next_restart_then_what_was_left_out_is_given_back(tell: Callable[[str], Story]) -> None:
    story = tell(f"mode: act\npolicy: {{cooldown: 1min, budget_window: 1s}}\n{QUICK}")
    job = searched(story)
    hangs(story, job)
    assert job.excluded
    story.journal.slow_searches.drop("7")
    story.controller_is_killed()
    story.passes(minutes=20)
    hangs(story, job)
    assert job.excluded == () and job.state == "RUNNING"
    assert story.journal.node_entries("excluded", "7") == []


def test_given_others_that_are_taken_before_the_job_starts_then_it_gets_its_old_nodes_back(story: Story) -> None:
    job = searched(story)

    def others_are_taken() -> None:
        for name in ("n3", "n4"):
            story.cluster.nodes[name] = replace(story.cluster.nodes[name], state="DOWN")

    story.at("after outcome release", others_are_taken)
    hangs(story, job)
    assert job.excluded == () and job.nodes == ("n1", "n2") and job.state == "RUNNING"


@pytest.mark.parametrize("rung", ["requeue_hold", "exclude", "release"])
@pytest.mark.parametrize("moment", ["before intent", "after intent", "before outcome", "after outcome"])
def test_given_a_controller_that_dies_at_any_write_then_the_exclusion_is_made_once_and_the_search_lives(
    story: Story, moment: str, rung: str
) -> None:
    job = searched(story)
    story.controller_dies(f"{moment} {rung}")
    hangs(story, job)
    assert len(job.excluded) == 1 and job.state == "RUNNING"
    assert len(story.journal.node_entries("excluded", "7")) == 1
    assert story.done.count("requeue_hold 7") == 1
    assert story.journal.slow_searches.all() == list(story.controller.searches.all()) != []
