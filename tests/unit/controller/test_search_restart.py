"""Nodes that a restart leaves out once, to find the one that makes its job slow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.policy.decision import decide
from slurm_watchdog.controller.policy.search_restart import to_leave_out
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.slurm import SlurmNode
from tests.builders.policy_inputs import INCIDENT, LIMITS, SITUATION
from tests.builders.slow_clusters import job_search
from tests.builders.views import slurm_job

NODES = ("n1", "n2", "n3", "n4")
JOB = slurm_job(nodes=NODES, node_count=4, partition="gpu")
SEARCH = job_search("n1 n2 n3 n4")


def cluster(idle: str, busy: str = "") -> tuple[SlurmNode, ...]:
    states = dict.fromkeys(NODES, "ALLOCATED") | dict.fromkeys(idle.split(), "IDLE")
    states |= dict.fromkeys(busy.split(), "ALLOCATED")
    return tuple(SlurmNode(name=n, address="", state=state, partitions=("gpu",)) for n, state in states.items())


@pytest.mark.parametrize(
    ("idle", "busy", "most", "avoided", "count"),
    [
        ("s1 s2 s3", "", 8, (), 2),
        ("s1", "s2 s3", 8, (), 1),
        ("", "s1 s2 s3", 8, (), 0),
        ("s1 s2 s3", "", 1, (), 1),
        ("s1 s2", "", 8, ("n1",), 1),
        ("s1", "", 8, ("n1",), 0),
    ],
    ids=["half", "one is free", "none is free", "no more exclusions", "one goes to the culprit", "none is left"],
)  # fmt: skip
def test_as_many_suspects_are_left_out_as_others_are_free_for(
    idle: str, busy: str, most: int, avoided: tuple[str, ...], count: int
) -> None:
    found = to_leave_out(JOB, SEARCH, avoided, cluster(idle, busy), most)
    assert len(found) == count and set(found) <= set(NODES).difference(avoided)


def test_a_job_without_a_search_and_one_that_needs_its_nodes_leave_out_none() -> None:
    assert to_leave_out(JOB, None, (), cluster("s1 s2"), 8) == ()
    assert to_leave_out(replace(JOB, required_nodes=NODES), SEARCH, (), cluster("s1 s2"), 8) == ()


def test_once_a_node_is_named_it_alone_is_left_out() -> None:
    named = job_search("n1 n2 n3 n4", ("n3 n4 s1 s2", 0.0), ("n1 n3 n4 s1", 0.07))
    assert to_leave_out(JOB, named, (), cluster("s1 s2"), 8) == ("n1",)


def test_a_restart_for_a_hang_excludes_them_beside_the_culprit_and_says_why() -> None:
    situation = replace(SITUATION, job=JOB, nodes=cluster("s1 s2 s3"), search=SEARCH)
    decision = decide(INCIDENT, situation, replace(LIMITS, max_excluded_nodes=8), "d1")
    assert decision.exclude[0] == "n1" and decision.exclude[1:] == decision.searched
    assert len(decision.searched) in (1, 2) and decision.blamed == ("n1",)
    assert f"{', '.join(decision.searched)} left out once, to find the node that makes the job slow" in decision.reason
    asked = replace(INCIDENT, kind=IncidentKind.OPERATOR_RESTART)
    assert decide(asked, situation, LIMITS, "d2").searched == ()
    no_requeue = replace(situation, rule=replace(SITUATION.rule, ladder=(Rung.CANCEL,)))
    assert decide(INCIDENT, no_requeue, LIMITS, "d3").searched == ()
