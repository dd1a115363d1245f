"""What changes slowly, who holds what, and what it costs: real pynvml and the real collector on the stand-in
library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.model.observations import Gpu, MigInstance
from tests.integration.gpu_node import Node, read
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    TWO,
    UNKNOWN,
    Instance,
    Scenario,
    eight_cards,
    field_latencies,
)

pytestmark = pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev")

LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return Scenario(tmp_path / "scenario")


@pytest.fixture
def node(library: Path, scenario: Scenario) -> Iterator[Node]:
    node = Node(library, scenario)
    yield node
    node.probes.close()


def settled(node: Node) -> tuple[Gpu, ...]:
    """The rows once everything was read: the processes at once, the health in the tick after."""
    node.until(read)
    return node.tick()


# ------------------------------------------------------------------------------------------ values


def test_every_slow_value_comes_through(node: Node, scenario: Scenario) -> None:
    scenario.change(
        0,
        ecc=(3, 1),
        remapped=(2, 4, 1, 0),
        retired=(5, 1, 1),
        pcie=(8, 16, 1, 5),
        replays=9,
        links=((1, 1, 2, 3), (1, 0, 0, 0), (0, 4, 0, 0)),
        mig=False,
    )
    gpu = settled(node)[0]
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected) == (3, 1)
    assert (gpu.remapped_rows_corrected, gpu.remapped_rows_uncorrected) == (2, 4)
    assert (gpu.remap_pending, gpu.remap_failed) == (True, False)
    assert (gpu.retired_pages, gpu.retired_pages_pending) == (6, True)
    assert (gpu.pcie_link_width, gpu.pcie_link_width_max) == (8, 16)
    assert (gpu.pcie_link_generation, gpu.pcie_link_generation_max, gpu.pcie_replays) == (1, 5, 9)
    assert (gpu.nvlinks_active, gpu.nvlinks_down, gpu.nvlink_errors) == (2, 1, 10)
    assert (gpu.mig, gpu.memory_clock_hz, gpu.error) == (None, 2.619e9, None)


def test_activity_is_known_from_the_second_sample_on_where_the_card_has_it(node: Node, scenario: Scenario) -> None:
    scenario.change(0, gpm=(93.0, 61.5, 48.0, 1000.0, 500.0, -1, 4.0))
    first = settled(node)[0]
    assert (first.sm_active_ratio, first.error) == (None, None)
    node.tick(nvml.TURN_S)
    gpu, other = node.tick()
    assert (gpu.sm_active_ratio, gpu.tensor_active_ratio, gpu.dram_active_ratio) == pytest.approx((0.93, 0.615, 0.48))
    assert (gpu.nvlink_bytes_s, gpu.pcie_bytes_s) == (1500.0 * 2**20, None)
    assert (other.sm_active_ratio, other.error) == (None, None)
    scenario.change(0, gpm=(12.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    node.tick(nvml.TURN_S)
    gpu, _ = node.tick()
    assert (gpu.sm_active_ratio, gpu.tensor_active_ratio, gpu.pcie_bytes_s) == pytest.approx((0.12, 0.0, 0.0))


@pytest.mark.parametrize("call", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_activity_that_is_refused_costs_nothing_else(node: Node, scenario: Scenario, call: str) -> None:
    scenario.change(0, gpm=(93.0, 61.5, 48.0, 0, 0, 0, 0), ecc=(3, 1), rules=(f"error {call} 4",))  # no permission
    settled(node)
    node.tick(nvml.TURN_S)
    gpu, _ = node.tick()
    assert (gpu.sm_active_ratio, gpu.ecc_corrected, gpu.error) == (None, 3, None)


def test_what_a_gpu_has_not_got_is_unknown_and_no_error(node: Node, scenario: Scenario) -> None:
    gpu = settled(node)[1]
    assert gpu.error is None
    for name in (
        "ecc_corrected",
        "ecc_uncorrected",
        "remapped_rows_corrected",
        "remap_pending",
        "retired_pages",
        "retired_pages_pending",
        "pcie_link_width",
        "pcie_link_generation_max",
        "pcie_replays",
        "nvlinks_active",
        "nvlinks_down",
        "nvlink_errors",
        "mig",
    ):
        assert getattr(gpu, name) is None, name


@pytest.mark.parametrize(("counters", "errors"), [("totals", 10), ("links", 10), ("none", None)])
def test_nvlink_errors_are_asked_as_each_generation_wants_it(
    node: Node, scenario: Scenario, counters: str, errors: int | None
) -> None:
    scenario.change(0, links=((1, 1, 2, 3), (0, 4, 0, 0)), link_counters=counters)
    gpu = settled(node)[0]
    assert (gpu.nvlinks_active, gpu.nvlinks_down, gpu.nvlink_errors, gpu.error) == (1, 1, errors, None)


@pytest.mark.parametrize("code", [FUNCTION_NOT_FOUND, UNKNOWN])
def test_a_driver_without_field_values_still_has_links(node: Node, scenario: Scenario, code: int) -> None:
    scenario.rule(f"error nvmlDeviceGetFieldValues {code}")
    scenario.change(0, links=((1, 1, 2, 3),), replays=7)
    gpu = settled(node)[0]
    expected = (1, 0, None) if code == FUNCTION_NOT_FOUND else (None, None, None)
    assert (gpu.nvlinks_active, gpu.nvlinks_down, gpu.nvlink_errors) == expected
    assert (gpu.pcie_replays, gpu.error) == (7, None)


def test_slices_are_read_with_their_own_names_and_memory(node: Node, scenario: Scenario) -> None:
    slices = (Instance("MIG-one", 7, 0, (1, 10)), Instance("MIG-two", 9, 1, (2, 20)))
    scenario.change(0, mig=True, instances=slices, processes=((11, 5),))
    gpu = settled(node)[0]
    assert gpu.mig == (
        MigInstance(uuid="MIG-one", gpu_instance=7, compute_instance=0, memory_used_bytes=1, memory_total_bytes=10),
        MigInstance(uuid="MIG-two", gpu_instance=9, compute_instance=1, memory_used_bytes=2, memory_total_bytes=20),
    )
    assert (gpu.uuid, gpu.memory_used_bytes, gpu.utilization_ratio) == ("GPU-aaaa", 40 * 1024**3, None)
    assert (gpu.pids, gpu.error) == ((11,), None)


def test_mig_turned_on_and_off_while_it_runs_is_seen_within_a_minute(node: Node, scenario: Scenario) -> None:
    scenario.change(0, mig=False)
    assert settled(node)[0].mig is None
    scenario.change(0, mig=True, instances=(Instance("MIG-one", 7, 0),))
    node.until(lambda rows: rows[0].mig is not None, later_s=61.0)
    assert node.tick()[0].utilization_ratio is None
    scenario.change(0, mig=False, instances=())
    node.until(lambda rows: rows[0].mig is None, later_s=61.0)
    assert node.until(lambda rows: rows[0].utilization_ratio is not None)[0].utilization_ratio == 0.97


def test_a_slow_value_is_said_again_until_it_is_read_again(node: Node, scenario: Scenario) -> None:
    scenario.change(0, ecc=(1, 0))
    assert settled(node)[0].ecc_corrected == 1
    scenario.change(0, ecc=(2, 0))
    assert node.tick(later_s=30.0)[0].ecc_corrected == 1
    assert node.until(lambda rows: rows[0].ecc_corrected == 2, later_s=31.0)


# ------------------------------------------------------------------------------------------ who holds what


def test_memory_of_each_process_stands_in_the_order_of_pids(node: Node, scenario: Scenario) -> None:
    scenario.change(0, processes=((30, 3), (10, 1), (20, -1)))
    gpu = node.until(read)[0]
    assert (gpu.pids, gpu.process_memory_bytes) == ((10, 20, 30), (1, None, 3))


def test_who_only_draws_is_not_listed(node: Node, scenario: Scenario) -> None:
    scenario.change(0, processes=((10, 1),), graphics=((77, 5), (10, 1)))
    assert node.until(read)[0].pids == (10,)


def test_a_list_longer_than_the_buffer_is_read_whole(node: Node, scenario: Scenario) -> None:
    everyone = tuple((pid, pid) for pid in range(1000, 1200))
    scenario.change(0, processes=everyone)
    scenario.change(1, processes=everyone[:65])
    first, second = node.until(read)
    assert first.process_memory_bytes == first.pids == tuple(range(1000, 1200))
    assert second.pids == tuple(range(1000, 1065))


@pytest.mark.parametrize("lacking", [LISTS[:1], LISTS])
def test_a_library_that_lacks_a_function_is_read_without_it(
    scenario: Scenario, tmp_path: Path, lacking: tuple[str, ...]
) -> None:
    absent = (*lacking, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetRemappedRows")
    scenario.change(0, processes=((7, 1),), throttle=0x8, remapped=(1, 1, 1, 1), replays=3)
    node = Node(standin.build(tmp_path, without=absent), scenario)
    try:
        gpu = settled(node)[0]
        assert gpu.pids == (None if len(lacking) == 2 else (7,))
        assert (gpu.throttle, gpu.remap_failed, gpu.pcie_replays) == (("hw_slowdown",), None, 3)
        assert gpu.error is None
    finally:
        node.probes.close()


def test_a_list_that_fails_is_named_and_takes_nothing_else(node: Node, scenario: Scenario) -> None:
    scenario.change(0, processes=((7, 1),))
    assert node.until(read)[0].pids == (7,)
    scenario.rule(*(f"error {name} {UNKNOWN}" for name in LISTS))
    gpu = node.tick(later_s=61.0)[0]
    assert (gpu.pids, gpu.utilization_ratio) == (None, 0.97)
    assert str(gpu.error).startswith("pids: NVML_ERROR_UNKNOWN")


def test_what_a_gpu_said_before_it_was_lost_is_not_said_of_it_afterwards(node: Node, scenario: Scenario) -> None:
    scenario.change(0, processes=((7, 1),), ecc=(5, 5))
    assert settled(node)[0].ecc_corrected == 5
    scenario.change(0, rules=("lost",))
    lost = node.tick()[0]
    assert (lost.uuid, lost.pids, lost.ecc_corrected, lost.error) == (
        "GPU-aaaa", None, None, "NVML_ERROR_GPU_IS_LOST: GPU is lost",
    )  # fmt: skip
    scenario.change(0, rules=(), processes=((8, 1),), ecc=(0, 0))
    back = node.until(lambda rows: read(rows) and rows[0].pids is not None and rows[0].ecc_corrected == 0)[0]
    assert back.pids == (8,)


# ------------------------------------------------------------------------------------------ turns and cost


class Watched:
    """(GPUs that were listed, GPUs whose health was read, seconds in the driver) of each tick."""

    def __init__(self, node: Node):
        self.node, self.told = node, 0

    def tick(self, later_s: float = 0.0) -> tuple[list[int], list[int], float]:
        self.node.tick(later_s)
        turns, self.told = self.node.turns()[self.told :], len(self.node.turns())
        listed, looked = ([at for what, at in turns if what == kind] for kind in (nvml.LIST, nvml.HEALTH))
        return listed, looked, self.node.gpus.driver_s or 0.0


def test_one_gpu_at_a_time_is_asked_and_each_once_a_minute_from_the_start(library: Path, scenario: Scenario) -> None:
    scenario.only(eight_cards(processes=((7, 1),)))
    scenario.rule(*field_latencies())
    node = Node(library, scenario, hurry=False)
    watched = Watched(node)
    try:
        ticks = [watched.tick(later_s=5.0) for _ in range(49)]  # four minutes
        rows = node.tick()
    finally:
        node.probes.close()
    assert all(row.pids == (7,) and row.pcie_link_width == 16 for row in rows)
    assert [len(listed) for listed, _, _ in ticks[:9]] == [1] * 8 + [0]
    for which in (0, 1):
        assert max(len(tick[which]) for tick in ticks) == 1
        for index in range(8):
            at = [number * 5 for number, tick in enumerate(ticks) if index in tick[which]]
            assert {after - before for before, after in itertools.pairwise(at)} == {60}
    assert all(0.0 < seconds < 1.0 for _, _, seconds in ticks)


def test_suspicion_lists_the_processes_of_all_gpus_once(node: Node, scenario: Scenario) -> None:
    scenario.only(eight_cards())
    node.until(read)
    watched = Watched(node)
    node.gpus.want_processes()
    scenario.only(eight_cards(processes=((9, 9),)))
    assert watched.tick()[0][-8:] == list(range(8))
    assert [row.pids for row in node.tick()] == [(9,)] * 8
    watched.told = len(node.turns())
    assert watched.tick()[0] == []


def test_a_blocked_rank_that_nobody_lists_is_looked_for_once(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.change(0, processes=((41, 1),))
    watched = Watched(node)
    watched.tick()

    def lists(pids: tuple[int, ...], now: float) -> int:
        node.gpus.suspect(pids, now)
        return len(watched.tick()[0])

    assert lists((41,), 100.0) == 2
    assert [lists((41,), 105.0), lists((41, 99), 110.0)] == [0, 0], "41 is listed, and 99 comes too soon"
    assert lists((41, 99), 130.0) == 2
    assert lists((41, 99), 160.0) == 0, "99 was looked for and is on no GPU"
    assert lists((), 170.0) == lists((41,), 200.0) == 0
    assert lists((99,), 300.0) == 2, "it was not blocked in between"


def test_the_time_inside_the_driver_is_told_and_nothing_is_told_without_an_answer(
    node: Node, scenario: Scenario
) -> None:
    node.until(read)
    assert node.gpus.driver_s is not None and node.gpus.driver_s > 0.0
    scenario.rule("delay nvmlDeviceGetPowerUsage 0.2")
    node.tick()
    assert node.gpus.driver_s >= 0.4, "two GPUs"
    node.impatient()
    node.tick()
    assert node.gpus.driver_s is None


def test_a_dear_list_that_never_fits_the_budget_is_read_all_the_same(node: Node, scenario: Scenario) -> None:
    scenario.rule(*(f"delay {name} 0.02" for name in LISTS))
    scenario.change(0, processes=((7, 1),))
    node.until(read)
    scenario.only([TWO[0], TWO[1]])
    scenario.change(1, processes=((8, 1),))
    rows = node.until(lambda rows: rows[1].pids == (8,), later_s=61.0)
    assert rows[0].pids == ()


def test_a_lost_gpu_does_not_keep_the_others_from_their_turn(node: Node, scenario: Scenario) -> None:
    scenario.change(0, rules=(f"error * {GPU_IS_LOST}",))
    scenario.change(1, processes=((7, 1),), ecc=(1, 0))
    node.until(lambda rows: len(rows) == 2 and rows[1].ecc_corrected == 1)
    scenario.change(1, processes=((8, 1),), ecc=(2, 0))
    node.until(lambda rows: rows[1].pids == (8,) and rows[1].ecc_corrected == 2, later_s=61.0)
    assert nvml.RENEW_S > 61.0
