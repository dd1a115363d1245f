"""slurm_watchdog.agent.evidence.stacks: real processes that wait for real connections."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slurm_watchdog.agent.evidence.stacks import read_threads
from slurm_watchdog.agent.proc.files import read_call_name

CONNECT = "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
WAITS = {
    "recv": "c.recv(9)",
    "recv, with a time-out": "c.settimeout(900); c.recv(9)",
    "read": "import os; os.read(c.fileno(), 9)",
    "send": "c.sendall(bytes(10**8))",
    "another thread": "import threading; t = threading.Thread(target=c.recv, args=(9,)); t.start(); t.join()",
}
ELSEWHERE = {
    "a sleep": "import time; time.sleep(900)",
    "a pipe": "sys.stdin.read()",
    "a connection of another kind": "a, b = socket.socketpair(); a.recv(9)",
}


@contextmanager
def waiting(code: str) -> Iterator[tuple[int, socket.socket]]:
    """A Python that has connected to the socket, sent 4 bytes, and waits in `code`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = [sys.executable, "-c", f"{CONNECT} c.sendall(b'here'); {code}", str(server.getsockname()[1])]
        with subprocess.Popen(program, stdin=subprocess.PIPE) as process, server.accept()[0] as peer:
            try:
                assert peer.recv(4) == b"here"
                last, until = None, time.monotonic() + 20
                while time.monotonic() < until:
                    call = read_call_name(f"/proc/{process.pid}")
                    if call is not None and call == last:
                        break
                    last = call
                    time.sleep(0.3)
                yield process.pid, peer
            finally:
                process.kill()


@pytest.mark.parametrize("name", WAITS)
def test_what_moves_on_the_connection_that_a_process_waits_for_is_counted(name: str) -> None:
    with waiting(WAITS[name]) as (pid, peer):
        first = read_threads(pid)[1]
        assert [each.moved >= 4 for each in first] == [True]
        assert read_threads(pid)[1] == first, "nothing moves"
        if name == "send":
            until = time.monotonic() + 20
            while read_threads(pid)[1] in ((), first) and time.monotonic() < until:
                peer.recv(1 << 20)
            assert all(each.moved > first[0].moved for each in read_threads(pid)[1])


@pytest.mark.parametrize("name", ELSEWHERE)
def test_of_who_waits_for_no_connection_nothing_is_said(name: str) -> None:
    with waiting(ELSEWHERE[name]) as (pid, _):
        assert read_threads(pid)[1] == ()


def test_of_a_process_that_is_gone_nothing_is_said() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert read_threads(process.pid)[1] == ()
