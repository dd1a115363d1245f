"""Which nodes an incident is held against."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.controller.node_history.suspicion import blamed, events_of
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind, IncidentState
from tests.builders.notices import INCIDENT, replace


def incident(**changes: Any) -> Incident:
    return replace(INCIDENT, **changes)


ONE = (Culprit(node="n1", rank=3, gpu_uuid="GPU-a"),)


@pytest.mark.parametrize(
    ("what", "changes", "expected"),
    [
        ("a culprit with its GPU", {"culprits": ONE}, (("n1", "GPU-a"),)),
        ("no rank is identified", {"culprits": ()}, ()),
        ("a kind that is the program's fault", {"kind": IncidentKind.LOG_ERROR, "culprits": ONE}, ()),
        ("many are named", {"culprits": tuple(Culprit(node=f"n{n}") for n in range(3))}, ()),
        ("a restart should avoid it", {"culprits": (), "exclude_nodes": ("n2",)}, (("n2", ""),)),
        ("several cards of a node", {"culprits": (*ONE, Culprit(node="n1", gpu_uuid="GPU-b"))}, (("n1", "GPU-a"),)),
        (
            "a mount that only one node does not reach",
            {"kind": IncidentKind.FILESYSTEM_STALL, "mounts": ("/s",), "exclude_nodes": ("n1",), "culprits": ONE},
            (("n1", "mount:/s"),),
        ),
        (
            "processes blocked on a mount, and no node to blame",
            {"kind": IncidentKind.FILESYSTEM_STALL, "mounts": ("/s",), "culprits": ONE},
            (),
        ),
    ],
)
def test_an_incident_is_held_against(what: str, changes: dict[str, Any], expected: tuple[tuple[str, str], ...]) -> None:
    assert blamed(incident(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "compared", "number"),
    [
        ({}, True, 1),
        ({}, False, 0),
        ({"kind": IncidentKind.GPU_FAULT}, False, 1),
        ({"state": IncidentState.PENDING}, True, 0),
        ({"inhibited_by": "i9"}, True, 0),
        ({"state": IncidentState.RESOLVED}, True, 1),
    ],
    ids=["fires", "of a job on one node", "hardware", "only suspected", "explained by another", "over"],
)
def test_events_of_an_incident(changes: dict[str, Any], compared: bool, number: int) -> None:
    found = events_of(incident(culprits=ONE, **changes), "1000/train", compared=compared)
    assert len(found) == number
    assert all((each.key, each.at, each.place) == ("incident:i1:n1", 100.0, "GPU-a") for each in found)
