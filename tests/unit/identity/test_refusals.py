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

from slurm_watchdog.agent.courier.munge import MungeController
from slurm_watchdog.agent.courier.streams import Controller, TcpController, TlsController
from slurm_watchdog.base import clock
from slurm_watchdog.controller.health.metrics import REFUSED_REPORTS
from slurm_watchdog.controller.ingest.endpoint import AgentCredentials
from slurm_watchdog.identity.munge_library import (
    BadCredential,
    Credential,
    MungeLibrary,
    MungeUnavailable,
)
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.identity.tls import Context
from slurm_watchdog.wire import frames
from slurm_watchdog.wire.frames import (
    HELLO,
    LENGTH,
    MAGIC,
    MAX_UNPROVEN,
    PROOF,
    REPORT,
    TO_CONTROLLER,
    VERSION,
    Inbox,
    Seal,
    pack,
)
from slurm_watchdog.wire.rate_limits import CONNECTION_REASONS
from tests.builders.identity_door import Agent, Port, body_of, listening, until, url
from tests.builders.identity_files import DAY_S, controller_files, make_authority, node_files, revoke

SLOW_S = 25.0
"""Later than any deadline of a request, a frame or a handshake."""
ELSEWHERE = "10.9.9.9"


def post(body: bytes, *lines: str, path: str = "/healthz", size: int | None = None) -> bytes:
    head = "".join(
        f"{line}\r\n" for line in ("Host: x", f"Content-Length: {len(body) if size is None else size}", *lines)
    )
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def hello(node: str = "n1", version: int = VERSION) -> bytes:
    return pack(HELLO, frames.hello(node, "", version))


def reports(body: bytes, node: str = "n1") -> bytes:
    """All that an agent says that has proven itself otherwise."""
    return hello(node) + pack(REPORT, body)


def later(port: Port, seconds: float) -> None:
    """The port looks for what is too slow, as if it were so much later."""

    def look() -> None:
        for each in list(port.server.connections):
            each.check(port.server.now() + seconds)

    port.do(look)


def arrives(port: Port, *, is_proven: bool) -> bool:
    return port.do(
        lambda: (
            port.server.held > 0 or (port.server.tls is not None and not is_proven and bool(port.server.connections))
        )
    )  # type: ignore[no-any-return]


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
                until(lambda: arrives(port, is_proven=context is not None))
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
    well: Callable[[], str]
    more: Any = None


def reporting(controller: Callable[[Port], Controller], port: Port) -> Callable[[], str]:
    number = iter(range(1, 10**6))

    def well() -> str:
        agent = Agent(controller(port))
        try:
            return agent.report("n1", next(number))
        finally:
            agent.close()
            until(lambda: not port.do(lambda: port.door._streams))

    return well


@contextmanager
def own_port(**options: Any) -> Iterator[Stage]:
    """For who has proven himself; n1 is at the loopback address, as far as the port looks at that."""
    with listening(**options) as port:
        yield Stage(port, reporting(lambda port: TcpController(url(port), "n1"), port))


class Decoder(MungeLibrary):
    """munged, as far as the controller sees it: what the last credential is."""

    found: Credential | Exception

    def _decode(self, credential: bytes) -> Credential:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@contextmanager
def munge_port(**options: Any) -> Iterator[Stage]:
    decoder = Decoder()
    with listening(identity=AgentCredentials(0, frozenset({0}), decoder), **options) as port:

        def encode(payload: bytes) -> str:
            decoder.found = Credential(0, 0, True, payload)
            return "MUNGE:AAAA:"

        yield Stage(port, reporting(lambda port: MungeController(url(port), "n1", encode), port), decoder)


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
    files = node_files(ca, "n1", time.time())
    with listening(identity=Context(controller_files(ca), server=True), **options) as port:
        yield Stage(port, reporting(lambda port: TlsController(url(port, "https"), "n1", files), port), ca)


# -- requests and frames -------------------------------------------------------------------------------------------

Row = tuple[str, str, bytes, Callable[[Stage], bytes]]
"""(what he does, outcome, what stands in the answer, how)."""


def http(what: str, outcome: str, status: int, said: bytes, then: str = "") -> Row:
    return what, outcome, b" %d " % status, lambda s: exchange(s.port, said, then=then)


def frame(what: str, outcome: str, said: bytes, then: str = "") -> Row:
    told = b"" if then == "hang_up" else outcome.encode()
    return what, outcome, told, lambda s: exchange(s.port, said, then=then)


