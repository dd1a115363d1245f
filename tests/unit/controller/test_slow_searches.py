"""The search for a node that makes a job slow, from the incident to the name: what is begun, compared, kept and told."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.search_words import search_facts
from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.policy.search_tests import to_be_tested
from slurm_watchdog.controller.slow_searches import SlowSearches
from slurm_watchdog.detect import slow_job
from slurm_watchdog.detect.slow_job import SlowJob
from slurm_watchdog.journal.database import Database
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.slow_searches import SqlSlowSearches
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.cluster_view import ClusterView, StepTime
from slurm_watchdog.model.incidents import Culprit, Finding, Incident, IncidentKind, Truth
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from slurm_watchdog.model.node_test import NodeResult
from slurm_watchdog.model.slow_search import JobSearch, SearchState
from tests.builders.notices import INCIDENT
from tests.builders.slow_clusters import job_search
from tests.builders.step_noise import noisy
from tests.builders.views import cluster, job, slurm_job

SLOW = replace(INCIDENT, id="s1", kind=IncidentKind.SLOW_JOB, job_ids=("7",), jobs_now=("7",), culprits=())
FAST_S, SLOW_S = 10.0, 10.7
FIRST = ("n1", "n2", "n3", "n4")


class World:
    """A journal, the searches in it, and what the ledger was told."""

    def __init__(self, directory: Path, **policy: str) -> None:
        self.config = Config.model_validate({"policy": policy})
        self.journal = Journal(f"sqlite:///{directory}/journal.db", self._open)
        self.told: list[NodeEvent] = []
        self.wall = 1e6
        self.events: list[NodeEvent] = []
        self.start()

    def _open(self, url: str) -> Database:
        self.database = Database(url)
        return self.database

    def start(self) -> None:
        """A controller begins with what the journal has."""
        writer = JournalWriter(self.journal, LeftOut())

        def record(event: NodeEvent) -> None:
            self.told.append(event)
            writer.write_or_queue(lambda: self.journal.node_events.save(event))

        self.searches = SlowSearches(self.config, self.journal, writer, record, lambda: self.wall, lambda: self.events)

    def run(self, restarts: int, nodes: tuple[str, ...], seconds: list[float], *incidents: Incident, batch: float = 8.0) -> Finding:  # fmt: skip
        """The job's run is looked at; returns what the detector says after that."""
        times, at = [], 0.0
        for number, value in enumerate(noisy(seconds, restarts, 0.005)):
            at += value
            times.append(StepTime(step=number, seconds=value, at=at, logged=True, batch=batch))
        seen = job(
            job=slurm_job(nodes=nodes, restarts=restarts), step_id="0", step_times=tuple(times), run_age_s=at
        )  # fmt: skip
        self.wall += 2 * at
        view = ClusterView(now=at, jobs=(seen,))
        self.searches.update(view, incidents, {"7": seen.job})
        (found,) = slow_job.detect(replace(view, searches=self.searches.all()), SlowJob())
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def becomes_slow(world: World, *incidents: Incident) -> Finding:
    return world.run(0, FIRST, [FAST_S] * 200 + [SLOW_S] * 120, *(incidents or (SLOW,)))


def test_a_slow_job_without_a_sign_begins_a_search_and_says_what_is_done(world: World) -> None:
    said = becomes_slow(world)
    search = world.searches.get("7")
    assert search is not None and search.search.suspects == FIRST
    assert said.truth is Truth.BAD and said.actionable
    assert "a slow node is searched for among 4 nodes, n1 n2 n3 n4 (1 run compared)" in said.facts[-1]


