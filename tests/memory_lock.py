#!/usr/bin/env python3
"""A process whose memory lock is held for as long as a filesystem is frozen: nobody reads its command line meanwhile.

As a program, `python tests/memory_lock.py FILE`: maps FILE (made if missing, on a filesystem that can be
frozen), writes `ready` on its standard output and waits for SIGUSR1, doing nothing. Freeze the filesystem
first, then send the signal:

- thread A stores a byte in the mapped page and waits in the page fault, in D, holding the lock of that mapping;
- thread B unmaps it: it takes the lock of the whole memory for writing and waits for thread A with it.

From then on a process that reads `cmdline`, `environ`, `mem`, `smaps` of the process waits, too, while its `stat`, `status`,
`wchan`, `syscall`, `cgroup` and descriptors answer. Its main thread sleeps all the time: it is state S, and nothing of
that shows in `stat`. It ends when the filesystem is thawed and it was killed (or by itself, DONE_S later).

From a test, `mount` being a mount point that can be frozen:

    with MemoryLockHolder(mount / "mapped", env={"SLURM_JOB_ID": "7", ...}) as holder:   # started, ready, not yet stuck
        set_frozen(mount, True)
        holder.take()             # returns when reading its command line really hangs; raises TimeoutError if it does not
        ...                       # holder.pid
        set_frozen(mount, False)  # lets it go; leaving the block kills it

`is_memory_locked(pid)` says whether its command line cannot be read now. Where the process is started by something else
(a rank of a Slurm job), start the program there, and use `send_take(pid)` and `is_memory_locked(pid)`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

DONE_S = 600.0
PAGE = mmap.PAGESIZE


class MemoryLockHolder:
    """The program as a child of the test."""

    def __init__(self, file: Path, env: Mapping[str, str] | None = None, uid: int | None = None) -> None:
        argv = [sys.executable, str(Path(__file__).resolve()), str(file)]
        environment = {**os.environ, **(env or {})}
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment, user=uid)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{file}: the process that was to map it has ended")

    def take(self, timeout_s: float = 10.0) -> None:
        """Holds the lock, the filesystem being frozen. Raises TimeoutError if its command line can still be read."""
        send_take(self.pid)
        end = time.monotonic() + timeout_s
        while not is_memory_locked(self.pid):
            if time.monotonic() > end:
                raise TimeoutError(f"the memory lock of {self.pid} is not held after {timeout_s:g} s")
            time.sleep(0.05)

    def __enter__(self) -> MemoryLockHolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            if error is None:
                raise


def send_take(pid: int) -> None:
    """Tells a running program of this file to take the lock."""
    os.kill(pid, signal.SIGUSR1)


def is_memory_locked(pid: int, waits_s: float = 0.3) -> bool:
    """Whether a reader of the process's command line waits: stands in D for `waits_s`, however busy the machine is.

    Its wait can be ended by a kill, so it leaves nothing behind. Raises TimeoutError if neither shows within 10 s.
    """
    reader = subprocess.Popen(["cat", f"/proc/{pid}/cmdline"], stdout=subprocess.DEVNULL)
    try:
        since: float | None = None
        end = time.monotonic() + 10.0
        while time.monotonic() < end:
            if reader.poll() is not None:
                return False
            state = Path(f"/proc/{reader.pid}/stat").read_text().rpartition(")")[2].split()[0]
            since = (since or time.monotonic()) if state == "D" else None
            if since is not None and time.monotonic() - since > waits_s:
                return True
            time.sleep(0.02)
    finally:
        reader.kill()
        reader.wait(timeout=10)
    raise TimeoutError(f"reading the command line of {pid} neither ends nor waits")


def hold(file: str) -> None:
    """The program: see above. Calls into libc through ctypes let go of the interpreter's lock, so that both
    threads get stuck."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(descriptor, PAGE)
    address = libc.mmap(None, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"cannot map {file}")
    zeros = os.open("/dev/zero", os.O_RDONLY)
    go = threading.Event()

    def unmap() -> None:
        go.wait()
        time.sleep(0.2)  # thread A is in its page fault by then; nothing can be asked about that from in here
        libc.munmap(address, PAGE)

    def store() -> None:
        go.wait()
        # Into the page by a system call: if it is gone when the filesystem answers again, that is EFAULT and
        # not the end of this process.
        libc.read(zeros, ctypes.c_void_p(address), 1)

    for work in (store, unmap):
        threading.Thread(target=work, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGUSR1})
    go.set()
    time.sleep(DONE_S)


if __name__ == "__main__":
    hold(sys.argv[1])
