"""Mutual TLS: a node speaks for itself alone, and whoever can't show who it is does not get as far as a request."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from slurm_watchdog.agent.courier.process import controllers
from slurm_watchdog.agent.courier.streams import AuthenticationFailed, TlsController, in_words
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles
from slurm_watchdog.identity.tls import Context, names_of
from slurm_watchdog.model.protocol import DumpStacks, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_reply
from slurm_watchdog.wire.frames import ORDERS
from tests.builders.identity_door import Agent, Port, listening, until, url
from tests.builders.identity_files import (
    DAY_S,
    controller_files,
    issue,
    make_authority,
    node_files,
    replace_files,
    revoke,
)
from tests.builders.sending import sending


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("identity") / "ca", time.time())


@pytest.fixture
def port(ca: Path) -> Iterator[Port]:
    with listening(identity=Context(controller_files(ca), server=True)) as port:
        yield port


def connection(port: Port, files: TlsFiles) -> Agent:
    def make() -> TlsController:
        return TlsController(url(port, "https"), "n1", files)

    agent = Agent(make())
    agent.restart = make
    return agent


def recheck(agent: Agent) -> None:
    """The next report comes a minute later, as far as its files are concerned."""
    agent.controller._checked_at = float("-inf")  # type: ignore[attr-defined]


def test_a_node_reports_for_itself_and_for_nobody_else(ca: Path, port: Port) -> None:
    agent = connection(port, node_files(ca, "n1", time.time()))
    assert agent.report("n1") == "taken"
    assert agent.report("n2") == "wrong_node"
    assert "who has proven to be n1 may not report for 'n2'" in agent.why
    assert agent.report("n1", 2) == "taken"
    assert [each.node for each in port.reports] == ["n1", "n1"]
    assert port.outcome("wrong_node") == 1
    agent.close()


def test_the_loop_of_the_controller_takes_what_comes_before_its_handshake_is_begun(ca: Path) -> None:
    """uvloop reads a socket before the task that begins the handshake."""
    identity = Context(controller_files(ca), server=True)
    with listening(identity=identity, loop=uvloop.new_event_loop()) as port:
        files = node_files(ca, "n1", time.time())
        agents = [connection(port, files) for _ in range(20)]
        assert [each.report("n1", number) for number, each in enumerate(agents)] == ["taken"] * 20
        for each in agents:
            each.close()
        until(lambda: not port.do(lambda: port.server.connections))
        expired = node_files(ca, "n8", time.time() - 40 * DAY_S, 30)
        with pytest.raises(AuthenticationFailed):
            connection(port, expired).report("n8")
        until(lambda: port.refused("expired") == 1)


def test_the_five_lines_of_the_page_make_certificates_by_which_a_node_reports(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "authentication.md").read_text()
    lines = page[page.index("**Without an authority**") :].split("```")[1].strip()
    assert len(lines.splitlines()) == 5
    lines = lines.replace("IP:10.0.0.1", "IP:127.0.0.1")
    subprocess.run(["bash", "-euc", lines], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    with listening(identity=Context(TlsFiles(str(tmp_path), "controller"), server=True)) as port:
        agent = connection(port, TlsFiles(str(tmp_path), "agent"))
        assert agent.report("node001") == "taken"
        assert agent.report("node002") == "wrong_node"
        agent.close()
    shutil.copy(tmp_path / "agent.crt", tmp_path / "controller.crt")
    shutil.copy(tmp_path / "agent.key", tmp_path / "controller.key")
    with (
        listening(identity=Context(TlsFiles(str(tmp_path), "controller"), server=True)) as port,
        pytest.raises(OSError),
    ):
        connection(port, TlsFiles(str(tmp_path), "agent")).report("node001")


def test_the_handshake_is_paid_once_for_many_reports(ca: Path, port: Port) -> None:
    agent = connection(port, node_files(ca, "n1", time.time()))
    for sequence in range(20):
        assert agent.report("n1", sequence) == "taken"
    assert port.do(lambda: len(port.server.connections)) == 1
    agent.close()
    until(lambda: port.do(lambda: port.server.limits.total) == 0)


@pytest.mark.parametrize(
    ("made_days_ago", "days", "reason", "words"),
    [(40, 30, "expired", "has expired"), (-2, 30, "bad_certificate", "its log says why")],
)
def test_a_certificate_out_of_its_time_is_refused_in_the_handshake(
    ca: Path,
    port: Port,
    made_days_ago: int,
    days: int,
    reason: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = node_files(ca, "n8", time.time() - made_days_ago * DAY_S, days)
    with pytest.raises(AuthenticationFailed) as raised:
        connection(port, files).report("n8")
    assert words in in_words(raised.value)
    until(lambda: port.refused(reason) == 1)
    assert not port.reports
    until(lambda: "a connection from 127.0.0.1 was refused" in caplog.text)


def test_the_certificate_of_another_authority_is_refused_however_it_is_called(
    ca: Path, port: Port, tmp_path: Path
) -> None:
    other = make_authority(tmp_path / "other", time.time())
    files = node_files(other, "n1", time.time())
    shutil.copy(ca / "ca.crt", files.ca)  # it knows whom to trust, as everybody may
    with pytest.raises(AuthenticationFailed, match="the controller ended the connection in the handshake"):
        connection(port, files).report("n1")
    until(lambda: port.refused("bad_certificate") == 1)


def raw(port: Port, context: ssl.SSLContext) -> bytes:
    """What somebody gets who comes without our client."""
    with (
        socket.create_connection(("127.0.0.1", port.number), timeout=10) as sock,
        context.wrap_socket(sock) as secure,
    ):
        secure.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return secure.recv(100)


def anybody() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_without_a_certificate_nobody_gets_anything(port: Port) -> None:
    with contextlib.suppress(OSError):
        assert raw(port, anybody()) == b""
    until(lambda: port.refused("no_certificate") == 1)


def test_old_tls_is_refused(port: Port) -> None:
    context = anybody()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        raw(port, context)
    until(lambda: port.refused("handshake") == 1)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"POST /v1/report HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", "no_tls"),
        (b"\x00" * 200, "no_tls"),
        (b"\x16\x03\x01" + b"\xff" * 100_000, "handshake"),
    ],
)
def test_tls_port_given_no_tls_closes_and_counts(port: Port, said: bytes, reason: str) -> None:
    with socket.create_connection(("127.0.0.1", port.number), timeout=10) as sock:
        try:
            sock.sendall(said)
            while sock.recv(1000):
                pass
        except ConnectionError:
            pass
    until(lambda: sum(port.all_refused().values()) == 1)
    assert set(port.all_refused()) <= {reason, "handshake"}
    until(lambda: not port.server.connections)


def test_a_controller_s_certificate_is_none_for_a_node_and_a_node_s_none_for_a_controller(
    ca: Path, port: Port, tmp_path: Path
) -> None:
    disguised = tmp_path / "as_agent"
    shutil.copytree(ca / "controllers" / "localhost", disguised)
    for end in ("crt", "key"):
        os.rename(disguised / f"controller.{end}", disguised / f"agent.{end}")
    with pytest.raises(OSError):
        connection(port, TlsFiles(str(disguised), "agent")).report("localhost")
    until(lambda: port.refused("bad_certificate") == 1)

    node = Path(node_files(ca, "localhost", time.time()).directory)
    for end in ("crt", "key"):
        shutil.copy(node / f"agent.{end}", node / f"controller.{end}")
    with listening(identity=Context(TlsFiles(str(node), "controller"), server=True)) as false:
        with pytest.raises(ssl.SSLCertVerificationError) as raised:
            connection(false, node_files(ca, "n1", time.time())).report("n1")
        assert "the controller's certificate is not good" in in_words(raised.value)
        assert not false.reports


def test_a_client_s_certificate_reads_metrics_and_speaks_for_no_node(ca: Path, port: Port) -> None:
    made = issue(ca, "client", "prometheus", time.time())
    for end in ("crt", "key"):
        shutil.copy(made / f"client.{end}", made / f"agent.{end}")
    reader = connection(port, TlsFiles(str(made), "agent"))
    assert reader.report("prometheus") == "wrong_node"
    context = ssl.create_default_context(cafile=str(ca / "ca.crt"))
    context.load_cert_chain(made / "client.crt", made / "client.key")
    with (
        socket.create_connection(("127.0.0.1", port.number), timeout=10) as sock,
        context.wrap_socket(sock, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: secure.recv(1 << 16), b""))
    assert b"slurm_watchdog_reports_total" in text
    assert b"slurm_watchdog_certificate_expiry_timestamp_seconds" in text
    reader.close()


def test_a_handshake_that_does_not_go_on_is_ended(port: Port) -> None:
    with socket.create_connection(("127.0.0.1", port.number), timeout=10) as sock:
        sock.sendall(b"\x16\x03\x01\x02")
        until(lambda: port.do(lambda: len(port.server.connections)) == 1)
        port.do(lambda: [each.check(each.since + 11.0) for each in list(port.server.connections)])
        assert sock.recv(100) == b""
    assert port.refused("slow_handshake") == 1


def test_a_handshake_that_waited_for_us_is_not_found_slow(port: Port) -> None:
    """After a restart ten thousand come at once: whoever is refused for that comes again, and so for ever."""
    with socket.create_connection(("127.0.0.1", port.number), timeout=10) as sock:
        sock.sendall(b"\x16\x03\x01\x02")
        until(lambda: port.do(lambda: len(port.server.connections)) == 1)

        def look(seconds: float) -> None:
            for each in list(port.server.connections):
                each.check(port.server.now() + seconds)

        port.do(lambda: port.server.record_lag(14.0))
        port.do(lambda: look(20.0))
        assert port.all_refused() == {}, "six seconds were its own"
        port.do(lambda: look(24.5))
        assert port.refused("slow_handshake") == 1


def test_what_the_loop_is_usually_late_is_not_counted(port: Port) -> None:
    def count() -> float:
        before = port.server.late_s
        for second in range(2000):
            port.server.record_lag(0.9 if second % 2 else 0.1)
        return port.server.late_s - before

    assert port.do(count) == pytest.approx(1000 * 0.9)


def test_a_kept_connection_ends_with_its_certificate(ca: Path, port: Port) -> None:
    agent = connection(port, node_files(ca, "n1", time.time()))
    assert agent.report("n1") == "taken"

    def expire() -> None:
        (kept,) = port.server.connections
        kept._expires_at = time.time() - 1
        kept.check(0.0)

    port.do(expire)
    assert port.refused("expired") == 1
    until(lambda: not port.server.connections)


def test_renewed_certificates_are_taken_over_by_both_ends_without_a_restart(ca: Path, tmp_path: Path) -> None:
    place = shutil.copytree(ca / "controllers" / "localhost", tmp_path / "controller")
    context = Context(TlsFiles(str(place), "controller"), server=True)
    files = node_files(ca, "n5", time.time(), 20)
    with listening(identity=context) as port:
        agent = connection(port, files)
        assert agent.report("n5") == "taken"
        (first,) = port.do(lambda: set(port.server.connections))
        before = agent.controller.expires["own"], context.expires["own"]
        issue(ca, "controller", "localhost", time.time(), 500, ("127.0.0.1",))
        renewed = controller_files(ca)
        shutil.copy(renewed.key, context.files.key)
        shutil.copy(renewed.certificate, context.files.certificate)
        port.do(port.server.refresh)
        assert agent.report("n5", 2) == "taken", "a connection that is kept stays"
        node_files(ca, "n5", time.time() + 2, 30)
        recheck(agent)
        assert agent.report("n5", 3) == "taken"
        assert port.do(lambda: first not in port.server.connections)
        assert agent.controller.expires["own"] > before[0]
        assert context.expires["own"] > before[1]
        agent.close()


def test_files_that_cannot_be_used_change_nothing_and_are_told(
    ca: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = shutil.copytree(ca / "controllers" / "localhost", tmp_path / "controller")
    context = Context(TlsFiles(str(place), "controller"), server=True)
    with listening(identity=context) as port:
        agent = connection(port, node_files(ca, "n1", time.time()))
        good = (place / "controller.crt").read_text()
        (place / "controller.crt").write_text("half of a")
        port.do(port.server.refresh)
        assert "cannot be used, the old ones stay" in caplog.text
        assert agent.report("n1") == "taken"
        (place / "controller.crt").write_text(good)
        port.do(port.server.refresh)
        assert context.problem == ""
        agent.close()


def test_another_authority_sends_everybody_away_who_came_by_the_old_one(ca: Path, tmp_path: Path) -> None:
    place = shutil.copytree(ca / "controllers" / "localhost", tmp_path / "controller")
    with listening(identity=Context(TlsFiles(str(place), "controller"), server=True)) as port:
        agent = connection(port, node_files(ca, "n1", time.time()))
        assert agent.report("n1") == "taken"
        other = make_authority(tmp_path / "other", time.time())
        replace_files(TlsFiles(str(place), "controller"), controller_files(other))
        port.do(port.server.refresh)
        until(lambda: not port.server.connections)
        with pytest.raises(OSError):
            agent.report("n1", 2)
        assert len(port.reports) == 1


def together(target: Path, *parts: Path) -> None:
    """As `cat PARTS > TARGET`."""
    replacement = target.with_suffix(".new")
    replacement.write_text("".join(part.read_text() for part in parts))
    os.replace(replacement, target)


@pytest.mark.parametrize("some_were_revoked", [False, True])
def test_a_new_authority_takes_over_step_by_step_and_nobody_is_sent_away(
    tmp_path: Path, some_were_revoked: bool
) -> None:
    """The steps of docs/authentication.md. Both authorities have the same name."""
    old, new = make_authority(tmp_path / "old", time.time()), make_authority(tmp_path / "new", time.time())
    place = shutil.copytree(controller_files(old).directory, tmp_path / "controller")
    nodes = [shutil.copytree(node_files(old, name, time.time()).directory, tmp_path / name) for name in ("n1", "n2")]
    if some_were_revoked:
        node_files(old, "n9", time.time())
        revoke(old, "n9")
        shutil.copy(old / "ca.crl", place / "ca.crl")
    with listening(identity=Context(TlsFiles(str(place), "controller"), server=True)) as port:

        def all_report(*of: Path) -> None:
            port.do(port.server.refresh)
            for each in of:
                agent = connection(port, TlsFiles(str(each), "agent"))
                assert agent.report(each.name) == "taken"
                agent.close()

        all_report(*nodes)
        for machine in (place, *nodes):
            together(machine / "ca.crt", new / "ca.crt", old / "ca.crt")
            if some_were_revoked and machine == place:
                together(place / "ca.crl", new / "ca.crl", old / "ca.crl")
            all_report(*nodes)
        for node in nodes:
            made = Path(node_files(new, node.name, time.time()).directory)
            for name in ("agent.crt", "agent.key"):
                shutil.copy(made / name, node / name)
            all_report(*nodes)
        for name in ("controller.crt", "controller.key"):
            shutil.copy(Path(controller_files(new).directory) / name, place / name)
        all_report(*nodes)
        for machine in (*nodes, place):
            together(machine / "ca.crt", new / "ca.crt")
            if some_were_revoked and machine == place:
                together(place / "ca.crl", new / "ca.crl")
            all_report(*nodes)
        assert port.all_refused() == {}
        late = connection(port, node_files(old, "n1", time.time()))
        shutil.copy(new / "ca.crt", old / "nodes" / "n1" / "ca.crt")
        with pytest.raises(OSError):
            late.report("n1")
        until(lambda: port.refused("bad_certificate") == 1)


def test_a_list_of_another_authority_s_revocations_is_said_to_be_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = make_authority(tmp_path / "old", time.time()), make_authority(tmp_path / "new", time.time())
    shutil.copy(old / "ca.crl", new / "controllers" / "localhost" / "ca.crl")
    with listening(identity=Context(controller_files(new), server=True)) as port:
        with pytest.raises(OSError):
            connection(port, node_files(new, "n1", time.time())).report("n1")
        until(lambda: port.refused("bad_certificate") == 1)
        until(lambda: "unable to get certificate CRL" in caplog.text)


def test_agent_without_its_certificates_reports_what_is_missing_and_continues(
    ca: Path, port: Port, tmp_path: Path
) -> None:
    files = TlsFiles(str(tmp_path), "agent")
    with pytest.raises(AuthenticationFailed, match=r"agent\.key cannot be read"):
        connection(port, files).report("n1")
    made = Path(node_files(ca, "n1", time.time()).directory)
    with sending(*controllers("n1", "tls", str(tmp_path), [url(port, "https")])) as (sender, _):
        sender.put(Report(node="n1", boot_id="b", agent_id="a", sequence=1))
        until(lambda: "cannot be read" in sender.problem)
        for name in ("ca.crt", "agent.crt", "agent.key"):
            shutil.copy(made / name, tmp_path / name)
        until(lambda: len(port.reports) == 1)


def test_what_is_asked_comes_at_once_over_tls_as_well(ca: Path, port: Port) -> None:
    files = node_files(ca, "n1", time.time())
    with sending(TlsController(url(port, "https"), "n1", files)) as (sender, _):
        sender.put(Report(node="n1", boot_id="b", agent_id="a", sequence=1))
        until(lambda: len(port.reports) == 1 and bool(sender.replies()))
        (stream,) = port.door._streams.values()
        asked = tuple(
            DumpStacks(id=str(number), job_id="7", restarts=0) for number in range(200)
        )  # more than one record
        for _ in range(3):
            port.do(lambda: stream.send(ORDERS, encode_reply(Reply(commands=asked))))
        found: list[object] = []
        until(lambda: bool(found.extend(sender.orders()) or len(found) == 3), 5.0)
        assert found == [Reply(commands=asked)] * 3
        sender.put(Report(node="n1", boot_id="b", agent_id="a", sequence=2))
        until(lambda: len(port.reports) == 2)
        assert not sender.problem


def test_an_agent_that_is_to_show_a_certificate_never_speaks_without_tls(ca: Path) -> None:
    with listening() as plain:
        agent = Agent(TlsController(url(plain), "n1", node_files(ca, "n1", time.time())))
        with pytest.raises(AuthenticationFailed, match="https://"):
            agent.report("n1")
        assert not plain.reports


def test_a_key_that_others_may_read_keeps_the_controller_from_starting(ca: Path, tmp_path: Path) -> None:
    place = shutil.copytree(ca / "controllers" / "localhost", tmp_path / "controller")
    (place / "controller.key").chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        Context(TlsFiles(str(place), "controller"), server=True)


def test_names_are_those_of_the_certificate_without_the_site_s_domain() -> None:
    subject = ((("commonName", "n1"),),)
    assert names_of({"subject": subject}) == {"n1"}
    assert names_of({"subject": subject, "subjectAltName": (("DNS", "n2"),)}) == {"n2"}
    assert names_of({"subject": subject, "subjectAltName": (("URI", "slurm-watchdog:client:x"),)}) == frozenset()
    long = {
        "subjectAltName": (
            ("DNS", "n1.c.example.org"),
            ("DNS", "*.c.example.org"),
            ("DNS", "n1.other.org"),
            ("DNS", ".c.example.org"),
        )
    }
    assert names_of(long, "c.example.org") == {"n1", "n1.other.org"}
    assert names_of(long) == {"n1.c.example.org", "n1.other.org", ".c.example.org"}
    assert names_of({}) == frozenset()


def test_a_certificate_that_was_revoked_is_refused_and_its_kept_connection_ended(tmp_path: Path) -> None:
    ca = make_authority(tmp_path / "ca", time.time())
    own, thief = tmp_path / "n1", tmp_path / "n2"
    shutil.copytree(node_files(ca, "n1", time.time()).directory, own)
    shutil.copytree(node_files(ca, "n2", time.time()).directory, thief)
    with listening(identity=Context(controller_files(ca), server=True)) as port:
        good, stolen = (
            connection(port, TlsFiles(str(own), "agent")),
            connection(port, TlsFiles(str(thief), "agent")),
        )
        assert good.report("n1") == stolen.report("n2") == "taken"
        for name in ("n9", "n2"):  # the list holds all that ever were on it
            node_files(ca, "n9", time.time())
            revoke(ca, name)
            shutil.copy(ca / "ca.crl", ca / "controllers" / "localhost" / "ca.crl")
            port.do(port.server.refresh)
        until(lambda: not port.server.connections)
        good.close()
        stolen.close()
        with pytest.raises(AuthenticationFailed, match="its log says why"):
            stolen.report("n2", 2)
        until(lambda: port.refused("bad_certificate") == 1)
        assert good.report("n1", 2) == "taken"
        good.close()