ROWS: list[Row] = [
    http("is an agent of release 0.1", "old_agent", 426, post(b"{}", path="/v1/report")),
    http("is an agent of release 0.1 that begins a session", "old_agent", 426, post(b"", path="/v1/session")),
    frame("sends no report", "garbage", reports(b"[1,2")),
    frame("says no hello", "garbage", pack(REPORT, body_of("n1"))),
    frame("says hello twice", "garbage", hello() * 2),
    frame("says a hello that is none", "garbage", pack(HELLO, MAGIC + b"\x01")),
    frame("says no magic word", "garbage", pack(HELLO, b"\x01")),
    frame("speaks another version", "garbage", hello(version=2)),
    frame("sends an empty frame", "garbage", LENGTH.pack(0)),
    frame("sends a frame of another kind", "garbage", hello() + pack(b"z", b"")),
    frame("shows a credential where none is asked for", "garbage", hello() + pack(PROOF, b"MUNGE:AAAA:")),
    frame("announces too much", "too_large", hello() + LENGTH.pack(10**9)),
    frame("announces much before it is known", "too_large", LENGTH.pack(MAX_UNPROVEN + 1)),
    frame("sends a frame that does not end in time", "too_slow", hello() + LENGTH.pack(500) + b"r", then="slow"),
    frame("hangs up in the middle", "cut_off", LENGTH.pack(500) + b"h", then="hang_up"),
    frame("reports for another node", "wrong_node", reports(body_of("n2"))),
]


def begin(
    stage: Stage, found: Credential | Exception | None = None, credential: bytes = b"MUNGE:AAA:", **offer: str
) -> bytes:
    """What is answered to a credential; by default to a good one but for what `offer` says, and then to a report."""
    with socket.create_connection(("127.0.0.1", stage.port.number), timeout=20) as sock:
        sock.sendall(hello())
        inbox = Inbox(10**6)
        while (welcome := inbox.take()) is None:
            inbox.data += sock.recv(1 << 16)
        named = {"key": "aa" * 32, "node": "n1", "challenge": welcome[1].decode(), **offer}
        payload = " ".join(named[each] for each in ("key", "node", "challenge")).encode()
        stage.more.found = found or Credential(int(offer.get("uid", 0)), 0, True, payload)
        sock.sendall(pack(PROOF, credential) + pack(REPORT, body_of("n1"), Seal(b"b" * 32, TO_CONTROLLER)))
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def of_munge(what: str, outcome: str, *found: Any, **more: Any) -> Row:
    return what, outcome, outcome.encode(), lambda s: begin(s, *found, **more)


MUNGE_ROWS: list[Row] = [
    of_munge("shows a credential again", "replayed", BadCredential("Replayed credential", replayed=True)),
    of_munge("shows a credential of another stream", "replayed", challenge="0" * 32),
    of_munge("shows a credential that has expired", "unauthorized", BadCredential("Expired credential")),
    of_munge("shows the credential of another user", "unauthorized", Credential(1000, 0, True, b"{}")),
    of_munge("shows a credential that anybody may read", "unauthorized", Credential(0, 4294967295, True, b"x")),
    of_munge("shows what is none", "unauthorized", credential=b"MUNGE:AAA:\nMUNGE:AAB:"),
    of_munge("shows a credential while munged is away", "no_munge", MungeUnavailable("no answer")),
    of_munge("shows the credential of another node", "wrong_node", node="n2"),
    of_munge("does not know the key", "unauthorized"),
    frame("reports without a credential", "garbage", reports(body_of("n1"))),
]


def refused(stage: Stage, outcome: str, told: bytes, act: Callable[[Stage], bytes]) -> None:
    port = stage.port
    port.reports.clear()
    before = port.all_refused()
    answer = act(stage)
    until(lambda: port.outcome(outcome) == before.get(outcome, 0.0) + 1)
    assert told in answer
    assert port.reports == []
    after = port.all_refused()
    assert {name: value for name, value in after.items() if value != before.get(name, 0.0)} == {
        outcome: before.get(outcome, 0.0) + 1
    }, "that counter, once, and no other"
    assert stage.well() == "taken", "and who may report is served"


