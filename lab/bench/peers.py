"""What others run on every node, measured beside our agent: each as a Debian package installs it, with a
small configuration.

Nothing of a package's own configuration, ports, directories or services is used or left running. What cannot be had is
named on standard error and has no figure.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from lab.bench.figures import say
from lab.bench.process_tree import Target, started
from lab.bench.space import Space

PACKAGES = {  # Debian package -> the program that it brings
    "prometheus-node-exporter": "prometheus-node-exporter",
    "monit": "monit",
    "collectd-core": "collectd",
}
INSTALL_S = 300.0

PSUTIL_LOOP = """\
import sys, time
import psutil

with_threads, interval = sys.argv[1] == "threads", float(sys.argv[2])
wanted = ["pid", "ppid", "name", "status", "create_time", "cpu_times", "memory_info", "num_threads"]
jobs = {}
while True:
    began = time.monotonic()
    seen = list(psutil.process_iter(wanted))
    jobs = {process: job for process, job in jobs.items() if process in seen}
    for process in seen:
        try:
            if process not in jobs:
                jobs[process] = process.environ().get("SLURM_JOB_ID")
            if jobs[process] is None:
                continue
            with process.oneshot():
                process.io_counters(), process.num_ctx_switches()
                if with_threads:
                    process.threads()
        except psutil.Error:
            continue
    psutil.cpu_percent(percpu=True), psutil.virtual_memory(), psutil.disk_io_counters(), psutil.net_io_counters()
    for part in psutil.disk_partitions():
        psutil.disk_usage(part.mountpoint)
    time.sleep(max(0.0, interval - (time.monotonic() - began)))
"""
"""What one writes in an afternoon: the job's processes, with or without their threads, and the node's usual figures."""

MONIT = """\
set daemon {interval}
set logfile {directory}/log
set idfile {directory}/id
set statefile {directory}/state
set pidfile {directory}/pid
check system node
    if cpu usage > 95% for 10 cycles then alert
check filesystem root with path /
    if space usage > 90% then alert
"""
COLLECTD = """\
Hostname "node"
FQDNLookup false
BaseDir "{directory}"
PIDFile "{directory}/pid"
Interval {interval}
LoadPlugin logfile
LoadPlugin cpu
LoadPlugin memory
LoadPlugin load
LoadPlugin df
LoadPlugin interface
LoadPlugin processes
LoadPlugin tail
LoadPlugin network
<Plugin logfile>
    LogLevel warning
    File "{directory}/log"
</Plugin>
<Plugin processes>
    Process "python3"
</Plugin>
<Plugin network>
    Server "127.0.0.1" "{port}"
</Plugin>
<Plugin tail>
{tails}
</Plugin>
"""
TAIL = """\
    <File "{path}">
        Instance "{name}"
        <Match>
            Regex "iteration +([0-9]+)/"
            DSType "GaugeLast"
            Type "gauge"
            Instance "step"
        </Match>
    </File>
"""


def install() -> None:
    """Debian packages of the peers that are missing, where apt-get and the right to use it are there; starts
    no service."""
    missing = [package for package, program in PACKAGES.items() if find_program(program) is None]
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    say(f"installing {', '.join(missing)}, to be measured beside the agent")
    policy = Path("/usr/sbin/policy-rc.d")  # what invoke-rc.d asks before it starts a service
    ours = not policy.exists()
    try:
        if ours:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        for words in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            subprocess.run(
                ["apt-get", "-q", *words], check=True, timeout=INSTALL_S, stdout=sys.stderr, stdin=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{', '.join(missing)} can't be installed ({error}): no figures of them")
    finally:
        if ours:
            policy.unlink(missing_ok=True)


def find_program(name: str) -> str | None:
    """Its path; /usr/sbin is not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Place:
    """Where peers run and what they look at."""

    directory: Path
    space: Space
    ranks: tuple[int, ...]
    logs: list[Path]
    interval_s: float


