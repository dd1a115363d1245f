"""The agent's streams to its controllers. Who is at the other end of a ProvenStream is the controller; nothing else
becomes a command.

A ProvenStream is opened in this module alone (tests/architecture/test_proven_commands.py).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.base.text import one_line
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles
from slurm_watchdog.identity.transport import check_peer
from slurm_watchdog.model.protocol import JobWatch, Reply
from slurm_watchdog.wire.codec import decode_reply
from slurm_watchdog.wire.frames import (
    BYE,
    HELLO,
    MAGIC,
    MAX_UNPROVEN,
    OPENED,
    Bye,
    FrameError,
    Hello,
    Inbox,
    pack,
    unpack,
)

if TYPE_CHECKING:
    import ssl

    from slurm_watchdog.identity.munge_protocol import Seal
    from slurm_watchdog.identity.tls import Context

log = logging.getLogger(__name__)

UNIX = "unix:"  # What `controller_url` begins with where it names a socket; `slurm-watchdog run` sets it, no file can.
PORTS = {"http": 80, "https": 443}
FILE_CHECK_S = 60.0  # Time between two checks whether our certificate was renewed.
CONNECT_S = 5.0
ANSWER_S = 15.0
MAX_REPLY_BYTES = 1024**2  # 512 jobs with 2 kB each.
MAX_WHY = 300  # Characters of why a stream is ended.
MAX_JOBS = 512  # Watched on one node: there is no node with more CPUs to give away one by one.
MAX_LOGS = 64  # Named by the controller for one job; it names two.
MAX_PLACES = 16  # Directories and trackers of checkpoints of one job.
MAX_COMMANDS = 256  # In one reply, and waiting to be carried out.


class AuthenticationFailed(OSError):
    """We can't show who we are, or the peer has not shown to be the controller. The text says why, and what to do."""


class Refused(OSError):
    """The controller ends the stream, or what says so is not proven to be it; `code` is its word for why."""

    def __init__(self, bye: Bye):
        super().__init__(one_line(bye.why, MAX_WHY))  # it may be anybody's
        self.code = bye.code


