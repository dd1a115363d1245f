"""How much of a GPU works, by NVML's GPM (GPU Performance Monitoring: Hopper and later), for the NVML child.

Utilisation is 100 % also while one small kernel spins in a collective; GPM counts the share of the multiprocessors, of
the tensor cores and of the memory's bandwidth that was in use between two samples. One is taken when it is the GPU's
turn, once a minute, so that a value is the average since the turn before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

MIB: Final = float(2**20)
METRICS: Final[tuple[tuple[str, tuple[str, ...], float], ...]] = (
    ("sm_active_ratio", ("NVML_GPM_METRIC_SM_UTIL",), 0.01),
    ("tensor_active_ratio", ("NVML_GPM_METRIC_ANY_TENSOR_UTIL",), 0.01),
    ("dram_active_ratio", ("NVML_GPM_METRIC_DRAM_BW_UTIL",), 0.01),
    ("nvlink_bytes_s", ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC"), MIB),
    ("pcie_bytes_s", ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", "NVML_GPM_METRIC_PCIE_TX_PER_SEC"), MIB),
)
"""(name in the answer, the metrics whose sum it is, their unit: per cent, MiB a second; nvmlGpmMetricId_t)."""


@dataclass
class Activity:
    """The newest sample of one GPU; a GPU without GPM is asked once."""

    supported: bool | None = None
    _last: Any = None
    _spare: Any = None

    def read(self, nvml: Any, timed: Callable[..., Any], handle: Any, fatal: set[int]) -> dict[str, float]:
        """What it did since the last call; empty at the first one, and where it does not say. Raises NVMLError if its
        code is in `fatal`."""
        try:
            if self.supported is None:
                self.supported = bool(timed(nvml.nvmlGpmQueryDeviceSupport, handle).isSupportedDevice)
            return self._since_last(nvml, timed, handle) if self.supported else {}
        except nvml.NVMLError as error:
            if error.value in fatal:
                raise
            self.supported = False  # not for this user, or not on this card
            return {}

    def _since_last(self, nvml: Any, timed: Callable[..., Any], handle: Any) -> dict[str, float]:
        sample = self._spare or timed(nvml.nvmlGpmSampleAlloc)
        timed(nvml.nvmlGpmSampleGet, handle, sample)
        before, self._last = self._last, sample
        self._spare = before
        if before is None:
            return {}
        wanted = [name for _, names, _ in METRICS for name in names]
        asked = nvml.c_nvmlGpmMetricsGet_t(
            version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(wanted), sample1=before, sample2=sample
        )
        for metric, name in zip(asked.metrics, wanted, strict=False):
            metric.metricId = getattr(nvml, name)
        timed(nvml.nvmlGpmMetricsGet, asked)
        told = {
            name: metric.value
            for name, metric in zip(wanted, asked.metrics, strict=False)
            if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value) and metric.value >= 0
        }
        return {
            what: sum(told[name] for name in names) * unit
            for what, names, unit in METRICS
            if all(name in told for name in names)
        }
