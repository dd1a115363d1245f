"""NVML, in a child of its own: any of its calls may take seconds, or for ever while a GPU is in trouble.

Nothing here is imported by the agent's loop but the name of the function. The child keeps one NVML session; what a GPU is
(handle, UUID, PCI address, minor) is asked anew only together with the list of processes, which is dear: about 4.5 ms a GPU
under the driver's global lock, while utilisation takes 2.5 us and memory 12 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def read_gpus(args: Any, state: dict[str, Any]) -> dict[str, Any]:
    """What every GPU says now, in NVML's units; with `processes` in `args` also who computes on it.

    One of `{"gpus": [...]}`, `{"missing": why}` on a node without driver, `{"error": why}` if NVML as a whole refuses. A GPU
    that can't be read is a row with `error` and `unreadable`; a value that it does not have is absent.
    """
    import pynvml

    try:
        if "devices" not in state:
            pynvml.nvmlInit()
            state["devices"] = {}
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        state.pop("devices", None)
        absent = error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return {"missing" if absent else "error": name_error(pynvml, error)}
    return {"gpus": [_read_gpu(pynvml, index, args["processes"], state["devices"]) for index in range(count)]}


def name_error(nvml: Any, error: Any) -> str:
    """`NVML_ERROR_GPU_IS_LOST: GPU is lost`: the name, which people search for, and NVML's own words."""
    names = [
        name for name in dir(nvml) if name.startswith("NVML_ERROR_") and getattr(nvml, name) == error.value
    ]
    return f"{names[0] if names else f'NVML error {error.value}'}: {error}"


def _read_gpu(nvml: Any, index: int, anew: bool, devices: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """One row. What is known of an index is kept while the GPU does not answer: its place is still its place."""
    device = devices.get(index)
    row: dict[str, Any] = {"index": index}
    try:
        if device is None or anew:
            device = devices[index] = _identify(nvml, index)
        row.update(device["identity"])
        _read_values(nvml, device["handle"], anew, row)
    except nvml.NVMLError as error:
        if device is not None:
            row.update(device["identity"])
        row.update(error=name_error(nvml, error), unreadable=True)
    return row


def _identify(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    identity = {"uuid": nvml.nvmlDeviceGetUUID(handle)}
    optional: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("bus_id", lambda: nvml.nvmlDeviceGetPciInfo(handle).busId),
        ("minor", lambda: nvml.nvmlDeviceGetMinorNumber(handle)),
        ("name", lambda: nvml.nvmlDeviceGetName(handle)),
    )
    for name, read in optional:
        try:
            identity[name] = read()
        except nvml.NVMLError as error:
            _raise_if_gone(nvml, error)
    return {"handle": handle, "identity": identity}


def _read_values(nvml: Any, handle: Any, processes: bool, row: dict[str, Any]) -> None:
    """Puts into `row` what the GPU answers. Raises NVMLError if the whole GPU does not."""
    reads: list[tuple[str, Callable[[], Any]]] = [
        ("utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        ("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        ("memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        ("power_mw", lambda: nvml.nvmlDeviceGetPowerUsage(handle)),
        ("temperature_c", lambda: _read_temperature(nvml, handle)),
        ("memory_bytes", lambda: _read_memory(nvml, handle)),
        ("throttle_mask", lambda: _read_throttle(nvml, handle)),
    ]
    if processes:
        reads.append(("pids", lambda: _read_pids(nvml, handle)))
    for name, read in reads:
        try:
            row[name] = read()
        except nvml.NVMLError as error:
            _raise_if_gone(nvml, error)
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                row.setdefault("error", f"{name}: {name_error(nvml, error)}")


def _raise_if_gone(nvml: Any, error: Any) -> None:
    """An error that concerns the whole GPU, or the whole session, ends the reading of this GPU."""
    if error.value in (
        nvml.NVML_ERROR_GPU_IS_LOST,
        nvml.NVML_ERROR_RESET_REQUIRED,
        nvml.NVML_ERROR_UNINITIALIZED,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    ):
        raise error


def _read_memory(nvml: Any, handle: Any) -> list[int]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return [memory.used, memory.total]


def _either(nvml: Any, newer: Callable[[], Any], older: Callable[[], Any]) -> Any:
    """What `newer` gives, or `older` where the driver (or pynvml) has not got that function."""
    try:
        return newer()
    except AttributeError:
        return older()
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return older()


def _read_temperature(nvml: Any, handle: Any) -> int:
    sensor = nvml.NVML_TEMPERATURE_GPU
    value = _either(
        nvml,
        lambda: nvml.nvmlDeviceGetTemperatureV(handle, sensor),
        lambda: nvml.nvmlDeviceGetTemperature(handle, sensor),
    )
    return int(value)


def _read_throttle(nvml: Any, handle: Any) -> int:
    value = _either(
        nvml,
        lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )
    return int(value)


def _read_pids(nvml: Any, handle: Any) -> list[int]:
    rows = _either(
        nvml,
        lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle),
        lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle),
    )
    return [row.pid for row in rows]
