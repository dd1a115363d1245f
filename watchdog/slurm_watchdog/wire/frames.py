"""The stream between an agent's courier and its controller: frames, each of four bytes of length, one of kind, and a
body. Pure, and without what a courier does not need: the bodies of REPORT and of its answers are in wire.codec.

The courier begins with HELLO. Where nodes prove themselves by MUNGE the controller answers WELCOME with a challenge,
and the courier PROOF: a credential that only the controller's user can decode, with a key, the node and that challenge
(`offer`). From then on each frame of both ends begins with a MAC by that key over its number, so that none can be
changed, left out, or sent again. By certificates, or on one user's socket, both ends are proven before the first frame.
OPENED says that reports are taken; each REPORT is answered by TAKEN, without a body where the answer is as before. A
STATE says in short that all is as by the REPORT before, and nothing has happened: it is not answered. NEWS (another
answer than the last one) and ORDERS come at any time; BYE says why the stream ends. What is said before the stream is
opened, and a BYE, are words.

Agent and courier exchange the same frames without a MAC; CLOSED, ASK and ANSWER are theirs alone: see agent.courier.
"""

from __future__ import annotations

import struct
from _blake2 import blake2b  # not from hashlib, which loads OpenSSL: a megabyte of each courier
from _operator import _compare_digest  # hmac.compare_digest

VERSION = 1
MAGIC = b"slurm-watchdog\r\n\r\n"
"""How the first frame's content begins: a server of HTTP takes it for a whole head, and answers at once that it is
none. The stream itself begins with the byte 0, as no request of HTTP does: no frame has 16 MiB."""
HELLO, WELCOME, PROOF, OPENED, BYE = b"h", b"w", b"p", b"o", b"b"
REPORT, STATE, TAKEN, NEWS, ORDERS = b"r", b"s", b"t", b"n", b"c"
CLOSED, ASK, ANSWER = b"x", b"q", b"a"
OF_THE_REPORT = frozenset({"garbage", "too_large"})  # Why a proven controller will never take a report.
MAX_BYTES = 8 * 1024**2  # Of a report: 1,000 processes with stacks have about 2 MiB.
MAX_UNPROVEN = 16 * 1024  # Bytes of a frame before the stream is opened: a credential has less than 1 KiB.
LENGTH = struct.Struct(">I")
MAC_BYTES = 16
KEY_BYTES = 32
TO_CONTROLLER, TO_AGENT = b"to-controller", b"to-agent"


class FrameError(Exception):
    """What is no frame of the other end: its arguments are (outcome, sentence)."""


class Seal:
    """The MACs of one direction of a stream: keyed BLAKE2b (RFC 7693), the number of the frame as its salt."""

    def __init__(self, key: bytes, direction: bytes):
        self._key, self._direction, self._number = key, direction, 0

    def mac(self, content: bytes) -> bytes:
        """Of the next frame."""
        self._number += 1
        salt = self._number.to_bytes(16, "big")
        return blake2b(content, key=self._key, salt=salt, person=self._direction, digest_size=MAC_BYTES).digest()

    def is_of(self, mac: bytes, content: bytes) -> bool:
        """Whether `mac` is that of the next frame; compared in constant time."""
        return _compare_digest(mac, self.mac(content))


def hello(node: str, release: str = "", version: int = VERSION) -> bytes:
    """The body of a HELLO."""
    return MAGIC + f"{version} {node} {release}".encode()


def offer(key: bytes, node: str, challenge: str) -> bytes:
    """What the credential of a PROOF carries, and what a controller has to find in it."""
    return f"{key.hex()} {node} {challenge}".encode()


def words(body: bytes, count: int) -> list[str]:
    """The first `count` - 1 words of a body, and the rest. Raises FrameError where there are fewer."""
    found = body.decode(errors="replace").split(" ", count - 1)
    if len(found) < count:
        raise FrameError("garbage", f"a frame of {len(found)} words: {count} are expected")
    return found


def pack(kind: bytes, body: bytes, seal: Seal | None = None) -> bytes:
    """One frame."""
    content = kind + body
    mac = b"" if seal is None else seal.mac(content)
    return LENGTH.pack(len(mac) + len(content)) + mac + content


class Inbox:
    """Frames as they arrive, each bounded and, with `seal`, proven."""

    __slots__ = ("data", "limit", "seal")

    def __init__(self, limit: int):
        """`limit`: the most bytes of one frame; like `seal` it may change between two frames."""
        self.data = bytearray()
        self.limit = limit
        self.seal: Seal | None = None

    def take(self) -> tuple[bytes, bytes] | None:
        """Kind and body of the first frame; None: not all of it is there. Raises FrameError."""
        data = self.data
        if len(data) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(data)
        if size > self.limit:
            if data.startswith(b"HTTP"):
                raise FrameError("http", "it speaks HTTP, as a controller of release 0.1 does: upgrade it")
            raise FrameError("too_large", f"a frame of {size} bytes: the limit is {self.limit}")
        end = LENGTH.size + size
        if len(data) < end:
            return None
        start = LENGTH.size + (0 if self.seal is None else MAC_BYTES)
        if start >= end:
            raise FrameError("garbage", "an empty frame")
        content = bytes(memoryview(data)[start:end])
        mac = bytes(memoryview(data)[LENGTH.size : start])
        del data[:end]
        if self.seal is not None and not self.seal.is_of(mac, content):
            raise FrameError("unauthorized", "a frame was changed on its way, sent again, or is another one's")
        return content[:1], content[1:]
