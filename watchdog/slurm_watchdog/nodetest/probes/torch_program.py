"""What each GPU of a node does under load: matrices, its memory, PCIe, and copies to its neighbour. Torch is needed.

This is the program of the interpreter that the site names (gpu_rate.py starts it): it imports nothing of ours. Never
run on a GPU so far (docs/limits.md): on a CPU, and with a stand-in for torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

now = time.monotonic  # noqa: TID251 - it runs where nothing of ours is installed, base/clock.py neither
SLICE_S = 0.2
"""Length of a repetition."""
LEAST = 5
"""Repetitions of a figure."""
AT_ONCE = 4
"""Calls between two waits: the GPU always has one to begin."""
SIZES = {"cuda": (8192, 1 << 30, 1 << 28), "cpu": (512, 1 << 24, 1 << 22)}
"""By device: rows of a matrix; bytes of a copy within the device, far above every cache; bytes of a transfer."""


def timed(work: Callable[[], object], wait: Callable[[], object], seconds: float) -> list[float]:
    """How often a second `work` is done, of each repetition; the first call is not counted."""
    work()
    wait()
    values: list[float] = []
    until = now() + seconds
    while len(values) < LEAST or now() < until:
        done, began = 0, now()
        while now() - began < SLICE_S:
            for _ in range(AT_ONCE):
                work()
            wait()
            done += AT_ONCE
        values.append(done / (now() - began))
    return values


def driver_uuid(index: int, library: Any) -> str:
    """Of the GPU that torch numbers so, from the CUDA driver (cuDeviceGetUuid, cuda.h), in NVML's form; empty: it does
    not answer."""
    device, buffer = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    try:
        if library.cuDeviceGet(ctypes.byref(device), index) or library.cuDeviceGetUuid(ctypes.byref(buffer), device):
            return ""
    except AttributeError:
        return ""
    text = bytes(buffer).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def card(torch: Any, index: int, library: Any) -> dict[str, str]:
    """Which GPU torch means by a number: its UUID, and its PCI address where this release of torch has it."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", "") or "")
    uuid = (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}") if uuid else driver_uuid(index, library)
    found = {"uuid": uuid} if uuid else {}
    bus = getattr(properties, "pci_bus_id", None)
    if isinstance(bus, int):
        domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        found["bus"] = f"{domain:08x}:{bus:02x}:{device:02x}.0"
    return found


def on_device(torch: Any, index: int, device: Any, kind: str, seconds: float) -> dict[str, list[float]]:
    """TFLOP/s of bfloat16 matrices (float32 on a CPU); GB/s read and written by copies within the device's memory."""
    rows, size, _ = SIZES[kind]
    wait = _waiting(torch, [device], kind)
    number = torch.bfloat16 if kind == "cuda" else torch.float32
    a, b = (torch.randn(rows, rows, device=device, dtype=number) for _ in range(2))
    products = timed(lambda: torch.matmul(a, b), wait, seconds)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = timed(lambda: target.copy_(source), wait, seconds)
    return {
        f"gpu_matmul/{index}": [each * 2 * rows**3 / 1e12 for each in products],
        f"gpu_memory/{index}": [each * 2 * size / 1e9 for each in copies],
    }


def transfers(torch: Any, index: int, device: Any, kind: str, seconds: float) -> dict[str, list[float]]:
    """GB/s from the node's memory to the device and back; nothing where no memory can be pinned for it."""
    size = SIZES[kind][2]
    try:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "cuda")
    except RuntimeError:
        return {}
    there = torch.empty(size, dtype=torch.uint8, device=device)
    wait = _waiting(torch, [device], kind)
    down = timed(lambda: there.copy_(host, non_blocking=True), wait, seconds)
    up = timed(lambda: host.copy_(there, non_blocking=True), wait, seconds)
    return {
        f"gpu_h2d/{index}": [each * size / 1e9 for each in down],
        f"gpu_d2h/{index}": [each * size / 1e9 for each in up],
    }


def to_neighbour(torch: Any, index: int, devices: list[Any], kind: str, seconds: float) -> dict[str, list[float]]:
    """GB/s to the next GPU, of the last one to the first; nothing where there is one GPU."""
    if len(devices) < 2:
        return {}
    here, there = devices[index], devices[(index + 1) % len(devices)]
    size = SIZES[kind][2]
    source = torch.empty(size, dtype=torch.uint8, device=here)
    target = torch.empty(size, dtype=torch.uint8, device=there)
    copies = timed(lambda: target.copy_(source, non_blocking=True), _waiting(torch, [here, there], kind), seconds)
    return {f"gpu_p2p/{index}": [each * size / 1e9 for each in copies]}


def _waiting(torch: Any, devices: list[Any], kind: str) -> Callable[[], object]:
    """Until all that was begun on these devices is done."""
    return lambda: [torch.cuda.synchronize(each) for each in devices if kind == "cuda"]


def measure(torch: Any, kind: str, seconds: float, library: Any) -> dict[str, Any]:
    """Rates by figure, cards by torch's number, and per number the time (CLOCK_MONOTONIC) of its load."""
    count = torch.cuda.device_count() if kind == "cuda" else 1
    devices = [torch.device(kind, index) if kind == "cuda" else torch.device("cpu") for index in range(count)]
    rates: dict[str, list[float]] = {}
    loads: dict[str, list[float]] = {}
    for index, device in enumerate(devices):
        began = now()
        rates.update(on_device(torch, index, device, kind, seconds))
        loads[str(index)] = [began, now()]
        rates.update(transfers(torch, index, device, kind, seconds / 2))
        rates.update(to_neighbour(torch, index, devices, kind, seconds / 2))
    cards = {str(index): card(torch, index, library) if kind == "cuda" else {} for index in range(count)}
    return {"rates": rates, "cards": cards, "loads": loads}


def main() -> None:
    """Arguments: seconds of each figure; cuda or cpu. Prints one line of JSON: `measure`, or {"skipped": why}."""
    seconds, kind = float(sys.argv[1]), sys.argv[2]
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        sys.stdout.write(f"{json.dumps({'skipped': f'torch cannot be imported: {error}'[:300]})}\n")
        return
    library = None
    if kind == "cuda":
        if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
            sys.stdout.write(f"{json.dumps({'skipped': 'this torch is built for the CPU alone'})}\n")
            return
        with contextlib.suppress(OSError):
            library = ctypes.CDLL("libcuda.so.1")
    sys.stdout.write(f"{json.dumps(measure(torch, kind, seconds, library))}\n")


if __name__ == "__main__":
    main()
