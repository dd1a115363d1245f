"""Every way in which somebody is refused at the agents' port: a row is what he does, the one counter that
rises, and what he is told.

No row may be missing: the labels of the counters are listed in the code, and each has to be here. After each
the port serves on.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.identity.munge_decoder import BadCredential, Credential, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import Session, authorization, encode_offer, new_session
from slurm_watchdog.identity.munge_sessions import Sessions
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.identity.tls import Context
from slurm_watchdog.wire.rate_limits import CONNECTION_REASONS, REFUSED_REPORTS
from tests.builders.identity_door import Port, body_of, listening, until
from tests.builders.identity_files import DAY_S, controller_files, make_authority, node_files, revoke

SLOW_S = 25.0
"""Later than any deadline of a request or a handshake."""
ELSEWHERE = "10.9.9.9"


def post(body: bytes, *lines: str, path: str = "/v1/report", size: int | None = None) -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"Content-Length: {len(body) if size is None else size}", *lines))
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def later(port: Port, seconds: float) -> None:
    """The port looks for what is too slow, as if it were so much later."""

    def look() -> None:
        for each in [*port.server.connections, *port.server.secured]:
            each.check(clock.monotonic() + seconds)

    port.do(look)


def exchange(port: Port, said: bytes, context: ssl.SSLContext | None = None, *, then: str = "") -> bytes:
    """What is answered until the port closes, or says a whole answer. `then`: `slow` lets time pass first,
    `hang_up` closes."""
    with socket.create_connection(("127.0.0.1", port.number), timeout=20) as plain:
        sock: socket.socket = plain
        heard = b""
        try:
            if context is not None:
                sock = context.wrap_socket(plain, server_hostname="localhost")
            sock.sendall(said)
            if then:
                until(lambda: port.do(lambda: any(each._inbox for each in port.server.connections)
                                      or any(each.peer is None for each in port.server.secured)))  # fmt: skip
            if then == "slow":
                later(port, SLOW_S)
            if then != "hang_up":
                while b"\r\n\r\n" not in heard and (more := sock.recv(1 << 16)):
                    heard += more
        except (ssl.SSLError, ConnectionError):
            pass
        finally:
            sock.close()
    return heard


# -- the ports: each tells what it refuses, and how somebody comes who is let in ------------------------------------


@dataclass
class Stage:
    """A port, and how a node reports there that may."""

    port: Port
    well: Callable[[], bytes]
    more: Any = None


@contextmanager
def own_port(**options: Any) -> Iterator[Stage]:
    """For who has proven himself; n1 is at the loopback address, as far as the port looks at that."""
    with listening(**options) as port:
        number = iter(range(1, 10**6))
        yield Stage(port, lambda: exchange(port, post(body_of("n1", next(number)))))


class Decoder:
    """munged, as far as the controller sees it."""

    def __init__(self) -> None:
        self.known: dict[str, Credential | Exception] = {}

    async def decode(self, credential: str) -> Credential:
        found = self.known[credential]
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        return


@dataclass
class Munge:
    """The end of an agent: a session that is begun, and credentials to begin others."""

    sessions: Sessions
    decoder: Decoder
    session: Session
    counter: int = 0

    def headers(self, body: bytes, *, counter: int | None = None) -> str:
        if counter is None:
            self.counter += 1
            counter = self.counter
        said = Session(self.session.id, self.session.key, self.session.node, 0.0)
        said.counter = counter - 1
        return f"Authorization: {authorization(said, '/v1/report', body)}"

    def credential(self, text: str, found: Credential | Exception | None = None, node: str = "n2", uid: int = 0) -> str:
        payload = encode_offer(new_session(node, 0.0), self.sessions.epoch)
        self.decoder.known[text] = Credential(uid, 10, 0, True, payload) if found is None else found
        return f"Authorization: Munge {text}"


@contextmanager
def munge_port(**options: Any) -> Iterator[Stage]:
    sessions, decoder = Sessions(0, frozenset({0}), clock.monotonic), Decoder()
    with listening(identity=(sessions, decoder), **options) as port:
        munge = Munge(sessions, decoder, new_session("n1", 0.0))
        payload = encode_offer(munge.session, sessions.epoch)
        begun = sessions.check_credential(Credential(0, 5, 0, True, payload))
        sessions.begin(begun, "127.0.0.1", 5)

        def well() -> bytes:
            body = body_of("n1", munge.counter + 1)
            return exchange(port, post(body, munge.headers(body)))

        yield Stage(port, well, munge)


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("refusals") / "ca", time.time())


def shown(files: TlsFiles, ca: Path) -> ssl.SSLContext:
    """What a client brings who has these files and trusts the authority."""
    context = ssl.create_default_context(cafile=str(ca / "ca.crt"))
    context.load_cert_chain(files.certificate, files.key)
    return context


@contextmanager
def tls_port(ca: Path, **options: Any) -> Iterator[Stage]:
    context = shown(node_files(ca, "n1", time.time()), ca)
    with listening(identity=Context(controller_files(ca), server=True), **options) as port:
        number = iter(range(1, 10**6))
        yield Stage(port, lambda: exchange(port, post(body_of("n1", next(number))), context), ca)


# -- requests ------------------------------------------------------------------------------------------------------

Row = tuple[str, str, int, Callable[[Stage], bytes]]
"""(what he does, outcome, status or 0 for none, how)."""


def spoilt(text: str) -> str:
    """The same with its last character changed."""
    return text[:-1] + ("0" if text[-1] != "0" else "1")


HTTP_ROWS: list[Row] = [
    ("speaks no HTTP", "garbage", 400, lambda s: exchange(s.port, b"hello\r\n\r\n")),
    ("sends no report", "garbage", 400, lambda s: exchange(s.port, post(b"[1,2"))),
    ("sends two lengths", "garbage", 400,
     lambda s: exchange(s.port, post(body_of("n1"), "Content-Length: 3"))),
    ("sends chunks", "garbage", 411, lambda s: exchange(s.port, post(b"", "Transfer-Encoding: chunked"))),
    ("sends it packed", "garbage", 415, lambda s: exchange(s.port, post(b"x", "Content-Encoding: gzip"))),
    ("sends a head without end", "garbage", 431, lambda s: exchange(s.port, b"POST /v1/report HTTP/1.1\r\nA: " + b"b" * 20_000)),
    ("announces too much", "too_large", 413, lambda s: exchange(s.port, post(b"", size=10**9))),
    ("gives a question a body", "too_large", 413,
     lambda s: exchange(s.port, b"GET /healthz HTTP/1.1\r\nContent-Length: 9999\r\n\r\n")),
    ("sends a head that does not end in time", "too_slow", 408,
     lambda s: exchange(s.port, b"POST /v1/rep", then="slow")),
    ("sends a body that does not end in time", "too_slow", 408,
     lambda s: exchange(s.port, post(b'{"node"', size=500), then="slow")),
    ("hangs up in the middle", "cut_off", 0,
     lambda s: exchange(s.port, post(b'{"node"', size=500), then="hang_up")),
]  # fmt: skip


def of_munge(stage: Stage, body: bytes, *lines: str, path: str = "/v1/report") -> bytes:
    return exchange(stage.port, post(body, *lines, path=path))


def twice(stage: Stage) -> bytes:
    """A report that was heard on the way, said again."""
    body = body_of("n1", 70)
    said = post(body, stage.more.headers(body))
    assert exchange(stage.port, said).startswith(b"HTTP/1.1 200 ")
    stage.port.reports.clear()
    return exchange(stage.port, said)


def begin(stage: Stage, text: str, **more: Any) -> bytes:
    return of_munge(stage, b"", stage.more.credential(text, **more), path="/v1/session")


MUNGE_ROWS: list[Row] = [
    ("says again what he heard", "replayed", 401, twice),
    ("shows a credential again", "replayed", 401, lambda s: begin(s, "MUNGE:AAA:", found=BadCredential("Replayed credential", replayed=True))),
    ("shows a credential that has expired", "unauthorized", 401,
     lambda s: begin(s, "MUNGE:AAB:", found=BadCredential("Expired credential"))),
    ("shows the credential of another user", "unauthorized", 401, lambda s: begin(s, "MUNGE:AAC:", uid=1000)),
    ("shows a credential that anybody may read", "unauthorized", 401,
     lambda s: begin(s, "MUNGE:AAD:", found=Credential(0, 10, 4294967295, True, b"x"))),
    ("shows a credential while munged is away", "no_munge", 503,
     lambda s: begin(s, "MUNGE:AAE:", found=MungeUnavailable("no answer"))),
    ("reports without a session", "unauthorized", 401, lambda s: of_munge(s, body_of("n1"))),
    ("makes up a session", "no_session", 401,
     lambda s: of_munge(s, body_of("n1"), f"Authorization: {authorization(new_session('n1', 0.0), '/v1/report', body_of('n1'))}")),
    ("changes a report on its way", "unauthorized", 401,
     lambda s: of_munge(s, body_of("n1", 8), s.more.headers(body_of("n1", 7)))),
    ("changes the proof", "unauthorized", 401, lambda s: of_munge(s, body_of("n1", 9), spoilt(s.more.headers(body_of("n1", 9))))),
    ("reports for another node", "wrong_node", 403,
     lambda s: of_munge(s, body_of("n2", 9), s.more.headers(body_of("n2", 9)))),
]  # fmt: skip


def refused(stage: Stage, outcome: str, status: int, act: Callable[[Stage], bytes]) -> None:
    port = stage.port
    port.reports.clear()
    before = port.all_refused()
    answer = act(stage)
    until(lambda: port.outcome(outcome) == before.get(outcome, 0.0) + 1)
    assert answer.startswith(b"HTTP/1.1 %d " % status) if status else answer == b""
    assert port.reports == []
    after = port.all_refused()
    assert {name: value for name, value in after.items() if value != before.get(name, 0.0)} == {
        outcome: before.get(outcome, 0.0) + 1
    }, "that counter, once, and no other"
    assert stage.well().startswith(b"HTTP/1.1 200 "), "and who may report is served"


@pytest.mark.parametrize(
    ("outcome", "status", "act"), [row[1:] for row in HTTP_ROWS], ids=[row[0] for row in HTTP_ROWS]
)
def test_refused_request_is_counted_once(outcome: str, status: int, act: Callable[[Stage], bytes]) -> None:
    with own_port() as stage:
        refused(stage, outcome, status, act)


@pytest.mark.parametrize(
    ("outcome", "status", "act"), [row[1:] for row in MUNGE_ROWS], ids=[row[0] for row in MUNGE_ROWS]
)
def test_with_munge_who_does_this_is_refused_and_counted_once(
    outcome: str, status: int, act: Callable[[Stage], bytes]
) -> None:
    with munge_port() as stage:
        refused(stage, outcome, status, act)


def test_with_certificates_who_reports_for_another_node_is_refused_and_counted_once(ca: Path) -> None:
    with tls_port(ca) as stage:
        context = shown(node_files(ca, "n2", time.time()), ca)
        refused(stage, "wrong_node", 403, lambda s: exchange(s.port, post(body_of("n1")), context))
        refused(
            stage,
            "too_slow",
            408,
            lambda s: exchange(s.port, post(b'{"node"', size=500), context, then="slow"),
        )
        refused(stage, "too_large", 413, lambda s: exchange(s.port, post(b"", size=10**9), context))


# -- by address: this machine's own is never looked at, so that another is put in its place --------------------------


def cluster_port(**options: Any) -> AbstractContextManager[Stage]:
    """A port for which 127.0.0.1 is an address of the cluster."""
    return own_port(is_own=lambda address: False, **options)


def test_who_says_he_is_another_node_is_refused_and_spends_nothing_of_that_node() -> None:
    addresses = {"n1": "127.0.0.1", "n2": ELSEWHERE}
    with cluster_port(address_of=addresses.get) as stage:
        port = stage.port
        refused(stage, "wrong_node", 403, lambda s: exchange(s.port, post(body_of("n2"))))
        for sequence in range(20):
            exchange(port, post(body_of("n2", sequence)))
        assert set(port.do(lambda: list(port.door._by_node.reports._known))) == {"n1"}
        refused_as_nobody = exchange(port, post(body_of("n9")))
        assert b"Slurm knows no node" in refused_as_nobody


def test_node_that_reports_too_often_is_refused_before_its_body_and_has_to_retry_before_slurm_answers() -> None:
    with cluster_port(address_of={"n1": "127.0.0.1"}.get) as stage:
        port = stage.port
        port.do(lambda: setattr(port.door._by_address.reports, "burst", 1.0))
        port.do(lambda: setattr(port.door._by_address.reports, "per_s", 0.0))
        assert stage.well().startswith(b"HTTP/1.1 200 ")
        assert exchange(port, post(b'{"node"', size=500)).startswith(b"HTTP/1.1 429 ")
        assert port.outcome("too_often") == 1
    with cluster_port(address_of={"n1": "127.0.0.1"}.get, knows_nodes=lambda: False) as stage:
        assert stage.well().startswith(b"HTTP/1.1 503 ")
        assert stage.port.outcome("busy") == 1


# -- connections ---------------------------------------------------------------------------------------------------


def anybody() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def old(context: ssl.SSLContext) -> ssl.SSLContext:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def renamed(place: str, stem: str) -> TlsFiles:
    """A certificate for something else, called as an agent's is."""
    for end in ("crt", "key"):
        shutil.copy(Path(place) / f"{stem}.{end}", Path(place) / f"agent.{end}")
    return TlsFiles(place, "agent")


