"""The door for agents: who may report for which node, in what size; and /metrics, /healthz beside it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec.structs import replace as replace_fields

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.identity.munge_decoder import BadCredential, Credential, MungeProcess, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import CREDENTIAL, Session, answer_mac
from slurm_watchdog.identity.munge_sessions import AuthenticationError, Sessions
from slurm_watchdog.identity.tls import Context
from slurm_watchdog.model.protocol import Command, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import MAX_BYTES, WireError, decode_report, encode_reply
from slurm_watchdog.wire.http_messages import Answer, Head, Request, refusal
from slurm_watchdog.wire.http_server import Server
from slurm_watchdog.wire.rate_limits import Limits, TokenBuckets, is_loopback, report_rate

PATHS = {"/v1/report": "POST", "/metrics": "GET", "/healthz": "GET"}
NOBODY: frozenset[str] = frozenset()
BODY_DEADLINE_S = 20.0  # A report has to arrive whole within this time: a slow sender holds no connection open.
WAITED_S = 1.0  # An older report was in its agent's spool: held answers would never let a backlog shrink.
TOO_EARLY = "Slurm has not listed its nodes yet: retry"
MAX_SMALL = 4096  # Bytes of a body that no one looks at.


@dataclass(frozen=True)
class OwnUser:
    """Agents are those of one ordinary user: no one else gets a connection to his socket."""

    uid: int
    socket: str  # In a directory that only he may enter.


Identity = Context | tuple[Sessions, MungeProcess] | OwnUser
"""Certificates, sessions by MUNGE, or one user: a door that asks for nothing can't be made."""


