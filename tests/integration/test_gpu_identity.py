"""UUID, PCI address, minor and index: four names that are never the same thing, whatever happens to the GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.agent.gpu import reader as gpu_reader
from slurm_watchdog.model import observations
from tests.integration.gpu_node import Node, read
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import GPU_IS_LOST, UNKNOWN, Gpu, Instance, Scenario

pytestmark = pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build(tmp_path_factory.mktemp("nvml"))


def card(number: int, **changes: object) -> Gpu:
    """A GPU each of whose values says which one it is."""
    fields: dict[str, object] = {
        "uuid": f"GPU-{number}",
        "bus": f"00000000:{0xA0 + number:02X}:00.0",
        "minor": 7 - number,
        "utilization": 10 + number,
        "sm_clock": 1000 + number,
        "power": (100 + number) * 1000,
        "temperature": 30 + number,
        "memory": (number, 1000 + number),
        "processes": ((100 + number, 5000 + number),),
        "ecc": (number, 10 + number),
        "replays": 70 + number,
        "links": ((1, number, 0, 0),),
        "mig": False,
    }
    return Gpu(**{**fields, **changes})  # type: ignore[arg-type]


def check(row: observations.Gpu) -> None:
    """Raises AssertionError if anything in the row is another GPU's."""
    number = int(row.uuid.removeprefix("GPU-"))
    expected = {
        "pci_bus_id": f"0000:{0xA0 + number:02x}:00.0",
        "minor": 7 - number,
        "utilization_ratio": (10 + number) / 100,
        "sm_clock_hz": (1000 + number) * 1e6,
        "power_w": 100.0 + number,
        "temperature_c": 30.0 + number,
        "memory_used_bytes": number,
        "memory_total_bytes": 1000 + number,
        "pids": (100 + number,),
        "process_memory_bytes": (5000 + number,),
        "ecc_corrected": number,
        "ecc_uncorrected": 10 + number,
        "pcie_replays": 70 + number,
        "nvlink_errors": number,
    }
    for name, value in expected.items():
        assert getattr(row, name) in (None, value), (row.uuid, name, getattr(row, name), value)
    assert all(each.uuid == f"MIG-{number}" for each in row.mig or ())


