"""The soak in short, on the real cluster: one of each kind of trouble, always the same ones, and the same
history checker.

Waits are for conditions, and nothing that is asserted is a time: on a slow machine it takes longer. `make
soak MINUTES=n` draws at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lab.soak.faults import fill_disk, garbage, kill_agent
from lab.soak.history import History, check, history_of
from lab.soak.stage import Deed, Stage
from lab.soak.story import settle
from lab.soak.tools import Request


@pytest.fixture
def stage(cluster_possible: None) -> Iterator[Stage]:
    with Stage(random.Random(1), nodes=2) as stage:
        yield stage


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_few_bad_minutes_leave_nothing_undone_nothing_done_twice_and_every_job_turning(
    stage: Stage,
) -> None:
    hung, moved = stage.submit(1), stage.submit(1)
    stage.wait_for(lambda: set(stage.turning()) == {hung, moved}, "both jobs to turn")
    stage.tools.fates(["done_and_lost", "lost", "ok", "slow", "refused"])
    stage.hurt(hung, "dataloader_hang.rank1")
    stage.wait_for(stage.open_actions, "something to be done about the hang")
    stage.kill_controller()
    mends = [garbage(stage), kill_agent(stage)]
    stage.wait_for(stage.start_controller, "the controller to start")
    for mend in mends:
        assert mend is not None
        mend[1]()
    stage.wait_for(
        lambda: stage.steps_of(hung) >= 3 and int(stage.job(hung)["Restarts"]) == 1,
        "the hung job to turn again",
    )
    stage.ask_restart(moved)
    stage.wait_for(stage.open_actions, "the other one to be moved")
    stage.kill_controller()
    stage.wait_for(stage.start_controller, "the controller to start")
    full = fill_disk(stage)
    stage.pause_controller()
    stage.cluster.stop_controller()
    stage.continue_controller()
    assert full is not None
    full[1]()
    stage.cluster.start_controller()
    settle(stage)
    history = history_of(stage)
    assert check(history) == []
    assert any(run.requeued_run == 0 and run.job_id == hung for run in history.requests)
    _the_checker_can_fail(history)


def _the_checker_can_fail(history: History) -> None:
    """With what was true a moment ago, and one thing that must not be."""
    first = next(request for request in history.requests if request.requeued_run is not None)
    twice = replace(history, requests=[*history.requests, first])
    assert _violated(twice) == {"no_run_is_requeued_twice_or_without_a_decision"}
    unhurt = replace(history, deeds=[deed for deed in history.deeds if not deed.what.startswith("fault ")])
    assert "no_healthy_run_is_acted_on" in _violated(unhurt)
    again = replace(history, runs=[*history.runs, history.runs[0]])
    assert _violated(again) == {"every_run_is_accounted_for"}
    stale = replace(history, logs={first.job_id: f"RUN 5\nexiting: kill switch /run/{first.job_id}.0/kill found\n"})
    assert _violated(stale) == {"no_switch_outlives_its_run"}
    over = Request(**{**vars(first), "before": {**first.before, "JobState": "COMPLETED"}})
    assert "what_is_over_stays_over" in _violated(replace(history, requests=[over]))
    open_ended = [type(run)(decision=run.decision, records=run.records) for run in history.actions]
    assert "nothing_is_lost" in _violated(replace(history, actions=open_ended))
    decided_at = history.actions[0].decision.decided_at
    away = [Deed(decided_at - 60.0, "slurm stopped"), Deed(decided_at + 60.0, "slurm started")]
    assert "guards_hold" in _violated(replace(history, deeds=[*history.deeds, *away]))


def _violated(history: History) -> set[str]:
    return {each.partition(":")[0] for each in check(history)}
