"""A session between one agent and the controller, begun by a MUNGE credential, and the proof that each message
of it carries.

The agent draws a key and puts it, with its node's name and the controller's present epoch, into a credential
that only the controller's user can decode. From then on a request carries the session, a counter and an
HMAC-SHA256 (RFC 2104) over method, path, counter and body; the answer carries one over status, counter and
body. So neither side accepts a message of a third party, or one twice.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from dataclasses import dataclass

import msgspec

KEY_BYTES = 32
SESSION_S = 3600.0  # An agent begins a new session after this time.
GRACE_S = 300.0  # The controller takes it for so much longer: one that is busy needs no new one in the middle.
AUTHORIZATION = re.compile(r"Session ([0-9a-f]{32}) ([0-9]{1,15}) ([0-9a-f]{64})")
CREDENTIAL = re.compile(r"Munge (MUNGE:[A-Za-z0-9+/=]{1,8000}:)")
STANDBY = "standby"  # The word for programs of a controller that waits for its turn: nothing was done.
EPOCH = re.compile(r"[0-9a-f]{32}")


class SessionOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the credential carries."""

    session: str
    key: str
    node: str
    epoch: str

    def __repr__(self) -> str:
        return f"SessionOffer(session={self.session!r}, node={self.node!r})"


@dataclass
class Session:
    """One end's view. The key is never printed."""

    id: str
    key: bytes
    node: str
    began_at: float  # On the holder's monotonic clock.
    counter: int = 0  # Of the newest message.
    address: str = ""  # Where it came from, and when its credential was made: the controller knows.
    made_at: int = 0

    def __repr__(self) -> str:
        return f"Session(id={self.id!r}, node={self.node!r}, counter={self.counter})"


@dataclass(frozen=True)
class RequestProof:
    """What a request says about itself, not yet believed."""

    session: str
    counter: int
    mac: str


def new_session(node: str, now: float) -> Session:
    """A session with a new random key."""
    # os.urandom, not secrets: that one brings the module random along, a quarter of a megabyte in every agent.
    return Session(os.urandom(16).hex(), os.urandom(KEY_BYTES), node, now)


def encode_offer(session: Session, epoch: str) -> bytes:
    return msgspec.json.encode(SessionOffer(session.id, session.key.hex(), session.node, epoch))


def decode_offer(data: bytes) -> SessionOffer:
    """Raises ValueError for what is none."""
    try:
        found = msgspec.json.decode(data, type=SessionOffer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("the credential carries no session") from error
    if not EPOCH.fullmatch(found.session) or not re.fullmatch(rf"[0-9a-f]{{{2 * KEY_BYTES}}}", found.key):
        raise ValueError("the credential carries no proper session")
    return found


def request_mac(key: bytes, path: str, counter: int, body: bytes) -> str:
    """The proof of a request; all are POST."""
    return _mac(key, f"POST\n{path}\n{counter}\n".encode(), body)


def answer_mac(key: bytes, status: int, counter: int, body: bytes) -> str:
    """The proof of the answer to the request with this counter."""
    return _mac(key, f"{status}\n{counter}\n".encode(), body)


def _mac(key: bytes, head: bytes, body: bytes) -> str:
    mac = hmac.new(key, head, hashlib.sha256)
    mac.update(body)
    return mac.hexdigest()


def authorization(session: Session, path: str, body: bytes) -> str:
    """The header of the next request."""
    session.counter += 1
    return f"Session {session.id} {session.counter} {request_mac(session.key, path, session.counter, body)}"


class SealedAnswer(msgspec.Struct, frozen=True):
    """What the controller answers a user on another machine, in a credential for him alone."""

    digest: str  # Of the request.
    status: int
    body: str


def request_digest(method: str, target: str, body: bytes) -> str:
    """What the credential of a user's request holds; `target` is path and query."""
    return hashlib.sha256(f"{method}\n{target}\n".encode() + body).hexdigest()


def parse_authorization(text: str) -> RequestProof | None:
    """None for anything else."""
    match = AUTHORIZATION.fullmatch(text)
    return None if match is None else RequestProof(match[1], int(match[2]), match[3])


def macs_equal(one: str, other: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())