def revoked(ca: Path) -> ssl.SSLContext:
    context = shown(node_files(ca, "n7", time.time()), ca)
    revoke(ca, "n7")
    shutil.copy(ca / "ca.crl", ca / "controllers" / "localhost" / "ca.crl")
    return context


def of_another_authority(ca: Path) -> ssl.SSLContext:
    return shown(node_files(make_authority(ca / "another", time.time()), "n1", time.time()), ca)


CONNECTION_ROWS: list[tuple[str, str, Callable[[Path], ssl.SSLContext | None], bytes]] = [
    ("shows no certificate", "no_certificate", lambda ca: anybody(), b"GET /metrics HTTP/1.1\r\n\r\n"),
    ("shows one that has expired", "expired", lambda ca: shown(node_files(ca, "n8", time.time() - 40 * DAY_S), ca), post(body_of("n8"))),
    ("shows one of tomorrow", "not_yet_valid", lambda ca: shown(node_files(ca, "n8", time.time() + 2 * DAY_S), ca), post(body_of("n8"))),
    ("shows one of another authority", "unknown_ca", of_another_authority, post(body_of("n1"))),
    ("shows one that was revoked", "revoked", revoked, post(body_of("n7"))),
    ("shows one that is for controllers", "wrong_purpose",
     lambda ca: shown(renamed(str(shutil.copytree(ca / "controllers" / "localhost", ca / "disguised")), "controller"), ca), post(body_of("n1"))),
    ("speaks without TLS", "no_tls", lambda ca: None, post(body_of("n1"))),
    ("speaks TLS 1.2", "old_tls", lambda ca: old(anybody()), b""),
    ("sends noise that begins as TLS does", "handshake", lambda ca: None, b"\x16\x03\x01\x00\x05abcde" + bytes(100_000)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "context", "said"),
    [row[1:] for row in CONNECTION_ROWS],
    ids=[row[0] for row in CONNECTION_ROWS],
)
def test_with_certificates_who_does_this_is_refused_in_the_handshake_and_counted_once(
    tmp_path: Path, reason: str, context: Callable[[Path], ssl.SSLContext | None], said: bytes
) -> None:
    ca = make_authority(tmp_path / "ca", time.time())
    theirs = context(ca)
    with tls_port(ca) as stage:
        exchange(stage.port, said, theirs)
        until(lambda: stage.port.refused(reason) == 1)
        assert stage.port.reports == []
        assert stage.port.all_refused() == {reason: 1.0}, "that counter, once, and no other"
        assert stage.well().startswith(b"HTTP/1.1 200 "), "and who may report is served"


