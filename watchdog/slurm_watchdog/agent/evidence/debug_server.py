"""Asks the debug server of PyTorch for what each rank has recorded, where a training has started it
(`torch.distributed.debug.start_debug_server`).

It listens on the node of rank 0 and asks the other ranks itself. As with NCCL's RAS it is called over the loopback, and
only if a process of this job listens there and nobody else; one page is read, which changes nothing.
"""

from __future__ import annotations

import socket
from typing import Final

from slurm_watchdog.agent.evidence.nccl_ras import loopback_of
from slurm_watchdog.agent.workers.request_types import AskDebugServer
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base import clock
from slurm_watchdog.model.collective_records import CollectiveRecord
from slurm_watchdog.parse.debug_server import MAX_BYTES, parse_debug_server

PORT: Final = 25_999
"""Of `start_debug_server`, if the training names no other."""
PAGE: Final = "/fr_trace_json"
"""Of all that the recorder of CPU collectives has. The page for NCCL has only what is active, without what has
finished: it says of nobody that it has not come (torch/distributed/debug/_debug_handlers.py)."""


def ask_debug_server(request: AskDebugServer, worker: WorkerState) -> list[CollectiveRecord]:
    """The records of all ranks. Raises OSError with the reason where it can't be asked, or answers something else."""
    until, asked_at = clock.monotonic() + request.deadline_s, clock.wall()
    with socket.create_connection((loopback_of(request.listeners, request.port), request.port), timeout=2.0) as there:
        there.sendall(f"GET {PAGE} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head, _, body = _read(there, until).partition(b"\r\n\r\n")
    if not head.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")):
        raise OSError(0, f"PyTorch's debug server answered {head[:60].decode(errors='replace')!r}")
    try:
        return list(parse_debug_server(body, asked_at))
    except ValueError as error:
        raise OSError(0, str(error)) from None


def _read(connection: socket.socket, until: float) -> bytes:
    """All until the end. Raises OSError."""
    body = bytearray()
    while len(body) <= MAX_BYTES:
        left_s = until - clock.monotonic()
        if left_s <= 0:
            raise TimeoutError("PyTorch's debug server did not answer in time")
        connection.settimeout(left_s)
        part = connection.recv(1 << 16)
        if not part:
            break
        body += part
    return bytes(body)