def test_runs_on_other_nodes_name_the_node_and_the_ledger_is_told_with_figures(world: World) -> None:
    becomes_slow(world)
    said = world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 120)
    assert said.truth is Truth.OK and "as fast as it was before step 200" in said.summary
    world.start()
    said = world.run(2, ("n1", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    assert said.truth is Truth.BAD and said.summary.startswith("Job 7 is still slower than before step 200: ")
    assert said.facts[0].startswith("n1 makes a step") and said.facts[0].endswith("restarts leave it out")
    world.run(3, ("n2", "n3", "n4", "s1"), [FAST_S] * 120)
    (event,) = world.told
    assert event.node == "n1" and event.chain == "1000/"
    assert event.what.startswith("n1 makes a step of job 7 7.") and "in 2 runs with it" in event.what
    assert (
        event.kind == NodeEventKind.SLOWED_ONCE and "(confidence 1.00); not confirmed yet, which takes 3" in event.what
    )
    search = world.searches.get("7")
    assert search is not None and search.named == ("n1",) and len(search.search.runs) == 3
    assert search.state is SearchState.FOUND
    assert world.journal.slow_searches.all() == [search]


def test_a_third_slow_run_with_the_node_confirms_it_and_the_ledger_weighs_the_same_event_in_full(world: World) -> None:
    test_runs_on_other_nodes_name_the_node_and_the_ledger_is_told_with_figures(world)
    world.run(4, ("n1", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    assert [each.kind for each in world.told] == [NodeEventKind.SLOWED_ONCE, NodeEventKind.SLOWED_JOB]
    assert world.told[0].key == world.told[1].key and world.told[1].what.endswith("(confidence 1.00)")
    assert world.searches.all()[0].confirmed == ("n1",)
    world.start()
    world.run(5, ("n2", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    assert world.told[-1].withdrawn_why and world.searches.all()[0].confirmed == ()


def test_a_failed_test_that_others_made_confirms_the_node_without_another_run(world: World) -> None:
    test_runs_on_other_nodes_name_the_node_and_the_ledger_is_told_with_figures(world)
    failed = NodeEvent(
        key="test_failed:root:t1:n1:memory", node="n1", kind=NodeEventKind.TEST_FAILED, at=world.wall,
        what="memory bandwidth is 6 GB/s", place="memory",
    )  # fmt: skip
    others = [replace(failed, node="n3"), replace(failed, withdrawn_why="no"), replace(failed, at=1.0)]
    world.events = [*others]
    world.run(3, ("n2", "n3", "n4", "s1"), [FAST_S] * 125)
    assert len(world.told) == 1
    world.events.append(failed)
    world.run(3, ("n2", "n3", "n4", "s1"), [FAST_S] * 126)
    world.run(3, ("n2", "n3", "n4", "s1"), [FAST_S] * 127)
    assert [each.kind for each in world.told] == [NodeEventKind.SLOWED_ONCE, NodeEventKind.SLOWED_JOB]
    assert world.told[1].what.endswith("; its test: memory bandwidth is 6 GB/s")


class Killed(BaseException):
    """The controller dies here."""


class DyingSearches(SqlSlowSearches):
    def save(self, search: JobSearch) -> None:
        super().save(search)
        raise Killed


def test_a_controller_that_dies_as_it_names_a_node_has_neither_event_nor_name_and_names_it_again(world: World) -> None:
    becomes_slow(world)
    world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 120)
    searches, world.journal.slow_searches = world.journal.slow_searches, DyingSearches(world.database)
    with pytest.raises(Killed):
        world.run(2, ("n1", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    world.journal.slow_searches = searches
    assert world.journal.node_events.since(0.0) == [] and searches.all()[0].named == ()
    world.start()
    world.run(2, ("n1", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    assert [each.node for each in world.journal.node_events.since(0.0)] == ["n1"] and searches.all()[0].named == ("n1",)


def test_a_node_that_later_runs_contradict_is_withdrawn(world: World) -> None:
    test_runs_on_other_nodes_name_the_node_and_the_ledger_is_told_with_figures(world)
    world.run(4, ("n2", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    assert [(each.node, each.withdrawn_why != "") for each in world.told] == [("n1", False), ("n1", True)]
    assert [each.state for each in world.searches.all()] == [SearchState.ACQUITTED]


def test_a_run_is_measured_again_only_when_it_has_half_as_many_steps_more(world: World) -> None:
    becomes_slow(world)
    counts = []
    for steps in (40, 80, 100, 130):
        world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * steps)
        search = world.searches.get("7")
        assert search is not None
        counts.append([run.batches for run in search.search.runs])
    assert counts == [[], [7], [7], [12]]


@pytest.mark.parametrize(
    "incidents",
    [
        (
            SLOW,
            replace(INCIDENT, id="i2", kind=IncidentKind.GPU_CLOCK_LOW, culprits=(Culprit(node="n2"),)),
        ),
        (replace(SLOW, inhibited_by="i2"),),
    ],
    ids=["a node has a sign", "explained"],
)
def test_no_search_is_begun_where_anything_else_names_a_node_or_explains_it(
    world: World, incidents: tuple[Incident, ...]
) -> None:
    becomes_slow(world, *incidents)
    assert world.searches.all() == ()


def test_a_job_that_is_fast_again_by_itself_ends_the_search(world: World) -> None:
    becomes_slow(world)
    world.run(0, FIRST, [FAST_S] * 300)
    assert world.searches.all() == () and world.journal.slow_searches.all() == []


def test_a_run_with_another_batch_size_is_not_compared(world: World) -> None:
    becomes_slow(world)
    said = world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 120, batch=16.0)
    search = world.searches.get("7")
    assert search is not None and search.search.runs == ()
    assert said.truth is Truth.UNKNOWN


def test_a_job_that_slurm_lists_no_longer_is_forgotten_after_a_day(world: World) -> None:
    becomes_slow(world)
    world.searches.update(cluster(), (), {})
    assert world.searches.all() != ()
    world.wall += 90000.0
    world.searches.update(cluster(), (), {})
    assert world.searches.all() == ()


def test_with_the_search_off_nothing_is_begun(tmp_path: Path) -> None:
    world = World(tmp_path, slow_search="off")
    said = becomes_slow(world)
    assert world.searches.all() == () and said.truth is Truth.BAD and not said.actionable


def result(node: str, *faults: str) -> NodeResult:
    truth = Truth.BAD if faults else Truth.OK
    return NodeResult(
        node=node, truth=truth, faults=tuple(("memory", each) for each in faults), figures="memory 13 GB/s"
    )


def test_a_test_that_fails_names_the_node_with_its_figures_and_one_that_passes_clears_nobody(world: World) -> None:
    becomes_slow(world)
    world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 120)
    search = world.searches.get("7")
    assert search is not None
    assert to_be_tested(search, frozenset({"n1", "n2", "s3"})) == ("n1", "n2")
    world.searches.note_test("7", [result("n1")])
    search = world.searches.get("7")
    assert search is not None and search.state is SearchState.SEARCHING and world.told == []
    assert "found nothing wrong with 1 node, n1: they stay suspects" in search_facts(search)[-1]
    assert to_be_tested(search, frozenset({"n1", "n2"})) == ("n2",), "once is enough"
    world.start()
    world.searches.note_test("7", [result("n2", "memory bandwidth is 6 GB/s, its peers 13")])
    search = world.searches.get("7")
    assert search is not None and search.named == ("n2",)
    (event,) = world.told
    assert event.node == "n2" and event.what.endswith("; its test: memory bandwidth is 6 GB/s, its peers 13")
    assert to_be_tested(search, frozenset({"n1"})) == (), "nothing is left to be told apart"
    world.run(2, ("n1", "n3", "n4", "s1"), [FAST_S] * 120)
    search = world.searches.get("7")
    assert search is not None and (search.state, search.named) == (SearchState.FOUND, ("n2",))
    assert world.journal.slow_searches.all() == [search]


def test_a_name_by_a_test_is_withdrawn_when_the_job_is_slow_without_the_node_too(world: World) -> None:
    becomes_slow(world)
    world.run(1, ("n3", "n4", "s1", "s2"), [FAST_S] * 120)
    world.searches.note_test("7", [result("n2", "a disk is slow")])
    world.run(2, ("n1", "n3", "n4", "s1"), [SLOW_S] * 120, SLOW)
    told = [(each.node, bool(each.withdrawn_why)) for each in world.told if each.node == "n2"]
    assert told == [("n2", False), ("n2", True)]
    search = world.searches.get("7")
    assert search is not None and "n2" not in search.named


def test_nothing_is_tested_while_all_suspects_are_in_the_job_or_too_many_are_left(world: World) -> None:
    becomes_slow(world)
    search = world.searches.get("7")
    assert search is not None and to_be_tested(search, frozenset(FIRST)) == ()
    many = job_search(" ".join(f"n{n}" for n in range(40)), (" ".join(f"n{n}" for n in range(20, 40)), 0.0))
    assert to_be_tested(many, frozenset(f"n{n}" for n in range(20))) == ()
    world.searches.note_test("8", [result("n1", "it is bad")])  # a search that is over meanwhile
