"""The door for agents: who may report for which node, in what size; and /metrics, /healthz beside it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
from aiohttp import web

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.base.text import one_line
from slurm_watchdog.controller.health.metrics import LOST_STREAMS, ControllerMetrics
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.identity.munge_library import BadCredential, Credential, MungeLibrary, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import STANDBY
from slurm_watchdog.identity.secret_files import check_secret
from slurm_watchdog.identity.tls import Context
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report, State
from slurm_watchdog.wire.codec import MAX_NAME, WireError, decode_report, decode_state, encode_reply
from slurm_watchdog.wire.frames import (
    HELLO,
    KEY_BYTES,
    MAC_BYTES,
    MAGIC,
    MAX_BYTES,
    NEWS,
    OPENED,
    ORDERS,
    PROOF,
    REPORT,
    STATE,
    TAKEN,
    TO_AGENT,
    TO_CONTROLLER,
    VERSION,
    WELCOME,
    FrameError,
    Seal,
    words,
)
from slurm_watchdog.wire.port import DEADLINE_S, Port, refusal
from slurm_watchdog.wire.rate_limits import Limits, TokenBuckets, is_loopback
from slurm_watchdog.wire.stream_server import Stream

log = logging.getLogger(__name__)

OLD_PATHS = ("/v1/report", "/v1/session")  # Of agents of release 0.1.
UPGRADE = f"this controller ({__version__}) speaks frames and no HTTP with agents: upgrade the agent"
NOBODY: frozenset[str] = frozenset()
TOO_EARLY = "Slurm has not listed its nodes yet: retry"
MAX_SMALL = 4096  # Bytes of a body that no one looks at.
REPORTS_AT_ONCE = 300  # Of an agent that was cut off: ten minutes at 5 s are 120, and each may be refused once.
REPORTS_A_SECOND = 20.0  # A hundred times what the default interval makes, and more where a site asks for more.
BYTES_AT_ONCE = 64 * 1024**2  # What an agent keeps (8 MiB), several times over.
BYTES_A_SECOND = 2 * 1024**2
KEY = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")
LOG_EVERY_S = 60.0  # What is refused or lost for one reason is logged once in this time; the metric counts it all.


@dataclass(frozen=True)
class OwnUser:
    """Agents are those of one ordinary user: no one else gets a connection to his socket."""

    uid: int
    socket: str  # In a directory that only he may enter.


@dataclass(frozen=True)
class AgentCredentials:
    """Agents show credentials of MUNGE, made by one of `agent_uids` for the controller, which `own_uid` runs."""

    own_uid: int
    agent_uids: frozenset[int]
    decoder: MungeLibrary

    def key_in(self, shown: Credential, node: str, challenge: str) -> bytes:
        """The key of a stream of `node`, to which `challenge` was sent. Raises FrameError."""
        named = shown.payload.decode(errors="replace").split(" ")
        key, its_node, its_challenge = named if len(named) == 3 else ("", "", "")  # frames.offer
        if shown.uid not in self.agent_uids:
            why = f"the credential was made by user {shown.uid}; see security.agent_user"
        elif not shown.is_for(self.own_uid):
            why = f"the credential is not for user {self.own_uid} alone; see security.controller_user"
        elif not KEY.fullmatch(key):
            why = "the credential carries no key of a stream"
        elif not challenge or its_challenge != challenge:
            raise FrameError("replayed", "the credential is for another stream, or another controller")
        elif its_node != node:
            raise FrameError("wrong_node", f"the credential is of {its_node!r}, and not of {node!r}")
        else:
            return bytes.fromhex(key)
        raise FrameError("unauthorized", why)


Identity = Context | AgentCredentials | OwnUser
"""Certificates, sessions by MUNGE, or one user: a door that asks for nothing can't be made."""


class StandbyDoor:
    """What answers agents while another controller is the active one: they try that."""

    def __init__(self, metrics: ControllerMetrics, sentence: Callable[[], str]):
        self._metrics, self._sentence = metrics, sentence

    def take_frame(self, stream: Stream, kind: bytes, body: bytes) -> None:
        raise FrameError(STANDBY, self._sentence())

    def ended(self, stream: Stream, reason: str, why: str) -> None:
        count_end(self._metrics, reason)


