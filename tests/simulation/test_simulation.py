"""The real controller on bad days that never were: the whole thing is `python -m tests.simulation --seeds 0-1000`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from slurm_watchdog.actuate import by_agent, by_slurm
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.journal.lease import Lease
from slurm_watchdog.model.actions import Fence, OperationOutcome
from tests.builders.thorough import first
from tests.simulation.__main__ import run_crash_points, run_one
from tests.simulation.checker import check
from tests.simulation.cluster import Cluster, SimJob
from tests.simulation.controller import SimEvidence, SimJournal
from tests.simulation.crash_points import LADDERS, POINTS, TROUBLE_AT_S, quiet_recipe, story_of, trouble
from tests.simulation.history import History, history_of
from tests.simulation.pair import Pair, PairLife
from tests.simulation.recipe import SHARED_SWITCH, recipe_of
from tests.simulation.sim import Simulation, simulation
from tests.simulation.slurm import SimSlurm
from tests.simulation.truth import Fault

SHARED_NUMBER = next(n for n in range(20) if quiet_recipe(n).kill_switch == SHARED_SWITCH)
"""A crash point whose kill switch lies where the next run looks for it, too."""
SEEDS: dict[tuple[str, int], str] = {
    (
        "crash-points",
        2420,
    ): "a requeue that was repeated because nobody answered came later, and hit the next run",
    (
        "crash-points",
        1795,
    ): "a controller that had just started took all nodes for silent ones, and left the kill switch on them",
    ("ladders", 103): "a job that was submitted while sbatch's answer was lost was submitted a second time",
    (
        "seeds",
        9,
    ): "a person's restart was begun on what a controller knew before it was stopped, and evidence that a full journal could not take counted as kept",
    ("seeds", 2): "a clock that was set gave the budget back that an earlier life of the controller had used",
}
"""Runs that once found a defect: (option, number) -> which. As long as chance is drawn as it was then; what
can be told without it has a test of its own below. Whole days (`seeds`) are thorough."""


def test_on_a_bad_day_nothing_is_lost_done_twice_or_done_to_a_healthy_job() -> None:
    with simulation(replace(recipe_of(0), hours=1.0, calm_s=2000.0)) as sim:
        sim.run()
        assert check(history_of(sim)) == []


@pytest.mark.parametrize("story", first(1, range(4)))
def test_wherever_the_controller_dies_the_action_is_done_once_or_ended_in_writing(story: int) -> None:
    found = run_crash_points(range(story * POINTS, story * POINTS + 10))
    assert [each.violations for each in found if each.violations] == []
    assert len(found) == 10
    assert sum(each.actions for each in found) >= 8, "hardly anything was decided"


@pytest.mark.parametrize("story", first(1, range(2)))
def test_whichever_of_two_controllers_dies_stops_or_is_cut_off_the_other_one_finishes_the_action(story: int) -> None:
    found = run_crash_points(range(story * POINTS, story * POINTS + 10), "failovers")
    assert [each.violations for each in found if each.violations] == []
    assert sum(each.actions for each in found) >= 8, "hardly anything was decided"
    assert sum(each.lives for each in found) >= 15, "hardly ever did the other one take over"


@pytest.mark.parametrize("story", first(1, range(3)))
def test_a_kill_switch_never_ends_the_run_after_its_own_wherever_it_lies_and_whoever_is_away(
    story: int,
) -> None:
    """A path of its run, one on the shared filesystem, one on each node that the next run looks at, too."""
    found = run_crash_points(range(story * POINTS, story * POINTS + 10), "cycles")
    assert [each.violations for each in found if each.violations] == []
    assert len(found) == 10
    assert sum(each.succeeded for each in found) >= 5, "hardly any job was moved"


@pytest.mark.parametrize("story", first(1, range(len(LADDERS))))
def test_whichever_rungs_a_site_wants_each_is_climbed_once_wherever_the_controller_dies(story: int) -> None:
    """Signals, a new job in the place of the old one, cancel, drain."""
    found = run_crash_points(range(story * POINTS, story * POINTS + 5), "ladders")
    assert [each.violations for each in found if each.violations] == []
    assert sum(each.actions for each in found) >= 4, "hardly anything was decided"


@pytest.mark.thorough
def test_a_fork_at_the_crash_point_is_the_run_that_the_crash_point_is_alone() -> None:
    assert run_crash_points([POINTS + 3, POINTS + 7])[1].digest == run_one("crash-points", POINTS + 7).digest


@pytest.mark.parametrize(
    ("option", "number"), [pytest.param(*key, marks=pytest.mark.thorough if key[0] == "seeds" else ()) for key in SEEDS]
)
def test_a_defect_that_the_simulator_found_stays_mended(option: str, number: int) -> None:
    assert run_one(option, number).violations == ()


@pytest.mark.thorough
def test_a_seed_is_a_run_whatever_order_the_interpreter_gives_its_sets() -> None:
    code = "from tests.simulation.__main__ import run_one; print(run_one('crash-points', 7).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in ("1", "2")
    }
    assert len(digests) == 1


def test_an_action_that_slurm_refused_is_tried_again_after_the_cooldown() -> None:
    recipe = replace(quiet_recipe(0), cooldown_s=120.0)
    recipe.weather.script = ["refused"]
    with simulation(recipe, lambda sim: trouble(sim, graceful=False)) as sim:
        sim.run()
        history = history_of(sim)
    assert check(history) == []
    assert [run.end is not None and run.end.ok for run in history.actions] == [False, True]
    assert [(each.verdict, each.by) for each in history.decisions.values()] == [
        ("allowed", "collective_hang"),
        ("suppressed", "cooldown"),
        ("allowed", "collective_hang"),
    ]


def test_a_request_that_was_repeated_and_comes_late_does_not_hit_the_next_run() -> None:
    recipe = quiet_recipe(0)
    recipe.weather.script = ["done late", "ok"]
    with simulation(recipe, lambda sim: trouble(sim, graceful=False)) as sim:
        sim.run()
        history = history_of(sim)
    assert check(history) == []
    assert [run.end is not None and run.end.ok for run in history.actions] == [True]
    assert len(list(history.ours("requeue"))) == 1


def test_the_work_that_a_requeue_cost_is_counted_in_seconds_of_the_run_that_lost_it() -> None:
    lost: list[float] = []

    def script(sim: Simulation) -> None:
        def look() -> None:
            assert sim.life is not None and sim.life.controller is not None
            lost.append(next(iter(sim.life.controller.metrics.lost_work.collect())).samples[0].value)

        next(iter(sim.cluster.sim_jobs.values())).saves = False
        trouble(sim, graceful=False)
        sim.timeline.at(sim.recipe.until_s - 60.0, look)

    with simulation(quiet_recipe(0), script) as sim:
        sim.run()
        end = history_of(sim).actions[0].end
    assert end is not None and end.steps_lost
    assert lost[0] == pytest.approx(5.0 * end.steps_lost, rel=0.1)


# ---------------------------------------------------------------------------------------- the checker can fail


def violated(history: History) -> set[str]:
    return {each.partition(":")[0] for each in check(history)}


def story(*, graceful: bool, number: int = 0) -> tuple[Simulation, History]:
    with simulation(quiet_recipe(number), lambda sim: trouble(sim, graceful=graceful)) as sim:
        sim.run()
        return sim, history_of(sim)


@pytest.mark.parametrize("graceful", [False, True])
def test_the_two_stories_end_well_when_nothing_goes_wrong(graceful: bool) -> None:
    _, history = story(graceful=graceful)
    assert check(history) == []
    assert [run.end is not None and run.end.ok for run in history.actions] == [True]


STOPS = ("after intent requeue_hold", "before requeue_hold 1001", "before end")


def failover(stage: str, what: str = "stop") -> tuple[list[str], History]:
    """The active controller is stopped at its first `stage` for 100 s: the other one has taken over, and the job runs again."""

    def script(sim: Simulation) -> None:
        assert isinstance(sim, Pair)
        left = [stage]

        def at(now: str) -> bool:
            if now in left:
                left.remove(now)
                sim.befall(what, 100.0)
            return False

        sim.die_at = at
        trouble(sim, graceful=False)

    with simulation(replace(story_of(0), hours=0.2, calm_s=200.0), script, Pair) as sim:
        sim.run()
        assert isinstance(sim, Pair) and sim.takeovers, "nobody took over"
        history = history_of(sim)
        return check(history), history


@pytest.mark.parametrize(("stage", "what"), [*((each, "stop") for each in STOPS), (STOPS[1], "machine")])
def test_what_a_stopped_controller_goes_on_with_after_it_was_replaced_comes_to_nothing(stage: str, what: str) -> None:
    violations, history = failover(stage, what)
    assert violations == []
    assert [run.end is not None and run.end.ok for run in history.actions] == [True]
    assert len(list(history.ours("requeue"))) == 1


Break = Callable[[pytest.MonkeyPatch], None]


def no_intents(patch: pytest.MonkeyPatch) -> None:
    """Acts first, and writes afterwards."""
    intent = SimJournal.operation_intent
    outcome = SimJournal.operation_outcome
    kept: list[tuple[Any, ...]] = []

    def keep(journal: SimJournal, *args: Any) -> None:
        kept.append(args)

    def both(journal: SimJournal, *args: Any) -> None:
        intent(journal, *kept.pop())
        outcome(journal, *args)

    patch.setattr(SimJournal, "operation_intent", keep)
    patch.setattr(SimJournal, "operation_outcome", both)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A repeated request hits whatever runs under the job's number now."""

    async def unfenced(client: SimSlurm, fence: Fence, *, only_unfinished: bool) -> tuple[OperationOutcome, str]:
        for _ in range(2):
            await client.requeue_hold(fence.job_id, only_unfinished=only_unfinished)
            await client.release(fence.job_id)
            await asyncio.sleep(120)
        return OperationOutcome.DONE, "twice, to be sure"

    patch.setattr(by_slurm, "requeue_hold", unfenced)


