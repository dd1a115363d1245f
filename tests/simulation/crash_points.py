"""One action, begun a few minutes after the start, and a controller that dies at any write of its journal
while Slurm answers as it likes.

Stories, turn about: a job that hangs and is requeued, and a restart that an operator asks for, by kill
switch; of searches, one in free mode and one that restarts the job itself. A number is a crash point. `POINTS` numbers in a row share a story up to the first write about it,
where each goes its own way: so they can be run as forks of one process (see forks.py), and each alone is the
same run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.simulation.pair import Pair
from tests.simulation.recipe import NODE_SWITCH, RUN_SWITCH, SHARED_SWITCH, Rates, Recipe
from tests.simulation.sim import Simulation

FATES = ("ok", "done and lost", "lost", "refused", "done late")
"""What Slurm does with a request."""
TROUBLE_AT_S = 150.0
POINTS = 50
"""Crash points of one story."""
WRITES = 32
"""Deaths are drawn from so many writes: most actions are over after fewer."""
SETTLED_S = 90.0
"""So long after everything has come to its end a run is over: a request that was lost is done up to 50 s
later, if it is done at all."""

Script = Callable[[Simulation], None]


def quiet_recipe(number: int) -> Recipe:
    """Two jobs of two ranks (one alone waits for nobody, and is no hang to act on), nothing that goes wrong
    by itself, half an hour."""
    rng = random.Random(f"crash point {number}")
    return Recipe(
        number, hours=0.5, calm_s=1000.0, nodes=5, jobs=2, interval_s=10.0, tick_s=5.0, step_s=(5.0,), sizes=(2,),
        kill_switch=rng.choice((RUN_SWITCH, SHARED_SWITCH)), rates=Rates(*([0.0] * 12)), restart_after_s=(0.5, 60.0),
    )  # fmt: skip


def story_of(story: int) -> Recipe:
    """The recipe that the crash points of one story share. Mostly there is one job alone: a second one is
    there to be left alone."""
    recipe, rng = quiet_recipe(story), random.Random(f"story {story}")
    if rng.random() < 0.75:
        recipe.jobs, recipe.nodes = 1, 3
    recipe.interval_s, recipe.tick_s = rng.choice(((10.0, 5.0), (15.0, 10.0), (15.0, 10.0)))
    recipe.cooldown_s = 120.0
    recipe.settled_s = SETTLED_S
    return recipe


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


class Branch:
    """What is special about one crash point, from the first write about its trouble on: up to three deaths,
    each at a write drawn from all of an action's or a moment after it, and Slurm's answers to the first
    requests."""

    def __init__(self, number: int, writes: int = WRITES):
        rng = random.Random(f"crash point script {number}")
        self.number = number
        self.deaths = {
            rng.randrange(1, writes): rng.choice((0, 0, 0, rng.randrange(1, 12)))
            for _ in range(rng.choice((1, 1, 2, 3)))
        }
        self.fates = [rng.choice(FATES) for _ in range(rng.randrange(5))]
        self.count = 0

    def take(self, sim: Simulation) -> None:
        """From here on the run is this crash point's."""
        sim.reseed(f"crash point {self.number}")
        sim.recipe.weather.script = list(self.fates)
        sim.die_at = lambda stage: self.dies(sim)

    def dies(self, sim: Simulation) -> bool:
        """Whether the controller dies at this write; some deaths come a few turns of its loop later."""
        self.count += 1
        turns = self.deaths.get(self.count)
        if turns is None or not sim.stormy:
            return False
        if turns:
            sim.kill(turns)
        return not turns


class CycleBranch(Branch):
    """One cycle of a kill switch: beside the deaths, half of the time something befalls the nodes that have
    it, or may have it."""

    def take(self, sim: Simulation) -> None:
        super().take(sim)
        rng = random.Random(f"cycle {self.number}")
        nodes = [node.name for job in sim.cluster.sim_jobs.values() for node in job.nodes]
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            node, at_s = rng.choice(nodes), rng.choice((rng.uniform(0, 20), rng.uniform(0, 150)))
            what = rng.choice(("cut", "cut", "agent"))
            if what == "cut":
                sim.timeline.after(at_s, partial(sim.cut, frozenset({node}), rng.choice((5.0, 30.0, 120.0, 400.0))))
            else:
                sim.timeline.after(at_s, partial(sim.restart_agent, node, rng.choice((1.0, 30.0, 200.0))))


