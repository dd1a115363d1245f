"""Silent agents, lost nodes, partitions, a Slurm that does not answer: each told as what it is, and nobody
accused for many."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect import node_rules
from slurm_watchdog.model.cluster_view import ClusterView, Progress
from slurm_watchdog.model.incidents import Severity, Truth
from slurm_watchdog.model.node_view import SlurmNodeView, UnreachedNode
from tests.builders.lost_nodes import NOW, cluster
from tests.builders.views import job, progress, slurm_job


def bad(findings: list) -> list[str]:
    return [finding.subject for finding in findings if finding.truth is Truth.BAD]


GONE = UnreachedNode("n0", 3, 12.0)


def gone(unreached: UnreachedNode = GONE, state: str = "ALLOCATED", silent: int = 1, **of_job: Any) -> ClusterView:
    """n0 says nothing for 60 s, and its machine does not answer."""
    view = cluster(silent, of=4, states={"n0": state})
    stands = {"progress": without_a_step(48.0), "job": slurm_job(nodes=("n0", "n1"))}
    return replace(view, unreached=(unreached,), jobs=(job(**{**stands, **of_job}),))


def without_a_step(age_s: float, **changes: Any) -> Progress:
    """Of a run with steps of a second, whose log is still read."""
    return progress(age_s, **{"read_age_s": 3.0, "paces_s": (1.0,) * 100, "longest_pace_s": 4.0, **changes})


def test_a_node_that_answers_nobody_while_its_job_stands_is_down_before_slurm_says_so() -> None:
    (found,) = [each for each in node_rules.DOWN.detect(gone()) if each.truth is Truth.BAD]
    assert (found.actionable, found.exclude_nodes, found.severity) == (True, ("n0",), Severity.CRITICAL)
    assert "neither its agent, for 60 s, nor its slurmd (3 connections in 12 s) answers" in found.summary


@pytest.mark.parametrize(
    "view",
    [
        gone(replace(GONE, tries=2)),
        gone(silent=0),
        gone(state="IDLE+POWERED_DOWN"),
        gone(progress=without_a_step(44.0)),
        gone(progress=without_a_step(58.0, read_age_s=58.0)),
        gone(progress=without_a_step(58.0, read_age_s=None)),
        gone(progress=without_a_step(58.0, longest_pace_s=40.0)),  # as in an evaluation
        gone(progress=without_a_step(58.0, phase="evaluating")),
        gone(progress=None),
        replace(
            gone(),
            jobs=(*gone().jobs, job(job=slurm_job(job_id="8", nodes=("n0",)), progress=progress(1.0, read_age_s=1.0))),
        ),
        replace(gone(), jobs=()),
    ],
)
def test_a_node_that_does_not_answer_is_not_down_unless_all_its_jobs_are_known_to_stand(view: ClusterView) -> None:
    assert bad(node_rules.DOWN.detect(view)) == []


@pytest.mark.parametrize("state", ["IDLE+MAINT", "IDLE+REBOOT_ISSUED", "IDLE+DRAIN", "IDLE+POWERED_DOWN"])
def test_a_node_on_which_a_job_runs_is_watched_whatever_its_state_says(state: str) -> None:
    view = cluster(1, of=10)
    used = (SlurmNodeView(name="n0", state=state, runs_job=True), *view.slurm_nodes[1:])
    assert bad(node_rules.SILENT.detect(replace(view, slurm_nodes=used))) == ["node:n0"]


def test_a_node_that_was_just_given_back_may_still_be_starting() -> None:
    view = cluster(1, of=10)
    for back_s, truth in ((30.0, Truth.UNKNOWN), (700.0, Truth.BAD)):
        states = (SlurmNodeView(name="n0", state="IDLE", back_at=NOW - back_s), *view.slurm_nodes[1:])
        seen = (replace(view.nodes[0], reported_at=NOW - 5000.0), *view.nodes[1:])
        assert node_rules.SILENT.detect(replace(view, slurm_nodes=states, nodes=seen))[0].truth is truth


@pytest.mark.parametrize(("silent", "listings", "told"), [(1, 1, False), (1, 2, True), (0, 2, False), (0, 3, True)])
def test_slurms_word_counts_after_a_few_listings_in_a_row(silent: int, listings: int, told: bool) -> None:
    view = cluster(silent, of=4, states={"n0": "DOWN*"})
    states = tuple(replace(s, lost_listings=listings) if s.name == "n0" else s for s in view.slurm_nodes)
    found = next(f for f in node_rules.DOWN.detect(replace(view, slurm_nodes=states)) if f.subject == "node:n0")
    assert found.truth is (Truth.BAD if told else Truth.UNKNOWN)
    assert ("DOWN*" in found.summary) is told


def test_an_agent_that_has_been_quiet_as_long_as_its_node_is_not_said_to_report() -> None:
    """Slurm may know of a lost node before an agent counts as silent."""
    view = cluster(0, of=4, states={"n2": "DOWN*"})
    view = replace(view, heard_at={**view.heard_at, "n2": NOW - 20.0})
    (found,) = [f for f in node_rules.DOWN.detect(view) if f.truth is Truth.BAD]
    assert "its agent has not reported for 20 s, too" in found.summary


def just_silent(count: int, age_s: float) -> ClusterView:
    view = replace(cluster(count, of=200), silent_after_s=45.0)
    return replace(view, heard_at={**view.heard_at, **dict.fromkeys(view.silent_nodes, NOW - age_s)})


def test_many_that_fall_silent_together_are_told_once_it_shows_how_many_they_are() -> None:
    assert len(bad(node_rules.SILENT.detect(just_silent(9, 46.0)))) == 9, "few are told at once"
    soon = node_rules.SILENT.detect(just_silent(15, 46.0))
    assert bad(soon) == []
    assert [each.truth for each in soon].count(Truth.UNKNOWN) == 15
    assert len(bad(node_rules.SILENT.detect(just_silent(15, 56.0)))) == 15, "a switch is told, ten seconds later"
