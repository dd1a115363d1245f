"""How fast the kernel's log is read and understood: records a second of one core, through the agent's own collector."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

from lab.bench.figures import Figures, quantile, say

CAPTURES = Path(__file__).resolve().parents[2] / "tests/captures" / "kernel"
RECORDS = 100_000
REPEATS = 3


class Ring:
    """A log of the kernel in memory, a record each read, as the device gives them."""

    def __init__(self, records: Sequence[bytes]):
        self._records = iter(records)

    def read(self) -> bytes:
        """The next record. Raises BlockingIOError at the end."""
        record = next(self._records, None)
        if record is None:
            raise BlockingIOError
        return record

    def is_current(self) -> bool:
        return True

    def close(self) -> None:
        pass


def record(sequence: int, message: str, level: int = 4) -> bytes:
    """A record as /dev/kmsg gives it (Documentation/ABI/testing/dev-kmsg)."""
    return f"{level},{sequence},{sequence * 100},-;{message}\n".encode()


def healthy() -> Iterator[str]:
    """What healthy machines write."""
    lines = (CAPTURES / "healthy.txt").read_text().splitlines()
    return cycle([line.partition("] ")[2] for line in lines if line.startswith("[") and "] " in line])


def faults() -> Iterator[str]:
    """One message of each fault that we know, again and again."""
    lines = (CAPTURES / "signatures.txt").read_text().splitlines()
    return cycle([line.rsplit(" | ", 1)[-1] for line in lines if line and not line.startswith("#")])


def flood() -> Iterator[str]:
    """The same fault of ever new processes."""
    number = 0
    while True:
        number += 1
        yield f"NVRM: Xid (PCI:0000:{number % 8 + 1:02x}:00): 31, pid={number}, name=python, Ch 0000000b, intr 10000000"


def measure(messages: Iterator[str], count: int) -> tuple[float, int]:
    """Records a second, and how many events came of them."""
    from slurm_watchdog.agent.collectors.kernel_log import KernelLogReader

    records = [record(number, message) for number, message in enumerate(islice(messages, count))]
    ring = Ring(records)
    log = KernelLogReader("/dev/kmsg", open_device=lambda path: cast("Any", ring))
    events, ticks = 0, 0
    began = time.process_time()
    while True:
        told, _ = log.collect(1000.0 + ticks)
        events += len(told)
        ticks += 1
        if next(ring._records, None) is None:
            break
        assert ticks < count, "the collector does not get on"
    return (count - ticks) / (time.process_time() - began), events


def run(figures: Figures, count: int = RECORDS) -> None:
    """Records a second of healthy machines, of all faults, of a flood."""
    try:
        import slurm_watchdog.agent.collectors.kernel_log  # noqa: F401
    except ImportError:
        say("there is no collector of the kernel's log here: no figure")
        return
    for name, messages in (("healthy", healthy), ("faults", faults), ("flood", flood)):
        tries = [measure(messages(), count) for _ in range(REPEATS)]
        figures.add(f"kernel.records_per_second_{name}", quantile([rate for rate, _ in tries], 1.0), "1/s")
        say(f"{name}: {tries[0][1]} events")
