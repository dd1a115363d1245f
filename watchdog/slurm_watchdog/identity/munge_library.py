"""MUNGE for the controller, by libmunge: credentials are decoded and made in threads, for munged may hang.

A thread that hangs is left to libmunge, which gives up by itself after some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from slurm_watchdog.base import clock

log = logging.getLogger(__name__)

LIBRARY = "libmunge.so.2"
CREDENTIAL = re.compile(r"MUNGE:[A-Za-z0-9+/=]{1,8000}:")
CIPHER, SOCKET, UID_RESTRICTION = 0, 8, 9  # munge_opt_t of munge.h.
AES128 = 4  # munge_cipher_t.
REPLAYED_CODE = 17  # EMUNGE_CRED_REPLAYED.
UNAVAILABLE_CODES = frozenset({1, 5, 6, 7})  # EMUNGE_SNAFU, NO_MEMORY, SOCKET, TIMEOUT: nothing about the credential.
DEADLINE_S = 5.0  # munged answers within a millisecond.
RETRY_PAUSE_S = 5.0  # After a failure munged is not asked for so long; agents are asked to retry.
MAX_HANGING = 4  # Threads that wait for munged; what finds all of them waiting is not answered in time.
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
    restricted_to: int  # The user who can decode it; 0xffffffff for anybody.
    encrypted: bool
    payload: bytes = field(repr=False)

    def is_for(self, uid: int) -> bool:
        """Whether this user alone could read it on its way."""
        return self.restricted_to == uid and self.encrypted


class MungeLibrary:
    """One munged. It is asked for one credential at a time: it takes them so."""

    def __init__(
        self, socket: str = "", name: str = LIBRARY, *, deadline_s: float = DEADLINE_S, pause_s: float = RETRY_PAUSE_S
    ):
        """`socket` of munged, empty for its usual one; `name` of the library; `pause_s` after a failure."""
        self._socket, self._name = os.fsencode(socket), name
        self._deadline_s, self._pause_s = deadline_s, pause_s
        self._threads = ThreadPoolExecutor(MAX_HANGING, "munge")
        self._answers = 0
        self._retry_at, self._why = float("-inf"), ""

    async def decode(self, credential: str) -> Credential:
        """Raises BadCredential, MungeUnavailable."""
        if not CREDENTIAL.fullmatch(credential):
            raise BadCredential("this is not a credential")
        return await self._in_time(lambda: self._decode(credential.encode("ascii")))

    async def encode(self, payload: bytes, uid: int) -> str:
        """A credential that the user `uid` alone can decode. Raises MungeUnavailable."""
        return await self._in_time(lambda: self._encode(payload, uid))

    async def _in_time(self, work: Callable[[], T]) -> T:
        if clock.monotonic() < self._retry_at:
            raise MungeUnavailable(self._why)
        found: Any
        try:
            found = await self._answer(work)
        except BadCredential as error:
            found = error
        except OSError as error:  # TimeoutError is one
            why = str(error) or "it gave no answer in time"
            if self._why != why:
                log.error("MUNGE cannot verify who an agent is: %s", why)
            self._why, self._retry_at = why, clock.monotonic() + self._pause_s
            raise MungeUnavailable(why) from error
        if self._why:
            log.warning("MUNGE answers again")
        self._why = ""
        if isinstance(found, BadCredential):
            raise found
        return found  # type: ignore[no-any-return]

    async def _answer(self, work: Callable[[], T]) -> T:
        """Raises TimeoutError once munged has answered no one for so long: ten thousand agents wait in one queue."""
        coming = asyncio.get_running_loop().run_in_executor(self._threads, self._counted, work)
        answers = -1
        while not coming.done():
            if answers == self._answers:
                coming.cancel()
                raise TimeoutError
            answers = self._answers
            await asyncio.wait([coming], timeout=self._deadline_s)
        return coming.result()

    # -- in a thread -------------------------------------------------------------------------------------------

    def _counted(self, work: Callable[[], T]) -> T:
        try:
            return work()
        finally:
            self._answers += 1

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
        data, size, cipher = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        uid, gid, restricted = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.c_uint32()
        with self._context() as (library, context):
            try:
                found = map(ctypes.byref, (data, size, uid, gid))
                _check(library, library.munge_decode(credential, context, *found))
                library.munge_ctx_get(context, ctypes.c_int(UID_RESTRICTION), ctypes.byref(restricted))
                library.munge_ctx_get(context, ctypes.c_int(CIPHER), ctypes.byref(cipher))
                payload = ctypes.string_at(data, size.value) if data.value else b""
            finally:
                if data.value:  # the key of a stream
                    ctypes.memset(data, 0, size.value)
                    library.free(data)
        return Credential(uid.value, restricted.value, cipher.value != 0, payload)

    def _encode(self, payload: bytes, uid: int) -> str:
        text, options = ctypes.c_char_p(), ((UID_RESTRICTION, ctypes.c_uint32(uid)), (CIPHER, ctypes.c_int(AES128)))
        with self._context(*options) as (library, context):
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