def count_end(metrics: ControllerMetrics, reason: str) -> None:
    """Of a stream: lost, or refused."""
    (metrics.lost_streams if reason in LOST_STREAMS else metrics.reports).labels(reason).inc()


def watching_app(metrics: ControllerMetrics, healthy: Callable[[], tuple[bool, str]]) -> web.Application:
    """/metrics for Prometheus, /healthz for health checks."""

    async def text(request: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def health(request: web.Request) -> web.Response:
        good, sentence = healthy()
        said = msgspec.json.encode({"healthy": good, "detail": sentence, "time": clock.wall()})
        return web.Response(body=said, status=200 if good else 503, content_type="application/json")

    app = web.Application(client_max_size=MAX_SMALL)
    app.add_routes([web.get("/metrics", text), web.get("/healthz", health)])
    return app


class ReportEndpoint:
    """Checks a report at the edge and hands it on. Refusals are counted and change nothing else."""

    def __init__(  # noqa: PLR0913 - one door, and all that it asks
        self,
        *,
        identity: Identity,
        address_of: Callable[[str], str | None] | None,
        take: Callable[[Report, object], tuple[object, Reply | None]],
        hold: Callable[[str, tuple[str, str], State, object], tuple[object, Reply | None]],
        metrics: ControllerMetrics,
        healthy: Callable[[], tuple[bool, str]],
        interval_s: float = 5.0,
        knows_nodes: Callable[[], bool] = lambda: True,
        is_own: Callable[[str], bool] = is_loopback,
        is_active: Callable[[], bool] = lambda: True,
        commands: CommandQueue | None = None,
        record: Callable[[bytes], None] = lambda frame: None,
    ):
        """`identity`: what agents prove themselves by; `knows_nodes`: whether Slurm has said by now which
        nodes there are: until then no agent is refused as an unknown node; `is_own`: whether an address is this
        machine's, whose connections are bounded by their total only. `is_active`: False while another
        controller may be the active one: no report is taken, and no command goes out. `commands` are pushed from here
        on, as soon as they are asked. `record` gets each frame that is taken, its kind before its content."""
        self._is_active = is_active
        self._address_of = address_of
        self._take, self._hold = take, hold
        self._metrics = metrics
        self._healthy = healthy
        self._identity = identity
        self._knows_nodes = knows_nodes
        self._commands = commands
        self._record = record
        if commands is not None:
            commands.on_asked = self.push
        self._limits = Limits(by_address=address_of is not None, is_own=is_own)
        self._beginnings = TokenBuckets(burst=10.0, per_s=0.1)  # Streams of one address: an agent keeps one for days.
        self._resolved: dict[str, frozenset[str]] = {}
        self._reports = TokenBuckets(REPORTS_AT_ONCE, max(REPORTS_A_SECOND, 4.0 / interval_s))  # Of each node.
        self._bytes = TokenBuckets(BYTES_AT_ONCE, BYTES_A_SECOND)
        self._streams: dict[str, Stream] = {}  # Node -> its newest stream that was opened.
        self._said: dict[str, float] = {}  # Reason -> when it was logged last.
        if isinstance(identity, Context):
            metrics.show_certificates(lambda: identity.expires)

    def server(self) -> Port:
        """What listens on the port."""
        identity = self._identity
        app = watching_app(self._metrics, self._healthy)
        return Port(
            app,
            admit=self._admit,
            count=lambda reason: self._metrics.refused_connections.labels(reason).inc(),
            limits=self._limits,
            tls=identity if isinstance(identity, Context) else None,
            only_uid=identity.uid if isinstance(identity, OwnUser) else None,
            streams=self,
        )

    def _admit(self, request: web.Request) -> web.Response | None:
        """Before the body: an agent of before need not send its report."""
        if request.path not in OLD_PATHS:
            return None
        if self._is_news("old_agent"):
            log.warning("the agent at %s is of release 0.1, which speaks HTTP: upgrade it", request.remote)
        self._metrics.reports.labels("old_agent").inc()
        return refusal(426, UPGRADE)

    # -- streams -----------------------------------------------------------------------------------------------

    def take_frame(self, stream: Stream, kind: bytes, body: bytes) -> Awaitable[None] | None:
        """See wire.stream_server.StreamDoor: at once, but where munged or the address of a name has to be asked."""
        if stream.is_open and kind in (REPORT, STATE):
            self._take_report(stream, kind, body)
            return None
        if not stream.node and kind == HELLO and body.startswith(MAGIC):
            return self._greet(stream, *words(body.removeprefix(MAGIC), 3))
        if stream.challenge and kind == PROOF:
            return self._prove(stream, body)
        raise FrameError("garbage", "a frame that nothing asked for")

    def ended(self, stream: Stream, reason: str, why: str) -> None:
        """A stream is lost, or was refused."""
        if self._streams.get(stream.node) is stream:
            del self._streams[stream.node]
        if reason in ("unauthorized", "replayed", "wrong_node"):
            self._limits.failed(stream.remote, clock.monotonic())
        count_end(self._metrics, reason)
        if reason != "closed_by_us" and self._is_news(reason):
            who = one_line(stream.node, MAX_NAME) or "no node"
            log.log(
                logging.INFO if reason == "closed_by_agent" else logging.WARNING,  # as each agent does that ends
                "the connection of %s (%s) has ended: %s", who, stream.remote, why or LOST_STREAMS.get(reason, reason),
            )  # fmt: skip

    def _is_news(self, reason: str) -> bool:
        """Whether it is to be logged: of each kind once in a while."""
        now = clock.monotonic()
        if now - self._said.get(reason, float("-inf")) < LOG_EVERY_S:
            return False
        self._said[reason] = now
        return True

    def push(self, node: str) -> None:
        """Sends the node at once what it was asked, if there is a stream on which it has been heard."""
        stream = self._streams.get(node)
        if self._commands is not None and stream is not None and stream.is_heard and self._is_active():
            closely = True if node in self._commands.close else None
            stream.send(ORDERS, encode_reply(Reply(commands=self._commands.pop(node), closely=closely)))

    def _greet(self, stream: Stream, version: str, node: str, release: str) -> Awaitable[None] | None:
        if version != str(VERSION):
            raise FrameError("garbage", f"this controller ({__version__}) speaks version {VERSION} of the protocol")
        if not self._is_active():
            raise FrameError(STANDBY, "another controller may be the active one by now")
        if self._too_early(stream.remote):
            raise FrameError("busy", TOO_EARLY)
        if stream.names is not None and node not in stream.names:
            shown = ", ".join(sorted(stream.names)[:3]) or "no node"
            raise FrameError("wrong_node", f"who has proven to be {shown} may not report for {node!r}")
        stream.node = node
        if not isinstance(self._identity, AgentCredentials):
            return self._open(stream, b"")
        if not self._limits.is_own(stream.remote) and not self._beginnings.acquire(stream.remote, clock.monotonic()):
            raise FrameError("too_often", f"too many connections from {stream.remote}")
        stream.challenge = os.urandom(16).hex()
        stream.send(WELCOME, stream.challenge.encode())
        return None

    async def _prove(self, stream: Stream, body: bytes) -> None:
        """By a credential of MUNGE, if it comes from the address of the node that it names."""
        assert isinstance(self._identity, AgentCredentials)
        challenge, stream.challenge = stream.challenge, ""
        try:
            shown = await self._identity.decoder.decode(body.decode("latin-1"))
        except BadCredential as error:
            raise FrameError("replayed" if error.replayed else "unauthorized", f"MUNGE says: {error}") from None
        except MungeUnavailable as error:
            raise FrameError("no_munge", f"MUNGE does not answer here ({error}): retry") from None
        await self._open(stream, self._identity.key_in(shown, stream.node, challenge))

    async def _open(self, stream: Stream, key: bytes) -> None:
        await self._check_node(stream)
        outgoing = Seal(key, TO_AGENT) if key else None
        stream.send(OPENED, b"" if outgoing is None else outgoing.mac(OPENED))
        if outgoing is not None:
            stream.seal(Seal(key, TO_CONTROLLER), outgoing)
        stream.open(MAX_BYTES + MAC_BYTES + 1)
        before = self._streams.get(stream.node)
        self._streams[stream.node] = stream
        if before is not None:
            before.refuse("replaced", "this node has begun another connection")

    def _take_report(self, stream: Stream, kind: bytes, body: bytes) -> None:
        now, node = clock.monotonic(), stream.node  # its own: it has proven to be that node
        if not (self._reports.acquire(node, now) and self._bytes.acquire(node, now, float(len(body)))):
            raise FrameError("too_often", f"too many reports for {stream.node!r}")
        try:
            report = decode_report(body) if kind == REPORT else decode_state(body)
        except WireError as error:
            raise FrameError("garbage", str(error)) from error
        if isinstance(report, State):
            if not stream.is_heard:
                raise FrameError("garbage", "a state, and no report before it")
        elif report.node != stream.node:
            raise FrameError("wrong_node", f"who has proven to be {stream.node} may not report for {report.node!r}")
        problem = self._wrong_node(stream.node, stream.remote)
        if problem is None:
            raise FrameError("busy", f"Slurm has another address for {stream.node} by now: retry")
        if problem:
            raise FrameError("wrong_node", problem)
        if not self._is_active():
            raise FrameError(STANDBY, "another controller may be the active one by now")
        reply: Reply | None
        if isinstance(report, State):
            stream.basis, reply = self._hold(node, stream.agent, report, stream.basis)
        else:
            stream.interval_s, stream.is_heard = report.interval_s, True
            stream.agent = report.boot_id, report.agent_id
            self._record(REPORT + body)
            stream.basis, reply = self._take(report, stream.basis)
        said = b"" if reply is None else encode_reply(reply)
        if kind == REPORT or (reply is not None and (reply.commands or said != stream.said)):
            stream.send(TAKEN if kind == REPORT else NEWS, said)
            stream.said = said or stream.said

    async def _check_node(self, stream: Stream) -> None:
        """Raises FrameError unless it comes from the node's address."""
        if self._wrong_node(stream.node, stream.remote) is None:
            await self._resolve(stream.node)
        if problem := self._wrong_node(stream.node, stream.remote):
            raise FrameError("wrong_node", problem)

    def _too_early(self, remote: str) -> bool:
        return self._address_of is not None and not self._limits.is_own(remote) and not self._knows_nodes()

    def _wrong_node(self, node: str, remote: str) -> str | None:
        """Why this address may not speak for this node; empty if it may, None if the address of a name is not
        known yet. A node speaks only for itself."""
        if self._address_of is None or not remote or self._limits.is_own(remote):
            return ""
        address = self._address_of(node)
        if address is None:
            return f"Slurm knows no node {node!r}"
        if remote != address and remote not in self._resolved.get(address, NOBODY):
            known = address in self._resolved or is_address(address)
            return f"{remote} is not the address that Slurm has for {node}" if known else None
        return ""

    async def _resolve(self, node: str) -> None:
        """Asks for the addresses of a node's name, within a deadline; what is found is kept."""
        name = self._address_of(node) if self._address_of is not None else None
        if name is None:
            return
        try:
            asked = asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found = await wait_for(asked, DEADLINE_S)
        except (OSError, TimeoutError):
            return
        self._resolved[name] = frozenset(str(entry[4][0]) for entry in found)


@lru_cache(maxsize=65536)
def is_address(text: str) -> bool:
    """Whether it is an address, not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def read_page_token(file: str) -> str:
    """The page's password in `file`, empty without a file. Raises ValueError if the file holds none, or
    others may read it."""
    if not file:
        return ""
    try:
        check_secret(file)  # its group may read it: the agent's user, or a unit's credential
        token = Path(file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"security.page_token_file: {error}") from error
    if len(token) < 16:
        how = f"openssl rand -hex 32 > {file}"
        raise ValueError(f"security.page_token_file {file} holds fewer than 16 characters: {how}")
    return token
