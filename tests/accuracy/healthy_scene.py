"""The scene in which a healthy thing happens: one job of many steps, and how long it is watched."""

from __future__ import annotations

from dataclasses import replace

from tests.accuracy.logs import FORMATS
from tests.accuracy.scene import Expect, Scene, Setup
from tests.accuracy.training import Plan
from tests.accuracy.world import World

NOTHING = Expect(())
H = 3600.0
SHORT_DAY_S = 6 * H


def scene_with(s: Setup, until_s: float, formats: tuple[str, ...] = tuple(FORMATS), **plan: object) -> Scene:
    """A job without other company: `plan` beyond what is drawn from the seed."""
    rng = s.rng
    name = str(plan.pop("format", rng.choice(formats)))
    given = {
        "step_s": rng.choice((30.0, 60.0, 105.0)),
        "jitter": rng.choice((0.01, 0.02, 0.03)),
        "loss_noise": rng.choice((0.003, 0.01, 0.03)),
    }
    full = Plan(nodes=s.nodes, per_node=s.per_node, format=name, **{**given, **plan})  # type: ignore[arg-type]
    if full.every == 0 and FORMATS[name].every * full.step_s > 120:
        full = replace(full, every=max(1, int(120 / full.step_s)))
    world = World(s.seed, s.nodes)
    job = world.add_job(full, 5.0, world.nodes)
    return Scene(world, job, replace(NOTHING), until_s)