def wait_readable(*fds: int) -> list[int]:
    """Those that can be read, once one can."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll()]


class ProvenStream:
    """One stream. Not for two threads. What it raises (OSError, FrameError) ends it."""

    def __init__(self, sock: socket.socket, answer_s: float):
        self._sock, self._answer_s = sock, answer_s
        self._inbox = Inbox(MAX_UNPROVEN)
        self._seal: Seal | None = None

    def seal(self, incoming: Seal, outgoing: Seal) -> None:
        """From the next frame on, in both directions."""
        self._inbox.seal, self._seal = incoming, outgoing

    def open(self) -> None:
        """The other end is proven: what it says may be longer."""
        self._inbox.limit = MAX_REPLY_BYTES

    def send(self, kind: bytes, body: bytes) -> None:
        self._sock.settimeout(self._answer_s)
        self._sock.sendall(pack(kind, body, self._seal))

    def receive(self, wake_fd: int = -1) -> tuple[bytes, bytes] | None:
        """The next frame, within the deadline; with `wake_fd` without one, and None once that can be read. Raises
        Refused for a BYE."""
        end = clock.monotonic() + self._answer_s
        while True:
            frame = self._inbox.take()
            if frame is not None:
                if frame[0] == BYE:
                    raise Refused(unpack(frame[1], Bye))
                return frame
            left_s = end - clock.monotonic()
            if wake_fd >= 0:
                if not self._wait(wake_fd):
                    return None
            elif left_s <= 0:
                raise TimeoutError("the answer did not come in time")
            self._sock.settimeout(0.0 if wake_fd >= 0 else left_s)
            try:
                data = self._sock.recv(1 << 16)
            except OSError as error:
                if wake_fd >= 0 and (isinstance(error, BlockingIOError) or type(error).__name__ == "SSLWantReadError"):
                    continue  # half a record of TLS: nothing in it yet
                raise
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._inbox.data += data

    def _wait(self, wake_fd: int) -> bool:
        """False once `wake_fd` can be read, True once the stream can."""
        if getattr(self._sock, "pending", int)():  # TLS holds bytes that no event tells of
            return True
        return wake_fd not in wait_readable(wake_fd, self._sock.fileno())

    def close(self) -> None:
        self._sock.close()


class Controller:
    """One address. Who listens there proves to be the controller before a stream is handed out. No traffic before."""

    def __init__(self, where: str, node: str):
        self.where, self.node = where, node
        self.certificates: dict[str, float] = {}
        """`own` and `authority` -> when that certificate ends, in seconds since the epoch; empty without them."""

    def connect(self) -> socket.socket:
        """Raises OSError."""
        raise NotImplementedError

    def prove(self, link: ProvenStream, kind: bytes, body: bytes) -> None:
        """Both ends, by the answer to our HELLO. Raises OSError, FrameError. Here the connection itself has proven
        them."""
        if kind != OPENED:
            raise AuthenticationFailed("the controller asks for MUNGE: is security.mode the same there?")

    def is_renewed(self) -> bool:
        """Whether our own certificate is another by now: streams with the old one have to end."""
        return False

    def recheck_files(self) -> None:
        """A certificate that was renewed is used from the next report on. For any thread."""

    def open(self, answer_s: float) -> ProvenStream:
        """Raises OSError, FrameError."""
        sock = self.connect()
        try:
            link = ProvenStream(sock, answer_s)
            link.send(HELLO, MAGIC + msgspec.msgpack.encode(Hello(self.node, release=__version__)))
            answer = link.receive()
            assert answer is not None
            self.prove(link, *answer)
            link.open()
        except BaseException:
            sock.close()
            raise
        return link


class OwnSocket(Controller):
    """The controller of this very user, at a socket."""

    def __init__(self, path: str, node: str, own_uid: int | None = None):
        """`own_uid`: another one than ours, for tests."""
        super().__init__(path, node)
        self._uid = os.geteuid() if own_uid is None else own_uid

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self.where)
            check_peer(sock, self._uid)
        except BaseException:
            sock.close()
            raise
        return sock


class TcpController(Controller):
    """At host and port of a URL."""

    def __init__(self, url: str, node: str):
        address = urlsplit(url)
        super().__init__(address.netloc.rpartition("@")[2], node)
        self.https, self.host = address.scheme == "https", address.hostname or ""
        self._port = address.port or PORTS[address.scheme]

    def connect(self) -> socket.socket:
        # As bytes: a str would be put through IDNA, whose tables take a megabyte. The library takes them, its
        # annotations do not say so.
        address = (self.host.encode("ascii"), self._port)
        sock = socket.create_connection(address, timeout=CONNECT_S)  # type: ignore[arg-type]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that is dead is noticed as soon as by a missing answer, also by what is not answered.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * ANSWER_S))
        return sock


class TlsController(TcpController):
    """By certificates of one authority on both ends."""

    def __init__(self, url: str, node: str, files: TlsFiles):
        super().__init__(url, node)
        self._files = files
        self._ours: Context | None = None
        self._checked_at = clock.monotonic()

    def connect(self) -> socket.socket:
        if not self.https:
            raise AuthenticationFailed(
                "controller has to begin with https:// where nodes prove themselves by certificates"
            )
        context = self._context()
        sock = super().connect()
        try:
            wrapped: socket.socket = context.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise
        return wrapped

    def open(self, answer_s: float) -> ProvenStream:
        try:
            return super().open(answer_s)
        except ConnectionResetError as error:  # as the server does that does not take our certificate
            own = "our certificate has expired" if self.certificates["own"] < clock.wall() else "its log says why"
            raise AuthenticationFailed(f"the controller ended the connection in the handshake: {own}") from error

    def _context(self) -> ssl.SSLContext:
        """Raises AuthenticationFailed if our own files cannot be used."""
        from slurm_watchdog.identity.tls import Context

        try:
            if self._ours is None:
                self._ours = Context(self._files, server=False)
            else:
                self._ours.refresh()
        except IdentityError as error:
            raise AuthenticationFailed(str(error)) from error
        self.certificates = self._ours.expires
        return self._ours.current

    def is_renewed(self) -> bool:
        now = clock.monotonic()
        if self._ours is None or now - self._checked_at < FILE_CHECK_S:
            return False
        self._checked_at = now
        return self._ours.refresh()

    def recheck_files(self) -> None:
        self._checked_at = float("-inf")


class Controllers:
    """Of several controllers the one that takes reports: after whatever kept one from it, the next is asked."""

    def __init__(self, each: Sequence[Controller]):
        self._all = deque(each)

    @property
    def current(self) -> Controller:
        return self._all[0]

    def next(self) -> None:
        self._all.rotate(-1)

    def certificates(self) -> dict[str, float]:
        return self.current.certificates

    def recheck_files(self) -> None:
        for each in self._all:
            each.recheck_files()


def in_words(error: Exception) -> str:
    """What went wrong, for the log: of TLS, what it means."""
    if isinstance(error, FrameError):
        return one_line(str(error.args[1]), MAX_WHY)
    if "ssl" in sys.modules:  # else it was not TLS, and stays unloaded
        import ssl

        if isinstance(error, ssl.SSLError):
            from slurm_watchdog.identity.tls import explain

            return explain(error)
    return str(error)


# ------------------------------------------------------------------------------------------------ what it says


def parse_reply(body: bytes) -> Reply:
    """The reply in a frame of a stream, of which nothing exceeds the bounds above. Raises WireError. Commands of a kind
    that this release does not know are left out: the rest of the reply is still good."""
    reply = decode_reply(body)
    watch = tuple(_bound_job(each) for each in reply.watch[:MAX_JOBS])
    commands = reply.commands[:MAX_COMMANDS]
    if len(watch) < len(reply.watch) or len(commands) < len(reply.commands):
        log.warning(
            "the controller named %d jobs and %d commands: the first %d and %d are taken",
            len(reply.watch), len(reply.commands), len(watch), len(commands),
        )  # fmt: skip
    return replace(reply, watch=watch, commands=commands)


def _bound_job(watch: JobWatch) -> JobWatch:
    return replace(
        watch,
        log_paths=watch.log_paths[:MAX_LOGS],
        log_offsets=watch.log_offsets[:MAX_LOGS],
        checkpoint_trackers=watch.checkpoint_trackers[:MAX_PLACES],
        checkpoint_directories=watch.checkpoint_directories[:MAX_PLACES],
        progress_files=watch.progress_files[:MAX_PLACES],
    )