STATES: dict[str, dict[str, object]] = {
    "fine": {},
    "lost": {"rules": ("lost",)},
    "all calls fail": {"rules": (f"error * {GPU_IS_LOST}",)},
    "no handle": {"rules": (f"error nvmlDeviceGetHandleByIndex_v2 {UNKNOWN}",)},
    "no name": {"rules": (f"error nvmlDeviceGetUUID {UNKNOWN}",)},
    "no lists": {"rules": (f"error nvmlDeviceGetComputeRunningProcesses_v3 {UNKNOWN}",)},
}
STEP = st.tuples(
    st.permutations(range(4)),
    st.lists(st.sampled_from(sorted(STATES)), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(0, 4),
    st.sampled_from([0.0, 5.0, 61.0, nvml.RENEW_S]),
    st.sampled_from([(), (), ("snapshot",), (f"error nvmlDeviceGetCount_v2 {UNKNOWN}",), ("error * 9",)]),
)


@settings(max_examples=25)
@given(steps=st.lists(STEP, min_size=2, max_size=8))
def test_no_row_ever_carries_what_is_another_gpus(library: Path, steps: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        scenario = Scenario(Path(directory) / "scenario", gpus=tuple(map(card, range(4))))
        node = Node(library, scenario)
        try:
            for order, states, slices, count, later_s, rules in steps:
                gpus = [
                    card(
                        number,
                        mig=slices[number],
                        instances=(Instance(f"MIG-{number}", 1, 0),) if slices[number] else (),
                        **STATES[states[number]],
                    )
                    for number in order
                ]
                scenario.rules = rules
                scenario.only(gpus[:count])
                for pause_s in (later_s, 0.0, 5.0):
                    rows = node.tick(pause_s)
                    named = [row.uuid for row in rows if row.uuid]
                    assert len(named) == len(set(named)), named
                    for row in rows:
                        if row.uuid:
                            check(row)
                        else:
                            assert row.power_w is None and row.pids is None
        finally:
            node.probes.close()


# ------------------------------------------------------------------------------------------ by name


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return Scenario(tmp_path / "scenario", gpus=tuple(map(card, range(3))))


@pytest.fixture
def node(library: Path, scenario: Scenario) -> Iterator[Node]:
    node = Node(library, scenario)
    yield node
    node.probes.close()


def places(rows: tuple[observations.Gpu, ...]) -> list[tuple[str, int]]:
    return [(row.uuid, row.index) for row in rows if row.error is None]


def test_a_gpu_that_comes_back_at_another_place_is_the_same_gpu(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.only([card(1), card(2)])
    rows = node.tick()
    assert places(rows) == [("GPU-1", 0), ("GPU-2", 1)]
    assert [(row.uuid, row.error) for row in rows[2:]] == [("GPU-0", "NVML does not list this GPU any more")]
    scenario.only([card(1), card(2), card(0)])
    rows = node.until(read)
    assert places(rows) == [("GPU-1", 0), ("GPU-2", 1), ("GPU-0", 2)]
    for row in rows:
        check(row)


def test_a_library_that_lists_gpus_only_once_is_asked_anew_after_a_while(node: Node, scenario: Scenario) -> None:
    """Between two sessions the count stays, and a GPU that fell off the bus and came back stays lost."""
    scenario.rule("snapshot")
    node.until(read)
    scenario.only([card(0), card(2)])
    assert [(row.uuid, row.error is None) for row in node.tick()] == [
        ("GPU-0", True), ("GPU-1", False), ("GPU-2", True),
    ]  # fmt: skip
    scenario.only([card(2), card(0), card(1)])
    node.tick(later_s=nvml.RENEW_S)
    rows = node.until(read, later_s=nvml.RENEW_S)
    assert sorted(places(node.tick())) == [("GPU-0", 1), ("GPU-1", 2), ("GPU-2", 0)]
    for row in rows:
        check(row)


def test_places_that_were_exchanged_are_noticed_within_a_minute(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.only([card(2), card(1), card(0)])
    rows = node.until(lambda rows: places(rows)[:1] == [("GPU-2", 0)], later_s=61.0)
    assert places(rows) == [("GPU-2", 0), ("GPU-1", 1), ("GPU-0", 2)]


def test_a_silent_gpu_is_the_last_that_was_at_its_place(node: Node, scenario: Scenario) -> None:
    """GPU-0 was at 0, went away, GPU-1 took its place and falls silent: nobody may call it GPU-0."""
    node.until(read)
    scenario.only([card(1), card(2)])
    node.tick()
    silent = card(1, rules=(f"error * {GPU_IS_LOST}",))
    scenario.only([silent, card(2)])
    node.tick(later_s=nvml.RENEW_S)
    rows = node.tick(later_s=nvml.RENEW_S)
    assert [(row.uuid, row.index, row.error is None) for row in rows[:2]] == [
        ("GPU-1", 0, False), ("GPU-2", 1, True),
    ]  # fmt: skip
    assert [(row.uuid, row.error) for row in rows[2:]] == [("GPU-0", "NVML does not list this GPU any more")]


def test_a_driver_that_was_loaded_anew_gives_the_gpus_back(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.rule("error * 18")  # the library and the driver are of two versions
    node.until(lambda rows: node.gpus.problem is not None)
    scenario.rules = ()
    scenario.only([card(2), card(0), card(1)])
    rows = node.until(read, later_s=gpu_reader.RETRY_S)
    assert places(rows) == [("GPU-2", 0), ("GPU-0", 1), ("GPU-1", 2)]
    for row in rows:
        check(row)


def test_gpus_that_are_never_seen_again_are_forgotten_in_the_end(library: Path, scenario: Scenario) -> None:
    node = Node(library, scenario, max_known=3)
    try:
        node.until(read)
        for number in (10, 20, 30):
            scenario.only([card(number), card(number + 1)] * (number != 20) + [card(number)] * (number == 20))
            rows = node.tick()
            assert len(rows) == 3
            assert {row.uuid for row in rows if row.error is None} >= {f"GPU-{number}"}
    finally:
        node.probes.close()
