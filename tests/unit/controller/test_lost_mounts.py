"""Which nodes a restart avoids because they alone have lost a filesystem."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.controller.policy.placement import FRESH_S, LOST_S, lost_mounts
from slurm_watchdog.model.node_view import NodeView, SeenMount
from slurm_watchdog.model.observations import MountProbe

NOW = 1000.0


def node(name: str, responding: bool, *, seconds: float = 45.0, at: float = NOW - 5.0, **more: Any) -> NodeView:
    given = {"mount": "/data", "device": "nas:/d", "fs_type": "nfs4"} | more
    probe = MountProbe(responding=responding, seconds=0.01 if responding else seconds, **given)
    return NodeView(name=name, reported_at=NOW, mounts=(SeenMount(at=at, probe=probe),))


def lost(*nodes: NodeView) -> list[str]:
    return [name for name, _ in lost_mounts(nodes[:1], lambda: nodes, NOW)]


def test_lost_mounts_names_the_node_that_alone_does_not_reach_a_shared_filesystem_and_says_so() -> None:
    nodes = (node("n1", False), node("n2", True), node("n3", True))
    assert lost_mounts(nodes[:2], lambda: nodes, NOW) == (
        ("n1", "its mount of /data has not answered for 45 s, and 2 other nodes reach it"),
    )


@pytest.mark.parametrize(
    "others",
    [
        (),
        (node("n2", False), node("n3", True)),  # as many do not reach it: the server, or the fabric
        (node("n2", True, at=NOW - FRESH_S - 1),),
        (node("n2", True, device="other:/d"),),
        (node("n2", True, mount="/else"),),
        (node("n2", True, uid=1000),),
    ],
)
def test_lost_mounts_names_nobody_where_no_majority_of_others_reaches_the_same_filesystem(
    others: tuple[NodeView, ...],
) -> None:
    assert lost(node("n1", False), *others) == []


@pytest.mark.parametrize(
    "own",
    [
        node("n1", False, seconds=LOST_S - 1),
        node("n1", False, at=NOW - FRESH_S - 1),
        node("n1", False, uid=1000),
        node("n1", False, fs_type="xfs"),
        node("n1", False, fs_type=None),
        node("n1", True),
    ],
)
def test_lost_mounts_takes_no_short_wait_no_old_word_no_users_word_and_no_disk_of_its_own(
    own: NodeView,
) -> None:
    assert lost(own, *(node(f"n{each}", True, fs_type=own.mounts[0].probe.fs_type) for each in range(2, 6))) == []
