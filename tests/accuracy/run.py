"""One run: build the scene, let it be judged, score it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.replay.player import numbered_ids, replay
from tests.accuracy.cases import Case
from tests.accuracy.drive import Drive, Story, write_trace
from tests.accuracy.healthy import Thing
from tests.accuracy.scene import HANG, Scene, Setup
from tests.accuracy.score import Score, right_ones, score
from tests.accuracy.world import INTERVAL_S


def direct(scene: Scene, config: Config | None = None) -> Story:
    """The scene through state and judgement, without JSON; questions are answered. Ends some time after the verdict.

    From the fault on the looks are as frequent as in the service, later every 5 s; before it as in coarse healthy runs.
    """
    drive = Drive(scene.world, config or Config(), calm_s=COARSE_LOOKS_S)

    def done(story: Story, now: float) -> bool:
        if scene.fault_at is None or now < scene.fault_at:
            return False
        soon = now < scene.fault_at + CLOSE_S
        drive.look_every(drive.config.controller.tick if soon else INTERVAL_S, now)
        right = [i for i in right_ones(scene.expect, story.incidents.values()) if (i.fired_at or 0.0) >= scene.fault_at]
        return bool(right) and now > (right[0].fired_at or 0.0) + scene.settle_s

    return drive.run(scene.until_s, done)


def trace_lines(scene: Scene) -> Iterator[bytes]:
    """The scene as the lines of a trace v1, up to some minutes after its bound."""
    world, told = scene.world, False
    for line in write_trace(world, scene.until_s, scene):
        yield line
        if (
            scene.fault_at is not None
            and not told
            and world.now > scene.fault_at + scene.within() + scene.expect.without_stacks_s + scene.settle_s
        ):
            return


def by_trace(scene: Scene, config: Config | None = None) -> tuple[list[Incident], list[str]]:
    """The scene as text through `replay`: incidents, and what was ignored or failed."""
    file = io.BytesIO(b"".join(trace_lines(scene)))
    outcome = replay(file.read, config or Config(), numbered_ids())
    return list(outcome.incidents), [
        text for text in outcome.tally.sentences() if "defect" in text or "skipped" in text
    ]


CLOSE_S = 60.0
"""So long after a fault every tick is a look, as in the service: verdicts are due within ten seconds then."""
WITHOUT_STACKS_S = 20.0
"""Where nobody can give stacks (a plain trace), GPUs have to be seen for a while before they say who waits."""


def case_scene(case: Case, seed: int, nodes: int) -> Scene:
    """One run of a case, not begun yet."""
    return case.build(Setup(seed, nodes))


def thing_scene(thing: Thing, seed: int) -> Scene:
    """One run of a healthy thing; the seed chooses its size, too."""
    nodes, per_node = thing.sizes[seed % len(thing.sizes)]
    return thing.build(Setup(seed, nodes, per_node))


@contextmanager
def quiet() -> Iterator[None]:
    """Thousands of incidents are told to nobody; what else logs afterwards, in this process, is heard again."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


@quiet()
def run_case(case: Case, seed: int, nodes: int, way: str) -> Score:
    """One run of a case, `way` direct or trace."""
    scene, late_s = case_scene(case, seed, nodes), 0.0
    if way == "trace":
        incidents, failures = by_trace(scene)
        late_s = WITHOUT_STACKS_S if set(HANG) & set(scene.expect.kinds) else scene.expect.without_stacks_s
        scene.expect.kinds += scene.expect.without_stacks
    else:
        story = direct(scene)
        incidents, failures = list(story.incidents.values()), story.failures
        if scene.fault_at is not None:
            late_s = max((s for at, s in story.late if -s < at - scene.fault_at < scene.within()), default=0.0)
    return score(case.key, seed, nodes, way, scene, incidents, failures, late_s)


FINE_EVERY = 16
COARSE_S, COARSE_LOOKS_S = 20.0, 60.0
"""One run in sixteen has reports and looks every 5 s, as agents ship; the others every 20 and 60 s, to
simulate more hours. Whatever is not as it should be makes the looks as frequent as in the service."""


@quiet()
def run_thing(thing: Thing, seed: int, hours: float = float("inf")) -> tuple[float, list[Incident], list[str], int]:
    """One healthy run, of so many `hours` at most: simulated job-hours, what was said and is not explained,
    detectors that failed, nodes."""
    scene = thing_scene(thing, seed)
    fine = thing.fine or seed % FINE_EVERY == 0
    interval_s, calm_s = (INTERVAL_S, INTERVAL_S) if fine else (COARSE_S, COARSE_LOOKS_S)
    story = Drive(scene.world, Config(), interval_s=interval_s, calm_s=calm_s).run(min(scene.until_s, 3600.0 * hours))
    said = [i for i in story.incidents.values() if i.inhibited_by is None]
    return story.ended_at / 3600.0, said, story.failures, len(scene.world.nodes)
