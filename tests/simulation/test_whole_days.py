"""Days that a site has: nodes that fall silent, a controller or a clock or a slurmctld that stands, arrays,
jobs that end by themselves.

Nothing that is well may be touched, and what hangs is dealt with once. Each day is a script; the history
checker reads every one.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.accuracy.training import Plan
from tests.builders.thorough import first
from tests.simulation.checker import ACCUSES, check
from tests.simulation.history import History, history_of
from tests.simulation.recipe import RUN_SWITCH, Rates, Recipe
from tests.simulation.sim import Simulation, simulation

QUIET = Rates(*([0.0] * 12))
AT_S = 900.0
"""When things go wrong: long after every job's first steps."""
COARSE_TICK_S = 10.0
"""Half as many ticks, where what is tested takes minutes: a tick is most of what a simulated day costs."""
Script = Callable[[Simulation], None]


def day(nodes: int = 8, jobs: int = 3, hours: float = 1.0, **other: object) -> Recipe:
    """A quiet day of jobs of two nodes; nothing goes wrong by itself, and there is no calm at its end but
    what the script leaves."""
    recipe = Recipe(
        3, hours=hours, calm_s=0.0, nodes=nodes, jobs=jobs, interval_s=15.0, tick_s=5.0, step_s=(10.0,), sizes=(2,),
        kill_switch=RUN_SWITCH, rates=Rates(*vars(QUIET).values()), totals=(100_000,),
    )  # fmt: skip
    return replace(recipe, **other)


def run(recipe: Recipe, script: Script) -> tuple[Simulation, History]:
    with simulation(recipe, script) as sim:
        sim.run()
        return sim, history_of(sim)


def hang(sim: Simulation, number: int = 0, kind: str = "hang") -> None:
    sim.begin_fault(list(sim.cluster.sim_jobs.values())[number], kind)


def accusations(history: History) -> list[str]:
    return [each.summary for each in history.incidents.values() if each.kind in ACCUSES and each.fired_at is not None]


# ---------------------------------------------------------------------------------------- silence


def silence(sim: Simulation, share: float) -> None:
    """Six jobs of eight fail in three ways while a share of all nodes falls silent for twenty minutes."""

    def trouble() -> None:
        for number, kind in enumerate(("hang", "stopped", "storage", "hang", "stopped", "storage")):
            hang(sim, number, kind)
        names = [node.name for node in sim.cluster.nodes]
        sim.cut(frozenset(names[len(names) - round(share * len(names)) :]), 1200.0)

    sim.timeline.at(AT_S, trouble)


@pytest.mark.parametrize("percent", first(1, [24, 20, 4, 40, 100]))
def test_above_a_fifth_of_silent_nodes_nothing_is_done_and_below_no_more_than_the_budget(
    percent: int,
) -> None:
    recipe = day(nodes=25, jobs=8, hours=(AT_S + 900.0) / 3600.0, tick_s=COARSE_TICK_S, budget=3)
    _, history = run(recipe, lambda sim: silence(sim, percent / 100))
    assert check(history) == []
    assert len(history.actions) == 0 if percent > 20 else 1 <= len(history.actions) <= 3


# ---------------------------------------------------------------------------------------- what stands, and comes back


def controller_stops(sim: Simulation) -> None:
    sim.stop(60.0)


def clock_jumps(sim: Simulation) -> None:
    sim.move_clock(3600.0)


def clock_falls_back(sim: Simulation) -> None:
    sim.move_clock(-3600.0)


def slurm_goes_away(sim: Simulation) -> None:
    sim.recipe.weather.away = True

    def back() -> None:
        sim.recipe.weather.away = False

    sim.timeline.after(1800.0, back)


