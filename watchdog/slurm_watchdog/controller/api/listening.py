"""Opens the local socket: for root, the controller's user and one group."""

from __future__ import annotations

import grp
import logging
import os
import socket
from pathlib import Path

from aiohttp import web

log = logging.getLogger(__name__)

SOCKET_MODE = 0o660
"""Root and the socket's group: who may use the commands is in that group."""


async def open_socket(runner: web.AppRunner, path: str, group: str = "") -> None:
    """Listens on `path`, for the members of `group` and nobody else; a socket that a dead controller left is replaced.

    Raises OSError if a live one holds it.
    """
    _make_room(Path(path))
    await web.UnixSite(runner, path).start()
    if group:
        _hand_to(path, group)
    os.chmod(path, SOCKET_MODE)


def _hand_to(path: str, group: str) -> None:
    """The group of people is apart from the controller's own, which may read its files. Without it the socket
    stays the latter's."""
    try:
        os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except (KeyError, PermissionError) as error:
        why = "no such group" if isinstance(error, KeyError) else "the controller is no member of it"
        log.warning(
            "%s is for root and the controller's user alone: controller.socket_group is %s (%s)",
            path,
            group,
            why,
        )


def _make_room(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            raise OSError(f"another controller answers on {path}; stop it first")
