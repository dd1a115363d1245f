"""The agent's end of its courier: a unix socket, from which the loop takes frames and questions' answers. Nothing here
waits.

Where systemd has a socket for it the courier is a unit of its own, with its own user. Elsewhere (`slurm-watchdog run`,
an agent without systemd) it is a child without rights.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress

from slurm_watchdog.agent.children.become_user import keep_capabilities
from slurm_watchdog.base.loop import Waiter
from slurm_watchdog.base.python310 import run_code
from slurm_watchdog.config.agent import Security
from slurm_watchdog.wire.frames import ANSWER, ASK, Inbox, pack

log = logging.getLogger(__name__)

SOCKET = "/run/slurm-watchdog-courier/socket"  # systemd/slurm-watchdog-courier.socket
MAX_FRAME = 12 << 20  # Bytes: a reply has 1 MiB, an answer of RAS 11, compressed.
ONE_READ = 1 << 18
BURY_S = 0.2  # A courier notices within a millisecond that its agent is gone, unless it is about to connect.

Then = Callable[[bytes, str], None]
"""Is given the answer to a question, and why there is none; one of them is empty."""
Start = Callable[[], socket.socket]  # A new courier, behind this socket. Raises OSError.


def courier_command(node: str, security: Security, urls: Iterable[str]) -> list[str]:
    """The words that start the courier of `node` to the controllers at `urls`."""
    mode = security.identity()
    place = f"{security.controller_user}:{security.munge_socket}"
    where = security.tls_directory if mode == "tls" else place
    program = run_code("from slurm_watchdog.agent.courier.process import main; main()")
    return [*program, node, mode, where, *urls]


def _without_rights() -> None:
    keep_capabilities(())


class Starter:
    """Connects to the courier that systemd starts; where there is none it is a child, the one before is ended."""

    def __init__(self, command: list[str], *, is_child: bool):
        """`command` starts a child, with `is_child` in any case."""
        self._command, self._is_child = command, is_child
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> socket.socket:
        if not self._is_child and os.geteuid() != 0 and os.access(SOCKET, os.W_OK):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.connect(SOCKET)
            except OSError:
                sock.close()
                raise
            return sock
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        with theirs:
            environment = {"MALLOC_ARENA_MAX": "1", **os.environ}
            environment.pop("NOTIFY_SOCKET", None)  # the agent's
            self._child = subprocess.Popen(
                self._command, stdin=theirs.fileno(), env=environment, cwd="/",
                preexec_fn=_without_rights,  # noqa: PLW1509 - the agent's process has one thread
            )  # fmt: skip
        return ours

    def pids(self) -> frozenset[int]:
        """The child, while there is one."""
        return frozenset() if self._child is None else frozenset({self._child.pid})

    def bury(self) -> None:
        """Waits a moment for the child, which ends with its link; one that hangs is killed."""
        child, self._child = self._child, None
        if child is None:
            return
        for _ in range(2):
            try:
                child.wait(BURY_S)
                break
            except subprocess.TimeoutExpired:
                child.kill()


class CourierLink:
    """The courier that is there now, if there is one."""

    def __init__(self, start: Start, bury: Callable[[], None] = lambda: None):
        """`bury` is called when the link to what `start` made was closed."""
        self._start, self._bury = start, bury
        self.expires: dict[str, float] = {}
        """`own` and `authority` -> when that certificate ends, in seconds since the epoch; empty without them."""
        self._sock: socket.socket | None = None
        self._inbox, self._unsent = Inbox(MAX_FRAME), bytearray()
        self._waiter = Waiter()
        self._asked: dict[int, Then] = {}
        self._number = 0

    def fileno(self) -> int:
        """Readable when there is something to receive, or room for what is not sent yet."""
        return self._waiter.fileno()

    @property
    def is_there(self) -> bool:
        return self._sock is not None

    def start(self) -> None:
        """A new courier. Raises OSError."""
        self.close()
        self._sock = self._start()
        self._waiter.watch(self._sock.fileno())

    def send(self, kind: bytes, body: bytes) -> None:
        """Raises OSError where there is no courier any more."""
        self._unsent += pack(kind, body)
        self._flush()

    def receive(self) -> list[tuple[bytes, bytes]]:
        """What has come, but for answers. Raises OSError once the courier has ended, FrameError for what is not one."""
        found: list[tuple[bytes, bytes]] = []
        if self._sock is None:
            return found
        if self._unsent:
            self._flush()
        with suppress(BlockingIOError):
            data = self._sock.recv(ONE_READ)
            if not data:
                raise ConnectionResetError("the courier has ended")
            self._inbox.data += data
        while (frame := self._inbox.take()) is not None:
            if frame[0] == ANSWER:
                self._answer(frame[1])
            else:
                found.append(frame)
        return found

    def ask_ras(self, host: str, port: int, then: Then) -> None:
        """Asks NCCL's RAS at this address of this machine; `then` is called once."""
        try:
            if self._sock is None:
                self.start()
            self._number += 1
            self._asked[self._number] = then
            self.send(ASK, f"{self._number} ras {host} {port}".encode())
        except OSError as error:
            self._asked.pop(self._number, None)
            then(b"", f"the courier cannot be asked: {error}")

    def close(self) -> None:
        """Lets it go: it ends."""
        if self._sock is not None:
            self._waiter.forget(self._sock.fileno())
            self._sock.close()
            self._bury()
        self._sock, self._inbox = None, Inbox(MAX_FRAME)
        self._unsent.clear()
        for number in list(self._asked):
            self._finish(number, b"", "the courier has ended")

    def _flush(self) -> None:
        if self._sock is None:
            raise ConnectionResetError("there is no courier")
        with suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        self._waiter.watch(self._sock.fileno(), writing=bool(self._unsent))

    def _answer(self, body: bytes) -> None:
        number, _, said = body.partition(b" ")
        is_good, text = said[:2] == b"+ ", said[2:]
        self._finish(int(number), text if is_good else b"", "" if is_good else text.decode(errors="replace"))

    def _finish(self, number: int, found: bytes, why: str) -> None:
        then = self._asked.pop(number, None)
        if then is not None:
            then(found, why)
