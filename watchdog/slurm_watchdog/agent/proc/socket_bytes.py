"""What came and went on the connection that a process waits for: /proc/PID/io does not count send() and recv().

The kernel counts for each TCP connection. To ask it takes a copy of the process's descriptor, held for the moment of
the question; nothing is read from it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.agent.proc.system_call import SystemCall, int32, parse_syscall
from slurm_watchdog.base.descriptors import closing, opened
from slurm_watchdog.knowledge.syscalls import name_of
from slurm_watchdog.model.evidence import SocketBytes

TALKS: Final = frozenset(
    {"sendto", "recvfrom", "sendmsg", "recvmsg", "sendmmsg", "recvmmsg", "read", "write", "readv", "writev"}
)
"""Calls whose first argument is the connection."""
POLLS: Final = frozenset({"poll", "ppoll"})
"""… and those that point to a table of them: Python waits so where a time-out is set."""
MOST_POLLED: Final = 8
"""Connections; who polls more serves others."""
_POLLFD: Final = struct.Struct("=ihh")
_COUNTS: Final = struct.Struct("=QQ")
COUNTS_AT: Final = 120
"""tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (linux/tcp.h, since Linux 4.1)."""
PIDFD_GETFD: Final = 438
"""Number of this call on every architecture (Linux 5.6)."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def read_socket_bytes(pid: int) -> SocketBytes | None:
    """Of the connection that the main thread of `pid` waits for; the first one where it waits for several. None: it
    does not sleep in such a call, or that cannot be known."""
    try:
        # A thread in D may hold the connection's own lock, for which the question would wait as long.
        if b") S " not in read_file(f"/proc/{pid}/task/{pid}/stat"):
            return None
        call = parse_syscall(read_file(f"/proc/{pid}/task/{pid}/syscall"))
        if call is None or call.number < 0:
            return None
        for fd in _descriptors(pid, call, name_of(call.number, os.uname().machine)):
            name = os.readlink(f"/proc/{pid}/fd/{fd}")
            if name.startswith("socket:") and (count := _count(pid, fd)) is not None:
                return SocketBytes(socket=name, moved=count)
    except (OSError, ValueError, struct.error):
        return None
    return None


def _descriptors(pid: int, call: SystemCall, name: str) -> Iterator[int]:
    if name in TALKS:
        yield int32(call.args[0])
    elif name in POLLS and 0 < call.args[1] <= MOST_POLLED:
        with opened(f"/proc/{pid}/mem", os.O_RDONLY) as memory:
            table = os.pread(memory, call.args[1] * _POLLFD.size, call.args[0])
        yield from (fd for fd, _, _ in _POLLFD.iter_unpack(table) if fd >= 0)


def _count(pid: int, fd: int) -> int | None:
    """Bytes that the other end has acknowledged, and those that came; None for what is no TCP connection."""
    with closing(os.pidfd_open(pid)) as process:
        copy = _LIBC.syscall(PIDFD_GETFD, process, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        with socket.socket(fileno=copy) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return None
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, COUNTS_AT + _COUNTS.size)
    acknowledged, received = _COUNTS.unpack_from(told, COUNTS_AT)
    return int(acknowledged + received)
