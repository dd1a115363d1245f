"""chain_broken: a training that went from job to job has ended early with nothing behind it; a single job is
no chain."""

from __future__ import annotations

import pytest

from slurm_watchdog.detect.crash_loop import chain_broken
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.past_runs import EndedJob
from tests.builders.ended_jobs import ended
from tests.builders.logged_runs import NOW, past
from tests.builders.views import cluster


def judge(*jobs: EndedJob) -> list[Finding]:
    return chain_broken(cluster(ended=jobs))


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"])
def test_a_link_that_ended_early_with_nothing_behind_it_breaks_the_chain(state: str) -> None:
    (finding,) = judge(ended(state))
    assert (finding.truth, finding.subject, finding.actionable) == (Truth.BAD, "chain:9", False)
    assert "at step 450 of 1000" in finding.summary
    assert "it went on from job 7, 8" in finding.facts


def test_a_job_that_was_requeued_before_and_is_not_any_more_is_a_chain_of_its_own_runs() -> None:
    own = {"preceded_by": (), "past": (past(first_step=1),), "run": past(first_step=401, restarts=1)}
    (finding,) = judge(ended("NODE_FAIL", **own))
    assert finding.truth is Truth.BAD
    assert judge(ended("NODE_FAIL", **{**own, "run": past(first_step=1, restarts=1)})) == []


def test_chain_broken_waits_for_the_successor_to_appear() -> None:
    (finding,) = judge(ended(ended_at=NOW - 119))
    assert finding.truth is Truth.UNKNOWN


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED"])
def test_chain_broken_ignores_jobs_that_completed_or_were_cancelled(state: str) -> None:
    assert [f.truth for f in judge(ended(state))] == [Truth.OK]


def test_a_chain_that_goes_on_or_is_at_its_last_step_is_whole() -> None:
    assert [f.truth for f in judge(ended(succeeded_by=("10",)))] == [Truth.OK]
    assert [f.truth for f in judge(ended("TIMEOUT", last_step=1000))] == [Truth.OK]


def test_a_job_that_ran_once_is_no_chain_and_is_not_spoken_of() -> None:
    assert judge(ended(preceded_by=())) == []
    assert judge(ended(preceded_by=(), run=None, last_step=None)) == []