def no_removal(patch: pytest.MonkeyPatch) -> None:
    """Says that the kill switch is gone."""

    async def forgotten(*_: object) -> tuple[OperationOutcome, str]:
        return OperationOutcome.DONE, "removed"

    patch.setattr(by_agent, "remove_kill_switch", forgotten)


def no_end(patch: pytest.MonkeyPatch) -> None:
    """An action is over, and nobody writes it down."""
    patch.setattr(SimJournal, "end_action", lambda *_: None)


def no_evidence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimEvidence, "add", lambda *_: None)


def no_warm_up(patch: pytest.MonkeyPatch) -> None:
    """A guard that does not look: it acts in the first seconds of a controller's life."""
    patch.setattr(Controller, "blind", lambda *_: None)


def healthy(patch: pytest.MonkeyPatch) -> None:
    """What is acted on has no fault in truth."""
    begin = Cluster.begin_fault

    def forgotten(cluster: Cluster, job: SimJob, kind: str) -> Fault | None:
        fault = begin(cluster, job, kind)
        cluster.truth.faults.clear()
        return fault

    patch.setattr(Cluster, "begin_fault", forgotten)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "graceful", "number", "shout"),
    [
        (no_intents, False, 0, "every_requeue_is_of_its_run_and_once"),
        (no_fence, False, 0, "every_requeue_is_of_its_run_and_once"),
        (no_removal, True, SHARED_NUMBER, "no_switch_outlives_its_run"),
        (no_end, False, 0, "nothing_is_lost"),
        (no_evidence, False, 0, "evidence_comes_first"),
        (healthy, False, 0, "no_healthy_job_is_acted_on"),
    ],
)
def test_the_checker_shouts_at_a_product_that_is_broken_on_purpose(
    monkeypatch: pytest.MonkeyPatch, how: Break, graceful: bool, number: int, shout: str
) -> None:
    how(monkeypatch)
    _, history = story(graceful=graceful, number=number)
    assert shout in violated(history)


