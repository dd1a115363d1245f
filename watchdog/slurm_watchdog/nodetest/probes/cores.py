"""CPU and memory of a node: how fast one core and all allocated cores hash and copy. Standard library only."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
from collections.abc import Callable
from typing import Any

from slurm_watchdog.base import clock
from slurm_watchdog.nodetest.probes.repeat import BUDGET_S, MORE, repeated

BLOCK = 65_536
"""Bytes hashed at once: they fit into the second level of every server CPU's cache, so that memory plays no part."""
COPY = 64 << 20
"""Bytes copied at once: source and target together are more than a core's share of any server CPU's cache."""
LEAST_COPY = 8 << 20
MEMORY_SHARE = 8
"""At most an eighth of the memory that is available."""
MEMORY_LEAST_SHARE = 2
"""With so little memory that the smallest buffers take more than half of it, nothing is measured."""
CGROUP = "/sys/fs/cgroup"
ORDER, RESULT = struct.Struct("d"), struct.Struct("ddd")
LEAST = 5
"""Repetitions: of so many the upper quartile is the second best."""
SLICE_S = 0.2
"""Least length of a repetition: two periods of the kernel's CPU bandwidth control (100 ms), so that a quota shows."""

Kernel = Callable[[float], "tuple[float, float, float]"]
"""Works for so many seconds; returns (units a second, seconds of CPU, seconds that it took)."""


def cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def hashing(seconds: float) -> tuple[float, float, float]:
    """MB/s of SHA-256 on one core."""
    block = bytes(BLOCK)
    hasher = hashlib.sha256()
    done = 0
    began, cpu = clock.monotonic(), _cpu_s()
    while (took := clock.monotonic() - began) < seconds:
        for _ in range(16):
            hasher.update(block)
        done += 16
    return done * BLOCK / took / 1e6, _cpu_s() - cpu, took


def copier(size: int) -> Kernel:
    """GB/s of copies from one buffer of `size` bytes to another; a byte that is copied counts once."""
    buffers = [mmap.mmap(-1, size), mmap.mmap(-1, size)]
    for each in buffers:
        for at in range(0, size, mmap.PAGESIZE):
            each[at] = 1
    source, target = (ctypes.c_char.from_buffer(each) for each in buffers)  # as long as they live, so does the memory

    def copying(seconds: float) -> tuple[float, float, float]:
        done = 0
        began, cpu = clock.monotonic(), _cpu_s()
        while (took := clock.monotonic() - began) < seconds:
            ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), size)
            done += 1
        return done * size / took / 1e9, _cpu_s() - cpu, took

    return copying