def test_a_handshake_that_does_not_go_on_is_ended_and_counted_once(ca: Path) -> None:
    with tls_port(ca) as stage:
        exchange(stage.port, b"\x16\x03\x01\x02", then="slow")
        assert stage.port.all_refused() == {"slow_handshake": 1.0}
        assert stage.well().startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("reason", ["too_many", "too_many_of_one_address", "too_many_failures"])
def test_a_connection_too_many_is_refused_and_counted_once(reason: str) -> None:
    with cluster_port(address_of={"n1": "127.0.0.1"}.get) as stage:
        port, limits = stage.port, stage.port.server.limits
        name, few = {"too_many": ("most", 0), "too_many_of_one_address": ("most_of_one", 0)}.get(reason, ("", 0))
        before = getattr(limits, name) if name else 0
        if name:
            port.do(lambda: setattr(limits, name, few))
        else:
            port.do(lambda: [limits.failed("127.0.0.1", clock.monotonic()) for _ in range(20)])
        assert exchange(port, post(body_of("n1"))) == b""
        until(lambda: port.refused(reason) == 1)
        assert port.all_refused() == {reason: 1.0}
        port.do(lambda: setattr(limits, name, before) if name else limits._failures._known.clear())
        assert stage.well().startswith(b"HTTP/1.1 200 ")


