"""GPUs of this node: see slurm_watchdog.agent.gpu.reader, which has NVML read them.

Sees: UUID, PCI address, minor; utilisation, clocks, power, temperature, memory, throttle reasons; processes
    with their memory; ECC, remapped rows, retired pages, PCIe, NVLink, MIG; activity of multiprocessors, tensor
    cores, memory and links (GPM); Xid events
From: NVML, in one child
How often: values every tick (temperature, memory and throttle reasons every other); processes and health of
    a GPU once a minute, one GPU after the other, in 5 ms of driver time a tick; all at once only if a rank
    is under suspicion
Never: NVML in the loop; a setting, a reset
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_watchdog.agent.collectors.collector import Collector, CollectorSpec, Problem
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.report import GpuSection, ProcessSection

SLOW_NVML_S = 3.0  # Its first answer may take seconds, until the driver has woken the GPUs; then the wait is reported.


class GpuCollector(Collector):
    """What NVML says of every GPU, and what it announced."""

    def begin(self, now: float) -> None:
        """NVML is slow: its worker reads while the other collectors look."""
        self.context.gpus.ask(now, self.deadline_s)

    def collect(self, now: float) -> GpuSection:
        """Every GPU; one that did not answer, with the reason."""
        gpus = self.context.gpus.collect(now)
        ranks = (p for p in self.sections.of(ProcessSection).processes if p.role is Role.RANK)
        self.context.gpus.suspect((rank.pid for rank in ranks if rank.blocked is not None), now)
        return GpuSection(gpus=gpus, node_events=self.context.gpus.drain_events(now))

    def problems(self, now: float) -> Iterator[Problem]:
        """Why NVML says nothing, or that it is waited for."""
        if self.context.gpus.problem:
            yield Problem(self.context.gpus.problem)
        waiting_s = self.context.gpus.waiting_s(now)
        if waiting_s is not None and waiting_s >= SLOW_NVML_S:
            yield Problem(f"NVML has not answered for {waiting_s:.0f} s, and no GPU is known yet")


SPEC = CollectorSpec("gpu", GpuSection, GpuCollector)