@pytest.mark.parametrize(("outcome", "told", "act"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_what_is_refused_is_counted_once(outcome: str, told: bytes, act: Callable[[Stage], bytes]) -> None:
    with own_port() as stage:
        refused(stage, outcome, told, act)


@pytest.mark.parametrize(
    ("outcome", "told", "act"), [row[1:] for row in MUNGE_ROWS], ids=[row[0] for row in MUNGE_ROWS]
)
def test_with_munge_who_does_this_is_refused_and_counted_once(
    outcome: str, told: bytes, act: Callable[[Stage], bytes]
) -> None:
    with munge_port() as stage:
        refused(stage, outcome, told, act)


def test_with_certificates_who_reports_for_another_node_is_refused_and_counted_once(ca: Path) -> None:
    with tls_port(ca) as stage:
        context = shown(node_files(ca, "n2", time.time()), ca)
        refused(stage, "wrong_node", b"wrong_node", lambda s: exchange(s.port, hello(), context))
        of_n2 = hello("n2")
        slow = of_n2 + LENGTH.pack(500) + b"r"
        refused(stage, "too_slow", b"too_slow", lambda s: exchange(s.port, slow, context, then="slow"))
        refused(stage, "too_large", b"too_large", lambda s: exchange(s.port, of_n2 + LENGTH.pack(10**9), context))


# -- by address: this machine's own is never looked at, so that another is put in its place --------------------------


def cluster_port(**options: Any) -> AbstractContextManager[Stage]:
    """A port for which 127.0.0.1 is an address of the cluster."""
    return own_port(is_own=lambda address: False, **options)


def test_who_says_he_is_another_node_is_refused_and_spends_nothing_of_that_node() -> None:
    addresses = {"n1": "127.0.0.1", "n2": ELSEWHERE}
    with cluster_port(address_of=addresses.get) as stage:
        port = stage.port
        refused(stage, "wrong_node", b"wrong_node", lambda s: exchange(s.port, reports(body_of("n2"), "n2")))
        assert b"Slurm knows no node" in exchange(port, reports(body_of("n9"), "n9"))
        for sequence in range(20):
            exchange(port, reports(body_of("n2", sequence), "n2"))
        assert set(port.do(lambda: list(port.door._reports._known))) == {"n1"}


def test_node_that_reports_too_often_is_refused_and_one_that_comes_before_slurm_has_to_retry() -> None:
    with cluster_port(address_of={"n1": "127.0.0.1"}.get) as stage:
        port = stage.port
        port.do(lambda: setattr(port.door._reports, "burst", 1.0))
        port.do(lambda: setattr(port.door._reports, "per_s", 0.0))
        assert [stage.well(), stage.well()] == ["taken", "too_often"]
        assert port.outcome("too_often") == 1
    with cluster_port(address_of={"n1": "127.0.0.1"}.get, knows_nodes=lambda: False) as stage:
        assert stage.well() == "busy"
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
    ("shows no certificate", "no_certificate", lambda ca: anybody(), b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("shows one that has expired", "expired", lambda ca: shown(node_files(ca, "n8", time.time() - 40 * DAY_S), ca), hello("n8")),
    ("shows one of tomorrow", "bad_certificate", lambda ca: shown(node_files(ca, "n8", time.time() + 2 * DAY_S), ca), hello("n8")),
    ("shows one of another authority", "bad_certificate", of_another_authority, hello()),
    ("shows one that was revoked", "bad_certificate", revoked, hello("n7")),
    ("shows one that is for controllers", "bad_certificate",
     lambda ca: shown(renamed(str(shutil.copytree(ca / "controllers" / "localhost", ca / "disguised")), "controller"), ca), hello()),
    ("speaks without TLS", "no_tls", lambda ca: None, hello()),
    ("speaks TLS 1.2", "handshake", lambda ca: old(anybody()), b""),
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
        assert stage.well() == "taken", "and who may report is served"


def test_a_handshake_that_does_not_go_on_is_ended_and_counted_once(ca: Path) -> None:
    with tls_port(ca) as stage:
        exchange(stage.port, b"\x16\x03\x01\x02", then="slow")
        assert stage.port.all_refused() == {"slow_handshake": 1.0}
        assert stage.well() == "taken"


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
        assert exchange(port, hello()) == b""
        until(lambda: port.refused(reason) == 1)
        assert port.all_refused() == {reason: 1.0}
        port.do(lambda: setattr(limits, name, before) if name else limits._failures._known.clear())
        assert stage.well() == "taken"


ELSEWHERE_TESTED = {
    "wrong_job": "the report is taken, what it says of a job of other nodes is not: test_node_ownership.py",
    "no_room": "for nodes that Slurm does not list: test_state_bounds.py",
    "standby": "another controller is the active one: test_standby.py",
    "failed": "a defect of ours: test_streams.py",
    "too_often": "above, by address; by node in test_rate_limits.py",
    "busy": "above; what is held at once in test_rate_limits.py",
    "another_user": "on a unix socket alone: test_unix.py",
}


def test_every_counter_of_a_refusal_has_a_row() -> None:
    requests = {row[1] for row in (*ROWS, *MUNGE_ROWS)}
    connections = {row[1] for row in CONNECTION_ROWS} | {
        "slow_handshake",
        "too_many",
        "too_many_of_one_address",
        "too_many_failures",
    }
    assert requests | (ELSEWHERE_TESTED.keys() & set(REFUSED_REPORTS)) == set(REFUSED_REPORTS)
    assert connections | (ELSEWHERE_TESTED.keys() & CONNECTION_REASONS.keys()) == CONNECTION_REASONS.keys()
    assert ELSEWHERE_TESTED.keys().isdisjoint(requests | connections)
