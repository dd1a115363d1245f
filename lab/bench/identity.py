"""What it costs the controller that agents prove who they are: a handshake, a report, a kept connection;
plain, by TLS, by a session.

`python -m lab.bench.identity MODE DIRECTORY` is the controller's end, a process of its own, so that nothing
else is measured.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.bench.figures import Figures, say
from slurm_watchdog.base import clock
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.ingest.endpoint import OwnUser, ReportEndpoint
from slurm_watchdog.identity.munge_decoder import Credential
from slurm_watchdog.identity.munge_protocol import Session, SessionOffer, authorization
from slurm_watchdog.identity.munge_sessions import Sessions
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.identity.tls import Context, make_context
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_report
from tests.builders.identity_files import make_authority, node_files

AGENTS = 500
ROUNDS = 40
FLEET = 10_000
INTERVAL_S = 5.0
TICKS_A_S = os.sysconf("SC_CLK_TCK")
MAX_PERCENT = 25.0
"""Of one core, for the reports of the whole fleet: a quarter of what the controller may take in all."""
MAX_HANDSHAKES_S = 30.0
"""Of one core, for the handshakes of the whole fleet after a restart: an agent counts as silent after 40 s."""
KEY = bytes(32)


def measure(figures: Figures) -> None:
    """All three, one after the other."""
    costs = {}
    for mode in ("plain", "tls", "session"):
        with tempfile.TemporaryDirectory() as place:
            costs[mode] = _measure(mode, Path(place))
        connect_ms, report_us, kib = costs[mode]
        figures.add(f"identity.{mode}.connection_ms_of_cpu", connect_ms, "ms")
        figures.add(f"identity.{mode}.report_us_of_cpu", report_us, "us")
        figures.add(f"identity.{mode}.kib_a_connection", kib, "KiB")
    for mode in ("tls", "session"):
        more_us = costs[mode][1] - costs["plain"][1]
        percent = more_us * 1e-6 * FLEET / INTERVAL_S * 100
        figures.add(f"identity.{mode}.percent_of_core_for_{FLEET}_agents", percent, "%", at_most=MAX_PERCENT)
        figures.add(
            f"identity.{mode}.seconds_of_core_for_{FLEET}_connections",
            costs[mode][0] * FLEET / 1000,
            "s",
            at_most=MAX_HANDSHAKES_S,
        )


def _measure(mode: str, place: Path) -> tuple[float, float, float]:
    """CPU of a connection with its first report in ms, of each further report in us, memory of a connection in KiB."""
    context = None
    if mode == "tls":
        now = clock.wall()
        context = make_context(node_files(make_authority(place / "ca", now), "n1", now), server=False)
    server = subprocess.Popen([sys.executable, "-m", "lab.bench.identity", mode, str(place)], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        sessions = [_session(number) for number in range(AGENTS)]
        socks: list[socket.socket] = []
        rss, cpu = _rss_kib(server.pid), _cpu_s(server.pid)
        for number in range(AGENTS):
            sock = _connect(port, context)
            socks.append(sock)
            _report(sock, mode, sessions[number], 0)
        connect_s = (_cpu_s(server.pid) - cpu) / AGENTS
        kib = (_rss_kib(server.pid) - rss) / AGENTS
        cpu = _cpu_s(server.pid)
        for round_ in range(1, ROUNDS + 1):
            for number, sock in enumerate(socks):
                _report(sock, mode, sessions[number], round_)
        report_s = (_cpu_s(server.pid) - cpu) / AGENTS / ROUNDS
        for sock in socks:
            sock.close()
        say(f"{mode}: {AGENTS} connections, {AGENTS * ROUNDS} reports of {len(_body('n1', 1))} bytes")
        return max(0.0, connect_s - report_s) * 1e3, report_s * 1e6, kib
    finally:
        server.terminate()
        server.wait(10)


def _connect(port: int, context: ssl.SSLContext | None) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if context is None else context.wrap_socket(sock, server_hostname="localhost")


def _node(mode: str, session: Session) -> str:
    return "n1" if mode == "tls" else session.node


def _report(sock: socket.socket, mode: str, session: Session, sequence: int) -> None:
    body = _body(_node(mode, session), sequence)
    proof = f"Authorization: {authorization(session, '/v1/report', body)}\r\n" if mode == "session" else ""
    sock.sendall(f"POST /v1/report HTTP/1.1\r\nContent-Length: {len(body)}\r\n{proof}\r\n".encode() + body)
    answer = sock.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200"), answer


def _body(node: str, sequence: int) -> bytes:
    rows = tuple(
        Process(
            pid=1000 + rank,
            start_ticks=5,
            job_id="7",
            role=Role.RANK,
            comm="python",
            state="R",
            uid=1000,
            rank=rank,
            world_size=16,
        )
        for rank in range(24)
    )
    return encode_report(Report(node=node, boot_id="b", agent_id="a", sequence=sequence, processes=rows))


def _session(number: int) -> Session:
    return Session(f"{number:032x}", KEY, f"n{number}", clock.monotonic())


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_S


def _rss_kib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return float(status.partition("VmRSS:")[2].split()[0])


# -- the controller's end ----------------------------------------------------------------------------------------


class NoDecoder:
    """Sessions are there already."""

    async def decode(self, credential: str) -> Credential:
        raise AssertionError(credential)

    async def close(self) -> None:
        return


async def _serve(mode: str, place: Path) -> None:
    sessions = Sessions(0, frozenset({0}), clock.monotonic)
    for number in range(AGENTS):
        mine = _session(number)
        sessions.begin(SessionOffer(mine.id, KEY.hex(), mine.node, sessions.epoch), "127.0.0.1", 0)
    tls = (
        Context(TlsFiles(str(place / "ca/controllers/localhost"), "controller"), server=True) if mode == "tls" else None
    )
    door = ReportEndpoint(
        address_of=None,
        accept=lambda report, size: Reply(controller_id="c"),
        metrics=ControllerMetrics(),
        healthy=lambda: (True, ""),
        identity=tls or ((sessions, NoDecoder()) if mode == "session" else OwnUser(0, "")),
        interval_s=0.001,
    )
    door._by_node.bytes.burst = float("inf")  # one node's certificate for all of them
    door._by_node.reports.burst = float("inf")
    server = door.server()
    server.only_uid = None  # "plain": what the others cost beside nothing
    port = await server.start("127.0.0.1", 0, 1000)
    print(port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(sys.argv[1], Path(sys.argv[2])))
