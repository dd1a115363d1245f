"""Drivers in which a process can sleep without end: their device files, and the functions that /proc/PID/wchan names.

The kernel shows there the first function of a sleeping thread that is no part of its scheduler (get_wchan): with a
mutex or a completion that is the driver's own.
"""

from __future__ import annotations

import re

import msgspec

from slurm_watchdog.base.late_regex import late_regex


class Driver(msgspec.Struct, frozen=True):
    """One driver."""

    name: str  # For sentences: `the NVIDIA driver`.
    devices: re.Pattern[str]  # Matches from the beginning of the path of a device file.
    functions: re.Pattern[str]  # Matches from the beginning of a wait channel.


def _driver(name: str, devices: str, functions: str) -> Driver:
    return Driver(name, re.compile(devices), re.compile(functions))


DRIVERS = (
    # open-gpu-kernel-modules 470 to 590: kernel-open/nvidia, nvidia-uvm, os-interface.c; the closed ones have _nv012345rm
    _driver("the NVIDIA driver", r"/dev/nvidia(?:\d+$|ctl$|-uvm|-caps|-modeset)",
            r"nv_|nvidia_|_nv\d|rm_\w|uvm_|os_(?:acquire|cond|delay|schedule|wait)|nvlink_|nvswitch_"),
    # drivers/infiniband, drivers/net/ethernet/mellanox/mlx5/core/cmd.c (wait_func, cmd_exec)
    _driver("the InfiniBand driver", "/dev/infiniband/",
            r"mlx[45]_|ib_|uverbs_|ucma_|rdma_|cma_(?!alloc)|cmd_exec|wait_func_handle|wait_func|bnxt_re|efa_|hfi1_|irdma_"),
    _driver("the GPUDirect copy driver", "/dev/gdrdrv", r"gdrdrv_|gdr_"),
    # drivers/gpu/drm/amd: amdgpu, amdkfd
    _driver("the AMD driver", r"/dev/kfd", r"amdgpu_|kfd_|kgd2kfd|svm_range_"),
    # drivers/gpu/drm, drivers/dma-buf: what the drivers of all graphics cards share
    _driver("a GPU driver", r"/dev/dri/", r"ttm_|dma_fence_"),
    _driver("the Slingshot driver", "/dev/cxi", r"cxi_|cass_"),
)  # fmt: skip
_STORAGE = late_regex(r"/dev/nvidia-fs"), late_regex(r"nvfs_")
"""Device file and functions of GPUDirect Storage: who sleeps there waits for a filesystem."""


def driver_of(path: str | None, wchan: str | None) -> Driver | None:
    """The driver in whose call a sleeping thread is, by the call's file, else by its wait channel; None: neither."""
    if any(storage.match(text or "") for storage, text in zip(_STORAGE, (path, wchan), strict=True)):
        return None
    for driver in DRIVERS:
        if driver.devices.match(path or ""):
            return driver
    return next((driver for driver in DRIVERS if driver.functions.match(wchan or "")), None)
