"""The courier as a process: what it is to agent and controller, what becomes of its end and of theirs."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import slurm_watchdog
from slurm_watchdog.agent.delivery import courier_link, sender
from slurm_watchdog.agent.delivery.courier_link import CourierLink, Starter
from slurm_watchdog.agent.delivery.spool import Spool
from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.model.protocol import DumpStacks, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_reply
from slurm_watchdog.wire.frames import ASK, HELLO, LENGTH, MAX_BYTES, ORDERS, pack
from tests.builders.identity_door import Port, listening, lost, until, url
from tests.builders.sending import DrivenSender

AGENT = Path(slurm_watchdog.__file__).parent / "agent"
ASKED = DumpStacks(id="c1", job_id="4", restarts=0)
PLAIN = """
import sys
from slurm_watchdog.agent.courier import process
from slurm_watchdog.agent.courier.streams import TcpController
process.controllers = lambda node, mode, place, urls: [TcpController(each, node) for each in urls]
process.main()
"""
"""A courier whose controllers need no proof: that they give one is tested elsewhere."""


def report(sequence: int) -> Report:
    return Report(node="n1", boot_id="b", agent_id="a", sequence=sequence)


class Children(Starter):
    """Couriers as children, noted."""

    def __init__(self, *urls: str) -> None:
        super().__init__([*run_code(PLAIN), "n1", "munge", "0:", *urls], is_child=True)
        self.pids: list[int] = []

    def __call__(self) -> socket.socket:
        found = super().__call__()
        assert self._child is not None
        self.pids.append(self._child.pid)
        return found


@contextmanager
def driven(*ports: Port, silent_s: float = 60.0) -> Iterator[tuple[DrivenSender, Children, Counter[str]]]:
    counts: Counter[str] = Counter()
    children = Children(*map(url, ports))
    made = DrivenSender(
        Spool(), CourierLink(children, children.bury), lambda each: counts.update([each]), silent_s=silent_s
    )
    made.start()
    try:
        yield made, children, counts
    finally:
        made.stop()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_report_goes_out_and_an_order_comes_in_at_once_through_the_process() -> None:
    with listening() as port, driven(port) as (sending, _, counts):
        sending.put(report(1))
        until(lambda: counts["sent"] == 1)
        (stream,) = port.door._streams.values()
        slowest_s = 0.0
        for _ in range(5):
            began = time.monotonic()
            port.do(lambda: stream.send(ORDERS, encode_reply(Reply(commands=(ASKED,)))))
            until(lambda: bool(sending.orders()))
            slowest_s = max(slowest_s, time.monotonic() - began)
        assert slowest_s <= 0.2


def test_of_a_courier_that_is_killed_nothing_is_lost_and_the_next_one_goes_on() -> None:
    with listening() as port, driven(port) as (sending, children, counts):
        for sequence in range(1, 6):
            sending.put(report(sequence))
            until(lambda count=sequence: counts["sent"] == count)  # type: ignore[misc]
            os.kill(children.pids[-1], signal.SIGKILL)
            until(lambda: "the courier has ended" in sending.problem)
        assert [each.sequence for each in port.reports] == [1, 2, 3, 4, 5]
        assert len(children.pids) == 5 and counts["failed"] == 0
        assert lost(port, "closed_by_agent") >= 4


def test_a_courier_that_does_not_move_is_replaced() -> None:
    with listening() as port, driven(port, silent_s=0.5) as (sending, children, counts):
        sending.put(report(1))
        until(lambda: counts["sent"] == 1)
        os.kill(children.pids[0], signal.SIGSTOP)
        sending.put(report(2))
        until(lambda: counts["sent"] == 2)
        assert [each.sequence for each in port.reports] == [1, 2]
        until(lambda: is_gone(children.pids[0]))


def test_a_courier_ends_with_its_agent_and_the_controller_sees_it() -> None:
    with listening() as port:
        with driven(port) as (sending, children, counts):
            sending.put(report(1))
            until(lambda: counts["sent"] == 1)
        until(lambda: is_gone(children.pids[0]))
        until(lambda: lost(port, "closed_by_agent") == 1)


@contextmanager
def by_systemd(place: Path, *urls: str) -> Iterator[subprocess.Popen[bytes]]:
    """A courier behind a socket at `place`, passed as systemd does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        head = f"import os\nos.dup2({listener.fileno()}, 3)\nos.environ['LISTEN_PID'] = str(os.getpid())\n"
        child = subprocess.Popen(
            [sys.executable, "-c", head + PLAIN, "n1", "munge", "0:", *urls],
            pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def connected(place: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(str(place))
    return sock


def test_a_courier_of_systemd_s_serves_the_agent_that_came_last(tmp_path: Path) -> None:
    with listening() as port, by_systemd(tmp_path / "s", url(port)) as courier, connected(tmp_path / "s") as first:
        first.sendall(pack(HELLO, b""))
        assert first.recv(5)[4:] == b"o"
        with connected(tmp_path / "s"):
            assert courier.wait(20) == 0, "systemd starts the next one for it"


def test_what_is_no_known_question_or_no_address_is_not_asked(tmp_path: Path) -> None:
    questions = [b"1 ping 127.0.0.1 1", b"2 ras localhost 1", b"3 ras secret.example 1", b"4 ras 127.0.0.1 x"]
    with by_systemd(tmp_path / "s", "http://127.0.0.1:1"), connected(tmp_path / "s") as sock:
        for number, each in enumerate(questions, 1):
            sock.sendall(pack(ASK, each))
            assert sock.recv(1000)[5:].startswith(b"%d - not asked" % number)
        sock.sendall(pack(ASK, b"5 ras 198.51.100.7 28028"))
        assert b"assign requested address" in sock.recv(1000)


def test_a_courier_that_cannot_be_started_is_said() -> None:
    children = Children("http://127.0.0.1:1")
    children._command[0] = "/nonexistent"
    sending = sender.Sender(Spool(), CourierLink(children))
    sending.put(report(1))
    assert "the courier does not start: ENOENT" in sending.problem
    assert sending.due_at() < float("inf") and sending.spool_bytes


@pytest.mark.parametrize(
    "said", [pack(b"z", b""), LENGTH.pack(MAX_BYTES + 100), pack(ASK, b"1 ras"), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_who_is_no_agent_is_let_go(tmp_path: Path, said: bytes) -> None:
    with by_systemd(tmp_path / "s", "http://127.0.0.1:1") as courier, connected(tmp_path / "s") as sock:
        sock.sendall(said)
        if b"ras" not in said:
            assert courier.wait(20) == 0
        else:
            assert sock.recv(5)[4:] == b"x"


def test_the_courier_loads_nothing_that_it_does_not_need_and_is_small() -> None:
    modules = "from slurm_watchdog.agent.courier import munge, process"
    program = f"{modules}\nimport sys\nprint(*sys.modules)\nprint(open('/proc/self/smaps_rollup').read())"
    done = subprocess.run(run_code(program), capture_output=True, text=True, timeout=60, check=True)
    names, _, sizes = done.stdout.partition("\n")
    heavy = {
        "msgspec",
        "ssl",
        "logging",
        "re",
        "typing",
        "subprocess",
        "threading",
        "hashlib",
        "asyncio",
        "json",
        "zlib",
    }
    assert not heavy & set(names.split())
    own = sum(int(line.split()[1]) for line in sizes.splitlines() if line.startswith("Private_"))
    assert own <= 6 * 1024


def test_no_other_module_of_the_agent_has_a_network() -> None:
    """What the unit forbids is tried nowhere."""
    words = {"create_connection", "create_server", "getaddrinfo"}
    found = {
        str(file.relative_to(AGENT).parent)
        for file in AGENT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in words
    }
    assert found == {"courier"}
    assert courier_link.SOCKET.startswith("/run/")
