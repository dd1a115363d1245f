"""Asks NCCL's RAS of a job, once: through a port on this node on which processes of the job listen.

Every rank of a job listens on the same port (28028 of the loopback by default), and another job of the same user may
share it: then no one is asked. The question stops and changes nothing; RAS threads answer for the whole job. Who
listens is read by a child of the job's owner; the courier asks; a child takes the answer apart.
"""

from __future__ import annotations

import os
import re
import zlib

from slurm_watchdog.agent.children.answers import Listeners
from slurm_watchdog.agent.children.become_user import check_process
from slurm_watchdog.agent.children.requests import FindListeners, ParseRas, WorkerState
from slurm_watchdog.agent.evidence.process_state import Tables
from slurm_watchdog.agent.proc.files import read_links, read_stat
from slurm_watchdog.model.collective_records import RasAnswer
from slurm_watchdog.parse.nccl_ras import MAX_BYTES, parse_ras

ADDRESS_VARIABLE = "NCCL_RAS_ADDR"
DEFAULT_PORT = 28028  # NCCL user guide, Environment Variables: localhost:28028.
LOOPBACK = ("127.0.0.1", "::1")
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
    for index, (pid, start_ticks) in enumerate(request.processes):
        worker.note(index)
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


def parse_answer(request: ParseRas, worker: WorkerState) -> RasAnswer:
    """What RAS says. Raises ValueError, zlib.error for anything else."""
    return parse_ras(zlib.decompressobj().decompress(request.answer, MAX_BYTES))
