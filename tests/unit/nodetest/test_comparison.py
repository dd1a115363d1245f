"""The picture of a test: each node's figure beside its peers', the worst nodes first, bounded."""

from __future__ import annotations

import msgspec

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.node_comparison import MOST_NODES, NodeComparison
from slurm_watchdog.nodetest.comparison import comparison_of
from slurm_watchdog.nodetest.conduct import Report
from slurm_watchdog.nodetest.judge import Verdict, judge_nodes
from slurm_watchdog.nodetest.results import Fault, Measured
from tests.builders.measured_nodes import compared, node, nodes


def report(measured: list[Measured], *verdicts: Verdict) -> Report:
    judged = verdicts or tuple(judge_nodes(measured, {}, {}))
    return Report(began_at=1.0, ended_at=2.0, verdicts=judged, nodes=tuple(measured))


def test_the_bad_node_comes_first_and_its_share_is_of_its_peers_median() -> None:
    found = comparison_of(report(nodes(5, node("n3", figures={"cpu_all": 30000.0}))), "n3 is bad.")
    assert [(each.name, each.verdict) for each in found.nodes[:2]] == [("n3", "bad"), ("n1", "ok")]
    (cpu,) = [each for each in found.figures if each.title == "CPU, all cores"]
    assert cpu.values[:2] == ((30000.0, 0.5), (60000.0, 1.0))
    assert (cpu.unit, cpu.worst_share) == ("MB/s", 0.9)
    assert "50% less" in found.nodes[0].why


def test_less_is_worse_also_where_a_small_figure_is_good() -> None:
    times = [node(f"n{at}", figures={"disk_fsync /tmp": 1.0}) for at in range(1, 5)]
    found = comparison_of(report([*times, node("n5", figures={"disk_fsync /tmp": 20.0})]), "")
    (fsync,) = [each for each in found.figures if each.unit == "ms"]
    assert (20.0, 0.05) in fsync.values
    assert (fsync.worst_share, fsync.title) == (0.2, "fsync time of a disk")


def test_nodes_of_another_model_are_no_peers_and_one_alone_has_no_share() -> None:
    found = comparison_of(report([node("n1"), node("n2"), node("n3", model="Y x64")]), "")
    assert all(each.values[2] is None and each.values[0] is not None for each in found.figures)


def test_of_many_nodes_the_worst_are_drawn_and_the_rest_is_counted() -> None:
    many = [node(f"n{at}") for at in range(500)]
    verdicts = [Verdict(node=each.name, truth=Truth.OK) for each in many]
    verdicts[400] = Verdict(node="n400", truth=Truth.BAD, faults=(Fault(place="cpu", what="x" * 1000),))
    found = comparison_of(report(many, *verdicts), "y" * 1000)
    assert (len(found.nodes), found.left_out, found.nodes[0].name) == (MOST_NODES, 436, "n400")
    body = msgspec.json.encode(found)
    assert msgspec.json.decode(body, type=NodeComparison) == found
    assert len(body) < 64 * 1024 / 2  # the socket takes 64 KiB


def test_the_example_of_the_page_has_a_bad_node_and_one_that_was_not_judged() -> None:
    found = compared(8).comparison
    assert [(each.name, each.verdict) for each in found.nodes[:2]] == [("n3", "bad"), ("n8", "unknown")]
