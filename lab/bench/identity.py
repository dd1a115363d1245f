"""What it costs the controller that agents prove who they are: a handshake, a report, a kept connection;
plain, by TLS, by a session.

`python -m lab.bench.identity MODE DIRECTORY` is the controller's end, a process of its own, so that nothing
else is measured.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.bench import fleet_tls
from lab.bench.figures import Figures, say
from slurm_watchdog.agent.courier.streams import ProvenStream
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.ingest.endpoint import AgentCredentials, OwnUser, ReportEndpoint
from slurm_watchdog.identity.munge_library import Credential, MungeLibrary
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.identity.tls import Context
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.frames import HELLO, OPENED, PROOF, REPORT, TAKEN, TO_AGENT, TO_CONTROLLER, Seal, hello

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
    fleet = None
    if mode == "tls":
        fleet_tls.make(place, map(_node, range(AGENTS)))
        fleet = fleet_tls.Client(place)
    server = subprocess.Popen([sys.executable, "-m", "lab.bench.identity", mode, str(place)], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        links: list[ProvenStream] = []
        rss, cpu = _rss_kib(server.pid), _cpu_s(server.pid)
        for number in range(AGENTS):
            links.append(_open(_connect(port, fleet, number), mode, number))
            _report(links[-1], number, 0)
        connect_s = (_cpu_s(server.pid) - cpu) / AGENTS
        kib = (_rss_kib(server.pid) - rss) / AGENTS
        cpu = _cpu_s(server.pid)
        for round_ in range(1, ROUNDS + 1):
            for number, link in enumerate(links):
                _report(link, number, round_)
        report_s = (_cpu_s(server.pid) - cpu) / AGENTS / ROUNDS
        for link in links:
            link.close()
        say(f"{mode}: {AGENTS} connections, {AGENTS * ROUNDS} reports of {len(_body('n001', 1))} bytes")
        return max(0.0, connect_s - report_s) * 1e3, report_s * 1e6, kib
    finally:
        server.terminate()
        server.wait(10)


def _connect(port: int, fleet: fleet_tls.Client | None, number: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if fleet is None else fleet.wrap(sock, _node(number), shaken=True)


def _node(number: int) -> str:
    return f"n{number:03}"


def _open(sock: socket.socket, mode: str, number: int) -> ProvenStream:
    link = ProvenStream(sock, 30.0)
    link.send(HELLO, hello(_node(number)))
    if mode == "session":
        link.receive()
        link.send(PROOF, b"the key is known")
        incoming = Seal(KEY, TO_AGENT)
        assert link.receive() == (OPENED, incoming.mac(OPENED))
        link.seal(incoming, Seal(KEY, TO_CONTROLLER))
    else:
        assert link.receive() == (OPENED, b"")
    return link


def _report(link: ProvenStream, number: int, sequence: int) -> None:
    link.send(REPORT, _body(_node(number), sequence))
    answer = link.receive()
    assert answer[0] == TAKEN, answer


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


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_S


def _rss_kib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return float(status.partition("VmRSS:")[2].split()[0])


# -- the controller's end ----------------------------------------------------------------------------------------


class NoMunge(MungeLibrary):
    async def decode(self, credential: str) -> Credential:
        return Credential(0, 0, True, b"")


class KnownKey(AgentCredentials):
    """What munged itself costs is not measured here."""

    def key_in(self, shown: Credential, node: str, challenge: str) -> bytes:
        return KEY


async def _serve(mode: str, place: Path) -> None:
    tls = (
        Context(TlsFiles(str(place / "ca/controllers/localhost"), "controller"), server=True) if mode == "tls" else None
    )
    door = ReportEndpoint(
        address_of=None,
        take=lambda report, before: (None, Reply(controller_id="c")),
        hold=lambda node, agent, said, before: (None, None),
        metrics=ControllerMetrics(),
        healthy=lambda: (True, ""),
        identity=tls or (KnownKey(0, frozenset(), NoMunge()) if mode == "session" else OwnUser(0, "")),
        interval_s=0.001,
    )
    server = door.server()
    server.only_uid = None  # "plain": what the others cost beside nothing
    port = await server.start("127.0.0.1", 0, 1000)
    print(port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(sys.argv[1], Path(sys.argv[2])))
