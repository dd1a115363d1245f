"""The door for users on other machines: each request is proven by MUNGE, and about its maker's own jobs.

A request is plain HTTP, with a credential in its header that only the controller's user can decode and that holds a
digest of the request; munged lets no credential be decoded twice. The answer is a credential, too: made by the
controller's user, for the one who asked alone, with the digest that it answers. So nobody on the way reads an answer,
changes one or a request, or sends one again; and an address that somebody else has taken over answers nothing.

Root and the controller's user are not let in: who is root of a node is not root here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.controller.api.asking import ONLY_OWN, Handler, errors_as_sentences
from slurm_watchdog.controller.api.local_socket import MAX_BODY_BYTES, LocalApi
from slurm_watchdog.controller.api.restart_api import RestartApi
from slurm_watchdog.controller.api.user_lookup import UserLookup, person_numbered
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.controller.ports.commands import CommandSources
from slurm_watchdog.identity.munge_decoder import BadCredential, Decoder, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import CREDENTIAL, STANDBY, SealedAnswer, request_digest
from slurm_watchdog.wire.http_messages import Admission, Answer, Head, Request, refusal
from slurm_watchdog.wire.http_messages import Handler as RequestHandler
from slurm_watchdog.wire.http_server import Server
from slurm_watchdog.wire.rate_limits import Limits, TokenBuckets, most_connections

log = logging.getLogger(__name__)

ADDRESS_BURST, ADDRESS_PER_S = 200.0, 20.0
"""Requests of one address: all people of a login node come from one."""
BURST, PER_S = 60.0, 3.0
"""Requests of one user, once he is proven: who follows a restart asks once a second."""
MAX_ANSWER: Final = 700_000
"""Bytes of what is sealed: a credential of munged holds 1 MiB at most, in base64."""
MAX_CONNECTIONS: Final = 128
"""A quarter of rate_limits.SPARE_FILES: what the agents' port leaves is not for users alone."""
MAX_OF_ONE_ADDRESS: Final = 32
"""At once; this machine's own addresses are no exception."""
ARRIVAL_S: Final = 20.0
"""A request has to arrive whole within this time, as a report has to."""
SEALS_AT_ONCE: Final = 4
"""Programs munge that run at once, each with its pipes; munged takes one at a time."""
MUNGE_S: Final = 10.0
PERSON: Final = web.RequestKey("person", Person)

Encode = Callable[[bytes, int], Awaitable[str]]
"""(payload, user) -> a credential that he alone can decode. Raises MungeUnavailable."""


async def encode_with_munge(payload: bytes, uid: int, socket: str = "") -> str:
    """By the program munge, in a child with a deadline. Raises MungeUnavailable."""
    argv = ["munge", "--restrict-uid", str(uid), "--cipher", "aes128", *(["--socket", socket] if socket else [])]
    try:
        child = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            cwd="/", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise MungeUnavailable(f"the program munge cannot be run: {error.strerror}") from error
    try:
        out, _ = await wait_for(child.communicate(payload), MUNGE_S)
    except TimeoutError:
        child.kill()
        raise MungeUnavailable("munge gave no answer in time") from None
    if child.returncode != 0:
        raise MungeUnavailable(f"munge ended with exit code {child.returncode}")
    return out.decode("ascii").strip()


METHODS: Final = frozenset({"GET", "POST"})
PLAIN: Final = re.compile(r"[\x20-\x7e]*")
"""Of a line that is put together here: nothing in it ends the line."""


class _Pipe(asyncio.Transport):
    """The connection of one request: what is written is kept, until the application closes it."""

    def __init__(self, protocol: asyncio.Protocol):
        super().__init__()
        self._protocol, self._closing = protocol, False
        self.said = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.said += data

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._end)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        """All of it has been said."""

    resume_reading = pause_reading

    def _end(self) -> None:
        self._protocol.connection_lost(None)
        if not self.over.done():
            self.over.set_result(None)


async def answer_in_memory(protocol: Callable[[], asyncio.Protocol], request: Request) -> Answer:
    """What the application behind `protocol`, an aiohttp `AppRunner.server`, answers. It finishes what it has
    begun, also when nobody waits any more."""
    if request.method not in METHODS:
        return refusal(405, "there are GET and POST")
    lines = (f"{request.method} {request.target} HTTP/1.1", f"Authorization: {request.authorization}")
    if not all(PLAIN.fullmatch(line) for line in lines):
        return refusal(400, "a request is written in printable ASCII")
    head = "\r\n".join((*lines, "Host: localhost", f"Content-Length: {len(request.body)}", "Connection: close"))
    one = protocol()
    pipe = _Pipe(one)
    one.connection_made(pipe)
    one.data_received(f"{head}\r\n\r\n".encode("ascii") + request.body)
    await pipe.over
    first, _, body = bytes(pipe.said).partition(b"\r\n\r\n")
    if not first:
        return refusal(500, "this request failed; see the log of the controller")
    return Answer(body, int(first.split(b" ", 2)[1]))


