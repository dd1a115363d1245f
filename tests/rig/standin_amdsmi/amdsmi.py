"""A stand-in for amdsmi, the Python interface of AMD SMI: the names and the results of 7.0.2, and a file that says them.

STANDIN_AMDSMI names a JSON file: a list with an object for each GPU, from the name of a function without `amdsmi_get_`
to what it returns; a string that begins with `!` is the error that it ends with. What is not there is not supported.
"""

from __future__ import annotations

import json
import os
from enum import IntEnum
from pathlib import Path
from typing import Any


class AmdSmiException(Exception):
    """Of all."""


class AmdSmiClkType(IntEnum):
    """Clocks."""

    GFX, MEM = 0, 4


class AmdSmiTemperatureType(IntEnum):
    """Sensors."""

    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    """What of a sensor."""

    CURRENT = 0


def _gpus() -> list[dict[str, Any]]:
    return json.loads(Path(os.environ["STANDIN_AMDSMI"]).read_text())


def amdsmi_init() -> None:
    if not _gpus():
        raise AmdSmiException("AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded")


def amdsmi_get_processor_handles() -> list[int]:
    return list(range(len(_gpus())))


def _says(name: str, handle: int) -> Any:
    answer = _gpus()[handle].get(name, "!AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")
    if isinstance(answer, str) and answer.startswith("!"):
        raise AmdSmiException(answer[1:])
    return answer


def amdsmi_get_gpu_device_uuid(handle: int) -> str:
    return _says("gpu_device_uuid", handle)


def amdsmi_get_gpu_device_bdf(handle: int) -> str:
    return _says("gpu_device_bdf", handle)


def amdsmi_get_gpu_asic_info(handle: int) -> dict[str, Any]:
    return _says("gpu_asic_info", handle)


def amdsmi_get_gpu_activity(handle: int) -> dict[str, Any]:
    return _says("gpu_activity", handle)


def amdsmi_get_clock_info(handle: int, clock_type: AmdSmiClkType) -> dict[str, Any]:
    return _says(f"clock_info {clock_type.name}", handle)


def amdsmi_get_power_info(handle: int) -> dict[str, Any]:
    return _says("power_info", handle)


def amdsmi_get_temp_metric(handle: int, sensor: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric) -> int:
    return _says(f"temp_metric {sensor.name} {metric.name}", handle)


def amdsmi_get_gpu_vram_usage(handle: int) -> dict[str, Any]:
    return _says("gpu_vram_usage", handle)


def amdsmi_get_gpu_process_list(handle: int) -> list[dict[str, Any]]:
    return _says("gpu_process_list", handle)


def amdsmi_get_gpu_total_ecc_count(handle: int) -> dict[str, Any]:
    return _says("gpu_total_ecc_count", handle)


def amdsmi_get_pcie_info(handle: int) -> dict[str, Any]:
    return _says("pcie_info", handle)
