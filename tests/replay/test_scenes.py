"""Scenes with what has to be found in them, whom that names, and what may not be found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.model.actions import Verdict
from slurm_watchdog.model.incidents import IncidentState
from slurm_watchdog.replay.player import Outcome
from tests.builders.told import Line, play, verdict
from tests.replay import scenes
from tests.replay.scenes import SCENES, everybody, step, stuck, training

Scene = Callable[[], Iterator[Line]]
EVERY_S = {"hang": 60.0, "healthy": 20.0}
"""Between two reports, where it is not ten seconds."""


@dataclass(frozen=True)
class Expected:
    """`kinds`: one of them has to fire, naming `who` ((node, rank), the first culprits) within `within_s`
    after the fault."""

    kinds: tuple[str, ...]
    who: tuple[tuple[str, int], ...] = ()
    within_s: float = 0.0
    also: tuple[str, ...] = ()
    """May fire, too: the same trouble under the name of its consequence."""
    action: str = "none"
    verdict: str = "allowed"
    exclude: tuple[str, ...] = ()


EXPECTED: dict[str, Expected] = {
    # Two nodes: the filesystem itself. Nobody is restarted and no node is excluded for it.
    "filesystem_outage": Expected(("filesystem_outage",), (("n0", 0), ("n1", 2)), 75),
    # One node: it lost the filesystem, the others have it.
    "filesystem_stall": Expected(
        ("filesystem_stall",), (("n0", 0),), 75, action="requeue", verdict="observed", exclude=("n0",)
    ),
    # Its last words say why it died: they explain its death, and that the job lingers explains both.
    "dead_rank_zombie": Expected(("log_error",), (("n1", 3),), 20, also=("lingering_job",)),
    "dead_rank_not_listed": Expected(("log_error",), (("n1", 3),), 20, also=("lingering_job",)),
    # Without stacks no rank is identified, and it takes the limit for jobs whose stacks can't be had.
    "hang": Expected(("collective_hang", "stalled_progress"), (), 1900, action="requeue", verdict="suppressed"),
    "healthy": Expected(kinds=()),
}


def played(scene: Scene, lines: list[Line] | None = None, config: str = "") -> Outcome:
    return play(scene() if lines is None else lines, config, EVERY_S.get(scene.__name__, 10.0))


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_gives_what_is_expected_of_it(scene: Scene) -> None:
    expected, outcome = EXPECTED[scene.__name__], played(scene)
    fired = [i for i in outcome.incidents if i.fired_at is not None]
    told = {str(i.kind): i for i in fired}
    assert set(told) <= {*expected.kinds, *expected.also}, [i.summary for i in fired]
    if not expected.kinds:
        assert outcome.incidents == ()
        return
    found = next((told[kind] for kind in expected.kinds if kind in told), None)
    assert found is not None, [i.summary for i in outcome.incidents]
    assert tuple((c.node, c.rank) for c in found.culprits) == expected.who
    assert found.state is IncidentState.FIRING
    assert found.detected_after_s is not None
    assert 0 <= found.detected_after_s <= expected.within_s
    if found.inhibited_by is None:
        (decision, *_) = outcome.decisions(found)
        if decision.action != "none":
            assert (decision.action, decision.verdict) == (expected.action, expected.verdict)
        assert decision.exclude == expected.exclude
    assert all(d.verdict is not Verdict.ALLOWED or d.action == "none" for d in outcome.decided)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_in_what_order_nodes_and_their_processes_report_at_one_moment_changes_nothing(scene: Scene) -> None:
    shuffled = []
    for _, moment in groupby(scene(), key=lambda line: line["t"]):
        said = list(moment)
        in_order = [line for line in said if line["kind"] in ("job", "node", "fault", "log")]
        others = [line for line in said if line not in in_order]
        random.Random(3).shuffle(others)
        shuffled += [*in_order, *others]
    assert verdict(played(scene, shuffled)) == verdict(played(scene))


def test_it_observes_unless_configured_to_act_and_a_detector_that_is_off_finds_nothing() -> None:
    for config, wanted in (("", "observed"), ("mode: act", "allowed")):
        outcome = played(scenes.filesystem_stall, config=config)
        incident = next(i for i in outcome.incidents if i.kind == "filesystem_stall")
        (decision,) = outcome.decisions(incident)
        assert (decision.action, decision.verdict, decision.exclude) == ("requeue", wanted, ("n0",))
    assert played(scenes.filesystem_outage, config="detectors: {filesystem_outage: {mode: off}}").incidents == ()


def test_a_blocked_rank_in_a_single_sighting_of_a_healthy_moment_is_no_incident() -> None:
    lines = [*training(100), *everybody(110, {0: stuck(110, 107)}), *everybody(120), step(120, 12)]
    assert play(lines, every_s=10.0).incidents == ()


def test_a_step_that_a_bar_draws_again_is_no_progress() -> None:
    bar = "\r {0}%|##  | {0}/100 [00:10<00:50, 1.00s/it]"
    lines = list(training(1))
    for t in range(10, 2401, 10):
        lines += [*everybody(t), scenes.log(t, bar.format(min(t // 10, 20)))]
    told = {each.kind for each in play(lines, every_s=10.0).incidents if each.fired_at is not None}
    assert told and told <= {"collective_hang", "stalled_progress"}


DROPPED = {
    "proc": ("state_age_s", "syscall", "path", "mount", "wchan"),
    "gpu": ("uuid", "util", "sm_clock_mhz", "power_w", "temp_c", "mem_used_mib", "throttle", "pids"),
}
"""Fields that may be missing: nobody is accused for that."""


@pytest.mark.parametrize("scene", [scenes.healthy, scenes.filesystem_stall], ids=lambda scene: scene.__name__)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.02, 0.2, 0.9]))
@settings(max_examples=12)
def test_dropping_fields_adds_no_incident(scene: Scene, seed: int, share: float) -> None:
    chance = random.Random(seed)
    known = played(scene).incidents
    whole, culprits = {i.kind for i in known}, {c.rank for i in known for c in i.culprits}
    lines = [
        {name: line[name] for name in line if name not in DROPPED.get(line["kind"], ()) or chance.random() >= share}
        for line in scene()
    ]
    outcome = played(scene, lines)
    # A filesystem of which less is known may look like an outage's, or like a job that stands for whatever
    # reason: it does stand, and it is the same rank that everybody waits for.
    vaguer = {"filesystem_outage", "stalled_progress", "collective_hang"} if whole else set()
    assert {i.kind for i in outcome.incidents if i.fired_at} <= whole | vaguer, [i.summary for i in outcome.incidents]
    assert {c.rank for i in outcome.incidents if i.fired_at for c in i.culprits} <= culprits | {None}