def copy_size(workers: int, available: int) -> int:
    """Bytes of a buffer such that `workers` pairs of them stay within their share of `available` bytes; 0: not even
    the smallest ones fit."""
    if 2 * LEAST_COPY * workers > available // MEMORY_LEAST_SHARE:
        return 0
    return int(max(LEAST_COPY, min(COPY, available // (2 * MEMORY_SHARE * workers))))


def available_bytes() -> int:
    """What this process may still take: of the node, and within its own cgroup and those above it."""
    try:
        with open("/proc/meminfo") as file:
            rows = dict(line.split(":", 1) for line in file)
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = 1 << 30
    try:
        with open("/proc/self/cgroup") as file:
            room = cgroup_room(file.read())
    except OSError:
        room = None
    return free if room is None else max(0, min(free, room))


def cgroup_room(own: str, root: str = CGROUP) -> int | None:
    """Given /proc/self/cgroup (cgroups(7)): bytes up to the nearest memory limit of its cgroup and those above it, of
    version 2 or 1; cached files that the kernel can drop count as free. None: no limit is shown."""
    rooms = []
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        if names and "memory" not in names.split(","):
            continue
        base = f"{root}/memory" if names else root
        limits = ("memory.limit_in_bytes",) if names else ("memory.max", "memory.high")
        used_name = "memory.usage_in_bytes" if names else "memory.current"
        cached_name = "total_inactive_file" if names else "inactive_file"
        parts = path.strip("/").split("/")
        for depth in range(len(parts), -1, -1):
            place = "/".join([base, *parts[:depth]])
            used = _number(f"{place}/{used_name}")
            for name in limits:
                limit = _number(f"{place}/{name}")
                if limit is not None and used is not None:
                    rooms.append(limit - used + _row(f"{place}/memory.stat", cached_name))
    return min(rooms, default=None)


def _number(path: str) -> int | None:
    """Of a file with one number; None: it cannot be read, or is "max"."""
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _row(path: str, name: str) -> int:
    """The number behind `name` in a file of rows; 0: there is none."""
    try:
        with open(path) as file:
            return next((int(line.split()[1]) for line in file if line.startswith(f"{name} ")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


class Team:
    """`workers` processes that work at the same time, as often as asked; what each needs is made once."""

    def __init__(self, make: Callable[[], Kernel], workers: int) -> None:
        """Raises OSError."""
        self._members: list[tuple[int, int, int]] = []  # pid, where orders go, where answers come from
        for _ in range(workers):
            orders, answers = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                for _, theirs, _ in self._members:
                    os.close(theirs)  # else they would outlive their end
                os.close(orders[1])
                _obey(make, orders[0], answers[1])
            os.close(orders[0])
            os.close(answers[1])
            self._members.append((pid, orders[1], answers[0]))
        self._answers(1)

    def work(self, seconds: float) -> tuple[float, float, float]:
        """The sum of what all do, their seconds of CPU, and how long it took. Raises OSError if one has died."""
        for _, orders, _ in self._members:
            os.write(orders, ORDER.pack(seconds))
        found = [RESULT.unpack(each) for each in self._answers(RESULT.size)]
        return sum(each[0] for each in found), sum(each[1] for each in found), max(each[2] for each in found)

    def close(self) -> None:
        """Ends them."""
        for pid, orders, answers in self._members:
            os.close(orders)
            os.close(answers)
            os.waitpid(pid, 0)

    def _answers(self, size: int) -> list[bytes]:
        found = [os.read(answers, size) for _, _, answers in self._members]
        if any(len(each) != size for each in found):
            raise OSError("a worker process ended without a result")
        return found


def _obey(make: Callable[[], Kernel], orders: int, answers: int) -> None:
    """In a child: does not return."""
    try:
        kernel = make()
        os.write(answers, b"r")
        while len(order := os.read(orders, ORDER.size)) == ORDER.size:
            os.write(answers, RESULT.pack(*kernel(*ORDER.unpack(order))))
    finally:
        os._exit(0)


def _measure(name: str, make: Callable[[int], Kernel], seconds: float, *, shares: bool) -> dict[str, Any]:
    """One core and all of them, each in `seconds`."""
    count = max(LEAST, int(seconds / SLICE_S))
    slice_s = max(SLICE_S, seconds / count)
    alone, budget_s = make(1), max(BUDGET_S, MORE * seconds)
    single, others = repeated(lambda: alone(slice_s), count, shares=shares, budget_s=budget_s)
    workers = cpus()
    found = {f"{name}_core": single}
    if workers > 1:
        team = Team(lambda: make(workers), workers)
        try:
            every, more = repeated(lambda: team.work(slice_s), count, workers, shares=shares, budget_s=budget_s)
        finally:
            team.close()
        found[f"{name}_all"], others = every, max(others, more)
    return {"figures": found, "facts": {"cpus": workers, f"{name}_others": round(others, 2)}}


def measure_cpu(asked: dict[str, Any]) -> dict[str, Any]:
    """MB/s of hashing: `cpu_core`, `cpu_all`."""
    return _measure("cpu", lambda workers: hashing, asked["seconds"], shares=False)


def measure_memory(asked: dict[str, Any]) -> dict[str, Any]:
    """GB/s of copies: `memory_core`, `memory_all`; nothing where the job has too little memory."""
    return memory_within(available_bytes(), asked["seconds"])


def memory_within(available: int, seconds: float) -> dict[str, Any]:
    """The same, with so many bytes available."""
    if not copy_size(cpus(), available):
        why = f"the job may take {available >> 20} MiB of memory, too little for {cpus()} CPUs"
        return {"figures": {}, "facts": {"skipped": why}}
    return _measure("memory", lambda workers: copier(copy_size(workers, available)), seconds, shares=True)