class ReportEndpoint:
    """Checks a report at the edge and hands it on. Refusals are counted and change nothing else."""

    def __init__(  # noqa: PLR0913 - one door, and all that it asks
        self,
        *,
        identity: Identity,
        address_of: Callable[[str], str | None] | None,
        accept: Callable[[Report, int], Reply],
        metrics: ControllerMetrics,
        healthy: Callable[[], tuple[bool, str]],
        interval_s: float = 5.0,
        knows_nodes: Callable[[], bool] = lambda: True,
        is_own: Callable[[str], bool] = is_loopback,
        is_active: Callable[[], bool] = lambda: True,
        coming: Callable[[str], Awaitable[tuple[Command, ...]] | None] = lambda node: None,
    ):
        """`identity`: what agents prove themselves by; `knows_nodes`: whether Slurm has said by now which
        nodes there are: until then no agent is refused as an unknown node; `is_own`: whether an address is this
        machine's, whose connections are bounded by their total only. `is_active`: False while another
        controller may be the active one: no report is taken, and no command goes out. `coming`: what will be asked of a
        node within moments, where its answer is to wait for it."""
        self._coming = coming
        self._is_active = is_active
        self._address_of = address_of
        self._accept = accept
        self._metrics = metrics
        self._healthy = healthy
        self._tls = tls = identity if isinstance(identity, Context) else None
        self._own_user = identity if isinstance(identity, OwnUser) else None
        munge = None if isinstance(identity, Context | OwnUser) else identity
        self._knows_nodes = knows_nodes
        self._sessions: Sessions | None = munge[0] if munge else None
        self._decoder: MungeProcess | None = munge[1] if munge else None
        self._decoding: set[asyncio.Future[Credential]] = set()
        self._limits = Limits(by_address=address_of is not None, is_own=is_own)
        self._beginnings = TokenBuckets(burst=10.0, per_s=0.1)  # Sessions of one address: an agent needs one an hour.
        self._resolved: dict[str, frozenset[str]] = {}
        self._by_address, self._by_node = report_rate(interval_s), report_rate(interval_s)
        if tls is not None:
            metrics.show_certificates(lambda: tls.expires)

    def server(self) -> Server:
        """What listens on the port."""
        server = Server(
            self.answer,
            self.admit,
            self._refuse,
            MAX_BYTES,
            BODY_DEADLINE_S,
            tls=self._tls,
            count=lambda reason: self._metrics.refused_connections.labels(reason).inc(),
            limits=self._limits,
            only_uid=None if self._own_user is None else self._own_user.uid,
        )
        server.ends = None if self._decoder is None else self._decoder.close
        return server

    def admit(self, head: Head, remote: str) -> Answer | None:
        """Who may not report, or not so often, need not send its report."""
        if head.path != "/v1/report":
            return None if head.size <= MAX_SMALL else self._refuse("too_large", 413, f"{head.path} takes no body")
        if self._sessions is not None:
            try:
                self._sessions.claim(head.authorization, remote)
            except AuthenticationError as doubt:
                return self._refuse_identity(doubt, remote)
        one_node = self._address_of is not None and not self._limits.is_own(remote)
        if one_node and not self._by_address.acquire(remote, head.size, clock.monotonic()):
            return self._refuse("too_often", 429, f"too many reports from {remote}")
        return None

    def answer(self, request: Request) -> Answer | Awaitable[Answer]:
        """One request; at once, but where the address of a name has to be asked for first."""
        if request.path == "/v1/report" and request.method == "POST":
            return self._report(request)
        if request.path == "/v1/session" and request.method == "POST" and self._sessions is not None:
            if not request.authorization:
                return Answer(msgspec.json.encode({"epoch": self._sessions.epoch}))
            return self._begin(self._sessions, request)
        if request.method == "GET" and request.path == "/metrics":
            return Answer(self._metrics.text(), content_type=b"text/plain; version=0.0.4; charset=utf-8")
        if request.method == "GET" and request.path == "/healthz":
            good, sentence = self._healthy()
            return Answer(
                msgspec.json.encode({"healthy": good, "detail": sentence, "time": clock.wall()}),
                status=200 if good else 503,
            )
        if request.path in PATHS:
            return refusal(405, f"{request.path} takes {PATHS[request.path]}")
        return refusal(404, "there are /v1/report, /metrics and /healthz")

    # -- sessions by MUNGE -------------------------------------------------------------------------------------

    async def _begin(self, sessions: Sessions, request: Request) -> Answer:
        """A session for who shows a credential of MUNGE, if he comes from the address of the node that he names."""
        match = CREDENTIAL.fullmatch(request.authorization)
        remote = request.remote
        if not self._limits.is_own(remote) and not self._beginnings.acquire(remote, clock.monotonic()):
            return self._refuse("too_often", 429, f"too many sessions from {remote}")
        if match is None:
            return self._refuse_identity(AuthenticationError("unauthorized", "this is not a MUNGE credential"), remote)
        if self._too_early(remote):
            return self._refuse("busy", 503, TOO_EARLY)
        try:
            credential = await self._decode(match[1])
            beginning = sessions.check_credential(credential)
        except BadCredential as error:
            return self._refuse_identity(
                AuthenticationError("replayed" if error.replayed else "unauthorized", f"MUNGE says: {error}"), remote
            )
        except MungeUnavailable as error:
            return self._refuse("no_munge", 503, f"MUNGE does not answer here ({error}): retry")
        except AuthenticationError as doubt:
            return self._refuse_identity(doubt, remote)
        problem = self._wrong_node(beginning.node, remote)
        if problem is None:
            await self._resolve(beginning.node)
            problem = self._wrong_node(beginning.node, remote) or ""
        if problem:
            return self._refuse_identity(AuthenticationError("wrong_node", problem), remote)
        session = sessions.begin(beginning, remote, credential.made_at)
        body = b'{"session":true}'
        return Answer(body, proof=answer_mac(session.key, 200, 0, body))

    async def _decode(self, text: str) -> Credential:
        """Not cancelled with the one who asks: what decodes would have to be started again."""
        assert self._decoder is not None
        task = asyncio.ensure_future(self._decoder.decode(text))
        self._decoding.add(task)
        task.add_done_callback(self._decoded)
        return await asyncio.shield(task)

    def _decoded(self, task: asyncio.Future[Credential]) -> None:
        self._decoding.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, though no one may wait for it any more

    def _refuse_identity(self, doubt: AuthenticationError, remote: str) -> Answer:
        outcome, sentence = doubt.args
        self._limits.failed(remote, clock.monotonic())
        return self._refuse(outcome, 403 if outcome == "wrong_node" else 401, sentence)

    # -- reports -----------------------------------------------------------------------------------------------

    def _report(self, request: Request) -> Answer | Awaitable[Answer]:
        if self._sessions is None:
            return self._check_report(request, request.names)
        try:
            session, counter = self._sessions.authenticate(
                request.authorization, request.remote, request.path, request.body
            )
        except AuthenticationError as doubt:
            return self._refuse_identity(doubt, request.remote)
        answer = self._check_report(request, frozenset({session.node}))
        if isinstance(answer, Answer):
            return _proven(answer, session, counter)
        return _proven_later(answer, session, counter)

    def _check_report(self, request: Request, names: frozenset[str] | None) -> Answer | Awaitable[Answer]:
        """Takes the report if it is one of a node in `names`; None: of any."""
        try:
            report = decode_report(request.body)
        except WireError as error:
            return self._refuse("garbage", 400, str(error))
        if names is not None and report.node not in names:
            shown = ", ".join(sorted(names)[:3]) or "no node"
            return self._refuse("wrong_node", 403, f"who has proven to be {shown} may not report for {report.node!r}")
        if self._too_early(request.remote):
            return self._refuse("busy", 503, TOO_EARLY)
        problem, size = self._wrong_node(report.node, request.remote), len(request.body)
        if problem is None:
            return self._resolve_and_accept(report, size, request.remote)
        return self._accept_report(report, size, problem)

    async def _resolve_and_accept(self, report: Report, size: int, remote: str) -> Answer:
        await self._resolve(report.node)
        answer = self._accept_report(report, size, self._wrong_node(report.node, remote) or "")
        return answer if isinstance(answer, Answer) else await answer

    def _accept_report(self, report: Report, size: int, problem: str) -> Answer | Awaitable[Answer]:
        if problem:
            return self._refuse("wrong_node", 403, problem)
        if not self._is_active():
            return self._refuse("standby", 503, "another controller may be the active one by now")
        # Only now: who says he is another node would spend that one's pace, and it would be refused in his stead.
        if not self._by_node.acquire(report.node, size, clock.monotonic()):
            return self._refuse("too_often", 429, f"too many reports for {report.node!r}")
        reply = self._accept(report, size)
        # Behind a report that waited in the spool there are others: an agent sends one after the other's answer.
        at_once = reply.commands or reply.want_full or report.age_s > WAITED_S
        coming = None if at_once else self._coming(report.node)
        return Answer(encode_reply(reply)) if coming is None else _answer_later(reply, coming)

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
            found = await wait_for(asked, BODY_DEADLINE_S)
        except (OSError, TimeoutError):
            return
        self._resolved[name] = frozenset(str(entry[4][0]) for entry in found)

    def _refuse(self, outcome: str, status: int, sentence: str) -> Answer:
        self._metrics.reports.labels(outcome).inc()
        return refusal(status, sentence)


async def _answer_later(reply: Reply, coming: Awaitable[tuple[Command, ...]]) -> Answer:
    return Answer(encode_reply(replace_fields(reply, commands=await coming)))


def _proven(answer: Answer, session: Session, counter: int) -> Answer:
    return replace(answer, proof=answer_mac(session.key, answer.status, counter, answer.body))


async def _proven_later(answer: Awaitable[Answer], session: Session, counter: int) -> Answer:
    return _proven(await answer, session, counter)


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
    option = "security.page_token_file"
    path = Path(file)
    try:
        if path.stat().st_mode & 0o037:  # its group may: the agent's user, or a unit's credential
            raise ValueError(f"{option} {file} can be read by others: chmod 600 {file}")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {file} cannot be read: {error}") from error
    if len(token) < 16:
        raise ValueError(f"{option} {file} holds fewer than 16 characters: openssl rand -hex 32 > {file}")
    return token
