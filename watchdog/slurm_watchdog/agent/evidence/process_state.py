"""One process of a job as the kernel sees it, read in a child: threads, kernel stacks, locks, open files, sockets.

Nothing here stops a process or asks ptrace for more than a look.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from slurm_watchdog.agent.children.become_user import check_process
from slurm_watchdog.agent.children.requests import ReadProcessStates, WorkerState
from slurm_watchdog.agent.proc.files import read_call_name, read_file, read_links, read_stat, read_words
from slurm_watchdog.model.evidence import LockWait, ProcessState, SocketState, ThreadState

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
        key=lambda s: (-(s.send_queue_bytes + s.receive_queue_bytes), -s.retransmits, s.state == "LISTEN", s.peer)
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

    def with_sockets(self, found: ProcessState) -> ProcessState:
        """By the names of links alone: no file is touched."""
        _, targets = read_links(f"/proc/{found.pid}/fd")
        inodes = {int(target[8:-1]) for target in targets if target.startswith("socket:[")}
        sockets, seen = choose(inodes, self.of(found.pid)) if inodes else ((), 0)
        return replace(found, sockets=sockets, sockets_seen=seen)


MAX_THREADS = 1024  # Of one process: whose state is read.
MAX_SHOWN = 16  # Threads shown one by one: the main thread, and those that wait for a disk, a file or a debugger.
MAX_STACK = 24
STATUS_LINES = (
    "Threads", "VmRSS", "VmSwap", "Cpus_allowed_list", "Mems_allowed_list", "TracerPid", "SigPnd", "ShdPnd", "SigBlk",
    "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches", "Seccomp",
)  # fmt: skip
LIMIT_LINES = ("Max locked memory", "Max open files", "Max processes", "Max core file size", "Max address space")
ENDED = "the process has ended"
_LOCK = re.compile(r"^\d+: (?P<waits>-> )?(?P<kind>\S+) +\S+ +(?P<what>\S+) (?P<pid>-?\d+) (?P<file>\S+)")


def read_process_states(request: ReadProcessStates, state: WorkerState) -> list[ProcessState]:
    """A ProcessState for each process, in their order."""
    tables, locks, found = Tables(), _read_locks(), []
    for pid, start_ticks in state.each(request.processes):
        each = ProcessState(pid=pid, error=ENDED)
        with suppress(OSError, ValueError):
            try:
                check_process(pid, state.own)
                stat = read_stat(pid)
                if stat.start_ticks == start_ticks:
                    each = _read_process(ProcessState(pid=pid, lock=locks.get(pid), state=stat.state), tables)
            except PermissionError as error:
                each = ProcessState(pid=pid, error=str(error.strerror))
        found.append(each)
    return found


def _read_process(found: ProcessState, tables: Tables) -> ProcessState:
    for name, part in (("threads", _with_threads), ("status", _with_status), ("sockets", tables.with_sockets)):
        try:
            found = part(found)
        except (OSError, ValueError) as error:
            found = replace(found, problems=(*found.problems, f"{name}: {error}"))
    return found


def _with_threads(found: ProcessState) -> ProcessState:
    pid = found.pid
    names = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    shown: list[ThreadState] = []
    for name in names[:MAX_THREADS]:
        try:
            stat = read_stat(f"{pid}/task/{name}")
            if int(name) == pid or (stat.state in "DTtR" and len(shown) < MAX_SHOWN):
                shown.append(_thread(f"/proc/{pid}/task/{name}", int(name), stat.comm, stat.state))
        except (OSError, ValueError):  # it ended
            continue
    shown.sort(key=lambda thread: (thread.thread_id != pid, thread.state != "D", thread.thread_id))
    return replace(found, threads=tuple(shown), threads_seen=len(names))


def _thread(base: str, thread_id: int, comm: str, state: str) -> ThreadState:
    return ThreadState(
        thread_id=thread_id, comm=comm, state=state, wchan=read_words(f"{base}/wchan"), syscall=read_call_name(base),
        kernel_stack=parse_kernel_stack(read_words(f"{base}/stack") or ""),
    )  # fmt: skip


def parse_kernel_stack(text: str) -> tuple[str, ...]:
    """The functions in /proc/PID/stack, innermost first, without addresses and offsets."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].startswith("["):
            found.append(words[1].partition("+")[0])
    return tuple(found[:MAX_STACK])


def _with_status(found: ProcessState) -> ProcessState:
    lines = dict(
        line.split(":", 1)
        for line in read_file(f"/proc/{found.pid}/status").decode(errors="replace").splitlines()
        if ":" in line
    )
    status: list[tuple[str, str]] = [(name, lines[name].strip()) for name in STATUS_LINES if name in lines]
    with suppress(OSError):
        for line in Path(f"/proc/{found.pid}/limits").read_text().splitlines():
            status += [(name, line[26:].split("  ")[0].strip()) for name in LIMIT_LINES if line.startswith(name)]
    return replace(found, status=tuple(status))


def parse_locks(text: str) -> list[tuple[int, str, str, int]]:
    """(waiting pid, kind, file, holding pid) for everybody who waits in /proc/locks (see proc(5))."""
    found, holder = [], -1
    for match in filter(None, map(_LOCK.match, text.splitlines())):
        if match["waits"]:
            found.append((int(match["pid"]), f"{match['kind']} {match['what']}", match["file"], holder))
        else:
            holder = int(match["pid"])
    return found


def _read_locks() -> dict[int, LockWait]:
    waits = {}
    with suppress(OSError):
        for pid, kind, file, holder in parse_locks(Path("/proc/locks").read_text()):
            known = holder if holder > 0 else None
            comm = read_words(f"/proc/{known}/comm") if known is not None else None
            waits[pid] = LockWait(kind=kind, file=file, holder_pid=known, holder=comm)
    return waits
