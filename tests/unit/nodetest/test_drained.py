"""Drained nodes are tested in a reservation, and drained again whatever comes: an error, Ctrl-C, a death."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.nodetest.conduct import choose, lifted, put_back
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

NODES = tuple(
    SlurmNode(name=name, address=name, state="IDLE+DRAIN", reason=f"slurm-watchdog: {name}") for name in ("n1", "n2")
)
PEER = SlurmNode(name="n3", address="n3", state="IDLE")
"""In the reservation to be compared with; nothing is done to it."""


class Slurm:
    """Nodes with their reasons, reservations, and what was asked, in order."""

    def __init__(self, refuse: str = "") -> None:
        self.drained = {node.name: node.reason for node in NODES}
        self.reserved: set[str] = set()
        self.asked: list[str] = []
        self._refuse = refuse

    def _ask(self, what: str) -> None:
        if what == self._refuse:
            raise SlurmRefused(f"no {what}")
        self.asked.append(what)

    async def reserve_nodes(self, name: str, nodes: Sequence[str]) -> None:
        self._ask("create")
        self.reserved.add(name)

    async def delete_reservation(self, name: str) -> None:
        self._ask("delete")
        self.reserved.discard(name)

    async def undrain_node(self, node: str, reason: str, reason_at: float | None) -> None:
        self._ask(f"undrain {node}")
        del self.drained[node]

    async def drain_node(self, node: str, reason: str) -> None:
        self._ask(f"drain {node}")
        self.drained[node] = reason

    async def read_node(self, node: str) -> SlurmNode | None:
        reason = self.drained.get(node)
        return SlurmNode(name=node, address=node, state="IDLE+DRAIN" if reason else "IDLE", reason=reason or "")


async def through(slurm: Slurm, fails: BaseException | None = None) -> list[str]:
    lines: list[str] = []
    async with lifted(slurm, (*NODES, PEER), "r", lines.append):
        assert (slurm.drained, slurm.reserved) == ({}, {"r"})
        if fails is not None:
            raise fails
    return lines


WHOLE = {node.name: node.reason for node in NODES}


@pytest.mark.parametrize(
    "fails", [None, RuntimeError(), asyncio.CancelledError()], ids=["well", "error", "interrupted"]
)
def test_the_drain_comes_back_with_its_reason_before_the_reservation_goes(
    fails: BaseException | None,
) -> None:
    slurm = Slurm()
    if fails is None:
        assert asyncio.run(through(slurm)) == []
    else:
        with pytest.raises(type(fails)):
            asyncio.run(through(slurm, fails))
    assert (slurm.drained, slurm.reserved) == (WHOLE, set())
    assert slurm.asked == ["create", "undrain n1", "undrain n2", "drain n1", "drain n2", "delete"]


def test_who_may_not_reserve_changes_nothing() -> None:
    slurm = Slurm(refuse="create")
    with pytest.raises(SlurmRefused):
        asyncio.run(through(slurm))
    assert (slurm.drained, slurm.asked) == (WHOLE, [])


def test_a_drain_that_somebody_changed_keeps_its_new_reason_and_the_others_are_put_back() -> None:
    slurm = Slurm(refuse="undrain n2")
    slurm.drained["n2"] = "fan, ann"
    with pytest.raises(SlurmRefused):
        asyncio.run(through(slurm))
    assert (slurm.drained, slurm.reserved) == (WHOLE | {"n2": "fan, ann"}, set())


def test_a_node_that_cannot_be_drained_again_stays_reserved_and_is_said() -> None:
    slurm = Slurm(refuse="drain n1")
    (line,) = asyncio.run(through(slurm))
    assert slurm.reserved == {"r"}
    assert "could not be put back" in line and "reservation r keeps jobs away" in line


def test_where_slurm_does_not_answer_it_gives_up_after_one_node_and_they_stay_reserved() -> None:
    tries: list[str] = []

    class Silent(Slurm):
        async def drain_node(self, node: str, reason: str) -> None:
            tries.append(node)
            raise SlurmUnavailable("no answer")

    slurm, lines = Silent(), list[str]()
    slurm.drained, slurm.reserved = {}, {"r"}
    asyncio.run(put_back(slurm, "r", WHOLE, lines.append))
    assert tries == ["n1"] and slurm.reserved == {"r"}
    assert lines == ["n1, n2: reservation r keeps jobs away, for the drain could not be put back: no answer"]


class SlowSlurm(Slurm):
    """Answers after a while, as a busy slurmctld does."""

    async def reserve_nodes(self, name: str, nodes: Sequence[str]) -> None:
        await asyncio.sleep(0.03)
        await super().reserve_nodes(name, nodes)

    async def drain_node(self, node: str, reason: str) -> None:
        await asyncio.sleep(0.03)
        await super().drain_node(node, reason)


@pytest.mark.parametrize("first_s", [0.01, 0.05], ids=["while it reserves", "in the test"])
def test_a_test_that_is_told_to_end_again_and_again_still_drains_its_nodes_and_deletes_its_reservation(
    first_s: float,
) -> None:
    slurm = SlowSlurm()

    async def tested() -> None:
        async with lifted(slurm, (*NODES, PEER), "r", print):
            await asyncio.sleep(100)

    async def interrupted() -> None:
        task = asyncio.ensure_future(tested())
        await asyncio.sleep(first_s)
        for _ in range(4):  # the kernel repeats its signal for each thread of a parent that dies
            task.cancel()
            await asyncio.sleep(0.005)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert (slurm.drained, slurm.reserved) == (WHOLE, set())


@pytest.mark.parametrize(
    ("state", "reason", "named", "drained_by_us", "fits"),
    [
        ("IDLE", "", True, False, True),
        ("MIXED", "", True, False, True),
        ("IDLE+DRAIN", "fan", True, False, False),
        ("IDLE+DRAIN", "slurm-watchdog: Xid 79", False, True, True),
        ("MIXED+DRAIN", "slurm-watchdog: Xid 79", False, True, False),
        ("IDLE+DRAIN", "fan", False, True, False),
        ("IDLE", "", True, True, True),
        ("IDLE", "", False, True, False),
    ],
)
def test_which_nodes_are_tested(state: str, reason: str, named: bool, drained_by_us: bool, fits: bool) -> None:
    node = SlurmNode(name="n1", address="n1", state=state, reason=reason)
    peer = SlurmNode(name="n2", address="n2", state="IDLE+DRAIN", reason="slurm-watchdog: n2")
    asked = {"nodes": ("n[1-2]",) if named else (), "idle": False, "partition": "", "drained_by_us": drained_by_us}
    chosen, left = choose((node, peer), asked)
    assert ("n1" in [each.name for each in chosen]) == fits
    assert ("n1" in left) == (named and not fits)
