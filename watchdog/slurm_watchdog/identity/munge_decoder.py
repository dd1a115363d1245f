"""Decodes MUNGE credentials in a child process, which is killed and restarted when it hangs."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.base.python310 import run_module
from slurm_watchdog.identity.munge_protocol import CREDENTIAL, KEY_BYTES, SessionOffer

log = logging.getLogger(__name__)

START_S = 15.0  # For an interpreter to start on a busy machine.
DEADLINE_S = 5.0  # munged answers within a millisecond.
RETRY_PAUSE_S = 5.0  # After a failure munged is not asked for so long; agents are asked to retry.
END_S = 2.0  # For a killed process to exit.
MAX_ANSWER = 64 * 1024
ENCODE_S = 10.0


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


class _Answer(msgspec.Struct, frozen=True):
    code: int = 0
    error: str = ""
    uid: int = -1
    time: int = 0
    restricted_to: int = -1
    encrypted: bool = False
    payload: str = ""
    failed: str = ""
    ready: int = 0


REPLAYED_CODE = 17  # EMUNGE_CRED_REPLAYED of munge.h.
UNAVAILABLE_CODES = frozenset({1, 5, 6, 7})  # EMUNGE_SNAFU, NO_MEMORY, SOCKET, TIMEOUT: nothing about the credential.


class MungeProcess:
    """The process. One credential at a time: munged itself takes them so."""

    def __init__(
        self,
        socket: str = "",
        argv: Sequence[str] = (),
        *,
        deadline_s: float = DEADLINE_S,
        pause_s: float = RETRY_PAUSE_S,
    ):
        """`socket` of munged, empty for its usual one; `pause_s` after a failure."""
        self._deadline_s, self._pause_s = deadline_s, pause_s
        self._argv = list(argv) or [
            *run_module("slurm_watchdog.identity.munge_child"),
            *([socket] if socket else []),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._retry_at = float("-inf")
        self._why = ""

    async def decode(self, credential: str) -> Credential:
        """Raises BadCredential, MungeUnavailable."""
        async with self._lock:
            if clock.monotonic() < self._retry_at:
                raise MungeUnavailable(self._why)
            try:
                answer = await self._ask(credential)
            except (
                OSError,
                EOFError,
                TimeoutError,
                msgspec.MsgspecError,
                asyncio.LimitOverrunError,
            ) as error:
                await self._end()
                raise self._unavailable(
                    "it gave no answer in time"
                    if isinstance(error, TimeoutError)
                    else str(error) or "its process ended"
                ) from error
            except asyncio.CancelledError:
                await self._end()  # half an answer would be taken for the next one's
                raise
        return self._credential(answer)

    def _credential(self, answer: _Answer) -> Credential:
        if answer.code in UNAVAILABLE_CODES:
            raise self._unavailable(answer.error)
        if answer.code:
            raise BadCredential(answer.error, replayed=answer.code == REPLAYED_CODE)
        try:
            payload = base64.b64decode(answer.payload, validate=True)
        except binascii.Error as error:
            raise BadCredential("its payload is damaged") from error
        return Credential(answer.uid, answer.time, answer.restricted_to, answer.encrypted, payload)

    def _unavailable(self, why: str) -> MungeUnavailable:
        if self._why != why:
            log.error("MUNGE cannot verify who an agent is: %s", why)
        self._why, self._retry_at = why, clock.monotonic() + self._pause_s
        return MungeUnavailable(why)

    async def _ask(self, credential: str) -> _Answer:
        if self._process is None or self._process.returncode is not None:
            await self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(credential.encode("ascii") + b"\n")
        return await self._read(self._deadline_s)

    async def _start(self) -> None:
        await self._end()
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/", start_new_session=True, limit=MAX_ANSWER,
        )  # fmt: skip
        hello = await self._read(START_S)
        if not hello.ready:
            raise EOFError(hello.failed or "it does not start")
        if self._why:
            log.warning("MUNGE is asked again, by process %d", self._process.pid)
        self._why = ""

    async def _read(self, seconds: float) -> _Answer:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await wait_for(self._process.stdout.readline(), seconds)
        if not line:
            raise EOFError
        return msgspec.json.decode(line, type=_Answer)

    async def close(self) -> None:
        """Ends the process."""
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        """It is waited for only so long: one that hangs in the kernel cannot be ended by anybody."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):
                await wait_for(process.wait(), END_S)


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
        out, _ = await wait_for(child.communicate(payload), ENCODE_S)
    except TimeoutError:
        child.kill()
        raise MungeUnavailable("munge gave no answer in time") from None
    if child.returncode != 0:
        raise MungeUnavailable(f"munge ended with exit code {child.returncode}")
    return out.decode("ascii").strip()


class AuthenticationError(Exception):
    """Why an agent is not believed: (outcome, sentence)."""


class AgentCredentials:
    """How a controller learns the key of an agent's stream."""

    def __init__(self, own_uid: int, agent_uids: frozenset[int], decoder: MungeProcess):
        """`own_uid` runs the controller; agents of `agent_uids` are believed."""
        self._own_uid, self._agent_uids, self.decoder = own_uid, agent_uids, decoder
        self._decoding: set[asyncio.Future[Credential]] = set()

    async def key_of(self, text: str, node: str, challenge: str) -> bytes:
        """What a stream of `node`, to which `challenge` was sent, has shown. Raises AuthenticationError,
        MungeUnavailable."""
        if not CREDENTIAL.fullmatch(text):
            raise AuthenticationError("unauthorized", "this is not a MUNGE credential")
        # Not cancelled with the stream: what decodes would have to be started again.
        task = asyncio.ensure_future(self.decoder.decode(text))
        self._decoding.add(task)
        task.add_done_callback(self._decoded)
        try:
            credential = await asyncio.shield(task)
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

    def _decoded(self, task: asyncio.Future[Credential]) -> None:
        self._decoding.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, though no one may wait for it any more
