"""A courier's streams to its controllers. Who is at the other end of a ProvenStream is the controller; nothing else
becomes a command. A ProvenStream is opened in this module alone (tests/architecture/test_proven_commands.py).
"""

from __future__ import annotations

import os
import socket
import sys

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles
from slurm_watchdog.wire.frames import BYE, HELLO, MAX_UNPROVEN, OPENED, FrameError, Inbox, Seal, hello, pack, words

TYPE_CHECKING = False  # As of typing, which would take half a megabyte of the courier.
if TYPE_CHECKING:
    from slurm_watchdog.identity.tls import Context

UNIX = "unix:"  # What `controller_url` begins with where it names a socket; `slurm-watchdog run` sets it, no file can.
PORTS = {"http": 80, "https": 443}
FILE_CHECK_S = 60.0  # Time between two checks whether our certificate was renewed.
CONNECT_S = 5.0
ANSWER_S = 15.0
MAX_REPLY_BYTES = 1024**2  # 512 jobs with 2 kB each.
MAX_WHY = 300  # Characters of why a stream is ended.
ONE_READ = 1 << 16


class AuthenticationFailed(OSError):
    """We can't show who we are, or the peer has not shown to be the controller. The text says why, and what to do."""


class Refused(OSError):
    """The controller ends the stream, or what says so is not proven to be it; `code` is its word for why."""

    def __init__(self, bye: bytes):
        self.code, why = words(bye, 2)
        super().__init__(why[:MAX_WHY])


class ProvenStream:
    """One stream. What it raises (OSError, FrameError) ends it."""

    def __init__(self, sock: socket.socket, answer_s: float):
        self._sock, self._answer_s = sock, answer_s
        self._inbox = Inbox(MAX_UNPROVEN)
        self._seal: Seal | None = None

    def fileno(self) -> int:
        return self._sock.fileno()

    def seal(self, incoming: Seal, outgoing: Seal) -> None:
        """From the next frame on, in both directions."""
        self._inbox.seal, self._seal = incoming, outgoing

    def open(self) -> None:
        """The other end is proven: what it says may be longer."""
        self._inbox.limit = MAX_REPLY_BYTES

    def send(self, kind: bytes, body: bytes) -> None:
        self._sock.settimeout(self._answer_s)
        self._sock.sendall(pack(kind, body, self._seal))

    def take(self) -> tuple[bytes, bytes] | None:
        """The next frame, if it has arrived. Raises Refused for a BYE."""
        frame = self._inbox.take()
        if frame is not None and frame[0] == BYE:
            raise Refused(frame[1])
        return frame

    def read(self, wait_s: float = 0.0) -> bool:
        """Takes in what has arrived, or arrives within `wait_s`; whether there may be more, of which poll(2) knows
        nothing."""
        self._sock.settimeout(wait_s)
        try:
            data = self._sock.recv(ONE_READ)
        except OSError as error:
            if isinstance(error, BlockingIOError) or type(error).__name__ == "SSLWantReadError":
                return False  # half a record of TLS: nothing in it yet
            raise
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._inbox.data += data
        return bool(getattr(self._sock, "pending", int)())

    def receive(self) -> tuple[bytes, bytes]:
        """The next frame, within the deadline."""
        end = clock.monotonic() + self._answer_s
        while (frame := self.take()) is None:
            left_s = end - clock.monotonic()
            if left_s <= 0:
                raise TimeoutError("the answer did not come in time")
            self.read(left_s)
        return frame

    def close(self) -> None:
        self._sock.close()


class Controller:
    """One address. Who listens there proves to be the controller before a stream is handed out. No traffic before."""

    def __init__(self, where: str, node: str):
        self.where, self.node = where, node
        self.expires: dict[str, float] = {}
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

    def open(self, answer_s: float) -> ProvenStream:
        """Raises OSError, FrameError."""
        sock = self.connect()
        try:
            link = ProvenStream(sock, answer_s)
            link.send(HELLO, hello(self.node, __version__))
            self.prove(link, *link.receive())
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
        from slurm_watchdog.identity.transport import check_peer

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
    """At host and port of a URL, which the configuration has checked."""

    def __init__(self, url: str, node: str):
        scheme, _, rest = url.partition("://")
        where = rest.partition("/")[0].rpartition("@")[2]
        super().__init__(where, node)
        host, _, port = where.rpartition(":") if where[where.rfind("]") + 1 :].count(":") else (where, "", "")
        self.https, self.host = scheme == "https", host.strip("[]")
        self._port = int(port or PORTS[scheme])

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
        from slurm_watchdog.identity.tls import Context  # only here: other couriers do without its memory

        if not self.https:
            raise AuthenticationFailed(
                "controller has to begin with https:// where nodes prove themselves by certificates"
            )
        try:
            self._ours = ours = self._ours or Context(self._files, server=False)
        except IdentityError as error:
            raise AuthenticationFailed(str(error)) from error
        self.expires = ours.expires
        sock = super().connect()
        try:
            wrapped: socket.socket = ours.current.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise
        return wrapped

    def open(self, answer_s: float) -> ProvenStream:
        try:
            return super().open(answer_s)
        except ConnectionResetError as error:  # as the server does that does not take our certificate
            own = "our certificate has expired" if self.expires["own"] < clock.wall() else "its log says why"
            raise AuthenticationFailed(f"the controller ended the connection in the handshake: {own}") from error

    def is_renewed(self) -> bool:
        now = clock.monotonic()
        if self._ours is None or now - self._checked_at < FILE_CHECK_S:
            return False
        self._checked_at = now
        return self._ours.refresh()


def in_words(error: Exception) -> str:
    """What went wrong, for the log: of TLS, what it means."""
    if isinstance(error, FrameError):
        return str(error.args[1])[:MAX_WHY]
    if "ssl" in sys.modules:  # else it was not TLS, and stays unloaded
        from slurm_watchdog.identity import tls

        return tls.explain(error)
    return str(error)
