"""How fast `scan-log` and `scan-log --kernel` read what somebody sends: megabytes a second of one core, from
the file to the verdict."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path

from click.testing import CliRunner

from lab.bench.figures import Figures, say
from lab.bench.logs import KINDS, Kind, chunks
from slurm_watchdog.cli.scan_log import scan_log

MIN_LOG_MB_PER_SECOND = 200.0
MIN_KERNEL_MB_PER_SECOND = 8.0
"""What the project promises; logs of jobs have gigabytes, the kernel's some megabytes."""
TOTAL = 300_000_000
"""Of the kind that has a bound; the others have a fifth, which pays more for the start of the program."""
KERNEL_TOTAL = 20_000_000
REPEATS = 2

_SYSLOG = (
    "usb 1-{0}: new high-speed USB device number {0} using xhci_hcd",
    'audit: type=1400 audit(17392680{0:02d}.{0}:12): apparmor="DENIED" operation="open" profile="x" pid={0} comm="python3"',
    "IPv6: ADDRCONF(NETDEV_CHANGE): veth{0}: link becomes ready",
    "docker0: port {0}(veth{0}) entered forwarding state",
    "perf: interrupt took too long (2501 > {0}), lowering kernel.perf_event_max_sample_rate to 79000",
    "EXT4-fs (nvme0n1p{0}): mounted filesystem with ordered data mode. Opts: (null)",
    "nvidia-uvm: Loaded the UVM driver, major device number {0}.",
    "pci 0000:{0:02d}:00.0: BAR 0: assigned [mem 0x92000000-0x92ffffff 64bit pref]",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
)


def syslog() -> Iterator[str]:
    """/var/log/messages of many nodes: the kernel's lines, and a fault now and then."""
    for number, text in zip(count(), cycle(_SYSLOG), strict=False):
        stamp = f"Feb 11 {number // 360_000 % 24:02d}:{number // 6000 % 60:02d}:{number // 100 % 60:02d}"
        said = text.format(number % 90)
        if number % 5000 == 0:
            said = f"NVRM: Xid (PCI:0000:86:00): 31, pid={number}, name=python3, Ch 00000008"
        yield f"{stamp} gpu{number % 64:03d} kernel: [{number / 7:12.6f}] {said}\n"


def rate(path: Path, *options: str) -> float:
    """Megabytes a second of the processor's time, the best of a few."""
    best = 0.0
    for _ in range(REPEATS):
        began = time.process_time()
        result = CliRunner().invoke(scan_log, ["--json", *options, str(path)])
        spent = time.process_time() - began
        if result.exit_code == 2 or not result.stdout:
            raise RuntimeError(f"{path} could not be read: {result.output[-300:]}")
        best = max(best, path.stat().st_size / spent / 1e6)
    return best


def write(path: Path, kind: Callable[[], Iterator[str]], total: int) -> None:
    """A file of about `total` bytes."""
    with open(path, "wb") as file:
        for data, _ in chunks(kind, total):
            file.write(data)


def run(figures: Figures, total: int = TOTAL, kernel_total: int = KERNEL_TOTAL) -> None:
    """Each kind of log, the slowest of them, and the kernel's."""
    kinds: dict[str, Kind] = {
        name: KINDS[name] for name in ("megatron", "text", "nccl", "prefixed", "progress", "redraws")
    }
    rates = {}
    with tempfile.TemporaryDirectory(prefix="slurm-watchdog-bench-") as directory:
        for name, kind in kinds.items():
            path = Path(directory) / f"{name}.log"
            write(path, kind, total if name == "megatron" else total // 5)
            rates[name] = rate(path)
            path.unlink()
            figures.add(f"scan_log.mb_per_s_{name}", rates[name], "MB/s")
        text = sorted(rates.values())
        say(f"the slowest is {min(rates, key=lambda name: rates[name])}, the median {text[len(text) // 2]:.0f} MB/s")
        figures.add("scan_log.mb_per_s", rates["megatron"], "MB/s", at_least=MIN_LOG_MB_PER_SECOND)
        path = Path(directory) / "messages"
        write(path, syslog, kernel_total)
        figures.add("scan_kernel.mb_per_s", rate(path, "--kernel"), "MB/s", at_least=MIN_KERNEL_MB_PER_SECOND)
