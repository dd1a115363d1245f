"""How agent and controller prove who they are, and what the kernel says of the other end of a unix socket."""

from __future__ import annotations

import os
import socket
import stat
import struct
from typing import Literal

Transport = Literal["tls", "munge", "unix"]
"""tls: certificates. munge: a credential of MUNGE, then HMACs. unix: one ordinary user's own socket
(`slurm-watchdog run`). There is no other: holding an address proves nothing."""

_CREDENTIALS = "3i"  # struct ucred of socket(7): pid, uid, gid.


class AnotherUser(PermissionError):
    """The other end of a socket is not this user. The text says who it is."""


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end of the unix socket `sock`.

    SO_PEERCRED gives who called connect() or listen() (unix(7)): no process can forge it.
    """
    pid, uid, _ = struct.unpack(
        _CREDENTIALS, sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
    )
    return pid, uid


def check_peer(sock: socket.socket, own_uid: int) -> None:
    """Returns if the process at the other end of the unix socket `sock` runs as `own_uid`. Raises AnotherUser."""
    _, uid = peer_of(sock)
    if uid != own_uid:
        raise AnotherUser(f"the other end of the socket belongs to user {uid}, not to {own_uid}")


def check_directory(path: str, own_uid: int) -> None:
    """Returns if only `own_uid` may enter the directory `path`. Raises AnotherUser, or OSError if there is none."""
    seen = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != own_uid or seen.st_mode & 0o077:
        raise AnotherUser(f"{path} must be a directory of user {own_uid} with mode 0700")
