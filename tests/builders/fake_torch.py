"""A stand-in for torch, as far as the program of `test-nodes` uses it: GPUs that only count and wait.

Written as text: it is imported by an interpreter of its own, from a directory on its path.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = """
import os, time
from types import SimpleNamespace

UUIDS = os.environ.get("FAKE_TORCH_UUIDS", "").split()
if os.environ.get("FAKE_TORCH_BROKEN"):
    raise ImportError("libcudnn.so.9: cannot open shared object file")
version = SimpleNamespace(cuda=os.environ.get("FAKE_TORCH_CUDA", "12.8") or None)
bfloat16 = float32 = uint8 = None

class Tensor:
    def copy_(self, other, non_blocking=False):
        time.sleep(0.001)
        return self

def randn(*size, device=None, dtype=None): return Tensor()
def empty(size, dtype=None, device=None, pin_memory=False):
    if pin_memory and os.environ.get("FAKE_TORCH_NO_PIN"):
        raise RuntimeError("cannot pin")
    return Tensor()
def empty_like(other): return Tensor()
def matmul(a, b):
    time.sleep(0.001)
    if os.environ.get("FAKE_TORCH_CARD"):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
def device(kind, index=0): return (kind, index)

class cuda:
    @staticmethod
    def device_count():
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        return len(UUIDS)
    @staticmethod
    def synchronize(device): pass
    @staticmethod
    def get_device_properties(index):
        given = {} if UUIDS[index] == "-" else {"uuid": UUIDS[index]}
        return SimpleNamespace(name="fake", **given)
"""


def install(directory: Path, uuids: list[str], **more: str) -> dict[str, str]:
    """Makes it importable from `directory`; returns what goes into the environment. `-`: torch gives no UUID."""
    (directory / "torch.py").write_text(SOURCE)
    return {"PYTHONPATH": str(directory), "FAKE_TORCH_UUIDS": " ".join(uuids), **more}
