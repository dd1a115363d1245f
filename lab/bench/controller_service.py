"""The controller as a process of its own under load, the fleet beside it, and how long it takes to answer."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.bench.figures import say
from tests.munged import Munged

if TYPE_CHECKING:
    from lab.bench.at_scale import Options

PROBE_EVERY_S = 0.02
START_S = 60.0
MAIN = "import sys; from slurm_watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"


def prefer(pid: int, nice: int) -> None:
    """Gives a process, the leader of a session, precedence; without root it goes without. Where the kernel
    groups processes by session (sched_autogroup), it is the session's precedence that counts."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():
            group.write_text(str(nice))
    except PermissionError:
        say("this user may prefer no process: what else runs here takes its share, and wall times are longer for it")


@dataclass
class Service:
    """The controller's process."""

    config: Path
    port: int
    directory: Path
    nice: int
    tls: ssl.SSLContext | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, and waits until it answers. Raises TimeoutError."""
        log = open(self.directory / "controller.log", "ab")  # noqa: SIM115  (its end of it is closed with it)
        command = [sys.executable, "-c", MAIN, "controller", "--config", str(self.config)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environ, start_new_session=True)
        log.close()
        prefer(self.process.pid, self.nice)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                self.get("/healthz", 5.0)
                return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("the controller does not answer: " + self.tail())

    def get(self, path: str, seconds: float) -> bytes:
        """The body of an answer. Raises OSError."""
        connection = (
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
            if self.tls is None
            else http.client.HTTPSConnection("localhost", self.port, timeout=seconds, context=self.tls)
        )
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def taken(self) -> int:
        """Reports that it has taken over since its start."""
        of = re.search(
            rb'^slurm_watchdog_reports_total\{outcome="accepted"\} ([0-9.e+]+)$', self.get("/metrics", 30.0), re.M
        )
        assert of is not None
        return round(float(of[1]))

    def tail(self) -> str:
        return (self.directory / "controller.log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def cpu_s(self) -> float:
        """Time of the process and of those it has waited for: Slurm's commands are its doing."""
        assert self.process is not None
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        assert self.process is not None
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise ValueError("no VmRSS")


def fleet_options(options: Options, port: int, munge: Munged, tls: Path | None = None) -> list[str]:
    """Those of a fleet of this benchmark."""
    given = {"port": port, "nodes": options.nodes, "jobs": options.jobs, "workers": options.workers,
             "interval": options.interval_s}  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*words, *(("--munge", munge.socket) if tls is None else ("--tls", str(tls)))]


class FleetProcess:
    """The agents, in a process of their own."""

    def __init__(self, options: Sequence[str], nice: int = 0, ahead: Sequence[str] = ()):
        """`options` of lab.bench.fleet; `ahead`: what starts it."""
        self._process = subprocess.Popen(
            [*ahead, sys.executable, "-m", "lab.bench.fleet", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,
        )
        prefer(self._process.pid, nice)
        self._lock = threading.Lock()

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """One command and its answer. Raises EOFError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise EOFError("the fleet has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wait_for_all(self, nodes: int, seconds: float) -> float:
        """Seconds until all agents were answered once. Raises TimeoutError."""
        began = time.monotonic()
        while (count := self.ask("count"))["known"] < nodes:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"of {nodes} agents only {count['known']} were taken: {count}")
            time.sleep(0.05)
        return time.monotonic() - began

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)


@dataclass
class Prober:
    """Asks for a trifle again and again: however long that takes beyond nothing, so long the event loop did
    something else."""

    port: int
    tls: ssl.SSLContext | None = None
    waits_s: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        sock: socket.socket | None = None
        while not self._stop.wait(PROBE_EVERY_S):
            try:
                if sock is None:
                    sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if self.tls is not None:
                        sock = self.tls.wrap_socket(sock, server_hostname="localhost")
                began = time.monotonic()
                sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: controller\r\n\r\n")
                if not sock.recv(65536):
                    raise OSError("closed")
                self.waits_s.append(time.monotonic() - began)
            except OSError:
                if sock is not None:
                    sock.close()
                sock = None
        if sock is not None:
            sock.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._stop.clear()
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(40)
