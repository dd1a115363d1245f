"""Faults that NVML announces: an event set in the real child, on the stand-in library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.agent.gpu import reader as gpu_reader
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.observations import NodeEvent
from tests.integration.gpu_node import Node, read
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import ECC_DOUBLE_BIT, NOT_SUPPORTED, TWO, UNKNOWN, Scenario

pytestmark = pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev")


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


def said(events: tuple[NodeEvent, ...]) -> list[tuple[str | None, int | None]]:
    return [(event.gpu_uuid, event.xid) for event in events]


def test_an_xid_is_told_once_with_its_gpu_and_what_is_known_of_it(node: Node, scenario: Scenario) -> None:
    node.until(read)
    assert node.events() == ()
    scenario.event(1, 94)
    node.tick()
    (event,) = node.events(later_s=2.0)
    row = describe_xid(94)
    assert (event.source, event.name, event.xid, event.severity) == ("nvml", "xid", 94, row.severity)
    assert (event.gpu_uuid, event.pci_bus_id) == ("GPU-bbbb", "0000:07:00.0")
    assert event.may_exclude_node is row.may_exclude_node
    assert event.age_s >= 2.0
    node.tick()
    assert node.events() == ()


def test_what_happened_before_the_agent_came_is_not_told(node: Node, scenario: Scenario) -> None:
    scenario.event(0, 31)
    node.until(read)
    scenario.event(0, 45)
    node.tick()
    assert said(node.events()) == [("GPU-aaaa", 45)]


def test_events_are_told_in_their_order_and_equal_ones_are_folded(node: Node, scenario: Scenario) -> None:
    node.until(read)
    for index, xid in ((0, 31), (1, 31), (0, 31), (0, 45), (0, 31)):
        scenario.event(index, xid)
    node.tick()
    events = node.events()
    assert said(events) == [("GPU-aaaa", 31), ("GPU-bbbb", 31), ("GPU-aaaa", 45)]
    assert [event.repeats for event in events] == [2, 0, 0]


def test_a_double_bit_error_is_no_xid(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.event(0, 0, ECC_DOUBLE_BIT)
    node.tick()
    (event,) = node.events()
    assert (event.name, event.xid, event.gpu_uuid) == ("gpu_ecc_uncorrected", None, "GPU-aaaa")


def test_a_fault_without_a_number_is_no_event(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.event(0, 0)
    scenario.event(0, 48)
    node.tick()
    assert said(node.events()) == [("GPU-aaaa", 48)]


def test_a_flood_is_taken_in_bounded_portions(node: Node, scenario: Scenario) -> None:
    node.until(read)
    many = tuple((sequence, 1000 + sequence, standin.XID) for sequence in range(1, 101))
    scenario.change(0, events=many)
    portions = []
    for _ in range(5):
        node.tick()
        portions.append(len(node.events()))
    assert portions == [nvml.MAX_EVENTS] * 3 + [100 - 3 * nvml.MAX_EVENTS, 0]


def test_gpus_that_announce_nothing_are_read_all_the_same(node: Node, scenario: Scenario) -> None:
    scenario.change(0, event_types=0)
    node.until(read)
    scenario.event(0, 31)
    scenario.event(1, 31)
    assert read(node.tick())
    assert said(node.events()) == [("GPU-bbbb", 31)]


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes"])
@pytest.mark.parametrize("code", [NOT_SUPPORTED, UNKNOWN])
def test_a_driver_without_events_is_quiet(node: Node, scenario: Scenario, call: str, code: int) -> None:
    scenario.rule(f"error {call} {code}")
    node.until(read)
    for _ in range(3):
        assert read(node.tick())
    assert node.events() == ()
    assert node.gpus.problem is None


def test_the_fall_of_a_gpu_is_told_by_its_name_and_the_others_events_go_on(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.event(0, 79)
    scenario.change(0, rules=("lost",))
    first, second = node.tick()
    assert (first.error is None, second.error) == (False, None)
    assert said(node.events()) == [("GPU-aaaa", 79)]
    node.tick()  # a set without the one that is lost
    scenario.event(1, 63)
    assert node.tick()[1].utilization_ratio == 0.0
    assert said(node.events()) == [("GPU-bbbb", 63)]


def test_a_new_session_registers_again(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.rule("error nvmlDeviceGetCount_v2 1")
    node.until(lambda rows: node.gpus.problem is not None)
    scenario.rule()
    node.until(read, later_s=gpu_reader.RETRY_S)
    scenario.event(1, 13)
    node.tick()
    assert said(node.events()) == [("GPU-bbbb", 13)]


def test_a_gpu_that_moved_in_the_list_is_still_told_by_its_own_name(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.only(TWO[::-1])
    scenario.event(0, 31)  # now GPU-bbbb
    node.tick()
    assert said(node.events()) == [("GPU-bbbb", 31)]


def test_a_wait_that_never_returns_hangs_the_child_and_nothing_else(node: Node, scenario: Scenario) -> None:
    node.until(read)
    node.impatient()
    scenario.rule("hang nvmlEventSetWait_v2")
    node.until(lambda rows: bool(node.hung()))
    assert [row.uuid for row in node.tick()] == ["GPU-aaaa", "GPU-bbbb"]
    scenario.rule()
    node.patient()
    node.until(read)
    scenario.event(0, 31)
    node.tick()
    assert said(node.events()) == [("GPU-aaaa", 31)]