def half_is_cut(sim: Simulation) -> None:
    names = [node.name for node in sim.cluster.nodes]
    sim.cut(frozenset(names[: len(names) // 2]), 300.0)


def agents_restart(sim: Simulation) -> None:
    for node in sim.cluster.nodes:
        sim.restart_agent(node.name, 5.0)


def controller_dies(sim: Simulation) -> None:
    sim.kill()


TROUBLES = (
    controller_dies, half_is_cut, controller_stops, clock_jumps, clock_falls_back, slurm_goes_away, agents_restart,
)  # fmt: skip


@pytest.mark.parametrize("what", first(2, TROUBLES))
def test_whatever_stands_and_comes_back_no_healthy_job_is_touched_or_accused(what: Script) -> None:
    _, history = run(day(tick_s=COARSE_TICK_S), lambda sim: sim.timeline.at(AT_S, lambda: what(sim)))
    assert check(history) == []
    assert history.actions == []
    assert accusations(history) == []


@pytest.mark.parametrize("what", first(1, TROUBLES))
def test_a_job_that_hangs_meanwhile_is_dealt_with_once_and_no_other_one_is(what: Script) -> None:
    def script(sim: Simulation) -> None:
        sim.timeline.at(AT_S - 20.0, lambda: hang(sim))
        sim.timeline.at(AT_S, lambda: what(sim))

    _, history = run(day(hours=1.4, tick_s=COARSE_TICK_S), script)
    assert check(history) == []
    assert [run.end is not None and run.end.ok for run in history.actions] == [True]


# ---------------------------------------------------------------------------------------- jobs that end by themselves


@pytest.mark.parametrize("after_s", first(1, range(60, 200, 20)))
def test_a_job_that_ends_by_itself_in_the_middle_of_an_action_is_not_run_again(after_s: int) -> None:
    def script(sim: Simulation) -> None:
        job = next(iter(sim.cluster.sim_jobs.values()))

        def ends() -> None:
            if job.state == "RUNNING" and job.restarts == 0:
                job.end(sim.timeline.now, "COMPLETED")

        sim.timeline.at(AT_S, lambda: hang(sim))
        sim.timeline.at(AT_S + after_s, ends)

    _, history = run(day(nodes=3, jobs=1, hours=0.7), script)
    assert check(history) == []
    ended = any(deed.by == "job" and deed.what == "ends COMPLETED" for deed in history.deeds)
    requeued = len(list(history.ours("requeue")))
    assert requeued == (0 if ended else 1)


@pytest.mark.parametrize("deed", first(1, ["cancel", "requeue"]))
def test_a_job_that_somebody_ends_in_the_middle_of_an_action_stays_as_they_wanted_it(deed: str) -> None:
    for after_s in range(60, 160, 25):

        def script(sim: Simulation, after_s: int = after_s) -> None:
            job = next(iter(sim.cluster.sim_jobs.values()))
            sim.timeline.at(AT_S, lambda: hang(sim))
            sim.timeline.at(AT_S + after_s, lambda: sim.people(deed, job))

        _, history = run(day(nodes=3, jobs=1, hours=0.7), script)
        assert check(history) == [], after_s


# ---------------------------------------------------------------------------------------- arrays


def array(sim: Simulation) -> None:
    """Four elements, one at once; the third one hangs."""
    for job in list(sim.cluster.jobs):
        sim.people("cancel", job)  # type: ignore[arg-type]
    plan = Plan(
        nodes=2,
        per_node=1,
        format="megatron",
        step_s=5.0,
        jitter=0.02,
        start_s=30.0,
        save_every=20,
        save_s=10.0,
        total=60,
        name="a",
    )
    elements = sim.cluster.new_array(plan, 4, 1)
    third = elements[2]

    def hang_third() -> None:
        if third.state == "RUNNING" and third.doing == "step" and len(third.told_at) > 25:
            sim.begin_fault(third, "hang")
        else:
            sim.timeline.after(5.0, hang_third)

    sim.timeline.after(5.0, hang_third)


def test_an_element_of_an_array_with_a_limit_is_restarted_and_no_other_one_is_touched() -> None:
    sim, history = run(day(nodes=4, jobs=1, hours=1.5), array)
    assert check(history) == []
    requeued = [(deed.job_id, deed.restarts) for deed in history.ours("requeue")]
    array_id = next(job.array for job in sim.cluster.sim_jobs.values() if job.array)
    assert requeued == [(f"{array_id}_3", 0)]
    ended = [deed.job_id for deed in history.deeds if deed.by == "job" and deed.what == "ends COMPLETED"]
    assert sorted(ended) == [f"{array_id}_{task}" for task in (1, 2, 3, 4)]
    running: set[str] = set()
    for deed in history.deeds:
        if deed.what == "start":
            running.add(deed.job_id)
            assert len({each for each in running if each.startswith(array_id)}) <= 1
        elif deed.what.startswith(("ends ", "requeue")):
            running.discard(deed.job_id)
    assert [run.end is not None and run.end.ok for run in history.actions] == [True]


# ---------------------------------------------------------------------------------------- memory


def objects(root: object) -> int:
    """How many objects are reachable from it, classes, functions, modules and whatever belongs to the
    simulation left out."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(
            each, (type, types.ModuleType, types.FunctionType, types.CodeType, Simulation)
        ):
            continue
        seen.add(id(each))
        if not type(each).__module__.startswith(("tests.", "sqlalchemy", "asyncio", "_asyncio", "prometheus_client")):
            stack.extend(gc.get_referents(each))
    return len(seen)


@pytest.mark.thorough
def test_days_of_jobs_that_come_and_go_do_not_make_the_controller_grow() -> None:
    counts: list[int] = []

    def script(sim: Simulation) -> None:
        def renew() -> None:
            if sum(job.over_at is None for job in sim.cluster.sim_jobs.values()) < sim.recipe.jobs:
                sim.submit()
            sim.timeline.after(120.0, renew)

        def look() -> None:
            if sim.life is None or sim.life.controller is None:
                return  # the day is over
            c = sim.life.controller
            counts.append(
                sum(
                    objects(part)
                    for part in (c.state, c.judge, c.commands, c.evidence, c.collector, c.decider._earlier)
                )
            )
            sim.timeline.after(1800.0, look)

        renew()
        for hour in range(1, 12, 2):
            sim.timeline.at(3600.0 * hour, lambda: hang(sim, -1))
        sim.timeline.at(7200.0, look)

    recipe = day(nodes=5, jobs=2, hours=12.0, interval_s=60.0, tick_s=60.0, totals=(60, 90))
    sim, history = run(recipe, script)
    assert check(history) == []
    assert len(sim.cluster.sim_jobs) > 40
    half = len(counts) // 2
    assert max(counts[half:]) < 1.3 * max(counts[:half])
