"""Files that hold secrets: where they are, and who may read them."""

from __future__ import annotations

import os
import stat


class IdentityError(ValueError):
    """A file of ours is missing, open to others, or not what it should be. The text says which, why, and what to do."""


class TlsFiles:
    """Where the certificates of one service are: `ca.crt`, `agent.crt` and `agent.key`, or the controller's, and
    `ca.crl`, the list of revoked certificates, which may be missing."""

    def __init__(self, directory: str, service: str):
        """`service`: `agent` or `controller`."""
        self.directory, self.service = directory, service
        names = "ca.crt", "ca.crl", f"{service}.crt", f"{service}.key"
        self.ca, self.revoked, self.certificate, self.key = (os.path.join(directory, name) for name in names)


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
