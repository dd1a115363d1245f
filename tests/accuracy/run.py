"""One run: build the scene, let it be judged, score it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import NamedTemporaryFile

from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.recording.recorder import Recorder
from slurm_watchdog.replay.player import replay
from tests.accuracy.cases import Case
from tests.accuracy.drive import Drive, Story, seldom
from tests.accuracy.healthy import Thing
from tests.accuracy.scene import Scene, Setup
from tests.accuracy.score import Score, right_ones, score
from tests.accuracy.world import INTERVAL_S


def direct(scene: Scene, recorder: Recorder | None = None) -> Story:
    """The scene through a controller; questions are answered. Ends some time after the verdict.

    From the fault on the looks are as frequent as in the service, later every 5 s; before it as in coarse healthy runs.
    """
    drive = Drive(scene.world, Config(), calm_s=COARSE_LOOKS_S, recorder=recorder)

    def done(story: Story, now: float) -> bool:
        if scene.fault_at is None or now < scene.fault_at:
            return False
        soon = now < scene.fault_at + CLOSE_S
        drive.look_every(drive.config.controller.tick if soon else INTERVAL_S, now)
        right = [i for i in right_ones(scene.expect, story.incidents.values()) if (i.fired_at or 0.0) >= scene.fault_at]
        return bool(right) and now > (right[0].fired_at or 0.0) + scene.settle_s

    return drive.run(scene.until_s, done)


def by_replay(scene: Scene) -> tuple[list[Incident], list[str]]:
    """The scene recorded and replayed: incidents, and what was skipped, or was otherwise when it was recorded."""
    with NamedTemporaryFile() as file:
        recorder = Recorder(file.name, max_waiting=0)
        story = direct(scene, recorder=recorder)
        recorder.close()
        outcome = replay(file.readline, seldom(Config(), COARSE_LOOKS_S))
    found = [each for each in outcome.incidents if each.fired_at is not None]
    lived, played = ([(i.kind, i.fired_at, i.culprits) for i in each] for each in (story.incidents.values(), found))
    wrong = [*outcome.tally.skipped, *outcome.differs, *(f"{each} in one alone" for each in {*lived} ^ {*played})]
    return found, [*wrong, *story.failures]


CLOSE_S = 60.0
"""So long after a fault every tick is a look, as in the service: verdicts are due within ten seconds then."""


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
    """One run of a case, `way` direct or replay."""
    scene, late_s = case_scene(case, seed, nodes), 0.0
    if way == "replay":
        incidents, failures = by_replay(scene)
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
