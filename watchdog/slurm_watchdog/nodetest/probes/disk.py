"""A directory's filesystem: write with fsync, read back, a small fsync, metadata. Standard library only.

The file is unlinked as soon as it is open: nothing of it is left, however the test ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import Any

from slurm_watchdog.base import clock
from slurm_watchdog.nodetest.probes.repeat import figure

BLOCK, LEAST_BLOCK = 1 << 20, 1 << 16
"""Bytes of a write; less on a filesystem that is nearly full, so that all fits into its share."""
CHUNK_BLOCKS = 4
"""Blocks between two fsyncs of the write test: a repetition."""
SMALL = 4096
MOST_CHUNKS = 64
"""Of a test: 256 MiB at most, whatever the disk's speed; then the file is written from its beginning again."""
FREE_SHARE = 4
"""The file may take at most a quarter of what is free."""
FILES = 20
"""That a repetition of the metadata test makes, looks at, renames and removes."""
LEAST = 3
OTHERS_BYTES_S = 20e6
"""Where other programs move more than this on the same disk meanwhile, its figures are disturbed: a log and a journal
write less, and a disk that is broken enough to be named gives nobody so much."""
SECTOR = 512
"""Bytes, of every device (Documentation/block/stat.rst)."""
OWN_WRITES = 2
"""A journal may write data a second time."""
OWN_FSYNC = 32_768
"""Bytes of a small write with its fsync: data, metadata and the journal's own blocks."""
REPETITION_S = 3.0
"""At most: where one would take longer, it has smaller blocks or fewer files, so that a slow disk has figures."""


def measure_local(asked: dict[str, Any]) -> dict[str, Any]:
    """Figures of `asked["directory"]`: `disk_write` and `disk_read` in MB/s, `disk_fsync` in ms."""
    return _measure(asked["directory"], asked["seconds"], "disk", metadata=False)


def measure_shared(asked: dict[str, Any]) -> dict[str, Any]:
    """The same as `mount_…`, and `mount_metadata` in operations a second."""
    return _measure(asked["directory"], asked["seconds"], "mount", metadata=True)


