"""What is measured: unit, which direction is better, and the least difference that counts. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple


class Kind(NamedTuple):
    """A row for a figure."""

    title: str
    """As in a sentence: "its … is …"."""
    unit: str
    more_is_better: bool
    relative: float
    """Least share by which it has to be worse than what it is compared with. Sources: see KINDS."""
    absolute: float = 0.0
    """The same in its unit; both have to be exceeded."""
    column: str = ""
    """Of the table, where it has one."""
    alike: bool = True
    """Whether the other GPUs of a node are peers, too. Not where it depends on the slot: on the socket, the switch."""
    shared_by_guests: bool = False
    """Whether the other guests of a virtual machine's host share what is measured: there only a site's floor counts."""


KINDS: Final[dict[str, Kind]] = {
    "cpu_core": Kind("CPU, one core", "MB/s", True, 0.10, column="cpu, one core"),
    "cpu_all": Kind("CPU, all cores", "MB/s", True, 0.10, column="cpu, all"),
    "memory_core": Kind("memory bandwidth, one core", "GB/s", True, 0.20, shared_by_guests=True),
    "memory_all": Kind("memory bandwidth, all cores", "GB/s", True, 0.15, column="memory", shared_by_guests=True),
    "disk_write": Kind("write rate of", "MB/s", True, 0.75, column="disk write"),
    "disk_read": Kind("read rate of", "MB/s", True, 0.75),
    "disk_fio_write": Kind("write rate by fio of", "MB/s", True, 0.75),
    "disk_fio_read": Kind("read rate by fio of", "MB/s", True, 0.75),
    "disk_fio_random": Kind("random reads by fio of", "op/s", True, 0.75),
    "disk_fsync": Kind("fsync time of", "ms", False, 4.0, 5.0),
    "mount_write": Kind("write rate of", "MB/s", True, 0.75, column="mount write"),
    "mount_read": Kind("read rate of", "MB/s", True, 0.75),
    "mount_fio_write": Kind("write rate by fio of", "MB/s", True, 0.75),
    "mount_fio_read": Kind("read rate by fio of", "MB/s", True, 0.75),
    "mount_fio_random": Kind("random reads by fio of", "op/s", True, 0.75),
    "mount_fsync": Kind("fsync time of", "ms", False, 4.0, 5.0),
    "mount_metadata": Kind("metadata rate of", "op/s", True, 0.75),
    "nic_speed": Kind("speed of interface", "Gb/s", True, 0.01),
    "pair_latency": Kind("latency", "µs", False, 1.0, 300.0, column="latency"),
    "pair_out": Kind("bandwidth", "Gb/s", True, 0.35, column="bandwidth"),
    "pair_in": Kind("bandwidth back", "Gb/s", True, 0.35),
    "pair_iperf3": Kind("bandwidth by iperf3", "Gb/s", True, 0.35),
    "gpu_matmul": Kind("matrix multiplication of GPU", "TFLOP/s", True, 0.05, column="matmul"),
    "gpu_steadiness": Kind("slowest tenth of the matrix multiplications, by their median, of GPU", "%", True, 0.10),
    "gpu_clock": Kind("clock under load of GPU", "MHz", True, 0.10),
    "gpu_memory": Kind("memory bandwidth of GPU", "GB/s", True, 0.05, column="GPU memory"),
    "gpu_h2d": Kind("rate from the node's memory to GPU", "GB/s", True, 0.35, alike=False),
    "gpu_d2h": Kind("rate to the node's memory from GPU", "GB/s", True, 0.35, alike=False),
    "gpu_nccl": Kind("bus bandwidth of an all-reduce over the GPUs", "GB/s", True, 0.10),
    "gpu_p2p": Kind("rate to the next GPU from GPU", "GB/s", True, 0.35, alike=False),
}
"""CPU and memory: twice the spread over healthy tests on the local cluster (docs/test-nodes.md); memory of a guest is left
out, for others on the host took 25 to 47 % of it from healthy nodes there, for a minute and longer. Disks and mounts, whose
rates depend on caches and on who else uses them (reads there have two usual rates, one three times the other): a quarter,
four times. Links: the spread there, doubled. GPUs: by judgement, not measured by us; cards of one model differ by a few
per cent in the clock that their power limit leaves them, and a PCIe link that lost half of its lanes or a generation by
half. Latency by more than a processor takes to wake from its deepest sleep, 290 µs (C6 of Sapphire Rapids,
drivers/idle/intel_idle.c): how deep it sleeps differs with what else it does."""
MADS: Final = 5.0
"""A figure also has to be so many scaled median absolute deviations (of logarithms) away: one in a million of a normal
distribution is."""
SPREADS: Final = 3.0
"""… and so many times the spread of its own repetitions: a measurement on a restless node is no more exact than these."""
SCALE: Final = 1.4826
"""Makes the MAD of a normal distribution its standard deviation."""
LEAST_PEERS: Final = 4
"""With fewer, one bad node among them moves the median."""
LEAST_PAST: Final = 3
"""Earlier tests of a node that make its usual figure."""
CLOCK_S: Final = 1.0
"""Clocks that differ by more are out of order: NTP keeps them within milliseconds, and logs are compared by the second."""


class LinkError(NamedTuple):
    """A row for a counter of errors of a network interface."""

    title: str
    least: int
    """Fewer in one measurement are nobody's fault."""


LINK_ERRORS: Final[dict[str, LinkError]] = {
    "rx_errors": LinkError("receive errors", 10),
    "tx_errors": LinkError("transmit errors", 10),
    "symbol_error": LinkError("symbol errors", 10),
    "port_rcv_errors": LinkError("packets received with an error", 10),
    "link_error_recovery": LinkError("recoveries of the link", 1),
    "link_downed": LinkError("losses of the link", 1),
}
"""Of /proc/net/dev, and of a port in /sys/class/infiniband. A link of 400 Gb/s carries 1e13 bits in a test; at a bit error
rate of 1e-12 to 1e-15 behind its error correction that leaves ten errors at most, on a good one none."""


def split_key(key: str) -> tuple[str, str]:
    """`mount_write /scratch` and `gpu_matmul/3` into the name of the kind and what it is about."""
    name, _, subject = key.partition(" ")
    family, _, index = name.partition("/")
    return family, subject or index


NAMES: Final = tuple(KINDS)
