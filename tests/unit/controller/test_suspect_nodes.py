"""Suspect nodes that a restart avoids, and those that it does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.config.policy import Policy
from slurm_watchdog.controller.policy.decision import decide
from slurm_watchdog.controller.policy.placement import Suspects, suspect_nodes, to_avoid
from slurm_watchdog.model.incidents import Culprit, IncidentKind, IncidentState
from slurm_watchdog.model.slurm import SlurmNode
from tests.builders.policy_inputs import INCIDENT, LIMITS, SITUATION
from tests.builders.views import slurm_job

JOB = slurm_job(nodes=("n1", "n2"), node_count=2, partition="gpu")


def nodes(**states: str) -> tuple[SlurmNode, ...]:
    return tuple(SlurmNode(name=name, address="", state=state, partitions=("gpu",)) for name, state in states.items())


IDLE = nodes(n1="ALLOCATED", n2="ALLOCATED", n3="IDLE", n4="IDLE", n5="IDLE")
BUSY = nodes(n1="ALLOCATED", n2="ALLOCATED", n3="ALLOCATED", n4="ALLOCATED", n5="IDLE")


@pytest.mark.parametrize(
    ("suspects", "blamed", "how", "known", "avoided"),
    [
        ("n3", "n1", Suspects.IGNORE, IDLE, ""),
        ("n3", "n1", Suspects.PREFER, IDLE, "n3"),
        ("n2 n3", "n1", Suspects.PREFER, IDLE, "n2 n3"),
        ("n2 n3 n4", "n1", Suspects.PREFER, (*IDLE, *nodes(n6="IDLE")), "n2 n3"),
        ("n2", "n1", Suspects.PREFER, BUSY, ""),
        ("n2", "n1", Suspects.EXCLUDE, BUSY, "n2"),
        ("n2 n3 n4", "n1", Suspects.EXCLUDE, BUSY, "n2 n3"),
        ("x9", "n1", Suspects.EXCLUDE, BUSY, ""),
        ("n1", "n1", Suspects.EXCLUDE, BUSY, ""),
    ],
    ids=["ignored", "others are free", "several", "no more than allowed", "nobody free", "may wait for others",
         "the job must be able to start", "of another partition", "avoided anyway"],
)  # fmt: skip
def test_suspects_that_a_restart_avoids(
    suspects: str, blamed: str, how: Suspects, known: tuple[SlurmNode, ...], avoided: str
) -> None:
    found = to_avoid(JOB, [(node, "why") for node in suspects.split()], blamed.split(), how, known, 3)
    assert " ".join(node for node, _ in found) == avoided


def test_only_an_open_incident_that_fires_makes_a_suspect() -> None:
    suspect = replace(INCIDENT, kind=IncidentKind.SUSPECT_NODE, culprits=(Culprit(node="n7"),), summary="n7 again")
    over = replace(suspect, state=IncidentState.RESOLVED, culprits=(Culprit(node="n8"),))
    assert suspect_nodes([INCIDENT, suspect, over]) == (("n7", "n7 again"),)


def test_a_decision_excludes_a_suspect_with_its_reason_and_starts_no_step_without_it() -> None:
    limits = replace(LIMITS, policy=Policy(suspects="exclude"))
    situation = replace(SITUATION, job=JOB, nodes=IDLE, suspects=(("n3", "n3 fails again and again"),))
    decision = decide(replace(situation, incident=INCIDENT, config=limits), "d1")
    assert decision.exclude == ("n1", "n3") and decision.avoid == ()
    assert "n3 is avoided: n3 fails again and again" in decision.reason
    asked = replace(INCIDENT, kind=IncidentKind.OPERATOR_RESTART)
    assert decide(replace(situation, incident=asked, config=limits), "d2").exclude == ("n1",)
