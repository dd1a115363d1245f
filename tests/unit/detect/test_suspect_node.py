"""suspect_node: by the past alone, with two thresholds, and never of a node that somebody has in hand."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.detect.node_rules import SUSPECT
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_events import NodeSuspicion
from slurm_watchdog.model.node_view import SlurmNodeView
from tests.builders.views import cluster

OUT = (SlurmNodeView(name="n1", state="IDLE+DRAIN"),)


def suspect(score: float) -> tuple[NodeSuspicion, ...]:
    return (NodeSuspicion(node="n1", score=score, place="GPU-0", recent=3, reasons="Xid 3 days ago"),)


@pytest.mark.parametrize(
    ("known", "more", "truth"),
    [
        (suspect(2.3), {}, Truth.BAD),
        (suspect(2.2), {}, None),
        (suspect(2.2), {"asked": frozenset({"node:n1"})}, Truth.UNKNOWN),
        (suspect(1.4), {"asked": frozenset({"node:n1"})}, Truth.OK),
        ((), {"asked": frozenset({"node:n1"})}, Truth.OK),
        (suspect(2.3), {"slurm_nodes": OUT}, Truth.UNKNOWN),
        (None, {"asked": frozenset({"node:n1"})}, None),
    ],
    ids=["suspect", "not yet", "fades", "faded", "mended", "out of service", "no memory"],
)
def test_suspect_node(known: tuple[NodeSuspicion, ...] | None, more: dict[str, Any], truth: Truth | None) -> None:
    found = SUSPECT.detect(cluster(suspects=known, **more))
    assert [each.truth for each in found] == ([] if truth is None else [truth])
    if truth is Truth.BAD:
        assert found[0].culprits[0].gpu_uuid == "GPU-0" and "Xid 3 days ago" in found[0].facts
        assert found[0].facts[-1] == 'to drain it: scontrol update NodeName=n1 State=DRAIN Reason="suspect node"'
