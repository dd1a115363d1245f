"""The node that makes a job slow, from the incident to the name: what begins it, what is compared, and what is told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.slow_nodes import SlowNodes
from slurm_watchdog.detect import slow_job
from slurm_watchdog.detect.slow_job import SlowJob
from slurm_watchdog.model.cluster_view import ClusterView, StepTime
from slurm_watchdog.model.incidents import Culprit, Finding, Incident, IncidentKind, Truth
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from tests.builders.notices import INCIDENT
from tests.builders.step_noise import noisy
from tests.builders.views import job, slurm_job

SLOW = replace(INCIDENT, id="s1", kind=IncidentKind.SLOW_JOB, job_ids=("7",), jobs_now=("7",), culprits=())
FAST_S, SLOW_S = 10.0, 10.7
FIRST = ("n1", "n2", "n3", "n4")


class World:
    """What is looked for, and what the history of nodes was told."""

    def __init__(self) -> None:
        self.told: list[NodeEvent] = []
        self.events: list[NodeEvent] = []
        self.wall = 1e6
        self.nodes = SlowNodes(SlowJob(), self.told.append, lambda: self.wall, lambda: self.events)

    def run(self, restarts: int, nodes: tuple[str, ...], seconds: list[float], *incidents: Incident, batch: float = 8.0) -> Finding:  # fmt: skip
        """The job's run is looked at; returns what the detector says after that."""
        times, at = [], 0.0
        for number, value in enumerate(noisy(seconds, restarts, 0.005)):
            at += value
            times.append(StepTime(step=number, seconds=value, at=at, logged=True, batch=batch))
        seen = job(job=slurm_job(nodes=nodes, restarts=restarts), step_id="0", step_times=tuple(times), run_age_s=at)
        self.wall += at
        view = ClusterView(now=at, jobs=(seen,))
        self.nodes.update(view, incidents, {"7": seen.job})
        (found,) = slow_job.detect(replace(view, searches=self.nodes.all()), SlowJob())
        return found


@pytest.fixture
def world() -> World:
    return World()


def becomes_slow(world: World, *incidents: Incident) -> Finding:
    return world.run(0, FIRST, [FAST_S] * 200 + [SLOW_S] * 120, *(incidents or (SLOW,)))


def test_a_slow_job_without_a_sign_says_which_nodes_may_be_it_and_is_never_acted_on(world: World) -> None:
    said = becomes_slow(world)
    assert said.truth is Truth.BAD and not said.actionable
    assert "one of 4 nodes may make it slow: n[1-4] (1 run compared)" in said.facts[-1]


def test_a_node_that_shows_a_sign_needs_no_comparison(world: World) -> None:
    sign = replace(INCIDENT, id="g1", kind=IncidentKind.GPU_FAULT, culprits=(Culprit(node="n3"),))
    becomes_slow(world, SLOW, sign)
    assert world.nodes.all() == ()


def test_runs_on_other_nodes_name_the_node_and_the_history_is_told_with_figures(world: World) -> None:
    becomes_slow(world)
    said = world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 120)
    assert said.truth is Truth.OK and "as fast as it was before step 200" in said.summary
    said = world.run(2, ("n1", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    assert said.truth is Truth.BAD and said.summary.startswith("Job 7 is still slower than before step 200: ")
    assert said.facts[0].startswith("n1 makes a step of job 7 ")
    (event,) = world.told
    assert (event.node, event.kind, event.chain) == ("n1", NodeEventKind.SLOWED_ONCE, "1000/")
    assert "in 2 runs with it" in event.what and "not confirmed" in event.what
    world.run(3, ("n1", "s1", "s2", "s3"), [SLOW_S] * 120, SLOW)
    assert [each.kind for each in world.told] == [NodeEventKind.SLOWED_ONCE, NodeEventKind.SLOWED_JOB]
    assert world.told[0].key == world.told[1].key


def test_a_node_that_later_runs_contradict_is_withdrawn(world: World) -> None:
    becomes_slow(world)
    world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 120)
    world.run(2, ("n1", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    world.run(3, ("s1", "s2", "n3", "n4"), [SLOW_S] * 120, SLOW)
    assert [(each.node, each.withdrawn_why != "") for each in world.told] == [("n1", False), ("n1", True)]


def test_a_failed_test_of_a_suspect_that_the_run_does_without_names_it_in_full(world: World) -> None:
    becomes_slow(world)
    world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 120)
    failed = NodeEvent(
        key="test_failed:root:t1:n1:memory", node="n1", kind=NodeEventKind.TEST_FAILED, at=world.wall, what="6 GB/s",
        place="memory",
    )  # fmt: skip
    world.events = [replace(failed, node="n3"), replace(failed, withdrawn_why="no"), replace(failed, at=1.0)]
    world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 121)
    assert world.told == []
    world.events.append(failed)
    world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 122)
    (event,) = world.told
    assert (event.node, event.kind) == ("n1", NodeEventKind.SLOWED_JOB) and "a test of it failed" in event.what


@pytest.mark.parametrize("why", ["another batch size", "fewer nodes", "too few steps"])
def test_only_like_is_compared_with_like(world: World, why: str) -> None:
    becomes_slow(world)
    nodes = ("n3", "n4") if why == "fewer nodes" else ("n3", "n4", "s1", "s2")
    steps, batch = 20 if why == "too few steps" else 120, 16.0 if why == "another batch size" else 8.0
    said = world.run(1, nodes, [FAST_S] * steps, batch=batch)
    assert said.truth is Truth.UNKNOWN and world.nodes.all()[0].runs == ()


def test_a_run_that_is_fast_again_with_the_same_nodes_ends_it(world: World) -> None:
    becomes_slow(world)
    world.run(0, FIRST, [FAST_S] * 200 + [SLOW_S] * 40 + [FAST_S] * 120)
    assert world.nodes.all() == ()