@dataclass
class UserDoor:
    """Who comes in, and what goes out."""

    decoder: Decoder
    encode: Encode
    now: Callable[[], float] = clock.monotonic
    users: UserLookup = field(default_factory=lambda: UserLookup(person_numbered))

    def __post_init__(self) -> None:
        self._pace = TokenBuckets(ADDRESS_BURST, ADDRESS_PER_S)
        self._users_pace = TokenBuckets(BURST, PER_S)
        self._seals = asyncio.Semaphore(SEALS_AT_ONCE)

    def admit(self, head: Head, remote: str) -> Answer | None:
        """Before the body of a request is taken: why it is not."""
        if self._pace.acquire(remote, self.now()):
            return None
        return refusal(429, "too many requests from this address: wait a minute")

    async def person(self, request: web.Request, body: bytes) -> Person | web.Response:
        """Who has made the request; or why nobody is believed to have."""
        match = CREDENTIAL.fullmatch(request.headers.get("Authorization", ""))
        if match is None:
            return _refusal(401, "users prove themselves by MUNGE here: slurm-watchdog --socket munge://HOST:PORT")
        try:
            shown = await self.decoder.decode(match[1])
        except BadCredential as error:
            return _refusal(401, f"MUNGE says: {error}")
        except MungeUnavailable as error:
            return _refusal(503, f"MUNGE does not answer here ({error}): come again")
        if shown.restricted_to != os.geteuid() or not shown.encrypted:
            return _refusal(401, f"the credential is not for user {os.geteuid()} alone")
        if shown.payload != request_digest(request.method, request.path_qs, body).encode():
            return _refusal(401, "the credential is for another request")
        if shown.uid in (0, os.geteuid()):
            return _refusal(403, "this door is for users: root and the controller's user ask on the management node")
        if not self._users_pace.acquire(str(shown.uid), self.now()):
            return _refusal(429, "too many requests of yours: wait a minute")
        try:
            return await self.users.find(shown.uid)
        except KeyError:
            return _refusal(403, f"there is no user {shown.uid} here")
        except TimeoutError:
            return _refusal(503, "who you are can't be looked up now: come again")

    async def seal(self, request: web.Request, body: bytes, uid: int, answer: web.StreamResponse) -> web.Response:
        """The answer for this user alone."""
        document = answer.body if isinstance(answer, web.Response) and isinstance(answer.body, bytes) else b""
        digest = request_digest(request.method, request.path_qs, body)
        sealed = msgspec.json.encode(SealedAnswer(digest, answer.status, document.decode(errors="replace")))
        if len(sealed) > MAX_ANSWER:  # measured so: in it each quote of the document has two bytes, or four
            too_large = '{"error": "the answer is too large for this door: ask on the management node"}'
            sealed = msgspec.json.encode(SealedAnswer(digest, 413, too_large))
        try:
            async with self._seals:
                return web.Response(text=await self.encode(sealed, uid))
        except MungeUnavailable as error:
            return _refusal(503, f"MUNGE does not answer here ({error}): come again")


def make_user_app(controller: CommandSources, door: UserDoor) -> web.Application:
    """The routes that are open to users from anywhere: about their own jobs."""

    @web.middleware
    async def proven(request: web.Request, handler: Handler) -> web.StreamResponse:
        body = await request.read()
        person = await door.person(request, body)
        if isinstance(person, web.Response):
            return person
        request[PERSON], request[ONLY_OWN] = person, person.uid or 0
        answer = await errors_as_sentences(request, handler)
        if answer.status == 403:  # whose it is instead is nothing for this user
            answer = web.json_response({"error": "that is about no job of yours, or not for you to do"}, status=403)
        return await door.seal(request, body, person.uid or 0, answer)

    def person_of(request: web.Request) -> Person:
        found: Person = request[PERSON]
        return found

    api = LocalApi(controller, person_of)
    restarts = RestartApi(controller, api.who)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[proven])
    routes: tuple[tuple[str, str, Any], ...] = (
        ("GET", "/v1/status", api.status),
        ("GET", "/v1/incidents", api.incidents),
        ("GET", "/v1/incidents/{id}", api.explain),
        ("GET", "/v1/incidents/{id}/evidence/{number}", api.evidence),
        ("POST", "/v1/diagnose", api.start_diagnosis),
        ("GET", "/v1/diagnose/{id}", api.diagnosis),
        ("POST", "/v1/restart", restarts.restart),
        ("POST", "/v1/restart/cancel", restarts.cancel),
    )
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    return app


async def make_user_server(
    controller: CommandSources, door: UserDoor, count: Callable[[str], None] = lambda reason: None
) -> Server:
    """The port itself, not yet open, with the limits of the agents' port. `count` is called with the reason of each
    refused connection."""
    runner = web.AppRunner(make_user_app(controller, door), access_log=None)
    await runner.setup()
    protocol = runner.server
    assert protocol is not None  # after setup
    server = _port(lambda request: answer_in_memory(protocol, request), door.admit, count)

    async def end() -> None:
        await runner.cleanup()
        await door.decoder.close()

    server.ends = end
    return server


def make_refusing_server(sentence: Callable[[], str]) -> Server:
    """The same port, not yet open, of a standby: it answers at once which controller is the active one."""

    def refuse() -> Answer:
        return Answer(msgspec.json.encode({"error": sentence(), "code": STANDBY}), 503)

    return _port(lambda request: refuse(), lambda head, remote: refuse(), lambda reason: None)


def _port(handle: RequestHandler, admit: Admission, count: Callable[[str], None]) -> Server:
    return Server(
        handle,
        admit,
        lambda outcome, status, sentence: refusal(status, sentence),
        MAX_BODY_BYTES,
        ARRIVAL_S,
        count=count,
        limits=Limits(
            is_own=lambda address: False,
            most=min(MAX_CONNECTIONS, most_connections()),
            most_of_one=MAX_OF_ONE_ADDRESS,
        ),
    )


def _refusal(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence}, status=status)
