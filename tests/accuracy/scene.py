"""What a case is made of: a world, one job in it that something happens to, and what is expected of the watchdog."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tests.accuracy.logs import FORMATS
from tests.accuracy.looks import Look
from tests.accuracy.training import Job, Node, Plan, Rank
from tests.accuracy.world import World

TIMED_FORMATS = ("bloom", "megatron", "nemo", "nemo2", "maxtext", "json", "hf", "nanogpt")
"""Those that say how long their steps took."""
REPORT_S = 10.0
"""A fault is seen with the next report, and judged with the next tick: the bound of the issue beyond a
detector's own limit."""

HANG = ("collective_hang", "stalled_progress")


@dataclass
class Expect:
    """What has to be found, who has to be named, and how soon after the fault."""

    kinds: tuple[str, ...]
    """One of them has to fire and to stand for itself. Empty: nothing may fire."""
    nodes: frozenset[str] | None = None
    """Exactly these are named; None: not asked."""
    ranks: frozenset[int] | None = None
    gpu: str | None = None
    mount: str | None = None
    nobody: bool = False
    """Nobody may be named."""
    exclude_nobody: bool = False
    """No node may be excluded."""
    also: tuple[str, ...] = ()
    """Kinds that may stand beside it: the same fault under another true name."""
    within_s: float | Callable[[], float] = 80.0
    first_only: bool = False
    """Only the first culprit is compared: the others are consequences that are named, too."""


@dataclass
class Scene:
    """One run of one case."""

    world: World
    job: Job
    expect: Expect
    until_s: float
    fault_at: float | None = None
    fault_node: str | None = None
    settle_s: float = 150.0
    """So long after the verdict it is looked on: what else is said?"""

    def fault(self, t: float, node: str | None = None) -> None:
        """It begins now."""
        self.fault_at, self.fault_node = t, node

    def within(self) -> float:
        bound = self.expect.within_s
        return bound() if callable(bound) else bound


@dataclass
class Setup:
    """Seed and size, and what builders of cases need."""

    seed: int
    nodes: int
    per_node: int = 8
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}/{self.nodes}")

    @property
    def ranks(self) -> int:
        return 8 * self.nodes

    def scene(self, expect: Expect, formats: tuple[str, ...] = tuple(FORMATS), **plan: object) -> Scene:
        """A job on `nodes` nodes, a small other job on one node more, and a node without any."""
        rng = self.rng
        name = str(plan.pop("format", rng.choice(formats)))
        given = {
            "step_s": 10.0 if self.nodes > 8 else rng.choice((3.0, 6.0, 10.0, 15.0)),
            "jitter": rng.choice((0.01, 0.02, 0.03)),
        }
        full = Plan(nodes=self.nodes, format=name, **{**given, **plan})  # type: ignore[arg-type]
        if full.every == 0 and FORMATS[name].every * full.step_s > 60:
            full = replace(full, every=max(1, int(60 / full.step_s)))
        world = World(self.seed, self.nodes + 2)
        job = world.add_job(full, 5.0, world.nodes[: self.nodes])
        other = Plan(nodes=1, per_node=2, format="json", step_s=7.0, name="other", user="b")
        world.add_job(other, 0.0, [world.nodes[self.nodes]])
        return Scene(world, job, expect, until_s=self.warm_s(full) + 2400.0)

    def warm_s(self, plan: Plan, lines: int = 14) -> float:
        """The moment by which a job has told so many steps."""
        every = plan.every or FORMATS[plan.format].every
        return 5.0 + plan.start_s + plan.prepare_s + plan.compile_s + lines * every * plan.step_s

    def some_rank(self, job: Job) -> Rank:
        return job.ranks[self.rng.randrange(len(job.ranks))]


def hang_bound(job: Job) -> Callable[[], float]:
    """max(60 s, 3 x slowest recent step) + 10 s, as the issue has it."""

    def bound() -> float:
        told = job.told_at[-51:]
        slowest_s = max((b - a for a, b in pairwise(told)), default=0.0)
        return max(60.0, 3.0 * slowest_s) + REPORT_S

    return bound


def node_of(scene: Scene, rank: Rank) -> Node:
    return next(node for node in scene.world.nodes if node.name == rank.node)


def hang(scene: Scene, setup: Setup, at: float, others: Look, culprit: Look, number: int | None = None) -> None:
    """At `at` one rank stays out of the collective in which the others wait, and never enters it."""

    def begin(t: float) -> None:
        rank = setup.some_rank(scene.job) if number is None else scene.job.ranks[number]
        scene.job.freeze(t, others, {rank.number: culprit})
        scene.expect.nodes, scene.expect.ranks = frozenset({rank.node}), frozenset({rank.number})
        scene.fault(t, rank.node)

    scene.world.at(at, begin)


def hang_in(scene: Scene, setup: Setup, doing: str, after: float, others: Look, culprit: Look) -> None:
    """The same, some seconds into the next evaluation, checkpoint, …"""

    def begins(span: object, t: float) -> None:
        if scene.job.doing == doing and t >= after:
            scene.job.on_begin = None
            hang(scene, setup, t + 4.0, others, culprit)

    scene.job.on_begin = begins
