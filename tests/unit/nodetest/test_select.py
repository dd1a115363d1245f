"""Which nodes are tested: those given, idle, of a job, or drained by us; the others with a reason."""

from __future__ import annotations

import pytest

from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.nodetest.select import Selection, choose_nodes, partition_of
from tests.builders.views import slurm_job

NODES = (
    SlurmNode(name="n1", address="n1", state="IDLE", partitions=("gpu", "main")),
    SlurmNode(name="n2", address="n2", state="ALLOCATED", partitions=("main",)),
    SlurmNode(name="n3", address="n3", state="IDLE+DRAIN", reason="slurm-watchdog: Xid 79", partitions=("main",)),
    SlurmNode(name="n4", address="n4", state="IDLE+DRAIN", reason="fan", partitions=("main",)),
    SlurmNode(name="n5", address="n5", state="DOWN*", partitions=("main",)),
)
VIEW = SlurmView(jobs=(slurm_job(job_id="7", state="RUNNING", nodes=("n1", "n2")),), nodes=NODES)


@pytest.mark.parametrize(
    ("asked", "chosen", "left"),
    [
        (Selection(idle=True), ["n1"], []),
        (Selection(partition="main"), ["n1", "n2"], []),
        (Selection(partition="gpu"), ["n1"], []),
        (Selection(names=("n2", "n4", "n5")), ["n2"], ["n4", "n5"]),
        (Selection(names=("n1", "n2"), idle=True), ["n1"], ["n2"]),
        (Selection(drained_by_us=True), ["n3"], []),
        (Selection(drained_by_us=True, names=("n1", "n2", "n3")), ["n1", "n3"], ["n2"]),
        (Selection(drained_by_us=True, names=("n1", "n4")), [], ["n4", "n1"]),
        (Selection(job="7"), ["n1", "n2"], []),
    ],
)
def test_what_is_asked_for_is_chosen_and_what_is_not_free_to_be_tested_has_a_reason(
    asked: Selection, chosen: list[str], left: list[str]
) -> None:
    found = choose_nodes(asked, VIEW)
    assert [node.name for node in found.nodes] == chosen
    assert list(found.left) == left
    assert found.after == ("7" if asked.job else "")


def test_a_node_that_we_keep_in_a_reservation_is_as_good_as_drained_by_us_unless_somebody_else_drained_it() -> None:
    reserved = SlurmNode(name="n6", address="n6", state="IDLE+MAINT+RESERVED", partitions=("main",))
    found = choose_nodes(Selection(drained_by_us=True), SlurmView(jobs=(), nodes=(*NODES, reserved)), {"n4", "n6"})
    assert [node.name for node in found.nodes] == ["n3", "n6"]


@pytest.mark.parametrize("asked", [Selection(names=("n9",)), Selection(job="8"), Selection(partition="none")])
def test_what_slurm_does_not_know_is_refused_with_a_sentence(asked: Selection) -> None:
    with pytest.raises(ValueError, match=r"Slurm knows no|No node fits"):
        choose_nodes(asked, VIEW)


def test_a_pair_is_submitted_in_a_partition_that_both_have() -> None:
    assert partition_of(NODES[:2], "") == "main"
    assert partition_of(NODES[:2], "gpu") == "gpu"
