"""Files that hold secrets: who may read them, and whether they have changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class IdentityError(Exception):
    """A file of ours is missing, open to others, or not what it should be. The text says which, why, and what to do."""


CA_FILE = "ca.crt"
REVOKED_FILE = "ca.crl"


@dataclass(frozen=True)
class TlsFiles:
    """Where the certificates of one service lie: `ca.crt`, `agent.crt` and `agent.key`, or the controller's."""

    directory: str
    service: str  # `agent` or `controller`.

    @property
    def ca(self) -> str:
        return os.path.join(self.directory, CA_FILE)

    @property
    def certificate(self) -> str:
        return os.path.join(self.directory, f"{self.service}.crt")

    @property
    def key(self) -> str:
        return os.path.join(self.directory, f"{self.service}.key")

    @property
    def revoked(self) -> str:
        """The list of revoked certificates; it may be missing."""
        return os.path.join(self.directory, REVOKED_FILE)

    def all(self) -> tuple[str, str, str]:
        return self.ca, self.certificate, self.key

    def watched(self) -> tuple[str, str, str, str]:
        """Authority, revocation list, own certificate and key."""
        return self.ca, self.revoked, self.certificate, self.key


Stamp = tuple[tuple[int, int, int, int], ...]  # (device, inode, size, change in ns) of each file; missing: zeros.


def read_stamp(paths: Sequence[str]) -> Stamp:
    """Differs from the one before when a file, or the link to it, was replaced or written to."""
    found = []
    for path in paths:
        try:
            seen = os.stat(path)
            found.append((seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0, 0))
    return tuple(found)


def check_secret(path: str) -> None:
    """A secret may be read by its owner and, as a unit's credential may be, by its group. Raises IdentityError."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise IdentityError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise IdentityError(f"{path} is not a file")
    if mode & 0o037:
        raise IdentityError(f"{path} can be read or changed by others (mode {mode & 0o7777:04o}): chmod 600 {path}")
    if not os.access(path, os.R_OK):
        raise IdentityError(f"{path} cannot be read by user {os.geteuid()}: chown it to the service's user")


def read_text(path: str, limit: int = 1 << 20) -> str:
    """The text of a file of ours. Raises IdentityError."""
    try:
        with Path(path).open(encoding="ascii") as file:
            return file.read(limit)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise IdentityError(f"{path} cannot be read: {reason}") from error
