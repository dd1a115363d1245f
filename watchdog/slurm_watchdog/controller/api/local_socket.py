"""The local socket for the commands: for root, the controller's user and one group. Who asks is known from the kernel,
and written into the journal."""

from __future__ import annotations

import grp
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from slurm_watchdog.controller.api.answers import Api, CommandSources
from slurm_watchdog.controller.api.asking import MAX_BODY_BYTES, UNKNOWN_CALLER, Asked, RequestRefused, UserLookup
from slurm_watchdog.controller.api.routes import ROUTES, answer, refusal_of
from slurm_watchdog.controller.policy.access import Person

log = logging.getLogger(__name__)

SOCKET_MODE = 0o660  # Root and the socket's group: who may use the commands is in that group.
SO_PEERGROUPS = 59  # asm-generic/socket.h; Python's `socket` has no name for it.
MAX_GROUPS = 256  # What Python's getsockopt takes: 1024 bytes.


def make_app(
    controller: CommandSources, person_of: Callable[[web.Request], Person] | None = None,
    users: UserLookup | None = None,
) -> web.Application:  # fmt: skip
    """Answers every route; `person_of` says who asks (the process at the other end), and `users` how he is called."""
    api, users, who = Api(controller), users or UserLookup(), person_of or peer_person

    async def handle(request: web.Request) -> web.Response:
        try:
            asked = Asked(request.method, request.raw_path, who(request), await request.read())
        except RequestRefused as error:
            status, body = error.status, refusal_of(str(error))
        except web.HTTPRequestEntityTooLarge:
            status, body = 413, refusal_of("the request is too large")
        else:
            status, body = await answer(api, ROUTES, asked, users)
        return web.Response(status=status, body=body, content_type="application/json")

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


def peer_person(request: web.Request) -> Person:
    """The process at the other end with its groups, as the kernel tells it. Raises RequestRefused."""
    sock = request.transport.get_extra_info("socket") if request.transport else None
    if sock is None:
        raise RequestRefused(403, UNKNOWN_CALLER)
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, gid = struct.unpack("3i", credentials)
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS * struct.calcsize("i"))
    except OSError:  # in more groups than fit, or a kernel before 4.13: its first group is known
        raw = b""
    return Person(uid, frozenset({gid, *struct.unpack(f"{len(raw) // 4}i", raw)}))


async def open_socket(runner: web.AppRunner, path: str, group: str = "") -> None:
    """Listens on `path`, for the members of `group` and no one else; a socket that a dead controller left is replaced.

    Raises OSError if a live one holds it.
    """
    _make_room(Path(path))
    await web.UnixSite(runner, path).start()
    if group:  # apart from the controller's own, which may read its files; without it the socket stays the latter's
        try:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        except (KeyError, PermissionError) as error:
            why = "no such group" if isinstance(error, KeyError) else "the controller is not a member of it"
            log.warning(
                "%s is for root and the controller's user alone: controller.socket_group is %s (%s)", path, group, why
            )
    os.chmod(path, SOCKET_MODE)


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
