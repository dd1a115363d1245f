"""The two doors of the commands: the local socket, for root, the controller's user and one group, where the kernel says
who asks; and the port for users on other machines, each of whose requests is proven by MUNGE, and about its maker's own
jobs.

A request to that port is plain HTTP, with a credential in its header that only the controller's user can decode and
that holds a digest of the request; munged lets no credential be decoded twice. The answer is a credential, too: made by
the controller's user, for the one who asked alone, with the digest that it answers. So no one on the way reads an
answer, changes one or a request, or sends one again; and an address that someone else has taken over answers nothing.
Root and the controller's user are not let in there: who is root of a node is not root here. It is not the agents'
protocol: frames are proven, but can be read by others.
"""

from __future__ import annotations

import grp
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.controller.api.answers import Api, CommandSources
from slurm_watchdog.controller.api.asking import MAX_BODY_BYTES, UNKNOWN_CALLER, Asked, RequestRefused, UserLookup
from slurm_watchdog.controller.api.routes import ROUTES, USER_ROUTES, answer, refusal_of
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.identity.munge_library import BadCredential, MungeLibrary, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import SealedAnswer, request_digest
from slurm_watchdog.wire.port import Port, refusal
from slurm_watchdog.wire.rate_limits import Limits, TokenBuckets, most_connections

log = logging.getLogger(__name__)

SOCKET_MODE = 0o660  # Root and the socket's group: who may use the commands is in that group.
SO_PEERGROUPS = 59  # asm-generic/socket.h; Python's `socket` has no name for it.
MAX_GROUPS = 256  # What Python's getsockopt takes: 1024 bytes.
ADDRESS_BURST, ADDRESS_PER_S = 200.0, 20.0  # Requests of one address: all people of a login node come from one.
BURST, PER_S = 60.0, 3.0  # Requests of one user, once he is proven: who follows a restart asks once a second.
MAX_ANSWER = 700_000  # Bytes of what is sealed: a credential of munged holds 1 MiB at most, in base64.
MAX_CONNECTIONS = 128  # Of socket and users each: a quarter of what the agents' port leaves (rate_limits.SPARE_FILES).
MAX_OF_PAGE = 256  # A browser keeps one or a few.
MAX_OF_ONE_ADDRESS = 32  # At once; this machine's own addresses are no exception.


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


def few(most: int = MAX_CONNECTIONS, **bounds: Any) -> Limits:
    """The connections of a port that is not for agents."""
    return Limits(most=min(most, most_connections()), **bounds)


def local_port(controller: CommandSources, count: Callable[[str], None]) -> Port:
    """The local socket, not yet open. `count` is called with the reason of each refused connection."""
    own = ("user 0", f"user {os.geteuid()}")  # as Connection.remote has them
    return Port(make_app(controller), count=count, limits=few(is_own=lambda who: who in own))


async def open_socket(port: Port, path: str, group: str = "") -> None:
    """Listens on `path`, for the members of `group` and no one else; a socket that a dead controller left is replaced.

    Raises OSError if a live one holds it.
    """
    _make_room(Path(path))
    await port.start_unix(path)
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


# ------------------------------------------------------------------------------------------------ users elsewhere


class UserDoor:
    """Who comes in, and what goes out."""

    def __init__(self, controller: CommandSources, munge: MungeLibrary, users: UserLookup | None = None):
        self._api, self._munge = Api(controller), munge
        self._users = users or UserLookup()
        self._pace = TokenBuckets(ADDRESS_BURST, ADDRESS_PER_S)
        self._users_pace = TokenBuckets(BURST, PER_S)

    def server(self, count: Callable[[str], None] = lambda reason: None) -> Port:
        """The port itself, not yet open. `count` is called with the reason of each refused connection."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        limits = few(is_own=lambda address: False, most_of_one=MAX_OF_ONE_ADDRESS)
        return Port(app, admit=self._admit, count=count, limits=limits)

    def _admit(self, request: web.Request) -> web.Response | None:
        """Before the body of a request is taken: why it is not."""
        if self._pace.acquire(request.remote or "", clock.monotonic()):
            return None
        return refusal(429, "too many requests from this address: wait a minute")

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            digest = request_digest(request.method, request.raw_path, await request.read())
            person = await self._person(request.headers.get("Authorization", ""), digest)
            uid = person.uid or 0
            asked = Asked(request.method, request.raw_path, person, await request.read(), only_own=uid)
            status, document = await answer(self._api, USER_ROUTES, asked)
            if status == 403:  # whose it is instead is nothing for this user
                document = refusal_of("that is about no job of yours, or not for you to do")
            return await self._seal(digest, uid, status, document)
        except RequestRefused as error:
            return refusal(error.status, str(error))
        except MungeUnavailable as error:
            return refusal(503, f"MUNGE does not answer here ({error}): retry")

    async def _person(self, authorization: str, digest: str) -> Person:
        """Who has made the request. Raises RequestRefused where no one is believed to have, and MungeUnavailable."""
        scheme, _, credential = authorization.partition(" ")
        if scheme != "Munge":
            how = "users prove themselves by MUNGE here: slurm-watchdog --socket munge://HOST:PORT"
            raise RequestRefused(401, how)
        try:
            shown = await self._munge.decode(credential)
        except BadCredential as error:
            raise RequestRefused(401, f"MUNGE says: {error}") from None
        if not shown.is_for(os.geteuid()):
            raise RequestRefused(401, f"the credential is not for user {os.geteuid()} alone")
        if shown.payload != digest.encode():
            raise RequestRefused(401, "the credential is for another request")
        if shown.uid in (0, os.geteuid()):
            raise RequestRefused(403, "root and the controller's user ask on the management node, not at this port")
        if not self._users_pace.acquire(str(shown.uid), clock.monotonic()):
            raise RequestRefused(429, "too many requests of yours: wait a minute")
        try:
            return await self._users.find(shown.uid)
        except KeyError:
            raise RequestRefused(403, f"there is no user {shown.uid} here") from None
        except TimeoutError:
            raise RequestRefused(503, "your user name cannot be looked up now: retry") from None

    async def _seal(self, digest: str, uid: int, status: int, document: bytes) -> web.Response:
        """The answer for this user alone. Raises MungeUnavailable."""
        sealed = msgspec.json.encode(SealedAnswer(digest, status, document.decode()))
        if len(sealed) > MAX_ANSWER:  # measured so: in it each quote of the document has two bytes, or four
            too_large = refusal_of("the answer is too large for this port: ask on the management node").decode()
            sealed = msgspec.json.encode(SealedAnswer(digest, 413, too_large))
        return web.Response(text=await self._munge.encode(sealed, uid))