@contextmanager
def running(place: Place) -> Iterator[list[Target]]:
    """All peers that can be had, each with its own directory, until the block ends."""
    with ExitStack() as stack:
        targets = []
        for start in (_node_exporter, _monit, _collectd, _psutil, _psutil_threads):
            name = start.__name__.removeprefix("_")
            home = place.directory / name
            home.mkdir()
            home.chmod(0o755)
            target = start(stack, home, place)
            if target is None:
                say(f"{name} is not here: no figure of it")
            else:
                targets.append(target)
        yield targets


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _node_exporter(stack: ExitStack, home: Path, place: Place) -> Target | None:
    program = find_program("prometheus-node-exporter")
    if program is None:
        return None
    port = free_port()
    command = [program, f"--web.listen-address=127.0.0.1:{port}"]
    target = stack.enter_context(started("node_exporter", command, home / "log", space=place.space))
    scraper = Scraper(port, place.interval_s)
    stack.callback(scraper.stop)
    scraper.start()
    return target


def _monit(stack: ExitStack, home: Path, place: Place) -> Target | None:
    program = find_program("monit")
    if program is None:
        return None
    text = MONIT.format(interval=max(1, round(place.interval_s)), directory=home)
    for rank, pid in enumerate(place.ranks):
        (home / f"rank{rank}.pid").write_text(f"{pid}\n")
        text += f"check process rank{rank} with pidfile {home}/rank{rank}.pid\n    if cpu > 400% then alert\n"
    file = home / "monitrc"
    file.write_text(text)
    file.chmod(0o600)
    return stack.enter_context(started("monit", [program, "-I", "-c", str(file)], home / "output", space=place.space))


def _collectd(stack: ExitStack, home: Path, place: Place) -> Target | None:
    program = find_program("collectd")
    if program is None:
        return None
    tails = "".join(TAIL.format(path=path, name=f"log{number}") for number, path in enumerate(place.logs))
    file = home / "collectd.conf"
    port = free_port(socket.SOCK_DGRAM)
    file.write_text(COLLECTD.format(directory=home, interval=place.interval_s, port=port, tails=tails))
    return stack.enter_context(
        started("collectd", [program, "-f", "-C", str(file)], home / "output", space=place.space)
    )


def _psutil(stack: ExitStack, home: Path, place: Place) -> Target | None:
    return _start_loop(stack, home, "psutil", "processes", place)


def _psutil_threads(stack: ExitStack, home: Path, place: Place) -> Target | None:
    return _start_loop(stack, home, "psutil_threads", "threads", place)


def _start_loop(stack: ExitStack, home: Path, name: str, what: str, place: Place) -> Target:
    """With the system's own Python if that can import psutil from here: one that shares no memory with the agent's."""
    import psutil

    file = home / "loop.py"
    file.write_text(PSUTIL_LOOP)
    environment = {**os.environ, "PYTHONPATH": str(Path(psutil.__file__).parents[1])}
    python = "/usr/bin/python3"
    check = [python, "-c", "import psutil"]
    if (
        not os.access(python, os.X_OK)
        or subprocess.run(check, env=environment, capture_output=True, timeout=60).returncode
    ):
        python = sys.executable
    command = [python, str(file), what, str(place.interval_s)]
    return stack.enter_context(started(name, command, home / "log", environment, place.space))


class Scraper:
    """Reads /metrics at an interval over one connection, as Prometheus does."""

    def __init__(self, port: int, interval_s: float):
        self.port, self.interval_s = port, interval_s
        self.scrapes, self.failures = 0, 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(10)

    def _run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        while not self._stopping.wait(self.interval_s):
            try:
                scrape(connection)
                self.scrapes += 1
            except (OSError, HTTPException):
                self.failures += 1
                connection.close()


def scrape(connection: HTTPConnection) -> bytes:
    """One answer of /metrics, compressed as Prometheus asks for it. Raises OSError or HTTPException."""
    connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip", "User-Agent": "Prometheus/2.42.0"})
    with connection.getresponse() as answer:
        return answer.read()
