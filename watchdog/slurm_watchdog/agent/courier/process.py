"""The courier's process. It passes frames between an agent, which has no network, and the controller, and answers one
question of its own: what NCCL's RAS says at an address of this machine.

It looks at sizes and kinds alone; what frames say is decoded at their ends. Of the agent it takes HELLO (begin a
stream), REPORT and STATE (for that stream), and ASK; to the agent go OPENED, CLOSED with the reason, TAKEN, NEWS and
ORDERS, and ANSWER. Nothing waits here: a frame that comes while there is no stream is dropped, and the agent, which
keeps what was not taken, was sent CLOSED before. It serves one agent and ends with it, or when another one connects;
the next one reads configuration and keys again. A thread answers each question.

It is a process of 6 MiB: nothing that this package imports may take more (a test looks).
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import socket
import sys

from slurm_watchdog.agent.courier import streams
from slurm_watchdog.agent.courier.streams import Controller, ProvenStream, in_words
from slurm_watchdog.base import clock
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.wire import frames
from slurm_watchdog.wire.frames import FrameError, pack

NAME = "swd courier"  # What `ps` and `top` show.
LISTENING = 3  # The first descriptor that systemd passes (sd_listen_fds(3)).
BEAT_S = 10.0  # Between two signs of life for systemd, where it waits for them, while nothing else happens.
MAX_QUESTIONS = 2  # At once: each may take four times MAX_SENT_BYTES.
NUMERIC = frozenset("0123456789abcdef.:")  # Of an address: no name is looked up.
RAS_S = 12.0  # For the whole talk: RAS itself gives the other processes 5 s (its own default).
MAX_RAS_BYTES = 16 << 20  # As slurm_watchdog.parse.nccl_ras takes.
MAX_SENT_BYTES = 4 << 20  # Of an answer, compressed: that of 10,000 ranks is a tenth of its 16 MiB.
MAX_LINE = 200


class AgentGone(Exception):
    """The agent does not listen any more."""


class Courier:
    """Serves the agent at the other end of `link`."""

    def __init__(
        self, link: socket.socket, controllers: list[Controller], answer_s: float = streams.ANSWER_S, listener: int = -1
    ):
        """After whatever kept one of `controllers` from taking reports the next is asked. `listener`: where other
        agents would connect."""
        self._link, self._all, self._answer_s, self._listener = link, list(controllers), answer_s, listener
        self._inbox = frames.Inbox(frames.MAX_BYTES + 1)
        self._stream: ProvenStream | None = None
        self._due = float("inf")  # When the report that is on its way has to be answered.
        self._writing = _thread.allocate_lock()
        self._questions = 0

    def serve(self) -> None:
        """Until the agent's end is closed, or this process is to be another one."""
        try:
            while self._round():
                pass
        except AgentGone:
            pass
        except FrameError as error:
            sys.stderr.write(f"<3>this is not an agent: {error.args[1]}\n")
        finally:
            self._close()
            self._link.close()

    def _round(self) -> bool:
        poll = select.poll()
        for fd in (self._link.fileno(), self._listener, -1 if self._stream is None else self._stream.fileno()):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        left_s = self._due - clock.monotonic()
        ready = [fd for fd, _ in poll.poll(max(0.0, min(left_s, BEAT_S)) * 1000)]
        beat()
        if self._stream is not None and (self._stream.fileno() in ready or left_s <= 0):
            self._listen(self._stream)
        if self._listener in ready or (self._link.fileno() in ready and not self._read()):
            return False
        if self._stream is not None and self._all[0].is_renewed():
            self._lose(streams.Refused(b"renewed our certificate was renewed"))
        return True

    def _read(self) -> bool:
        """Takes what the agent has sent; False at its end."""
        try:
            data = self._link.recv(streams.ONE_READ)
        except OSError:
            data = b""
        self._inbox.data += data
        while (frame := self._inbox.take()) is not None:
            self._carry(*frame)
        return bool(data)

    def _carry(self, kind: bytes, body: bytes) -> None:
        try:
            if kind == frames.HELLO:
                self._close()
                self._stream = self._all[0].open(self._answer_s)
                expires = self._all[0].expires
                told = f"{expires.get('own', 0.0)} {expires.get('authority', 0.0)} {self._all[0].where}"
                self._tell(frames.OPENED, told.encode())
            elif kind in (frames.REPORT, frames.STATE):
                if self._stream is not None:
                    self._stream.send(kind, body)
                    if kind == frames.REPORT:
                        self._due = clock.monotonic() + self._answer_s
            elif kind == frames.ASK:
                self._ask(*frames.words(body, 4))
            else:
                raise AgentGone
        except (OSError, FrameError) as error:
            self._lose(error)

    def _listen(self, stream: ProvenStream) -> None:
        """Passes on what the controller has sent."""
        try:
            is_more = True
            while is_more:
                is_more = stream.read()
                while (frame := stream.take()) is not None:
                    kind, body = frame
                    if kind not in (frames.TAKEN, frames.NEWS, frames.ORDERS):
                        raise FrameError("garbage", "it sent a frame that nothing asked for")
                    if kind == frames.TAKEN:
                        self._due = float("inf")
                    self._tell(kind, body)
            if clock.monotonic() >= self._due:
                raise TimeoutError("the answer did not come in time")
        except (OSError, FrameError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """The stream, or the attempt to begin one, has ended for this reason."""
        was_open = self._stream is not None
        self._close()
        code = error.code if isinstance(error, streams.Refused) else "-"
        where = self._all[0].where.replace(" ", "?")
        self._tell(frames.CLOSED, f"{code} {where} {in_words(error)}".encode(errors="replace"))
        if not was_open or code not in ("renewed", *frames.OF_THE_REPORT):
            self._all.append(self._all.pop(0))

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._due = None, float("inf")

    def _tell(self, kind: bytes, body: bytes) -> None:
        try:
            with self._writing:
                self._link.sendall(pack(kind, body))
        except OSError:
            raise AgentGone from None

    # -- questions ---------------------------------------------------------------------------------------------

    def _ask(self, number: str, what: str, host: str, port: str) -> None:
        is_known = what == "ras" and port.isdecimal() and not set(host) - NUMERIC
        if not is_known or self._questions >= MAX_QUESTIONS:
            self._tell(frames.ANSWER, f"{number} - not asked: too many questions, or an unknown one".encode())
            return
        self._questions += 1
        _thread.start_new_thread(self._answer, (number, host, int(port)))

    def _answer(self, number: str, host: str, port: int) -> None:
        """In a thread."""
        try:
            said = f"{number} + ".encode() + ask_ras(host, port)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            why = getattr(error, "strerror", None) or error
            said = f"{number} - {why}".encode(errors="replace")
        self._questions -= 1
        try:
            self._tell(frames.ANSWER, said)
        except AgentGone:
            pass


def ask_ras(host: str, port: int, deadline_s: float = RAS_S) -> bytes:
    """What NCCL's RAS says at this address of this machine, compressed (zlib). Raises OSError, ValueError."""
    until = clock.monotonic() + deadline_s
    # From that address itself: no one can bind an address that is not this machine's.
    with socket.create_connection((host, port), min(2.0, deadline_s), (host, 0)) as there:
        return _talk(there, until)


def _talk(connection: socket.socket, until: float) -> bytes:
    """As `ncclras -v -f json` talks; a release that has no JSON refuses that line and answers in text."""
    for line in ("CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json"):
        connection.sendall(f"{line}\n".encode())
        answered = _read_line(connection, until)
        if not answered.startswith((b"SERVER PROTOCOL ", b"OK", b"ERROR: ")):
            raise ValueError(f"no answer of NCCL's RAS: {answered[:60]!r}")
    connection.sendall(b"VERBOSE STATUS\n")
    import zlib  # only here: most couriers are asked nothing

    packer, packed, taken = zlib.compressobj(1), bytearray(), 0
    while (part := _read(connection, until, streams.ONE_READ)) and taken <= MAX_RAS_BYTES:
        taken += len(part)
        packed += packer.compress(part)
        if len(packed) > MAX_SENT_BYTES:
            raise ValueError("an answer that is too long")
    return bytes(packed + packer.flush())


def _read_line(connection: socket.socket, until: float) -> bytes:
    body = bytearray()
    while len(body) <= MAX_LINE and not body.endswith(b"\n") and (part := _read(connection, until, 1)):
        body += part
    return bytes(body)


def _read(connection: socket.socket, until: float, most: int) -> bytes:
    """What comes next, empty at the end. Raises OSError."""
    left_s = until - clock.monotonic()
    if left_s <= 0:
        raise TimeoutError("NCCL's RAS did not answer in time")
    connection.settimeout(left_s)
    return connection.recv(most)


# ------------------------------------------------------------------------------------------------ the process


def controllers(node: str, mode: str, place: str, urls: list[str]) -> list[Controller]:
    """Those of `node`; no traffic yet. `place`: the directory of certificates; with MUNGE the controller's user, and
    after a colon munged's socket."""
    return [_controller(node, mode, place, url) for url in urls]


def _controller(node: str, mode: str, place: str, url: str) -> Controller:
    if url.startswith(streams.UNIX):
        return streams.OwnSocket(url.removeprefix(streams.UNIX), node)
    if mode == "tls":
        return streams.TlsController(url, node, TlsFiles(place, "agent"))
    from slurm_watchdog.agent.courier.munge import Munge, MungeController

    user, _, munge_socket = place.partition(":")
    return MungeController(url, node, Munge(user, munge_socket).encode)


def main() -> None:
    """`NODE MODE PLACE URL…`, as slurm_watchdog.agent.delivery.courier_link.courier_command has them. The agent is at
    standard input, or connects to the socket that systemd passes."""
    node, mode, place, *urls = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its agent
    with open("/proc/self/comm", "w") as file:
        file.write(NAME)
    served = controllers(node, mode, place, urls)
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()):
        Courier(socket.socket(fileno=0), served).serve()
        return
    beat("READY=1\nWATCHDOG=1")
    poll = select.poll()
    poll.register(LISTENING, select.POLLIN)
    while not poll.poll(BEAT_S * 1000):
        beat()
    with socket.socket(fileno=LISTENING) as listener:
        link, _ = listener.accept()
        Courier(link, served, listener=LISTENING).serve()


def beat(message: str = "WATCHDOG=1") -> None:
    """Tells systemd that this loop turns, as sd_notify(3) has it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            try:
                sock.sendto(message.encode(), "\0" + address[1:] if address[0] == "@" else address)
            except OSError:
                pass  # systemd restarts it in the end
