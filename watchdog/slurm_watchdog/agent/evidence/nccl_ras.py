"""Asks NCCL's RAS of a job, once: through a port on this node on which processes of the job listen.

Every rank of a job listens on the same port (28028 of the loopback by default), and another job of the same user may
share it: then no one is asked. The question stops and changes nothing; RAS threads answer for the whole job. Who
listens is read by a child of the job's owner; the talk itself takes no rights.
"""

from __future__ import annotations

import os
import re
import socket

from slurm_watchdog.agent.children.answers import Listeners
from slurm_watchdog.agent.children.become_user import check_process
from slurm_watchdog.agent.children.requests import AskRas, FindListeners, WorkerState
from slurm_watchdog.agent.evidence.process_state import Tables
from slurm_watchdog.agent.proc.files import read_links, read_stat
from slurm_watchdog.base import clock
from slurm_watchdog.model.collective_records import RasAnswer
from slurm_watchdog.parse.nccl_ras import MAX_BYTES, parse_ras

ADDRESS_VARIABLE = "NCCL_RAS_ADDR"
DEFAULT_PORT = 28028  # NCCL user guide, Environment Variables: localhost:28028.
LOOPBACK = ("127.0.0.1", "::1")
RAS_S = 5  # After so long RAS answers without the processes that have not answered it (its own default).
MAX_LINE = 200
_PORT = re.compile(r"[^\s/]{0,200}:(\d{1,5})")


def ras_port(address: str | None) -> int | None:
    """The port in what a rank's NCCL_RAS_ADDR says, the default where it says nothing; None: it is not an address."""
    match = _PORT.fullmatch(address) if address else None
    port = int(match[1]) if match else 0
    return DEFAULT_PORT if not address else port if 0 < port < 65536 else None


def find_listeners(request: FindListeners, worker: WorkerState) -> Listeners:
    """Where processes of the job listen on that port, and whether others do, too."""
    table, namespace = None, ""
    owned: set[str] = set()
    for pid, start_ticks in request.processes:
        try:
            check_process(pid, worker.own)
            if read_stat(pid).start_ticks != start_ticks:
                continue
            if table is None:
                namespace, table = os.readlink(f"/proc/{pid}/ns/net"), Tables().of(pid)
            owned |= set(read_links(f"/proc/{pid}/fd")[1])
        except (OSError, ValueError):
            continue  # it has ended, or may not be looked into
    listening = {
        inode: each.local
        for inode, each in (table or {}).items()
        if each.state == "LISTEN" and each.local.endswith(f":{request.port}")
    }
    mine = {local for inode, local in listening.items() if f"socket:[{inode}]" in owned}
    shared = any(f"socket:[{inode}]" not in owned for inode in listening)
    return Listeners(addresses=tuple(sorted(mine))[:8], shared=shared, namespace=namespace)


def loopback_of(listeners: Listeners, port: int) -> str:
    """The address at which the job's own listener can be called. Raises OSError with the reason where it can't be."""
    if listeners.shared:
        raise OSError(0, f"port {port} is shared with processes that are not of this job")
    if listeners.namespace != os.readlink("/proc/self/ns/net"):
        raise OSError(0, "the job has its own network namespace, unreachable from here")
    for address in listeners.addresses:
        host = address.rpartition(":")[0].strip("[]")
        place = {"0.0.0.0": LOOPBACK[0], "::": LOOPBACK[1]}.get(host, host)
        if place in LOOPBACK or host[:1].isdigit():
            return place
    raise OSError(0, "it listens on no address that can be called from here")


def ask_ras(request: AskRas, worker: WorkerState) -> RasAnswer:
    """What RAS says. Raises OSError with the reason where it can't be asked, or does not answer as it should."""
    until = clock.monotonic() + request.deadline_s
    with socket.create_connection((loopback_of(request.listeners, request.port), request.port), timeout=2.0) as there:
        try:
            return parse_ras(_talk(there, until))
        except ValueError as error:
            raise OSError(0, str(error)) from None


def _talk(connection: socket.socket, until: float) -> bytes:
    """As `ncclras -v -f json` talks; a release that has no JSON refuses that line and answers in text."""
    for line in ("CLIENT PROTOCOL 2", f"TIMEOUT {RAS_S}", "SET FORMAT json"):
        connection.sendall(f"{line}\n".encode())
        answered = _read(connection, until, line=True)
        if not answered.startswith((b"SERVER PROTOCOL ", b"OK", b"ERROR: ")):
            raise ValueError(f"no answer of NCCL's RAS: {answered[:60]!r}")
    connection.sendall(b"VERBOSE STATUS\n")
    return _read(connection, until, line=False)


def _read(connection: socket.socket, until: float, *, line: bool) -> bytes:
    """One line, or all until the end. Raises OSError."""
    body = bytearray()
    limit = MAX_LINE if line else MAX_BYTES
    while len(body) <= limit and not (line and body.endswith(b"\n")):
        left_s = until - clock.monotonic()
        if left_s <= 0:
            raise TimeoutError("NCCL's RAS did not answer in time")
        connection.settimeout(left_s)
        part = connection.recv(1 if line else 1 << 16)
        if not part:
            break
        body += part
    return bytes(body)
