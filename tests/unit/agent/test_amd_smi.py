"""AMD's cards, through the names and results of amdsmi, into the rows that every vendor's cards have."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.agent.gpu.convert import make_gpu
from slurm_watchdog.agent.gpu.nvml import HEALTH, PROCESSES
from slurm_watchdog.agent.gpu.vendors import VENDORS, read_gpus
from slurm_watchdog.agent.workers.answer_types import GpuReading
from slurm_watchdog.agent.workers.request_types import ReadGpus
from slurm_watchdog.agent.workers.worker_state import WorkerState

STANDIN = Path(__file__).parents[2] / "rig" / "standin_amdsmi"
MI300: dict[str, Any] = {
    "gpu_device_uuid": "73ff74a1-0000-1000-80d7-7c4ee3aee1d4", "gpu_device_bdf": "0000:C1:00.0",
    "gpu_asic_info": {"market_name": "AMD Instinct MI300X"},
    "gpu_activity": {"gfx_activity": 100, "umc_activity": 4, "mm_activity": "N/A"},
    "clock_info GFX": {"clk": 2100}, "clock_info MEM": {"clk": 900},
    "power_info": {"socket_power": 612, "current_socket_power": 612, "average_socket_power": "N/A"},
    "temp_metric HOTSPOT CURRENT": 64, "gpu_vram_usage": {"vram_total": 196592, "vram_used": 98304},
    "gpu_process_list": [{"pid": 4711, "memory_usage": {"vram_mem": 98304 << 20}}, {"pid": 0}],
    "gpu_total_ecc_count": {"correctable_count": 3, "uncorrectable_count": 1},
    "pcie_info": {
        "pcie_static": {"max_pcie_width": 16}, "pcie_metric": {"pcie_width": 8, "pcie_replay_count": "N/A"},
    },
}  # fmt: skip
ALL_OF_ONE = [(0, PROCESSES), (0, HEALTH)]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerState]:
    """A child of a machine that has amdsmi, and no driver of NVIDIA's."""
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setenv("STANDIN_AMDSMI", str(tmp_path / "cards"))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    yield WorkerState()
    sys.modules.pop("amdsmi", None)  # tests that come after it are on another machine


def cards(tmp_path: Path, *found: dict[str, Any]) -> None:
    (tmp_path / "cards").write_text(json.dumps(found))


def read(worker: WorkerState, dear: Any = (), budget_s: float = 1.0) -> GpuReading:
    return read_gpus(ReadGpus(dear if dear == "all" else list(dear), budget_s), worker)


def test_every_value_of_a_card_comes_through_in_the_units_of_all_cards(worker: WorkerState, tmp_path: Path) -> None:
    cards(tmp_path, MI300)
    reading = read(worker, ALL_OF_ONE)
    assert reading.gpus is not None
    (row,) = reading.gpus
    gpu = make_gpu(row, row.processes or (), row.health or None)
    assert (gpu.uuid, gpu.pci_bus_id, gpu.name) == (MI300["gpu_device_uuid"], "0000:c1:00.0", "AMD Instinct MI300X")
    assert (gpu.utilization_ratio, gpu.sm_clock_hz, gpu.memory_clock_hz) == (1.0, 2.1e9, 9e8)
    assert (gpu.power_w, gpu.temperature_c) == (612.0, 64.0)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (98304 << 20, 196592 << 20)
    assert (gpu.pids, gpu.process_memory_bytes) == ((4711,), (98304 << 20,))
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected) == (3, 1)
    assert (gpu.pcie_link_width, gpu.pcie_link_width_max, gpu.pcie_replays) == (8, 16, None)
    assert (gpu.throttle, gpu.error) == (None, None)


