"""One action, begun a few minutes after the start, and a controller that dies at any write of its journal while Slurm answers as it likes.

Two stories: a job that hangs and is requeued, and a restart that an operator asks for, by kill switch. A number is a crash point.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.recipe import RUN_SWITCH, SHARED_SWITCH, Rates, Recipe
from tests.simulation.sim import Simulation

FATES = ("ok", "done and lost", "lost", "refused", "done late")
"""What Slurm does with a request."""
TROUBLE_AT_S = 150.0


def quiet_recipe(number: int) -> Recipe:
    """Two jobs of two ranks (one alone waits for nobody, and is no hang to act on), nothing that goes wrong by itself, half an hour."""
    rng = random.Random(f"crash point {number}")
    return Recipe(
        number, hours=0.5, calm_s=1000.0, nodes=5, jobs=2, interval_s=10.0, tick_s=5.0, step_s=(5.0,), sizes=(2,),
        kill_switch=rng.choice((RUN_SWITCH, SHARED_SWITCH)), rates=Rates(*([0.0] * 12)), restart_after_s=(0.5, 60.0),
    )  # fmt: skip


def trouble(sim: Simulation, *, graceful: bool) -> None:
    """At TROUBLE_AT_S a job hangs, or somebody wants it elsewhere."""
    job = next(iter(sim.cluster.sim_jobs.values()))
    job.listens = True

    def hang() -> None:
        """In a step: in a checkpoint that the log tells of a job may take half an hour."""
        sim.cluster.catch_up()
        if job.doing == "step":
            sim.begin_fault(job, "hang")
        else:
            sim.timeline.after(5.0, hang)

    sim.timeline.at(TROUBLE_AT_S, (lambda: sim.ask_restart(job)) if graceful else hang)


def crash_point(number: int) -> tuple[Recipe, Callable[[Simulation], None]]:
    """The recipe and the script of one crash point: up to three deaths, each at a write drawn from all of an action's, and Slurm's
    answers to the first requests."""
    rng = random.Random(f"crash point script {number}")
    deaths = {rng.randrange(1, 32) for _ in range(rng.choice((1, 1, 2, 3)))}
    fates = [rng.choice(FATES) for _ in range(rng.randrange(5))]
    graceful = number % 2 == 1
    recipe = quiet_recipe(number)

    def script(sim: Simulation) -> None:
        count = 0

        def dies(stage: str) -> bool:
            nonlocal count
            count += 1
            return count in deaths and sim.stormy

        sim.die_at = dies
        sim.recipe.weather.script = fates
        trouble(sim, graceful=graceful)

    return recipe, script
