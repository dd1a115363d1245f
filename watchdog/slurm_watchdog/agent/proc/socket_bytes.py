"""What came and went on the connections that a process waits for: /proc/PID/io does not count send() and recv().

The kernel counts for each TCP connection. To ask it takes a copy of the process's descriptor, held for the moment of
the question; nothing is read from it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
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
MOST_THREADS: Final = 256
MOST_CONNECTIONS: Final = 16
MOST_POLLED: Final = 8
"""Connections; who polls more serves others."""
_POLLFD: Final = struct.Struct("=ihh")
_COUNTS: Final = struct.Struct("=QQ")
COUNTS_AT: Final = 120
"""tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (linux/tcp.h, since Linux 4.1)."""
PIDFD_GETFD: Final = 438
"""Number of this call on every architecture (Linux 5.6)."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def read_socket_bytes(pid: int) -> tuple[SocketBytes, ...]:
    """Of each connection that a thread of `pid` waits for, as far as that can be known."""
    found: dict[str, SocketBytes] = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")[:MOST_THREADS]
    except OSError:
        return ()
    for thread in threads:
        with suppress(OSError, ValueError, struct.error):
            for fd in _waits_for(pid, f"/proc/{pid}/task/{thread}"):
                name = os.readlink(f"/proc/{pid}/fd/{fd}")
                known = not name.startswith("socket:") or name in found or len(found) == MOST_CONNECTIONS
                if not known and (count := _count(pid, fd)) is not None:
                    found[name] = SocketBytes(socket=name, moved=count)
    return tuple(found.values())


def _waits_for(pid: int, task: str) -> list[int]:
    """Descriptors that a thread waits for. One in D may hold a connection's own lock, for which the question would wait
    as long as it does."""
    call = parse_syscall(read_file(f"{task}/syscall")) if b") S " in read_file(f"{task}/stat") else None
    if call is None or call.number < 0:
        return []
    return list(_descriptors(pid, call, name_of(call.number, os.uname().machine)))


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
