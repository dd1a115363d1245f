"""MUNGE for the controller, by libmunge: credentials are decoded and made in threads, for munged may hang.

A thread that hangs is left to libmunge, which gives up by itself; it holds up nothing, nor the end of the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.identity.munge_protocol import CREDENTIAL, KEY_BYTES, SessionOffer

log = logging.getLogger(__name__)

LIBRARY = "libmunge.so.2"
CIPHER, ENCODE_TIME, SOCKET, UID_RESTRICTION = 0, 6, 8, 9  # munge_opt_t of munge.h.
AES128 = 4  # munge_cipher_t.
REPLAYED_CODE = 17  # EMUNGE_CRED_REPLAYED.
UNAVAILABLE_CODES = frozenset({1, 5, 6, 7})  # EMUNGE_SNAFU, NO_MEMORY, SOCKET, TIMEOUT: nothing about the credential.
DEADLINE_S = 5.0  # munged answers within a millisecond.
RETRY_PAUSE_S = 5.0  # After a failure munged is not asked for so long; agents are asked to retry.
MAX_HANGING = 4  # Threads that wait for munged; with more it is not asked.
T = TypeVar("T")


class MungeUnavailable(Exception):
    """MUNGE does not answer. The text says why."""


class BadCredential(Exception):
    """munged does not vouch for it. `replayed`: it has been shown before."""

    def __init__(self, why: str, *, replayed: bool = False):
        super().__init__(why)
        self.replayed = replayed


@dataclass(frozen=True)
class Credential:
    """What munged vouches for."""

    uid: int  # Of the process that made it.
    made_at: int  # Seconds since the epoch, by the clock of where it was made.
    restricted_to: int  # The user who can decode it; 0xffffffff for anybody.
    encrypted: bool
    payload: bytes

    def __repr__(self) -> str:
        return f"Credential(uid={self.uid}, made_at={self.made_at})"


class _Asker:
    """A thread that asks munged for what is queued, one after the other: munged takes it so."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self.answers = 0
        self.thread = threading.Thread(target=self._run, name="munge", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (asked := self.queue.get()) is not None:
            work, done = asked
            found: Any
            try:
                found = work()
            except Exception as error:  # noqa: BLE001 - raised by who waits for it
                found = error
            self.answers += 1
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                done.get_loop().call_soon_threadsafe(self._show, done, found)

    @staticmethod
    def _show(done: asyncio.Future[Any], found: Any) -> None:
        if not done.done():
            done.set_result(found)


class MungeLibrary:
    """One munged."""

    def __init__(
        self, socket: str = "", name: str = LIBRARY, *, deadline_s: float = DEADLINE_S, pause_s: float = RETRY_PAUSE_S
    ):
        """`socket` of munged, empty for its usual one; `name` of the library; `pause_s` after a failure."""
        self._socket, self._deadline_s, self._pause_s = os.fsencode(socket), deadline_s, pause_s
        self._name = name
        self._asker: _Asker | None = None
        self._hanging: list[threading.Thread] = []
        self._retry_at = float("-inf")
        self._why = ""

    async def decode(self, credential: str) -> Credential:
        """Raises BadCredential, MungeUnavailable."""
        return await self._in_time(lambda: self._decode(credential.encode("ascii")))

    async def encode(self, payload: bytes, uid: int) -> str:
        """A credential that the user `uid` alone can decode. Raises MungeUnavailable."""
        return await self._in_time(lambda: self._encode(payload, uid))

    async def _in_time(self, work: Callable[[], T]) -> T:
        if clock.monotonic() < self._retry_at:
            raise MungeUnavailable(self._why)
        if self._asker is None:
            self._hanging = [each for each in self._hanging if each.is_alive()]
            if len(self._hanging) >= MAX_HANGING:
                raise self._unavailable("munged hangs")
            self._asker = _Asker()
        asker, done = self._asker, asyncio.get_running_loop().create_future()
        asker.queue.put((work, done))
        answers = -1
        while not done.done():
            if answers == asker.answers:  # none for so long, to whomever
                self._leave(asker)
                raise self._unavailable("it gave no answer in time")
            answers = asker.answers
            await asyncio.wait([done], timeout=self._deadline_s)
        found = done.result()
        if isinstance(found, BadCredential):
            raise found
        if isinstance(found, Exception):
            raise self._unavailable(str(found)) from found
        if self._why:
            log.warning("MUNGE answers again")
        self._why = ""
        return found  # type: ignore[no-any-return]

    def _leave(self, asker: _Asker) -> None:
        if self._asker is asker:
            self._asker = None
            self._hanging.append(asker.thread)
            asker.queue.put(None)

    def _unavailable(self, why: str) -> MungeUnavailable:
        if self._why != why:
            log.error("MUNGE cannot verify who an agent is: %s", why)
        self._why, self._retry_at = why, clock.monotonic() + self._pause_s
        return MungeUnavailable(why)

    # -- in a thread -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _context(self, *options: tuple[int, Any]) -> Iterator[tuple[Any, Any]]:
        """(libmunge, a context with these options). Raises OSError."""
        library = load(self._name)
        context = ctypes.c_void_p(library.munge_ctx_create())
        try:
            for option, value in (*options, *([(SOCKET, ctypes.c_char_p(self._socket))] if self._socket else [])):
                library.munge_ctx_set(context, ctypes.c_int(option), value)
            yield library, context
        finally:
            library.munge_ctx_destroy(context)

    def _decode(self, credential: bytes) -> Credential:
        data, size = ctypes.c_void_p(), ctypes.c_int()
        uid, gid, restricted = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_uint32()
        made, cipher = ctypes.c_long(), ctypes.c_int()
        with self._context() as (library, context):
            try:
                _check(library, library.munge_decode(
                    credential, context, ctypes.byref(data), ctypes.byref(size), ctypes.byref(uid), ctypes.byref(gid)
                ))  # fmt: skip
                for option, value in ((ENCODE_TIME, made), (UID_RESTRICTION, restricted), (CIPHER, cipher)):
                    library.munge_ctx_get(context, ctypes.c_int(option), ctypes.byref(value))
                payload = ctypes.string_at(data, size.value) if data.value else b""
            finally:
                if data.value:  # the key of a stream
                    ctypes.memset(data, 0, size.value)
                    library.free(data)
        return Credential(uid.value, made.value, restricted.value, cipher.value != 0, payload)

    def _encode(self, payload: bytes, uid: int) -> str:
        text = ctypes.c_char_p()
        with self._context((UID_RESTRICTION, ctypes.c_uint32(uid)), (CIPHER, ctypes.c_int(AES128))) as (
            library,
            context,
        ):
            _check(library, library.munge_encode(ctypes.byref(text), context, payload, len(payload)))
            found = (text.value or b"").decode("ascii")
            library.free(text)
        return found


@cache
def load(name: str = LIBRARY) -> Any:
    """libmunge with the types of its functions. Raises OSError."""
    library: Any = ctypes.PyDLL(name)
    asking = ctypes.CDLL(name)  # Only what asks munged lets other threads run meanwhile: each turn has its price.
    library.munge_decode, library.munge_encode = asking.munge_decode, asking.munge_encode
    text, pointer = ctypes.c_char_p, ctypes.c_void_p
    library.munge_ctx_create.restype = pointer
    library.munge_ctx_destroy.argtypes = [pointer]
    library.munge_strerror.restype = text
    numbers = (ctypes.POINTER(each) for each in (pointer, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32))
    library.munge_decode.argtypes = [text, pointer, *numbers]
    library.munge_encode.argtypes = [ctypes.POINTER(text), pointer, text, ctypes.c_int]
    library.free.argtypes = [pointer]  # of the C library, which it is linked to
    return library


def _check(library: Any, code: int) -> None:
    """Raises BadCredential, and OSError where it is no answer about the credential."""
    if code:
        why = library.munge_strerror(code).decode(errors="replace")
        raise OSError(why) if code in UNAVAILABLE_CODES else BadCredential(why, replayed=code == REPLAYED_CODE)


class AuthenticationError(Exception):
    """Why an agent is not believed: (outcome, sentence)."""


class AgentCredentials:
    """How a controller learns the key of an agent's stream."""

    def __init__(self, own_uid: int, agent_uids: frozenset[int], decoder: MungeLibrary):
        """`own_uid` runs the controller; agents of `agent_uids` are believed."""
        self._own_uid, self._agent_uids, self.decoder = own_uid, agent_uids, decoder

    async def key_of(self, text: str, node: str, challenge: str) -> bytes:
        """What a stream of `node`, to which `challenge` was sent, has shown. Raises AuthenticationError,
        MungeUnavailable."""
        if not CREDENTIAL.fullmatch(text):
            raise AuthenticationError("unauthorized", "this is not a MUNGE credential")
        try:
            credential = await self.decoder.decode(text)
        except BadCredential as error:
            raise AuthenticationError(
                "replayed" if error.replayed else "unauthorized", f"MUNGE says: {error}"
            ) from None
        return self.check(credential, node, challenge)

    def check(self, credential: Credential, node: str, challenge: str) -> bytes:
        """The key in it. Raises AuthenticationError."""
        if credential.uid not in self._agent_uids:
            raise AuthenticationError(
                "unauthorized", f"the credential was made by user {credential.uid}; see security.agent_user"
            )
        if credential.restricted_to != self._own_uid or not credential.encrypted:
            raise AuthenticationError(
                "unauthorized",
                f"the credential is not for user {self._own_uid} alone; see security.controller_user",
            )
        try:
            offer = msgspec.json.decode(credential.payload, type=SessionOffer)
            key = bytes.fromhex(offer.key)
        except (ValueError, RecursionError) as error:
            raise AuthenticationError("unauthorized", "the credential carries no key of a stream") from error
        if not challenge or offer.challenge != challenge:
            raise AuthenticationError("replayed", "the credential is for another stream, or another controller")
        if offer.node != node:
            raise AuthenticationError("wrong_node", f"the credential is of {offer.node!r}, and not of {node!r}")
        if len(key) != KEY_BYTES:
            raise AuthenticationError("unauthorized", "the credential carries no proper key")
        return key
