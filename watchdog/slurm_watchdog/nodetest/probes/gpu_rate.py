"""How fast each GPU of a node multiplies matrices and copies memory, by torch from a Python that the site names.

The program below runs in that interpreter. Never run on a GPU so far (docs/limits.md): it ran with torch on a CPU.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from slurm_watchdog.nodetest.probes.repeat import figure

PROGRAM = """
import json, sys, time, torch
seconds, device_type = float(sys.argv[1]), sys.argv[2]
count = torch.cuda.device_count() if device_type == "cuda" else 1
size = 8192 if device_type == "cuda" else 512
kind = torch.bfloat16 if device_type == "cuda" else torch.float32
wait = torch.cuda.synchronize if device_type == "cuda" else (lambda device: None)
found = {}
for index in range(count):
    device = torch.device(device_type, index) if device_type == "cuda" else torch.device("cpu")
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    big = torch.empty((1 << 30 if device_type == "cuda" else 1 << 24), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    def timed(work, slice_s=0.2):
        values, until = [], time.perf_counter() + seconds
        work(); wait(device)
        while len(values) < 5 or time.perf_counter() < until:
            done, began = 0, time.perf_counter()
            while time.perf_counter() - began < slice_s:
                for _ in range(4):
                    work()
                wait(device)
                done += 4
            values.append(done / (time.perf_counter() - began))
        return values
    found[f"gpu_matmul/{index}"] = [each * 2 * size**3 / 1e12 for each in timed(lambda: torch.matmul(a, b))]
    found[f"gpu_memory/{index}"] = [each * 2 * big.numel() / 1e9 for each in timed(lambda: other.copy_(big))]
print(json.dumps(found))
"""
"""Arguments: seconds of each figure, and cuda or cpu. TFLOP/s of bfloat16 matrices of 8192, and GB/s read and written
by copies of 1 GiB, far above every GPU's cache."""


def measure_gpu_rate(asked: dict[str, Any]) -> dict[str, Any]:
    """Figures `gpu_matmul/N` (TFLOP/s) and `gpu_memory/N` (GB/s) of GPU N. Raises OSError with torch's last line."""
    done = subprocess.run(
        [asked["python"], "-c", PROGRAM, str(asked["seconds"]), asked.get("device", "cuda")],
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"{asked['python']} ended with {done.returncode}: {lines[-1] if lines else ''}"[:400])
    found = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return {"figures": {name: figure(values) for name, values in found.items()}, "facts": {"gpus": len(found) // 2}}