def test_what_a_card_has_not_got_is_unknown_and_no_error(worker: WorkerState, tmp_path: Path) -> None:
    cards(tmp_path, {"gpu_device_uuid": "a", "gpu_activity": {"gfx_activity": "N/A"}, "power_info": None})
    (row,) = read(worker, ALL_OF_ONE).gpus or ()
    assert (row.uuid, row.utilization_percent, row.power_mw, row.memory_bytes) == ("a", None, None, None)
    assert (row.processes, row.error) == (None, None)


def test_a_card_that_stops_answering_keeps_its_name_and_says_so(worker: WorkerState, tmp_path: Path) -> None:
    cards(tmp_path, MI300, MI300 | {"gpu_device_uuid": "b"})
    read(worker)
    cards(tmp_path, {"gpu_device_uuid": "!AMDSMI_STATUS_IO - I/O Error"}, MI300 | {"gpu_device_uuid": "b"})
    lost, other = read(worker).gpus or ()
    assert (lost.uuid, lost.unreadable, lost.utilization_percent) == (MI300["gpu_device_uuid"], True, None)
    assert "does not say" in (lost.error or "")
    assert (other.uuid, other.error) == ("b", None)


def test_what_is_dear_is_read_for_one_card_at_least_and_for_all_when_somebody_is_suspected(
    worker: WorkerState, tmp_path: Path
) -> None:
    cards(tmp_path, MI300, MI300 | {"gpu_device_uuid": "b"})
    few = read(worker, [(1, PROCESSES), (0, PROCESSES)], budget_s=0.0).gpus or ()
    assert [isinstance(row.processes, tuple) for row in few] == [False, True]
    every = read(worker, "all").gpus or ()
    assert [isinstance(row.processes, tuple) for row in every] == [True, True]


def test_a_driver_that_refuses_is_asked_again_and_is_an_error_once_it_was_there(
    worker: WorkerState, tmp_path: Path
) -> None:
    cards(tmp_path)
    assert read(worker).missing.startswith("NVML"), "a package without a driver: no cards of AMD are here"
    cards(tmp_path, MI300)
    assert len(read(worker).gpus or ()) == 1
    (tmp_path / "cards").write_text("not what it was")
    assert read(worker).error
    cards(tmp_path)
    reading = read(worker)
    assert "DRIVER_NOT_LOADED" in reading.error and not reading.missing


def test_where_no_vendor_is_here_the_first_one_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    reading = read(WorkerState())
    assert (reading.gpus, reading.error) == (None, "")
    assert reading.missing.startswith("NVML_ERROR_LIBRARY_NOT_FOUND")
    assert [reader.__module__.rpartition(".")[2] for reader in VENDORS] == ["nvml", "amd_smi"]


def test_a_release_that_lacks_some_names_leaves_only_their_values_out(
    worker: WorkerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ROCm 5 and of releases to come: functions, kinds of clocks and sensors, lists of handles."""
    library = importlib.import_module("amdsmi")
    monkeypatch.delattr(library, "AmdSmiTemperatureType")
    monkeypatch.delattr(library, "amdsmi_get_gpu_total_ecc_count")
    monkeypatch.setattr(library, "AmdSmiClkType", IntEnum("AmdSmiClkType", {"GFX": 0}))
    cards(tmp_path, MI300 | {"gpu_process_list": ["handle"], "gpu_device_bdf": "N/A"})
    (row,) = read(worker, ALL_OF_ONE).gpus or ()
    gpu = make_gpu(row, row.processes or None, row.health or None)
    assert (gpu.uuid, gpu.pci_bus_id, gpu.power_w, gpu.sm_clock_hz) == (MI300["gpu_device_uuid"], None, 612.0, 2.1e9)
    assert (gpu.temperature_c, gpu.memory_clock_hz, gpu.ecc_uncorrected, gpu.pcie_link_width) == (None, None, None, 8)
    assert row.processes is None, "who computes there is not known, and that is not nobody"
    cards(tmp_path, MI300 | {"gpu_device_uuid": "N/A"})
    (row,) = read(worker).gpus or ()
    assert row.unreadable
