"""What credentials of MUNGE carry for a user on another machine: of his request a digest, of the controller's answer
all. What they carry for agents is in slurm_watchdog.wire.frames."""

from __future__ import annotations

import hashlib

import msgspec

STANDBY = "standby"  # The word for programs of a controller that waits for its turn: nothing was done.


class SealedAnswer(msgspec.Struct, frozen=True):
    """What the controller answers a user on another machine, in a credential for him alone."""

    digest: str  # Of the request.
    status: int
    body: str


def request_digest(method: str, target: str, body: bytes) -> str:
    """What the credential of a user's request holds; `target` is path and query."""
    return hashlib.sha256(f"{method}\n{target}\n".encode() + body).hexdigest()
