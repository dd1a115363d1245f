"""The door for users on other machines: each request is proven by MUNGE, and about its maker's own jobs.

A request is plain HTTP, with a credential in its header that only the controller's user can decode and that holds a
digest of the request; munged lets no credential be decoded twice. The answer is a credential, too: made by the
controller's user, for the one who asked alone, with the digest that it answers. So no one on the way reads an answer,
changes one or a request, or sends one again; and an address that someone else has taken over answers nothing.

Root and the controller's user are not let in: who is root of a node is not root here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.controller.api.answers import Api, CommandSources
from slurm_watchdog.controller.api.asking import MAX_BODY_BYTES, Asked, RequestRefused, UserLookup
from slurm_watchdog.controller.api.routes import USER_ROUTES, answer, refusal_of
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.identity.munge_decoder import BadCredential, Decoder, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import CREDENTIAL, STANDBY, SealedAnswer, request_digest
from slurm_watchdog.wire.http_messages import Admission, Answer, Head, Request, refusal
from slurm_watchdog.wire.http_messages import Handler as RequestHandler
from slurm_watchdog.wire.http_server import Server
from slurm_watchdog.wire.rate_limits import Limits, TokenBuckets, most_connections

ADDRESS_BURST, ADDRESS_PER_S = 200.0, 20.0  # Requests of one address: all people of a login node come from one.
BURST, PER_S = 60.0, 3.0  # Requests of one user, once he is proven: who follows a restart asks once a second.
MAX_ANSWER = 700_000  # Bytes of what is sealed: a credential of munged holds 1 MiB at most, in base64.
MAX_CONNECTIONS = 128  # A quarter of rate_limits.SPARE_FILES: what the agents' port leaves is not for users alone.
MAX_OF_ONE_ADDRESS = 32  # At once; this machine's own addresses are no exception.
ARRIVAL_S = 20.0  # A request has to arrive whole within this time, as a report has to.
SEALS_AT_ONCE = 4  # Programs munge that run at once, each with its pipes; munged takes one at a time.

Encode = Callable[[bytes, int], Awaitable[str]]
"""(payload, user) -> a credential that he alone can decode. Raises MungeUnavailable."""


class UserDoor:
    """Who comes in, and what goes out."""

    def __init__(self, controller: CommandSources, decoder: Decoder, encode: Encode, users: UserLookup | None = None):
        self._api, self._decoder, self._encode = Api(controller), decoder, encode
        self._users = users or UserLookup()
        self._pace = TokenBuckets(ADDRESS_BURST, ADDRESS_PER_S)
        self._users_pace = TokenBuckets(BURST, PER_S)
        self._seals = asyncio.Semaphore(SEALS_AT_ONCE)

    def server(self, count: Callable[[str], None] = lambda reason: None) -> Server:
        """The port itself, not yet open, with the limits of the agents' port. `count` is called with the reason of each
        refused connection."""
        server = _port(self._handle, self._admit, count)
        server.ends = self._decoder.close
        return server

    def _admit(self, head: Head, remote: str) -> Answer | None:
        """Before the body of a request is taken: why it is not."""
        if self._pace.acquire(remote, clock.monotonic()):
            return None
        return refusal(429, "too many requests from this address: wait a minute")

    async def _handle(self, request: Request) -> Answer:
        try:
            person = await self._person(request)
            uid = person.uid or 0
            asked = Asked(request.method, request.target, person, request.body, only_own=uid)
            status, document = await answer(self._api, USER_ROUTES, asked)
            if status == 403:  # whose it is instead is nothing for this user
                document = refusal_of("that is about no job of yours, or not for you to do")
            return await self._seal(request, uid, status, document)
        except RequestRefused as error:
            return refusal(error.status, str(error))
        except MungeUnavailable as error:
            return refusal(503, f"MUNGE does not answer here ({error}): retry")

    async def _person(self, request: Request) -> Person:
        """Who has made the request. Raises RequestRefused where no one is believed to have, and MungeUnavailable."""
        match = CREDENTIAL.fullmatch(request.authorization)
        if match is None:
            how = "users prove themselves by MUNGE here: slurm-watchdog --socket munge://HOST:PORT"
            raise RequestRefused(401, how)
        try:
            shown = await self._decoder.decode(match[1])
        except BadCredential as error:
            raise RequestRefused(401, f"MUNGE says: {error}") from None
        if shown.restricted_to != os.geteuid() or not shown.encrypted:
            raise RequestRefused(401, f"the credential is not for user {os.geteuid()} alone")
        if shown.payload != _digest(request).encode():
            raise RequestRefused(401, "the credential is for another request")
        if shown.uid in (0, os.geteuid()):
            raise RequestRefused(
                403, "this door is for users: root and the controller's user ask on the management node"
            )
        if not self._users_pace.acquire(str(shown.uid), clock.monotonic()):
            raise RequestRefused(429, "too many requests of yours: wait a minute")
        try:
            return await self._users.find(shown.uid)
        except KeyError:
            raise RequestRefused(403, f"there is no user {shown.uid} here") from None
        except TimeoutError:
            raise RequestRefused(503, "your user name cannot be looked up now: retry") from None

    async def _seal(self, request: Request, uid: int, status: int, document: bytes) -> Answer:
        """The answer for this user alone. Raises MungeUnavailable."""
        sealed = msgspec.json.encode(SealedAnswer(_digest(request), status, document.decode()))
        if len(sealed) > MAX_ANSWER:  # measured so: in it each quote of the document has two bytes, or four
            too_large = refusal_of("the answer is too large for this door: ask on the management node").decode()
            sealed = msgspec.json.encode(SealedAnswer(_digest(request), 413, too_large))
        async with self._seals:
            return Answer((await self._encode(sealed, uid)).encode(), content_type=b"text/plain")


def _digest(request: Request) -> str:
    return request_digest(request.method, request.target, request.body)


def make_refusing_server(sentence: Callable[[], str]) -> Server:
    """The same port, not yet open, of a standby: it answers at once which controller is the active one."""

    def refuse() -> Answer:
        return Answer(refusal_of(sentence(), STANDBY), 503)

    return _port(lambda request: refuse(), lambda head, remote: refuse(), lambda reason: None)


def _port(handle: RequestHandler, admit: Admission, count: Callable[[str], None]) -> Server:
    def refuse(outcome: str, status: int, sentence: str) -> Answer:
        return refusal(status, sentence)

    most = min(MAX_CONNECTIONS, most_connections())
    limits = Limits(is_own=lambda address: False, most=most, most_of_one=MAX_OF_ONE_ADDRESS)
    return Server(handle, admit, refuse, MAX_BODY_BYTES, ARRIVAL_S, count=count, limits=limits)
