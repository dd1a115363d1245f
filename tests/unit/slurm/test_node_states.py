"""Nodes that are planned, rebooted, switched off or in maintenance, as each release of Slurm lists them: no fault."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from slurm_watchdog.detect import node_rules
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.slurm_states import is_away, is_lost, is_out
from slurm_watchdog.slurm import parse
from tests.builders.lost_nodes import cluster
from tests.builders.slurm_listings import parse_nodes

CAPTURES = sorted((Path(__file__).parents[2] / "captures" / "slurm").glob("*/node_states.json"))
RELEASES = pytest.mark.parametrize("capture", CAPTURES, ids=[path.parent.name for path in CAPTURES])


@cache
def states(capture: Path) -> dict[str, tuple[str, ...]]:
    """What was done -> the states in which the node was listed to which it was done."""
    about = {
        "maintenance": "n1", "reboot of an idle node": "n2", "reboot of a node with a job": "n3", "power down": "n4",
        "power up": "n4", "power down of a node with a job": "n3", "planned": "n6",
    }  # fmt: skip
    found: dict[str, list[str]] = {step: [] for step in about}
    for each in json.loads(capture.read_text()):
        nodes = parse_nodes(each["text"], parse.Marks("q7f", "q8r"))
        if each["step"] in about:
            found[each["step"]] += [node.state.upper() for node in nodes if node.name == about[each["step"]]]
    return {step: tuple(dict.fromkeys(seen)) for step, seen in found.items()}


def blamed(state: str) -> list[str]:
    """What is said of a node in this state, without a job, whose agent is silent."""
    view = cluster(1, of=10, states={"n0": state})
    return [
        each.kind
        for each in (*node_rules.SILENT.detect(view), *node_rules.DOWN.detect(view))
        if each.truth is Truth.BAD
    ]


@RELEASES
def test_a_node_that_is_in_maintenance_reboots_or_is_switched_off_is_no_fault(capture: Path) -> None:
    seen = states(capture)
    for step in ("maintenance", "reboot of an idle node", "power down"):
        away = [state for state in seen[step] if state != "IDLE"]
        assert away and all(blamed(state) == [] for state in away), (step, away)
    assert any("MAINT" in state for state in seen["maintenance"])
    assert any("REBOOT" in state for state in seen["reboot of an idle node"])
    assert any("POWER" in state for state in seen["power down"])


@RELEASES
def test_a_planned_node_is_there(capture: Path) -> None:
    (planned,) = [state for state in states(capture)["planned"] if "PLANNED" in state]
    assert blamed(planned) == ["agent_silent"]


@pytest.mark.parametrize(
    "state",
    ["IDLE+POWERED_DOWN", "IDLE+POWERING_DOWN", "idle~", "IDLE+POWERING_UP", "idle#", "IDLE+REBOOT_ISSUED",
     "IDLE+REBOOT_REQUESTED", "idle@", "IDLE+PLANNED", "idle-", "IDLE+MAINT", "maint$", "FUTURE"],
)  # fmt: skip
def test_power_saving_reboots_and_plans_are_no_faults(state: str) -> None:
    assert not is_lost(state) and not is_out(state)
    assert is_away(state) or "PLANNED" in state or state == "idle-"
