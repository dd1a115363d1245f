"""Short repetitions of one measurement: the median, how far they spread, and whether other processes took the CPU.

Standard library only, Python 3.8 and later: these modules run in whatever Python a node has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from slurm_watchdog.base import clock

OTHERS_BASE, OTHERS_SHARE = 0.25, 0.02
"""A repetition that shares something with other processes (memory) is disturbed where they use more than 0.25 cores and
2 % of all: daemons of a node take about 0.05, and 2 % is less than any difference that is judged."""
LOST = 0.03
"""One that needs its CPUs only is disturbed where it lost more than 3 % of their time, and others took half of that or
more. What a quota took is not lost to others, nor what a host does not give its virtual machine."""
TICKS_PER_S = 100.0
"""USER_HZ of proc(5): fixed by the kernel's interface on every architecture that Slurm is used on."""
MORE = 3
"""At most so many times the wanted repetitions are done where some are disturbed."""
BUDGET_S = 8.0
"""Of one figure, at least: a busy or slow node has fewer repetitions, and is not late for that."""
LEAST = 3
"""Undisturbed repetitions that make a figure."""


def parse_busy(text: str) -> tuple[float, int]:
    """Given /proc/stat: (seconds that all CPUs together were busy, CPUs). User, nice and system; steal, which is no
    process's of this node, and interrupts are left out."""
    lines = text.splitlines()
    fields = [float(each) for each in lines[0].split()[1:]]
    count = sum(line.startswith("cpu") and line[3:4].isdigit() for line in lines)
    return (fields[0] + fields[1] + fields[2]) / TICKS_PER_S, max(1, count)


def read_busy() -> tuple[float, int]:
    """The same, now. Raises OSError."""
    with open("/proc/stat") as file:
        return parse_busy(file.read())


def throttled_s() -> float:
    """Seconds of CPU for which a quota held this process's cgroup, or one above it, so far; 0: not shown."""
    most = 0.0
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        root = "/sys/fs/cgroup/cpu" if names else "/sys/fs/cgroup"
        parts = path.strip("/").split("/")
        for depth in range(len(parts), 0, -1):
            for row in _lines("/".join([root, *parts[:depth], "cpu.stat"])):
                name, _, value = row.partition(" ")
                scale = {"throttled_time": 1e9, "throttled_usec": 1e6}.get(name)  # cgroup v1 and v2
                most = max(most, float(value) / scale) if scale else most
    return most


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def figure(values: Sequence[float], *, disturbed: bool = False, upper: bool = False) -> list[Any]:
    """[median, spread as a share of it, repetitions, whether it is disturbed]: a figure as it is sent.

    `upper`: the upper quartile in place of the median (of three it is the same): of rates that others only lower.
    """
    middle = statistics.median(values)
    spread = statistics.median(abs(each - middle) for each in values) / abs(middle) if middle else 0.0
    value = sorted(values)[(len(values) - 1) * 3 // 4] if upper else middle
    return [value, spread, len(values), disturbed]


def is_disturbed(others: float, lost: float, cpus: int, workers: int, *, shares: bool) -> bool:
    """Of a repetition by `workers`: `others` cores were used by other processes, `lost` were not given to it."""
    if shares and others > OTHERS_BASE + OTHERS_SHARE * cpus:
        return True
    return lost > LOST * workers and others >= lost / 2


def repeated(
    work: Callable[[], tuple[float, float, float]],
    count: int,
    workers: int = 1,
    *,
    shares: bool = False,
    budget_s: float = BUDGET_S,
) -> tuple[list[Any], float]:
    """Does `work` at least `count` times, and more while repetitions are disturbed.

    `work` returns (the value measured, seconds of CPU that it used, those of its children included, seconds that each
    worker measured). Returns the figure, of undisturbed repetitions if there are enough, and the most cores that others
    used.
    """
    good: list[float] = []
    every: list[float] = []
    most = 0.0
    until = clock.monotonic() + budget_s
    while len(good) < count and len(every) < MORE * count and (not every or clock.monotonic() < until):
        busy, cpus = read_busy()
        held_s, began = throttled_s(), clock.monotonic()
        value, own_s, measured_s = work()
        took_s = clock.monotonic() - began
        others = (read_busy()[0] - busy - own_s) / took_s
        most = max(most, others)
        every.append(value)
        lost = workers - (own_s + throttled_s() - held_s) / measured_s
        if not is_disturbed(others, lost, cpus, workers, shares=shares):
            good.append(value)
    enough = len(good) >= min(LEAST, count)
    return figure(good if enough else every, disturbed=not enough, upper=True), most
