"""The TCP connections of a process: peers, queues, retransmits. Reading is for children, once for each
network namespace."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

from slurm_watchdog.model.evidence import SocketState

MAX_SOCKETS = 48  # Of one process: a rank has a few for each of its peers; those with something in a queue come first.
MAX_TABLE_BYTES = 8 << 20  # Of one table: some 50,000 connections.
STATES = {
    1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2", 6: "TIME_WAIT", 7: "CLOSE",
    8: "CLOSE_WAIT", 9: "LAST_ACK", 10: "LISTEN", 11: "CLOSING", 12: "NEW_SYN_RECV",
}  # fmt: skip
"""Numbers of include/net/tcp_states.h."""


def parse_tcp(text: str) -> dict[int, SocketState]:
    """The connections in /proc/PID/net/tcp or tcp6 (see proc(5)), by inode; lines that are none are left out."""
    found: dict[int, SocketState] = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        try:
            send, _, receive = fields[4].partition(":")
            found[int(fields[9])] = SocketState(
                state=STATES.get(int(fields[3], 16), fields[3]),
                local=parse_address(fields[1]),
                peer=parse_address(fields[2]),
                send_queue_bytes=int(send, 16),
                receive_queue_bytes=int(receive, 16),
                retransmits=int(fields[6], 16),
            )
        except (IndexError, ValueError):
            continue
    return found


def parse_address(text: str) -> str:
    """`0100007F:1F90` as `127.0.0.1:8080`: words of four bytes in the machine's own order. Raises ValueError."""
    host, _, port = text.partition(":")
    words = bytes.fromhex(host)
    if len(words) not in (4, 16):
        raise ValueError(f"{text!r} is not an address")
    data = b"".join(struct.pack("=I", *struct.unpack(">I", words[at : at + 4])) for at in range(0, len(words), 4))
    if len(data) == 16:
        six = ipaddress.IPv6Address(data)
        name = str(six.ipv4_mapped) if six.ipv4_mapped else f"[{six}]"
    else:
        name = socket.inet_ntoa(data)
    return f"{name}:{int(port, 16)}"


def choose(inodes: set[int], table: dict[int, SocketState]) -> tuple[tuple[SocketState, ...], int]:
    """The process's connections among all of its namespace, and how many there are. The telling ones first."""
    mine = [table[inode] for inode in inodes if inode in table]
    mine.sort(
        key=lambda s: (
            -(s.send_queue_bytes + s.receive_queue_bytes),
            -s.retransmits,
            s.state == "LISTEN",
            s.peer,
        )
    )
    return tuple(mine[:MAX_SOCKETS]), len(mine)


class Tables:
    """The tables of connections, each read once for its namespace."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[int, SocketState]] = {}

    def of(self, pid: int) -> dict[int, SocketState]:
        """All connections in the network namespace of `pid`. Raises OSError."""
        namespace = os.readlink(f"/proc/{pid}/ns/net")
        if namespace not in self._tables:
            table: dict[int, SocketState] = {}
            for name in ("tcp", "tcp6"):
                try:
                    with open(f"/proc/{pid}/net/{name}") as file:
                        table |= parse_tcp(file.read(MAX_TABLE_BYTES))
                except FileNotFoundError:  # a kernel without IPv6
                    continue
            self._tables[namespace] = table
        return self._tables[namespace]
