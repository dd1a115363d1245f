"""Which node is bad by its own figures: against peers, floors and its past; what is missing convicts nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.results import Measured, better
from tests.builders.measured_nodes import node, nodes, problem


def verdicts(measured: Sequence[Measured], **more: dict[str, object]) -> dict[str, Truth]:
    found = judge_nodes(measured, more.get("floors", {}), more.get("past", {}))  # type: ignore[arg-type]
    return {each.node: each.truth for each in found}


@pytest.mark.parametrize(
    "figures",
    [{"cpu_all": 30000.0}, {"memory_all": 150.0}, {"disk_write /tmp": 40.0}, {"mount_write /s": 300.0}],
)
def test_a_node_with_one_figure_far_below_its_four_peers_is_bad_and_no_other(figures: dict[str, float]) -> None:
    found = verdicts(nodes(5, node("n3", figures=figures)))
    assert found.pop("n3") is Truth.BAD
    assert set(found.values()) == {Truth.OK}


def test_the_memory_of_a_virtual_machine_is_shared_with_the_hosts_other_guests_and_only_a_floor_counts() -> None:
    fast = node("n1").figures["memory_all"]
    for guest, floors, truth in (
        (False, {}, Truth.BAD),
        (True, {}, Truth.OK),
        (True, {"memory_all": 0.9 * fast}, Truth.BAD),
    ):
        slow = node("n3", figures={"memory_all": 0.5 * fast}, facts={"state": {"virtual": guest}})
        found = {each.node: each.truth for each in judge_nodes(nodes(5, slow), floors, {})}
        assert found["n3"] is truth, (guest, floors)


def test_the_reason_has_the_figure_its_unit_and_what_the_peers_have() -> None:
    (bad,) = [each for each in judge_nodes(nodes(5, node("n3", figures={"cpu_all": 30000.0})), {}, {}) if each.reasons]
    assert bad.reasons == ("CPU, all cores is 30,000 MB/s, 50% less than the 60,000 MB/s on 4 peers",)


def test_with_three_peers_or_of_another_model_nothing_is_compared_and_no_node_is_bad() -> None:
    slow = node("n1", figures={"cpu_all": 30000.0})
    assert set(verdicts(nodes(4, slow)).values()) == {Truth.UNKNOWN}
    assert verdicts(nodes(5, node("n1", figures={"cpu_all": 30000.0}, model="Y x32")))["n1"] is Truth.UNKNOWN


def test_peers_that_differ_among_themselves_as_much_convict_nobody() -> None:
    spread = [node(f"n{at}", figures={"cpu_all": rate}) for at, rate in enumerate((60e3, 50e3, 70e3, 55e3, 65e3, 45e3))]
    assert set(verdicts(spread).values()) == {Truth.OK}


def test_a_node_with_disturbed_or_missing_figures_is_unknown_and_not_bad() -> None:
    without = Measured(name="n1", model="X x32", disturbed=("cpu_core", "cpu_all"), figures={"memory_all": 300.0})
    silent = Measured(name="n2", missing="its nodes were not free within 600 s")
    found = judge_nodes(nodes(6, without, silent), {}, {})
    assert [each.truth for each in found[:3]] == [Truth.UNKNOWN, Truth.UNKNOWN, Truth.OK]
    assert "other programs" in found[0].reasons[0]
    assert found[1].reasons == ("its nodes were not free within 600 s",)


def test_a_local_phase_that_hangs_is_a_verdict_even_of_a_single_node() -> None:
    assert verdicts([node("n1", problems=(problem("memory"),))]) == {"n1": Truth.BAD}


def test_a_mount_that_hangs_on_one_node_is_its_fault_and_on_all_of_them_nobodys() -> None:
    hung = (problem("mount", subject="/s"),)
    assert verdicts(nodes(5, node("n2", problems=hung)))["n2"] is Truth.BAD
    assert Truth.BAD not in verdicts([node(f"n{at}", problems=hung) for at in range(5)]).values()
    assert verdicts([node("n1", problems=hung)]) == {"n1": Truth.UNKNOWN}


def test_a_directory_that_exists_nowhere_convicts_nobody_and_the_sites_check_convicts_alone() -> None:
    absent = (problem("disk", "failed", "/nvme", "FileNotFoundError"),)
    assert set(verdicts([node(f"n{at}", problems=absent) for at in range(5)]).values()) == {Truth.UNKNOWN}
    assert (
        verdicts([node("n1", problems=(problem("site_check", "failed", said="it ended with 3"),))])["n1"] is Truth.BAD
    )


def test_a_floor_of_the_site_convicts_without_peers_for_one_directory_or_all() -> None:
    assert verdicts([node("n1")], floors={"cpu_all": 61000.0})["n1"] is Truth.BAD
    assert verdicts([node("n1")], floors={"mount_write /s": 1600.0})["n1"] is Truth.BAD
    assert verdicts([node("n1")], floors={"mount_write /other": 1600.0, "cpu_all": 50000.0})["n1"] is Truth.OK


def test_a_node_slower_than_in_three_earlier_tests_is_bad_unless_its_peers_are_as_slow_now() -> None:
    slow, past = node("n1", figures={"cpu_all": 30000.0}), {"n1": [{"cpu_all": 60000.0 + at} for at in range(3)]}
    assert verdicts([slow], past=past)["n1"] is Truth.BAD  # type: ignore[arg-type]
    assert verdicts([slow], past={"n1": past["n1"][:2]})["n1"] is Truth.UNKNOWN  # type: ignore[arg-type]
    all_slow = [node(f"n{at}", figures={"cpu_all": 30000.0}) for at in range(1, 6)]
    assert verdicts(all_slow, past=past)["n1"] is Truth.OK  # type: ignore[arg-type]


def test_a_filesystem_that_others_use_is_not_held_against_what_a_node_has_seen_of_it_before() -> None:
    past = {"n1": [{"mount_fsync /s": 0.3, "disk_fsync /tmp": 0.3}] * 3}
    shared, own = (node("n1", figures={name: 9.0}) for name in ("mount_fsync /s", "disk_fsync /tmp"))
    assert verdicts([shared], past=past)["n1"] is not Truth.BAD  # type: ignore[arg-type]
    assert verdicts([own], past=past)["n1"] is Truth.BAD  # type: ignore[arg-type]


def test_what_a_second_measurement_does_not_show_again_is_dropped() -> None:
    first = node(
        "n1", problems=(problem("disk", "failed", "/tmp"),), figures={"cpu_all": 30000.0, "disk_fsync /tmp": 90.0}
    )
    second = node("n1", figures={"cpu_all": 59000.0, "disk_fsync /tmp": 0.1})
    both = better(first, second)
    assert both.problems == ()
    assert (both.figures["cpu_all"], both.figures["disk_fsync /tmp"]) == (59000.0, 0.1)


def test_one_gpu_of_a_node_is_compared_with_its_seven_neighbours() -> None:
    cards = {f"gpu_matmul/{at}": 700.0 + at for at in range(8)}
    assert verdicts([node("n1", figures=cards)])["n1"] is Truth.OK
    (bad,) = judge_nodes([node("n1", figures=cards | {"gpu_matmul/5": 600.0})], {}, {})
    assert bad.reasons == ("matrix multiplication of GPU 5 is 600 TFLOP/s, 15% less than the 703 TFLOP/s on 7 peers",)


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"uncorrected": 1}, "memory errors"),
        ({"remap_failed": True}, "remapped"),
        ({"slowed": True}, "slows its clocks"),
        ({"pcie_width": 8, "pcie_width_most": 16}, "8 of 16 lanes"),
        ({}, ""),
    ],
)
def test_what_nvml_says_after_the_load_is_a_reason(card: dict[str, int | bool], words: str) -> None:
    healthy = {"uncorrected": 0, "remap_failed": False, "slowed": False, "pcie_width": 16, "pcie_width_most": 16}
    facts = {
        "gpu_health before": {"gpus": 1, "expected": 1, "gpu_0": healthy},
        "gpu_health after": {"gpus": 1, "expected": 1, "gpu_0": healthy | card},
    }
    (found,) = judge_nodes([node("n1", facts=facts)], {}, {})
    assert (found.truth is Truth.BAD) is bool(words)
    assert words in " ".join(found.reasons)


def test_a_disk_a_hundred_times_slower_is_bad_beside_peers_that_differ_fourfold() -> None:
    rates = (100.0, 400.0, 200.0, 3.0, 150.0, 300.0)
    disks = [node(f"n{at}", figures={"disk_write /tmp": rate}) for at, rate in enumerate(rates)]
    assert [name for name, truth in verdicts(disks).items() if truth is Truth.BAD] == ["n3"]


def test_a_figure_whose_repetitions_differ_as_much_as_it_is_behind_convicts_nobody() -> None:
    behind = {"cpu_all": 50000.0}
    assert verdicts(nodes(5, node("n3", figures=behind, spreads={"cpu_all": 0.01})))["n3"] is Truth.BAD
    assert verdicts(nodes(5, node("n3", figures=behind, spreads={"cpu_all": 0.08})))["n3"] is Truth.OK