def cycle_of(story: int) -> Recipe:
    """The recipe of the cycles of one story: always a restart that is asked for, the switch wherever a site
    may want it."""
    recipe = story_of(story)
    recipe.kill_switch = (RUN_SWITCH, SHARED_SWITCH, NODE_SWITCH)[story % 3]
    return recipe


FAILOVERS = ("kill", "kill", "kill", "stop", "stop", "stop", "freeze", "machine", "cut", "end")
"""What befalls an active controller: see Pair.befall."""
STAGES = 48
"""As WRITES, with the requests to Slurm."""


class PairBranch(Branch):
    """One action and two controllers: each that is the active one may die, be stopped or cut off at a write of the
    journal, before a request to Slurm or a moment after it, and somebody may pause everything meanwhile."""

    def __init__(self, number: int):
        super().__init__(number)
        rng = random.Random(f"failover {number}")
        self.befalls = {
            rng.randrange(1, STAGES): (rng.choice(FAILOVERS), rng.choice((0.0, 0.0, rng.uniform(0, 5))))
            for _ in range(rng.choice((1, 1, 2, 3)))
        }
        self.pause_after_s = rng.choice((None, None, rng.uniform(0, 120)))
        self.paused_s = rng.uniform(20, 200)

    def take(self, sim: Simulation) -> None:
        super().take(sim)
        if self.pause_after_s is not None:
            self.pause(sim, self.pause_after_s)

    def pause(self, sim: Simulation, after_s: float) -> None:
        """Until it is done: who asks tries again where nobody answers."""

        def again() -> None:
            if sim.stormy and not sim.paused:
                sim.pause()
                self.pause(sim, 5.0)
            elif sim.paused:
                sim.timeline.after(self.paused_s, sim.unpause)

        sim.timeline.after(after_s, again)

    def dies(self, sim: Simulation) -> bool:
        self.count += 1
        what, after_s = self.befalls.get(self.count, ("", 0.0))
        if not what or not sim.stormy:
            return False
        assert isinstance(sim, Pair)
        seconds = sim.rng.choice((2.0, 5.0, 8.0, 15.0, 60.0, 240.0))
        if after_s:
            later = sim.kill if what == "kill" else partial(sim.befall, what, seconds)
            if what in ("stop", "machine"):  # from within the loop: between two awaits
                later = partial(sim.befall, "freeze", seconds)
            sim.timeline.after(after_s, later)
        elif what != "kill":
            sim.befall(what, seconds)
        return what == "kill" and not after_s


LADDERS: tuple[dict[str, object], ...] = (
    {"ladder": ["evidence", "sigusr1", "sigterm", "requeue"], "signal_limit": "60s"},
    {
        "ladder": ["evidence", "sigterm", "requeue"],
        "drain": True,
        "exclude_nodes": True,
        "signal_limit": "60s",
    },
    {"ladder": ["evidence", "resubmit"]},
    {"ladder": ["evidence", "requeue", "resubmit", "cancel"], "exclude_nodes": True},
    {"ladder": ["evidence", "cancel"]},
    {"ladder": ["evidence", "sigusr1", "sigterm", "resubmit", "cancel"], "signal_limit": "60s"},
)
"""What a site may want to be done about a hang."""
HANGS = ("collective_hang", "rank_stopped", "lingering_job", "filesystem_stall")


def ladder_of(story: int) -> Recipe:
    """The recipe of the crash points of a hang with one of the ladders."""
    recipe = story_of(story)
    recipe.kinds = {kind: LADDERS[story % len(LADDERS)] for kind in HANGS}
    recipe.nodes += 2
    return recipe


def crash_point(number: int, option: str = "crash-points", part: Script | None = None) -> tuple[Recipe, Script]:
    """The recipe and the script of one crash point, or of one cycle of a kill switch. `part`, where given, is
    called at the first write in the place of what is special about the number."""
    story = number // POINTS
    recipe = {"cycles": cycle_of, "ladders": ladder_of}.get(option, story_of)(story)
    own = branch_of(number, option)

    def script(sim: Simulation) -> None:
        def first(stage: str) -> bool:
            (part or own.take)(sim)
            assert sim.die_at is not None
            return sim.die_at(stage)

        sim.die_at = first
        trouble(sim, graceful=option == "cycles" or (option != "ladders" and story % 2 == 1))

    return recipe, script


def branch_of(number: int, option: str) -> Branch:
    kinds = {"cycles": CycleBranch, "failovers": PairBranch}
    return kinds.get(option, Branch)(number)


def world_of(option: str) -> type[Simulation]:
    """With one controller or two."""
    return Pair if option == "failovers" else Simulation
