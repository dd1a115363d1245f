"""What credentials of MUNGE carry: of an agent, the key of its stream; of a user on another machine, his request.

An agent draws a key and puts it, with its node's name and the challenge that the controller drew for this one stream,
into a credential that only the controller's user can decode: see slurm_watchdog.wire.frames for what is proven by it.
"""

from __future__ import annotations

import hashlib
import hmac
import re

import msgspec

KEY_BYTES = 32
TO_CONTROLLER, TO_AGENT = b"to-controller", b"to-agent"
CREDENTIAL = re.compile(r"MUNGE:[A-Za-z0-9+/=]{1,8000}:")
STANDBY = "standby"  # The word for programs of a controller that waits for its turn: nothing was done.


class SessionOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent's credential carries."""

    key: str
    node: str
    challenge: str

    def __repr__(self) -> str:
        return f"SessionOffer(node={self.node!r})"


class Seal:
    """The MACs of one direction of a stream: keyed BLAKE2b (RFC 7693), the number of the frame as its salt."""

    def __init__(self, key: bytes, direction: bytes):
        self._key, self._direction, self._number = key, direction, 0

    def mac(self, content: bytes) -> bytes:
        """Of the next frame."""
        self._number += 1
        salt = self._number.to_bytes(16, "big")
        mac = hashlib.blake2b(content, key=self._key, salt=salt, person=self._direction, digest_size=16)
        return mac.digest()

    def is_of(self, mac: bytes, content: bytes) -> bool:
        """Whether `mac` is that of the next frame; compared in constant time."""
        return hmac.compare_digest(mac, self.mac(content))


class SealedAnswer(msgspec.Struct, frozen=True):
    """What the controller answers a user on another machine, in a credential for him alone."""

    digest: str  # Of the request.
    status: int
    body: str


def request_digest(method: str, target: str, body: bytes) -> str:
    """What the credential of a user's request holds; `target` is path and query."""
    return hashlib.sha256(f"{method}\n{target}\n".encode() + body).hexdigest()
