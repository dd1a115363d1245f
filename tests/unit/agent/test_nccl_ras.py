"""NCCL's RAS is asked through a port of the job alone, and answers as its releases do, late, too much, or not at all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import Listeners
from slurm_watchdog.agent.children.requests import FindListeners, ParseRas, WorkerState
from slurm_watchdog.agent.courier.process import ask_ras
from slurm_watchdog.agent.evidence.nccl_ras import find_listeners, loopback_of, parse_answer, ras_port
from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.model.collective_records import RasAnswer

CAPTURES = Path(__file__).parents[2] / "captures" / "ras"
Serve = Callable[[socket.socket], None]


def speaks(name: str) -> Serve:
    """As a release does, line by line: one that has no JSON refuses it."""
    body, knows_json = (CAPTURES / name).read_bytes(), name.endswith(".json")

    def serve(connection: socket.socket) -> None:
        for line in connection.makefile("rb"):
            if line.startswith(b"CLIENT PROTOCOL"):
                connection.sendall(b"SERVER PROTOCOL 2\n")
            elif line.startswith(b"TIMEOUT") or (knows_json and line == b"SET FORMAT json\n"):
                connection.sendall(b"OK\n")
            elif line == b"VERBOSE STATUS\n":
                connection.sendall(body)
                return
            else:
                connection.sendall(b"ERROR: Unknown command " + line)

    return serve


def says(text: bytes) -> Serve:
    return lambda connection: connection.sendall(text)


@contextmanager
def ras(serve: Serve) -> Iterator[int]:
    """A server in this process, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        threading.Thread(target=run, daemon=True).start()
        yield listener.getsockname()[1]


def listeners(port: int, pid: int | None = None) -> Listeners:
    mine = pid or os.getpid()
    worker = WorkerState(os.getuid())
    return find_listeners(FindListeners([(mine, read_stat(mine).start_ticks)], port), worker)


def ask(port: int, deadline_s: float = 12.0) -> RasAnswer:
    said = ask_ras(loopback_of(listeners(port), port), port, deadline_s)
    return parse_answer(ParseRas(said), WorkerState())


@pytest.mark.parametrize("name", ["2.24.txt", "2.26.txt", "2.28.json", "2.28-missing.json"])
def test_the_dialect_of_each_release_is_understood(name: str) -> None:
    with ras(speaks(name)) as port:
        answer = ask(port)
    assert len(answer.communicators) == 1


@pytest.mark.parametrize("text", [b"SSH-2.0-OpenSSH_9.6\r\n", b"x" * 1000, b"", b"OK\nOK\nOK\n", b"OK\nOK\nOK\n{]"])
def test_who_is_no_ras_is_left_alone_with_a_reason(text: bytes) -> None:
    with ras(says(text)) as port, pytest.raises((OSError, ValueError), match=r"answer|reset|Broken pipe"):
        ask(port)


def test_who_does_not_answer_and_who_never_ends_are_given_up_in_time() -> None:
    def trickles(connection: socket.socket) -> None:
        with suppress(OSError):
            while not over.wait(0.01):
                connection.sendall(b"O")

    over = threading.Event()
    for serve in (trickles, lambda connection: over.wait(10) and None):
        with ras(serve) as port, pytest.raises((OSError, ValueError), match=r"in time|timed out|no answer"):
            ask(port, 0.3)
    over.set()


def test_a_port_on_which_the_job_does_not_listen_is_not_asked() -> None:
    asked = threading.Event()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with ras(lambda connection: asked.set()) as port:
            assert listeners(port, other.pid).addresses == ()
    finally:
        other.kill()
        other.wait()
    assert not asked.is_set()


def test_a_port_that_the_job_shares_with_somebody_else_is_not_asked() -> None:
    share = "import socket,sys; s = socket.socket(); s.setsockopt(1, 15, 1); s.bind(('127.0.0.1', int(sys.argv[1])));"
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        command = [sys.executable, "-c", f"{share} s.listen(); print(flush=True); input()", str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(OSError, match="shared with processes that are not of this job"):
                ask(port)
            other.kill()


@pytest.mark.parametrize(
    ("address", "port"),
    [
        (None, 28028), ("", 28028), ("localhost:4000", 4000), ("[::1]:28029", 28029), ("localhost", None),
        ("localhost:0", None), ("localhost:99999", None), ("a b:1", None), ("../x:1", None), (":" * 99, None),
    ],
)  # fmt: skip
def test_the_port_is_the_one_of_the_environment_and_what_is_no_address_is_none(
    address: str | None, port: int | None
) -> None:
    assert ras_port(address) == port


def test_a_job_in_a_network_of_its_own_is_not_called() -> None:
    with ras(says(b"")) as port, pytest.raises(OSError, match="its own network namespace"):
        loopback_of(replace(listeners(port), namespace="net:[1]"), port)


def test_an_address_of_another_machine_is_not_called() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        ask_ras("198.51.100.7", 28028)


def test_an_answer_that_grows_beyond_its_bound_is_cut_off_and_one_that_is_none_is_refused() -> None:
    for answer in (zlib.compress(b" " * 500_000_000), b"", b"x" * 100):
        with pytest.raises((ValueError, zlib.error)):
            parse_answer(ParseRas(answer), WorkerState())