ELSEWHERE_TESTED = {
    "wrong_job": "the report is taken, what it says of a job of other nodes is not: test_node_ownership.py",
    "no_room": "for nodes that Slurm does not list: test_state_bounds.py",
    "too_often": "above, by address; by node in test_rate_limits.py",
    "busy": "above; what is held at once in test_rate_limits.py",
    "revocation_list_expired": "the list lives as long as its authority: nothing of ours makes such a one",
    "no_revocation_list": "then nobody whose authority has none is let in: test_tls.py",
    "bad_certificate": "what OpenSSL finds bad and has no word of ours",
    "another_user": "on a unix socket alone: test_unix.py",
    "refused_us": "a client's own alert: its log says why",
}


def test_every_counter_of_a_refusal_has_a_row() -> None:
    requests = {row[1] for row in (*HTTP_ROWS, *MUNGE_ROWS)}
    connections = {row[1] for row in CONNECTION_ROWS} | {
        "slow_handshake",
        "too_many",
        "too_many_of_one_address",
        "too_many_failures",
    }
    assert requests | (ELSEWHERE_TESTED.keys() & set(REFUSED_REPORTS)) == set(REFUSED_REPORTS)
    assert connections | (ELSEWHERE_TESTED.keys() & CONNECTION_REASONS.keys()) == CONNECTION_REASONS.keys()
    assert ELSEWHERE_TESTED.keys().isdisjoint(requests | connections)
