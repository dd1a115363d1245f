"""The same collector over NVIDIA's own library: runs where a GPU is, and says there what differs from the stand-in."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.model.observations import Gpu
from tests.integration.gpu_node import Node, read


def has_gpu() -> bool:
    """Whether the driver is here: its library, and a GPU's device file."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


pytestmark = [
    pytest.mark.hardware,
    pytest.mark.skipif(not has_gpu(), reason="needs a GPU and NVIDIA's driver"),
]


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.probes.close()


def settled(node: Node) -> tuple[Gpu, ...]:
    node.until(read)
    for _ in range(16):  # where lists take long, the health of one GPU a tick is read
        rows = node.tick()
    return rows


def test_the_four_names_are_those_of_the_kernel(node: Node) -> None:
    rows = settled(node)
    assert [row.index for row in rows] == list(range(len(rows)))
    assert len({row.uuid for row in rows}) == len(rows)
    for row in rows:
        assert row.uuid.startswith("GPU-")
        assert row.pci_bus_id is not None and len(row.pci_bus_id) == len("0000:c1:00.0")
        sysfs = Path("/sys/bus/pci/devices") / row.pci_bus_id
        if Path("/sys/bus/pci/devices").is_dir() and any(Path("/sys/bus/pci/devices").iterdir()):
            assert sysfs.exists(), "the address is not the kernel's"
        assert row.minor is not None
        assert Path(f"/dev/nvidia{row.minor}").exists() or os.environ.get("NVIDIA_VISIBLE_DEVICES")


def test_values_are_in_our_units(node: Node) -> None:
    for row in settled(node):
        assert row.error is None
        assert row.utilization_ratio is None or 0.0 <= row.utilization_ratio <= 1.0
        assert row.sm_clock_hz is not None and 1e8 <= row.sm_clock_hz <= 5e9
        assert row.memory_clock_hz is not None and 1e8 <= row.memory_clock_hz <= 2e10
        assert row.power_w is None or 1.0 <= row.power_w <= 2000.0
        assert row.temperature_c is not None and 5.0 <= row.temperature_c <= 110.0
        assert row.memory_total_bytes is not None and row.memory_used_bytes is not None
        assert 0 <= row.memory_used_bytes <= row.memory_total_bytes
        assert row.throttle is not None and row.pids is not None
        assert row.pcie_link_width in (None, 1, 2, 4, 8, 16)
        assert (row.pcie_link_width or 0) <= (row.pcie_link_width_max or 16)
        assert row.nvlinks_active is None or 0 <= row.nvlinks_active <= 36


def test_what_it_costs_is_told(node: Node, record_property: pytest.RecordProperty) -> None:
    """No bound here: a figure to be compared with what the stand-in's delays are made from."""
    settled(node)
    node.tick()
    assert node.gpus.driver_s is not None and node.gpus.driver_s > 0.0
    record_property("fast_ms", round(node.gpus.driver_s * 1e3, 3))
    node.gpus.want_processes()
    node.tick()
    record_property("lists_of_all_ms", round(node.gpus.driver_s * 1e3, 3))
    assert node.events() == ()


def test_events_can_be_registered_or_are_quiet(node: Node) -> None:
    settled(node)
    assert node.gpus.problem is None
