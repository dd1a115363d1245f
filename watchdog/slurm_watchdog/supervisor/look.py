"""What one node says of itself before a start: `python -m slurm_watchdog.supervisor.look`, one task a node, prints one
line of JSON. Standard library, and pynvml where it is there; what may hang has its time."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from slurm_watchdog.base import clock
from slurm_watchdog.supervisor.plan import LOOK_MARK

DEADLINE_S = 4.0  # For all checks together, which run side by side: the supervisor waits for five seconds.
COMMAND_S = 3.5  # For the site's command.
SLOWED = 0x8 | 0x40 | 0x80
"""nvmlClocksThrottleReasonHwSlowdown, …HwThermalSlowdown, …HwPowerBrakeSlowdown (nvml.h): the hardware brakes."""
ECC_UNCORRECTED, ECC_VOLATILE = 1, 0
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC (nvml.h): since the driver was loaded."""
METRICS_PORT = 9766  # Of agent.metrics_listen, as shipped.
FIRST_USER = 1000  # UID_MIN of login.defs(5), as distributions ship it.
MAX_METRICS = 4 << 20
XID = re.compile(rb'^slurm_watchdog_gpu_xid_total\{[^}\n]*\bxid="(\d{1,5})"[^}\n]*\} [1-9]', re.MULTILINE)
TELLING = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ETIMEDOUT, errno.EHOSTDOWN,
    errno.ESHUTDOWN, errno.ENXIO, errno.ENOENT})  # fmt: skip
"""Errors of a mount; others (a quota, a right) are the same everywhere."""


def main(question: str) -> None:
    """Answers `question`: {"directories": [...], "command": "..."}. Ends the process, whatever still hangs."""
    asked = json.loads(question)
    answers: dict[str, Any] = {
        "node": os.environ.get("SLURMD_NODENAME", ""), "gpus": None, "gpu_problems": [], "xids": [],
        "expected": _whole(os.environ.get("SLURM_GPUS_ON_NODE")), "directories": {}, "command": None,
    }  # fmt: skip
    jobs: list[tuple[str, Callable[[], None]]] = [
        ("gpus", lambda: _look_at_gpus(answers)),
        ("agent", lambda: _ask_agent(answers)),
    ]
    for directory in asked["directories"]:
        jobs.append((directory, lambda directory=directory: _try(directory, answers)))  # type: ignore[misc]
    if asked["command"]:
        jobs.append(("command", lambda: _run(asked["command"], answers)))
    threads = [(name, threading.Thread(target=job, daemon=True)) for name, job in jobs]
    for _, thread in threads:
        thread.start()
    end = clock.monotonic() + DEADLINE_S
    for _, thread in threads:
        thread.join(max(0.0, end - clock.monotonic()))
    answers["late"] = [name for name, thread in threads if thread.is_alive()]
    answers["wall"] = clock.wall()
    os.write(1, f"{LOOK_MARK}{json.dumps(answers)}\n".encode())
    os._exit(0)


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _try(directory: str, answers: dict[str, Any]) -> None:
    """Writes a file there, reads it, takes it away. `answers` has nothing, or what the filesystem said."""
    path = os.path.join(directory, f".slurm-watchdog-look-{os.uname().nodename}-{os.getpid()}")
    said = ""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, b"look\n")
            os.fsync(fd)
            if os.pread(fd, 5, 0) != b"look\n":
                said = "returns other bytes than were written"
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
    except OSError as error:
        if error.errno not in TELLING:
            return  # it answered: who may write there is no matter of the node
        said = error.strerror or str(error)
    answers["directories"][directory] = said


def _run(command: str, answers: dict[str, Any]) -> None:
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            check=False, timeout=COMMAND_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        answers["command"] = [124, f"no end within {COMMAND_S} s"]
        return
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    answers["command"] = [done.returncode, lines[-1][:200] if lines else ""]


def _ask_agent(answers: dict[str, Any], port: int = METRICS_PORT, first_user: int = FIRST_USER) -> None:
    """Xids since the start of the node's agent, from its metrics; nothing where they are not at the usual port."""
    for host in _services_addresses(port, first_user):
        answer = bytearray()
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            while len(answer) < MAX_METRICS and (data := connection.recv(65_536)):
                answer += data
        if answer:
            answers["xids"] = sorted({int(number) for number in XID.findall(answer)})
            return


def _services_addresses(port: int, first_user: int) -> list[str]:
    """Where on this host someone listens at `port` whose uid is below `first_user`: no ordinary user."""
    found = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(path) as rows:
            found += [host for host, uid in listeners(rows.read(), port) if uid < first_user]
    return found


def listeners(text: str, port: int) -> list[tuple[str, int]]:
    """(address to connect to, uid) of who listens at `port`, of /proc/net/tcp or tcp6 (proc(5)): the address is in
    words of 32 bits as this machine has them in memory. A wildcard is reached at the loopback address."""
    found = []
    for row in text.splitlines()[1:]:
        fields = row.split()
        if len(fields) < 8 or fields[3] != "0A" or not fields[1].endswith(f":{port:04X}"):
            continue
        word = fields[1].partition(":")[0]
        raw = b"".join(int(word[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(word), 8))
        host = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
        found.append(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(fields[7])))
    return found


def _look_at_gpus(answers: dict[str, Any]) -> None:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return
    except Exception as error:  # noqa: BLE001 - NVMLError's classes are made when pynvml is imported
        if type(error).__name__ != "NVMLError_LibraryNotFound":
            answers["gpu_problems"].append(f"NVML says: {error}")
        return
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        answers["gpu_problems"].append(f"NVML says: {error}")
        return
    answers["gpus"] = count
    for index in range(count):
        _look_at_gpu(nvml, index, answers["gpu_problems"])


def _look_at_gpu(nvml: Any, index: int, problems: list[str]) -> None:
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        problems.append(f"GPU {index}: {error}")
        return
    with contextlib.suppress(nvml.NVMLError):  # a GPU without ECC says that it has none
        if errors := nvml.nvmlDeviceGetTotalEccErrors(gpu, ECC_UNCORRECTED, ECC_VOLATILE):
            problems.append(f"GPU {index}: {errors} memory errors that ECC could not correct, since the driver's start")
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetRemappedRows(gpu)[3]:
            problems.append(f"GPU {index}: a row of its memory could not be remapped")
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & SLOWED:
            problems.append(f"GPU {index}: the hardware slows its clocks down")


if __name__ == "__main__":
    main(sys.argv[1])
