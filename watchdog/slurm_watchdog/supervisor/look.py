"""What one node says of itself before a start: one task a node, which prints one line of JSON. Standard library, and
pynvml where it is there; what may hang has its time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from slurm_watchdog.base import clock

DEADLINE_S = 4.0  # For all checks together, which run side by side: the supervisor waits for five seconds.
COMMAND_S = 3.5  # For the site's command.
TELLING = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ETIMEDOUT, errno.EHOSTDOWN,
    errno.ESHUTDOWN, errno.ENXIO, errno.ENOENT})  # fmt: skip
"""Errors of a mount; others (a quota, a right) are the same everywhere."""


def main(question: str) -> None:
    """Answers {"mark": "...", "directories": [...], "command": "..."}. Ends the process, whatever still hangs."""
    asked, expected = json.loads(question), os.environ.get("SLURM_GPUS_ON_NODE", "")
    problems = dict[str, str]()
    answers: dict[str, Any] = {
        "node": os.environ.get("SLURMD_NODENAME", ""), "gpus": None, "gpu_problem": "",
        "expected": int(expected) if expected.isdecimal() else None, "problems": problems,
    }  # fmt: skip
    jobs: list[tuple[str, Callable[[], None]]] = [("gpus", partial(_look_at_gpus, answers))]
    jobs += [(directory, partial(_try, directory, problems)) for directory in asked["directories"]]
    if asked["command"]:
        jobs.append(("the site's check", partial(_run, asked["command"], problems)))
    late = side_by_side(jobs, DEADLINE_S)
    answers["problems"] = {**problems, **{name: "does not answer" for name in late if name != "gpus"}}
    os.write(1, f"{asked['mark']}{json.dumps(answers)}\n".encode())
    os._exit(0)


def side_by_side(jobs: Sequence[tuple[str, Callable[[], None]]], within_s: float) -> list[str]:
    """Does these, in threads that no one waits for any longer; the names of those that are not done by then."""
    threads = [(name, threading.Thread(target=job, daemon=True)) for name, job in jobs]
    for _, thread in threads:
        thread.start()
    end = clock.monotonic() + within_s
    for _, thread in threads:
        thread.join(max(0.0, end - clock.monotonic()))
    return [name for name, thread in threads if thread.is_alive()]


def _try(directory: str, problems: dict[str, str]) -> None:
    """Writes a file there, reads it, takes it away. `problems` gets what the filesystem says where that fails."""
    path = os.path.join(directory, f".slurm-watchdog-look-{os.uname().nodename}-{os.getpid()}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, b"look\n")
            os.fsync(fd)
            if os.pread(fd, 5, 0) != b"look\n":
                problems[directory] = "returns other bytes than were written"
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
    except OSError as error:
        if error.errno in TELLING:  # any other is an answer: who may write there is no matter of the node
            problems[directory] = error.strerror or str(error)


def _run(command: str, problems: dict[str, str]) -> None:
    name = "the site's check"
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            check=False, timeout=COMMAND_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        problems[name] = f"has no end within {COMMAND_S} s"
        return
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    if done.returncode:
        problems[name] = f"ended with {done.returncode}" + (f": {lines[-1][:200]}" if lines else "")


def _look_at_gpus(answers: dict[str, Any]) -> None:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        answers["gpus"] = nvml.nvmlDeviceGetCount()
    except ImportError:
        return
    except Exception as error:  # noqa: BLE001 - NVMLError's classes are made when pynvml is imported
        if type(error).__name__ != "NVMLError_LibraryNotFound":
            answers["gpu_problem"] = f"NVML says: {error}"
