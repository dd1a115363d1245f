"""A directory's disk by fio, where it is installed: without the page cache, several requests at once. Standard library
only.

The file has no name when fio opens it, so that nothing is left however the test ends. What fio cannot do says nothing
about the disk: then there are no figures.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from typing import Any

JOBS = 4
"""Requests at once."""
SIZE = 64 << 20
"""Bytes of the file; a quarter of what is free at most."""
MOST_BYTES = 256 << 20
"""Of one job and pattern: a GiB in all is written at most, whatever the disk's speed."""
FREE_SHARE = 4
PATTERNS = (("write", "write", "1M"), ("read", "read", "1M"), ("random", "randread", "4k"))
"""Name, --rw, and size of a request; one after the other."""
START_S = 15.0
"""For fio to begin and end, beside the time of its patterns."""


def measure_fio(asked: dict[str, Any]) -> dict[str, Any]:
    """Figures of `asked["directory"]`, with `name` disk or mount: `…_fio_write` and `…_fio_read` in MB/s,
    `…_fio_random` in reads of 4 KiB a second. `skipped`: why there are none."""
    program = shutil.which("fio")
    if program is None:
        return _skipped("fio is not installed on the node")
    seconds = asked["seconds"] / 2
    try:
        fd, size = _file_in(asked["directory"])
    except OSError as error:  # the disk's own phase has it, too, and judges it
        return _skipped(f"no file can be made there: {error.strerror}")
    try:
        done = subprocess.run(
            [program, *options(f"/proc/self/fd/{fd}", size, seconds)], pass_fds=[fd], stdin=subprocess.DEVNULL,
            capture_output=True, check=False, timeout=len(PATTERNS) * seconds + START_S, cwd="/",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _skipped("fio did not end in time")
    except OSError as error:
        return _skipped(f"fio cannot be started: {error.strerror}")
    finally:
        os.close(fd)
    if done.returncode:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        return _skipped(f"fio ended with {done.returncode}: {lines[0] if lines else ''}"[:300])
    return parse_fio(done.stdout.decode(errors="replace"), asked["name"])


def _file_in(directory: str) -> tuple[int, int]:
    """A file without a name, and its bytes: allocated, so that a full disk shows here. Raises OSError."""
    free = os.statvfs(directory)
    size = min(SIZE, free.f_bavail * free.f_frsize // FREE_SHARE >> 20 << 20)
    if size <= 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fd, path = tempfile.mkstemp(prefix=".slurm-watchdog-test-", dir=directory)
    try:
        os.unlink(path)
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd, size


def options(path: str, size: int, seconds: float) -> list[str]:
    """Of fio (fio(1)): each pattern for `seconds`, or until it has moved MOST_BYTES a job."""
    common = [
        "--output-format=json", f"--filename={path}", f"--size={size}", f"--io_size={MOST_BYTES}", "--direct=1",
        "--ioengine=psync", "--thread", f"--numjobs={JOBS}", "--group_reporting", f"--runtime={int(seconds * 1000)}ms",
        "--fallocate=none", "--overwrite=1", "--allow_file_create=0",
    ]  # fmt: skip
    for name, kind, request in PATTERNS:
        common += [f"--name={name}", f"--rw={kind}", f"--bs={request}", "--stonewall"]
    return common


def parse_fio(text: str, name: str) -> dict[str, Any]:
    """Given what `fio --output-format=json` prints (with warnings before it): figures, or `skipped`."""
    try:
        found = json.loads(text[text.index("{") :])
        jobs = {each["jobname"]: each for each in found["jobs"]}
        if wrong := next((each for each in jobs.values() if each["error"]), None):
            return _skipped(f"fio's {wrong['jobname']} ended with error {wrong['error']}")
        values = {
            "write": jobs["write"]["write"]["bw_bytes"] / 1e6, "read": jobs["read"]["read"]["bw_bytes"] / 1e6,
            "random": float(jobs["random"]["read"]["iops"]),
        }  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        return _skipped(f"fio's answer is not understood: {type(error).__name__} {error}"[:300])
    figures = {f"{name}_fio_{key}": [value, 0.0, 1, False] for key, value in values.items() if value > 0}
    return {"figures": figures, "facts": {"version": str(found.get("fio version", ""))}}


def _skipped(why: str) -> dict[str, Any]:
    return {"figures": {}, "facts": {"skipped": why}}
