"""One seed, one run: a cluster, its people and its faults on a timeline, and the real controller in the middle."""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import sqlalchemy as sa

from slurm_watchdog.base import clock
from slurm_watchdog.journal.journal import JournalError
from slurm_watchdog.model.actions import Action, Decision, Verdict
from slurm_watchdog.notify.dispatcher import Channel
from tests.accuracy.training import Plan
from tests.simulation.agents import Agent
from tests.simulation.cluster import FORMS, Cluster, SimJob
from tests.simulation.controller import Life
from tests.simulation.recipe import Recipe
from tests.simulation.storm import storm
from tests.simulation.timeline import Timeline

SCHEDULE_EVERY_S = 5.0


@dataclass
class Circumstances:
    """What was true when a decision was written."""

    at: float
    started: float
    seeing_from: float
    slurm_age_s: float
    nodes_silent: int
    nodes_known: int
    paused: bool
    clock_moved_at: float


@dataclass
class Simulation:
    """The run of one recipe; `run` it once, then look at `cluster.truth` and at the journal at `url`."""

    recipe: Recipe
    directory: Path
    script: Callable[[Simulation], None] | None = None
    """In the place of what is drawn from the seed: puts its own events on the timeline."""
    circumstances: dict[str, Circumstances] = field(default_factory=dict)
    listeners: list[Channel] = field(default_factory=list)
    """Who gets every message, besides the people that nobody reads."""
    complaints: list[str] = field(default_factory=list)
    """What the product's own boundaries caught: a tick, a poll or a detector that raised."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.rng = random.Random(f"run {recipe.seed}")
        self.timeline = Timeline()
        self.cluster = Cluster(recipe.seed, recipe.nodes, self.timeline, recipe.kill_switch)
        self.config = recipe.config()
        self.url = f"sqlite:///{self.directory / 'journal.sqlite'}"
        self.life: Life | None = None
        self.lives = 0
        self.journal_full = False
        self.paused = False
        self.clock_moved_at = float("-inf")
        self.monotonic_zero = 5000.0
        self.die_at: Callable[[str], bool] | None = None
        self.open_actions: set[str] = set()
        """Decisions that were allowed and have no end yet."""
        self.agents = {
            node.name: Agent(node, self.cluster, recipe.network, random.Random(f"{recipe.seed} {node.name}"),
                             recipe.interval_s, self._post)
            for node in self.cluster.nodes
        }  # fmt: skip
        for _ in range(recipe.jobs):
            self.submit()
        self._schedule()

    # ------------------------------------------------------------------------------------ running

    @property
    def stormy(self) -> bool:
        """Whether things may still go wrong."""
        return self.timeline.now < self.recipe.until_s - self.recipe.calm_s

    def run(self) -> None:
        """To the end of the recipe's hours."""
        with _simulated(self):
            self.timeline.at(self.recipe.until_s - self.recipe.calm_s, self._calm)
            self.timeline.at(self.recipe.until_s, self._end)
            if self.recipe.settled_s is not None:
                self._look_whether_settled(None)
            (self.script or storm)(self)
            self._live()

    def _live(self) -> None:
        """One controller, life after life."""
        while self.timeline.now < self.recipe.until_s:
            self.lives += 1
            if self.rng.random() < 0.5:
                self.monotonic_zero = self.rng.uniform(0, 1e6) - self.timeline.now
            self.life = Life(self)
            self.cluster.deed("us", "controller starts")
            self.life.run()
            self.life = None
            away_s = self.rng.uniform(*self.recipe.restart_after_s)
            self.timeline.advance(min(self.recipe.until_s, self.timeline.now + away_s))

    def monotonic(self) -> float:
        """The controller's clock."""
        return self.timeline.now + self.monotonic_zero

    # ------------------------------------------------------------------------------------ across a fork

    def let_go(self) -> None:
        """Closes what can't be carried across."""
        assert self.life is not None and self.life.journal is not None
        self.life.journal.let_go()

    def go_on_at(self, url: str) -> None:
        """With another file."""
        assert self.life is not None and self.life.journal is not None
        self.url = url
        self.life.journal.go_on_at(url)

    def reseed(self, name: str) -> None:
        """From here on chance is another one's."""
        self.rng = random.Random(f"run {name}")
        self.cluster.rng = random.Random(f"cluster {name}")
        for node, agent in self.agents.items():
            agent.rng = random.Random(f"{name} {node}")
        if self.life is not None:
            self.life.reseed(f"life {name}")

    def _look_whether_settled(self, since: float | None) -> None:
        """Ends the run when something was done, everything that was begun has come to its end, and nothing
        has happened since."""
        settled, now = self.recipe.settled_s, self.timeline.now
        assert settled is not None
        if any(fault.ended is None for fault in self.cluster.truth.faults):
            settled += self.recipe.cooldown_s  # an action that failed may be tried again
        good = self.circumstances and not self.open_actions and self.life is not None and not self.life.dead
        since = (now if since is None else since) if good else None
        if since is not None and now - since >= settled:
            self.recipe.hours = now / 3600.0
            self._end()
        elif now < self.recipe.until_s:
            self.timeline.after(10.0, lambda: self._look_whether_settled(since))

    def _end(self) -> None:
        for node, path in self.cluster.switches:
            self.cluster.deed("fault", "switch left", detail=f"{node} {path}")
        if self.life is not None:
            self.life.loop.kill()

    def _calm(self) -> None:
        """From here on nothing goes wrong any more."""
        weather, network = self.recipe.weather, self.recipe.network
        weather.lost = weather.done_and_lost = weather.done_late = weather.refused = 0.0
        weather.away, weather.script = False, None
        network.lost = network.late = network.twice = 0.0
        network.cut = frozenset()
        self.cluster.down.clear()
        self.journal_full = False
        for agent in self.agents.values():
            agent.start(self.rng.random())
        self.unpause()

    def _schedule(self) -> None:
        self.cluster.schedule()
        self.timeline.after(SCHEDULE_EVERY_S, self._schedule)

    def _post(self, node: str, body: bytes, answer: Callable[[bytes | None], None]) -> bool:
        if self.life is None or self.life.dead:
            return False
        self.life.receive(node, body, answer)
        return True

    def submit(self) -> SimJob:
        rng = self.rng
        plan = Plan(
            nodes=rng.choice(self.recipe.sizes),
            per_node=1,
            format=rng.choice(FORMS),
            step_s=rng.choice(self.recipe.step_s),
            jitter=0.02,
            start_s=30.0,
            save_every=rng.choice((20, 40)),
            save_s=rng.choice((10.0, 30.0)),
            total=rng.choice(self.recipe.totals),
            name=f"j{rng.randrange(10**6)}",
        )
        return self.cluster.new_job(plan)

    # ------------------------------------------------------------------------------------ the record

    @property
    def job_hours(self) -> float:
        """Time that jobs ran, in hours."""
        total, since = 0.0, dict[str, float]()
        for deed in self.cluster.truth.deeds:
            if deed.what == "start":
                since[deed.job_id] = deed.t
            elif deed.what == "requeue" or (deed.by == "job" and deed.what.startswith("ends ")):
                total += deed.t - since.pop(deed.job_id, deed.t)
        return (total + sum(self.timeline.now - t for t in since.values())) / 3600.0

    def dies_at(self, stage: str) -> bool:
        if self.die_at is not None:
            return self.die_at(stage)
        return self.stormy and self.rng.random() < self.recipe.kill_at_writes

    def note_open(self, decision: Decision) -> None:
        """A decision is in the journal."""
        if decision.verdict is Verdict.ALLOWED and decision.action is not Action.NONE:
            self.open_actions.add(decision.id)

    def note_circumstances(self, decision: Decision) -> None:
        """A decision is about to be written: the controller may die as soon as it is."""
        assert self.life is not None
        now, life = self.timeline.now, self.life
        silent_after_s = self.config.controller.agent_silent_after
        self.circumstances[decision.id] = Circumstances(
            at=now,
            started=life.started,
            seeing_from=life.seeing_from,
            slurm_age_s=now - life.slurm.answered_at,
            nodes_silent=sum(now - heard > silent_after_s for heard in life.heard.values()),
            nodes_known=len(life.heard),
            paused=self.paused,
            clock_moved_at=self.clock_moved_at,
        )

    def digest(self) -> str:
        """Of everything that happened and of every row of the journal."""
        found = hashlib.sha256()
        for deed in self.cluster.truth.deeds:
            found.update(deed.line().encode() + b"\n")
        engine = sa.create_engine(self.url)
        with engine.connect() as sql:
            for table in sorted(sa.inspect(engine).get_table_names()):
                for row in sql.execute(sa.text(f"select * from {table} order by 1")):
                    found.update(repr(tuple(row)).encode() + b"\n")
        engine.dispose()
        return found.hexdigest()

    # ------------------------------------------------------------------------------------ what goes wrong

    def kill(self, waits: int = 0) -> None:
        """The controller dies now, or after so many turns of its loop."""
        if self.life is not None and not self.life.dead:
            self.cluster.deed("fault", f"controller is killed after {waits}")
            if waits:
                self.life.loop.kill_after(waits)
            else:
                self.life.loop.kill()

    def stop(self, seconds: float) -> None:
        if self.life is not None:
            self.cluster.deed("fault", f"controller stopped for {seconds:.0f} s")
            self.life.freeze(seconds)

    def move_clock(self, seconds: float) -> None:
        self.cluster.clock_offset_s += seconds
        self.clock_moved_at = self.timeline.now
        self.cluster.deed("fault", f"clock moved by {seconds:.0f} s")

    def cut(self, names: frozenset[str], seconds: float) -> None:
        network = self.recipe.network
        network.cut |= names
        self.cluster.deed("fault", f"cut {','.join(sorted(names))}")

        def mend() -> None:
            network.cut -= names
            self.cluster.deed("fault", f"mended {','.join(sorted(names))}")

        self.timeline.after(seconds, mend)

    def restart_agent(self, name: str, after_s: float) -> None:
        self.agents[name].kill()
        self.agents[name].start(after_s)
        self.cluster.deed("fault", f"agent of {name} dies for {after_s:.0f} s")

    def node_fails(self, name: str, seconds: float) -> None:
        """The node is gone: Slurm requeues its job."""
        self.cluster.down.add(name)
        self.agents[name].kill()
        for job in list(self.cluster.sim_jobs.values()):
            if job.state == "RUNNING" and any(node.name == name for node in job.nodes):
                self.cluster.catch_up()
                if job.state == "RUNNING":
                    self.cluster.requeue(job, "slurm", held=False)

        def back() -> None:
            self.cluster.down.discard(name)
            self.agents[name].start(30.0)

        self.timeline.after(seconds, back)

    def begin_fault(self, job: SimJob, kind: str, heals_after_s: float | None = None) -> None:
        fault = self.cluster.begin_fault(job, kind)
        if fault is not None and heals_after_s is not None:
            restarts = job.restarts

            def heal() -> None:
                if job.restarts == restarts:
                    self.cluster.heal(job)

            self.timeline.after(heals_after_s, heal)

    # ------------------------------------------------------------------------------------ people

    def people(self, deed: str, job: SimJob) -> None:
        self.cluster.catch_up()
        waiting = job.state == "PENDING" or (job.state == "COMPLETING" and job.next_state == "PENDING")
        if deed == "cancel" and job.state == "RUNNING":
            self.cluster.stop(job, "CANCELLED", "person")
        elif deed == "cancel" and waiting:
            job.state, job.over_at = "CANCELLED", self.timeline.now
            self.cluster.deed("person", "cancel", job)
        elif deed == "requeue" and job.state == "RUNNING":
            self.cluster.requeue(job, "person", held=self.rng.random() < 0.3)
        elif deed == "hold" and waiting:
            job.held_by = job.held_by or "person"
            self.cluster.deed("person", "hold", job)
        elif deed == "release" and waiting and job.held_by is not None:
            job.held_by = None
            self.cluster.deed("person", "release", job)

    def ask_restart(self, job: SimJob) -> None:
        """An operator's command, as the local socket hands it over."""
        life = self.life
        if life is None or life.dead or life.controller is None:
            return
        controller = life.controller

        def ask() -> None:
            known = controller.state.jobs.get(job.slurm_id)
            if known is None:
                return
            exclude = tuple(known.nodes[:1]) if self.rng.random() < 0.7 else ()
            try:
                controller.decider.ask_restart(known, exclude, "the simulation asks", "root")
            except JournalError:
                pass

        life.loop.call_soon(ask)

    def pause(self) -> None:
        def pause() -> None:
            assert self.life is not None and self.life.journal is not None
            try:
                self.life.journal.pause("the simulation asks", "root", clock.wall())
            except JournalError:
                return
            self.paused = True
            self.cluster.deed("person", "pause")

        if self.life is not None and self.life.controller is not None and not self.life.dead:
            self.life.loop.call_soon(pause)

    def unpause(self) -> None:
        """Until it is done: somebody remembers."""

        def resume() -> None:
            assert self.life is not None and self.life.journal is not None
            try:
                self.life.journal.resume("root", clock.wall())
            except JournalError:
                return
            self.paused = False
            self.cluster.deed("person", "resume")

        if self.life is not None and self.life.controller is not None and not self.life.dead:
            self.life.loop.call_soon(resume)
        self.timeline.after(30.0, lambda: self.unpause() if self.paused else None)