def no_question(patch: pytest.MonkeyPatch) -> None:
    """Its own clock is all that it looks at before it changes anything."""
    patch.setattr(Lease, "confirm", Lease.is_held)


def no_epoch(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether he is still the active one, the journal included."""
    patch.setattr(Lease, "is_held", lambda _: True)
    patch.setattr(Pair, "_watch", lambda *_: None)
    patch.setattr(PairLife, "check", None)
    patch.setattr(Lease, "check", lambda *_: None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "stage", "shout"),
    [
        (no_question, "before requeue_hold 1001", "asked for requeue_hold"),
        (no_epoch, "before evidence", "wrote evidence"),
    ],
)
def test_the_checker_shouts_at_a_controller_that_goes_on_after_it_was_replaced(
    monkeypatch: pytest.MonkeyPatch, how: Break, stage: str, shout: str
) -> None:
    how(monkeypatch)
    violations, _ = failover(stage, "machine")
    assert any("a controller that was replaced" in each and shout in each for each in violations), violations


@pytest.mark.thorough
def test_the_checker_shouts_at_a_controller_that_acts_before_it_has_looked_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller dies while the job hangs, and acts as soon as it is back."""
    no_warm_up(monkeypatch)
    monkeypatch.setattr(SimJournal, "paused", lambda *_: None)

    def script(sim: Simulation) -> None:
        trouble(sim, graceful=False)
        sim.timeline.at(60.0, sim.pause)
        sim.timeline.at(TROUBLE_AT_S + 55.0, sim.kill)

    with simulation(quiet_recipe(0), script) as sim:
        sim.run()
        assert "guards_hold" in violated(history_of(sim))
