"""The stream between an agent and its controller: frames, each of four bytes of length, one of kind, and msgpack. Pure.

The agent begins with HELLO. Where nodes prove themselves by MUNGE the controller answers WELCOME with a challenge, and
the agent PROOF: a credential that only the controller's user can decode, with the node, that challenge and a key. From
then on each frame of both ends begins with a MAC by that key over its number, so that none can be changed, left out, or
sent again. By certificates, or on one user's socket, both ends are proven before the first frame. OPENED says that
reports are taken; each REPORT is answered by TAKEN. A STATE says in short that all is as by the REPORT before, and
nothing has happened: it is not answered. NEWS (another answer than the last one) and ORDERS come at any time; BYE
says why the stream ends.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:  # agents that prove themselves otherwise do without its memory
    from slurm_watchdog.identity.munge_protocol import Seal

VERSION = 1
MAGIC = b"slurm-watchdog\r\n\r\n"
"""How the first frame's content begins: a server of HTTP takes it for a whole head, and answers at once that it is
none. The stream itself begins with the byte 0, as no request of HTTP does: no frame has 16 MiB."""
HELLO, WELCOME, PROOF, OPENED, BYE = b"h", b"w", b"p", b"o", b"b"
REPORT, STATE, TAKEN, NEWS, ORDERS = b"r", b"s", b"t", b"n", b"c"
MAX_UNPROVEN = 16 * 1024  # Bytes of a frame before the stream is opened: a credential has less than 1 KiB.
LENGTH = struct.Struct(">I")
MAC_BYTES = 16


class FrameError(Exception):
    """What is no frame of the other end: its arguments are (outcome, sentence)."""


class Hello(msgspec.Struct, frozen=True):
    """Who comes."""

    node: str
    version: int = VERSION
    release: str = ""


class Welcome(msgspec.Struct, frozen=True):
    challenge: str  # Random, for this stream alone.


class Bye(msgspec.Struct, frozen=True):
    """Why the controller closes the stream: a word for programs, and a sentence."""

    code: str
    why: str


T = TypeVar("T")


def unpack(body: bytes, kind: type[T]) -> T:
    """Raises FrameError for anything else."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError("garbage", f"not a {kind.__name__.lower()}: {str(error)[:200]}") from error


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