# ---------------------------------------------------------------------------------------- a bad day


# ---------------------------------------------------------------------------------------- the edges of the simulation


class _Complaints(logging.Handler):
    def __init__(self, sim: Simulation):
        super().__init__(logging.ERROR)
        self._sim = sim

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            if not isinstance(error, JournalError):
                text = f"{record.getMessage()}: {type(error).__name__}: {error}"
                self._sim.complaints.append(f"{self._sim.timeline.now:.0f}: {text}")


@contextmanager
def _simulated(sim: Simulation) -> Iterator[None]:
    """Inside it clocks, random names and the log belong to the simulation."""
    names = random.Random(f"names {sim.recipe.seed}")
    before = uuid.uuid4
    handler = _Complaints(sim)
    loggers = [logging.getLogger("slurm_watchdog"), logging.getLogger("asyncio")]
    levels = [(each, each.level, each.propagate) for each in loggers]
    for each in loggers:
        each.addHandler(handler)
        each.setLevel(logging.ERROR)
        each.propagate = False
    uuid.uuid4 = lambda: uuid.UUID(int=names.getrandbits(128), version=4)
    try:
        with (
            warnings.catch_warnings(),
            clock.simulated(sim.monotonic, sim.cluster.wall),
        ):
            # Of a controller that is killed between two awaits.
            warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
            yield
    finally:
        uuid.uuid4 = before
        for each, level, propagate in levels:
            each.removeHandler(handler)
            each.setLevel(level)
            each.propagate = propagate


@contextmanager
def simulation(
    recipe: Recipe,
    script: Callable[[Simulation], None] | None = None,
    world: type[Simulation] = Simulation,
) -> Iterator[Simulation]:
    """A simulation in a directory of its own, in memory where there is a place for that."""
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="simulated-", dir=memory if memory.is_dir() else None))
    try:
        yield world(replace(recipe), directory, script)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