def _measure(directory: str, seconds: float, name: str, *, metadata: bool) -> dict[str, Any]:
    """Raises OSError, with what the filesystem said."""
    free = os.statvfs(directory)
    share = free.f_bavail * free.f_frsize // FREE_SHARE // CHUNK_BLOCKS
    size = BLOCK
    while size > LEAST_BLOCK and size * LEAST > share:
        size //= 2
    if size * LEAST > share:
        return {"figures": {}, "facts": {"skipped": "too little space is free"}}
    fd, path = tempfile.mkstemp(prefix=".slurm-watchdog-test-", dir=directory)
    try:
        os.unlink(path)
        size = _block_for(fd, size)
        device, began = _device_of(fd), clock.monotonic()
        before = _moved(device)
        writes, chunks = _write(fd, seconds, size, int(min(share // size, MOST_CHUNKS)))
        reads = _read(fd, seconds, size, chunks)
        small = _small(fd, seconds / 2)
        own = CHUNK_BLOCKS * size * (OWN_WRITES * len(writes) + len(reads)) + OWN_FSYNC * len(small)
        disturbed = _moved(device) - before - own > OTHERS_BYTES_S * (clock.monotonic() - began)
        found = {f"{name}_write": figure(writes, upper=True, disturbed=disturbed)}
        found[f"{name}_read"] = figure(reads, upper=True, disturbed=disturbed)
        found[f"{name}_fsync"] = figure(small, disturbed=disturbed)
    finally:
        os.close(fd)
    if metadata:
        found[f"{name}_metadata"] = figure(_metadata(directory, seconds / 2), upper=True)
    return {"figures": found, "facts": {"block_bytes": size}}


def _device_of(fd: int) -> str:
    """Where the kernel counts what the whole disk below this file moves; empty where it has none of its own."""
    number = os.fstat(fd).st_dev
    place = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if os.path.exists(f"{place}/partition"):
        place = os.path.dirname(place)
    return f"{place}/stat" if os.path.exists(f"{place}/stat") else ""


def _moved(device: str) -> int:
    """Bytes that were read from it and written to it so far; 0 where that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(device) as file:
            fields = file.read().split()
        return SECTOR * (int(fields[2]) + int(fields[6]))
    return 0


def _pattern(number: int, size: int) -> bytes:
    """A block that no compression makes small and that no other block has."""
    return _RANDOM[: size - 8] + number.to_bytes(8, "big")


_RANDOM = os.urandom(BLOCK)


def _block_for(fd: int, size: int) -> int:
    """So large that a chunk is written within REPETITION_S, as far as one block of `size` tells."""
    began = clock.monotonic()
    os.pwrite(fd, _pattern(0, size), 0)
    os.fsync(fd)
    chunk_s = CHUNK_BLOCKS * (clock.monotonic() - began)
    while size > LEAST_BLOCK and chunk_s > REPETITION_S:
        size, chunk_s = size // 2, chunk_s / 2
    return size


def _write(fd: int, seconds: float, size: int, most: int) -> tuple[list[float], int]:
    """(MB/s of each chunk with its fsync, chunks that the file has)."""
    rates: list[float] = []
    until = clock.monotonic() + seconds
    while len(rates) < LEAST or clock.monotonic() < until:
        first = len(rates) % most * CHUNK_BLOCKS
        data = [_pattern(first + each, size) for each in range(CHUNK_BLOCKS)]
        began = clock.monotonic()
        for at, each in enumerate(data, first):
            os.pwrite(fd, each, at * size)
        os.fsync(fd)
        rates.append(CHUNK_BLOCKS * size / (clock.monotonic() - began) / 1e6)
    return rates, min(most, len(rates))


def _read(fd: int, seconds: float, size: int, chunks: int) -> list[float]:
    """MB/s of each chunk, read from the filesystem and not from this node's memory where it lets us say so."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    rates: list[float] = []
    until = clock.monotonic() + seconds
    for chunk in range(chunks):
        if len(rates) >= LEAST and clock.monotonic() > until:
            break
        blocks = range(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS)
        began = clock.monotonic()
        data = [os.pread(fd, size, number * size) for number in blocks]
        rates.append(CHUNK_BLOCKS * size / (clock.monotonic() - began) / 1e6)
        if data != [_pattern(number, size) for number in blocks]:
            raise OSError("it gives back other bytes than were written")
    return rates


def _small(fd: int, seconds: float) -> list[float]:
    """ms of a write of 4 KiB with its fsync."""
    times: list[float] = []
    until = clock.monotonic() + seconds
    while len(times) < LEAST or clock.monotonic() < until:
        began = clock.monotonic()
        os.pwrite(fd, _RANDOM[:SMALL], (len(times) % 16) * SMALL)
        os.fsync(fd)
        times.append((clock.monotonic() - began) * 1e3)
    return times


def _metadata(directory: str, seconds: float) -> list[float]:
    """Operations a second: create, stat, rename, unlink."""
    rates: list[float] = []
    files = 1
    place = tempfile.mkdtemp(prefix=".slurm-watchdog-test-", dir=directory)
    try:
        until = clock.monotonic() + seconds
        while len(rates) < 1 + LEAST or clock.monotonic() < until:
            names = [os.path.join(place, str(each)) for each in range(files)]
            began = clock.monotonic()
            for each in names:
                os.close(os.open(each, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            for each in names:
                os.stat(each)
            for each in names:
                os.rename(each, each + "b")
            for each in names:
                os.unlink(each + "b")
            took_s = clock.monotonic() - began
            rates.append(4 * files / took_s)
            if len(rates) == 1:
                files = max(1, min(FILES, int(REPETITION_S / took_s)))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return rates[1:]
