"""MUNGE, with a munged of our own: who is believed, what can't be shown twice, and that a munged that hangs
holds nobody up."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_watchdog.agent.delivery.channel import Proven
from slurm_watchdog.agent.delivery.munge_connection import Munge, ProvenConnection
from slurm_watchdog.agent.delivery.sender import Sender, Spool
from slurm_watchdog.base import clock
from slurm_watchdog.controller.app import uid_of
from slurm_watchdog.identity.munge_decoder import BadCredential, Credential, MungeProcess, MungeUnavailable
from slurm_watchdog.identity.munge_protocol import (
    Session,
    authorization,
    encode_offer,
    new_session,
    parse_authorization,
)
from slurm_watchdog.identity.munge_sessions import AuthenticationError, Sessions
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.http_client import AuthenticationFailed, Connection, Response
from tests.builders.identity_door import Port, body_of, listening, until
from tests.munged import THERE, Munged, munged

needs_munge = pytest.mark.skipif(
    os.geteuid() != 0 or not THERE, reason="a munged of our own needs root and the package munge"
)
NOBODY = 65534


@pytest.fixture(scope="module", name="munged")
def munged_of_this_module() -> Iterator[Munged]:
    with munged() as found:
        yield found


def opened(
    munged: Munged, own_uid: int = 0, agents: frozenset[int] = frozenset({0}), **limits: float
) -> dict[str, Any]:
    process = MungeProcess(munged.socket, **limits)
    return {"identity": (Sessions(own_uid, agents, clock.monotonic), process)}


@pytest.fixture
def port(munged: Munged) -> Iterator[Port]:
    with listening(**opened(munged)) as port:
        yield port


def agent(port: Port, munged: Munged, node: str = "n1", user: str = "0", **options: Any) -> ProvenConnection:
    inner = Connection(f"http://127.0.0.1:{port.number}", 10**6)
    return ProvenConnection(inner, node, Munge(user, munged.socket).encode, **options)


def report(
    connection: ProvenConnection | Connection, node: str, sequence: int = 1, **headers: str
) -> Proven | Response:
    return connection.post("/v1/report", body_of(node, sequence), headers, 10.0, 20.0)


@needs_munge
def test_a_node_proves_itself_once_and_then_each_report(port: Port, munged: Munged) -> None:
    connection = agent(port, munged)
    for sequence in range(5):
        assert report(connection, "n1", sequence).status == 200
    assert [each.sequence for each in port.reports] == [0, 1, 2, 3, 4]
    assert port.all_refused() == {}
    connection.close()


@needs_munge
def test_a_session_is_of_one_node(port: Port, munged: Munged) -> None:
    connection = agent(port, munged)
    assert report(connection, "n1").status == 200
    assert report(connection, "n2").status == 403
    assert port.outcome("wrong_node") == 2, "and once more in a new session"
    assert [each.node for each in port.reports] == ["n1"]
    connection.close()


@needs_munge
def test_a_new_session_is_begun_after_an_hour_and_when_the_controller_has_forgotten(port: Port, munged: Munged) -> None:
    moment = [0.0]
    connection = agent(port, munged, now=lambda: moment[0])
    assert report(connection, "n1").status == 200
    sessions = port.door._sessions
    assert sessions is not None
    (first,) = sessions._by_id
    moment[0] += 3601.0
    assert report(connection, "n1", 2).status == 200
    (second,) = sessions._by_id
    assert first != second, "the one before is gone"
    port.do(lambda: (sessions._by_id.clear(), sessions._of_node.clear()))
    assert report(connection, "n1", 3).status == 200
    assert port.outcome("no_session") == 1
    assert len(port.reports) == 3
    connection.close()


@needs_munge
def test_another_user_s_credential_is_refused(port: Port, munged: Munged) -> None:
    command = Munge("0", munged.socket)._argv

    def as_nobody(payload: bytes) -> str:
        done = subprocess.run(command, input=payload, capture_output=True, timeout=20, check=True, user=NOBODY)
        return done.stdout.decode().strip()

    inner = Connection(f"http://127.0.0.1:{port.number}", 10**6)
    with pytest.raises(AuthenticationFailed, match=f"made by user {NOBODY}"):
        report(ProvenConnection(inner, "n1", as_nobody), "n1")
    assert port.outcome("unauthorized") == 1
    assert not port.reports


@needs_munge
def test_a_credential_that_others_could_have_read_or_that_is_not_for_us_is_refused(port: Port, munged: Munged) -> None:
    with pytest.raises(AuthenticationFailed, match="MUNGE says: Unauthorized credential"):
        report(agent(port, munged, user=str(NOBODY)), "n1")

    def for_anybody(*arguments: str) -> Callable[[bytes], str]:
        argv = ["munge", "--socket", munged.socket, *arguments]
        return lambda payload: (
            subprocess.run(argv, input=payload, capture_output=True, timeout=20, check=True).stdout.decode().strip()
        )

    for encode in (for_anybody(), for_anybody("--restrict-uid", "0", "--cipher", "none")):
        inner = Connection(f"http://127.0.0.1:{port.number}", 10**6)
        with pytest.raises(AuthenticationFailed, match="not for user 0 alone"):
            report(ProvenConnection(inner, "n1", encode), "n1")
    assert port.outcome("unauthorized") == 3


class Tap:
    """A Connection that keeps what went through it, as somebody on the way would."""

    def __init__(self, inner: Connection):
        self.inner = inner
        self.seen: list[tuple[str, bytes, dict[str, str]]] = []

    def post(self, path: str, body: bytes, headers: dict[str, str], connect_s: float, answer_s: float) -> Response:
        self.seen.append((path, body, dict(headers)))
        return self.inner.post(path, body, headers, connect_s, answer_s)

    def post_kept(self, path: str, body: bytes, headers: dict[str, str], answer_s: float) -> Response:
        self.seen.append((path, body, dict(headers)))
        return self.inner.post_kept(path, body, headers, answer_s)

    def close(self) -> None:
        self.inner.close()


def tapped(port: Port, munged: Munged) -> tuple[Tap, ProvenConnection]:
    tap = Tap(Connection(f"http://127.0.0.1:{port.number}", 10**6))
    return tap, ProvenConnection(tap, "n1", Munge("0", munged.socket).encode)  # type: ignore[arg-type]


@needs_munge
def test_nothing_that_was_heard_on_the_way_can_be_said_again(port: Port, munged: Munged) -> None:
    tap, connection = tapped(port, munged)
    assert report(connection, "n1").status == 200
    thief = Connection(f"http://127.0.0.1:{port.number}", 10**6)
    for path, body, headers in [each for each in tap.seen if "Authorization" in each[2]]:
        assert thief.post(path, body, headers, 5.0, 10.0).status == 401
    assert port.outcome("replayed") == 2, "the credential and the report"
    path, body, headers = tap.seen[-1]
    claim = parse_authorization(headers["Authorization"])
    assert claim is not None
    changed = {"Authorization": f"Session {claim.session} {claim.counter + 1} {claim.mac}"}
    assert thief.post(path, body, changed, 5.0, 10.0).status == 401
    assert thief.post(path, body + b" ", changed, 5.0, 10.0).status == 401
    assert port.outcome("unauthorized") == 2
    assert len(port.reports) == 1
    assert report(connection, "n1", 2).status == 200, "and the session goes on"


@needs_munge
def test_nothing_that_was_heard_is_worth_anything_to_a_controller_that_was_started_again(
    port: Port, munged: Munged
) -> None:
    tap, connection = tapped(port, munged)
    connection._begin("/v1/report", {}, 5.0, 10.0)
    _, _, headers = tap.seen[-1]
    with listening(**opened(munged)) as other:
        # munged itself would refuse it a second time; another epoch is refused though it was never seen
        sessions = other.door._sessions
        assert sessions is not None
        payload = encode_offer(new_session("n1", 0.0), "0" * 32)
        with pytest.raises(AuthenticationError, match="a controller that no longer runs"):
            sessions.check_credential(Credential(0, 1, 0, True, payload))
        assert (
            Connection(f"http://127.0.0.1:{other.number}", 10**6).post("/v1/session", b"", headers, 5.0, 10.0).status
            == 401
        )


@needs_munge
def test_answers_of_somebody_else_are_not_believed(port: Port, munged: Munged) -> None:
    """Commands to agents come in answers."""

    class Liar(Tap):
        def post_kept(self, path: str, body: bytes, headers: dict[str, str], answer_s: float) -> Response:
            answer = super().post_kept(path, body, headers, answer_s)
            return (
                Response(answer.status, answer.reason, answer.headers, b'{"commands":[]}')
                if path == "/v1/report"
                else answer
            )

    liar = Liar(Connection(f"http://127.0.0.1:{port.number}", 10**6))
    connection = ProvenConnection(liar, "n1", Munge("0", munged.socket).encode)  # type: ignore[arg-type]
    with pytest.raises(AuthenticationFailed, match="another program answers"):
        report(connection, "n1")


@needs_munge
def test_a_report_comes_from_the_address_that_slurm_has_for_the_node(munged: Munged) -> None:
    with listening(address_of={"n1": "10.0.0.1"}.get, **opened(munged)) as port:
        door = port.door
        assert door._wrong_node("n1", "10.0.0.1") == ""
        assert "is not the address that Slurm has" in str(door._wrong_node("n1", "10.0.0.2"))
        assert "Slurm knows no node" in str(door._wrong_node("n9", "10.0.0.1"))
    sessions = Sessions(0, frozenset({0}), lambda: 0.0)
    mine = new_session("n1", 0.0)
    beginning = sessions.check_credential(Credential(0, 5, 0, True, encode_offer(mine, sessions.epoch)))
    sessions.begin(beginning, "10.0.0.1", 5)
    with pytest.raises(AuthenticationError, match=r"not of 10\.0\.0\.2"):
        sessions.claim(authorization(mine, "/v1/report", b""), "10.0.0.2")


@needs_munge
def test_a_munged_that_hangs_holds_up_neither_the_controller_nor_the_agent(munged: Munged) -> None:
    with listening(**opened(munged, deadline_s=0.5, pause_s=0.2)) as port:
        known = agent(port, munged)
        assert report(known, "n1").status == 200
        credential = Munge("0", munged.socket).encode(encode_offer(new_session("n2", 0.0), port.door._sessions.epoch))  # type: ignore[union-attr]
        munged.hang()
        try:
            with pytest.raises(AuthenticationFailed, match="munge gave no answer within"):
                Munge("0", munged.socket, deadline_s=0.5).encode(b"x")
            other = Connection(f"http://127.0.0.1:{port.number}", 10**6)
            with socket.create_connection(("127.0.0.1", port.number), timeout=20) as late:
                late.sendall(
                    f"POST /v1/session HTTP/1.1\r\nContent-Length: 0\r\nAuthorization: Munge {credential}\r\n\r\n".encode()
                )
                assert report(known, "n1", 2).status == 200, "a session that was begun goes on"
                assert b" 503 " in late.recv(1000)
            assert port.outcome("no_munge") >= 1
            other.close()
        finally:
            munged.go_on()
        deadline = time.monotonic() + 60
        while True:
            try:
                assert report(agent(port, munged, "n3"), "n3").status == 200
                break
            except AuthenticationFailed:
                assert time.monotonic() < deadline
                time.sleep(0.2)


@needs_munge
def test_a_client_that_goes_away_does_not_end_the_process_that_decodes(munged: Munged) -> None:
    with listening(**opened(munged)) as port:
        assert report(agent(port, munged), "n1").status == 200
        decoder: Any = port.door._decoder
        pid = decoder._process.pid
        for _ in range(20):
            credential = Munge("0", munged.socket).encode(b"x")
            with socket.create_connection(("127.0.0.1", port.number), timeout=10) as sock:
                sock.sendall(
                    f"POST /v1/session HTTP/1.1\r\nContent-Length: 0\r\nAuthorization: Munge {credential}\r\n\r\n".encode()
                )
        assert report(agent(port, munged, "n2"), "n2").status == 200
        assert decoder._process.pid == pid


def test_without_munge_the_process_says_so_and_is_not_asked_all_the_time() -> None:
    async def ask() -> None:
        process = MungeProcess(argv=["sh", "-c", 'echo \'{"failed":"libmunge.so.2: not there"}\''])
        for _ in range(3):
            with pytest.raises(MungeUnavailable, match="libmunge"):
                await process.decode("MUNGE:AAAA:")
        await process.close()

    asyncio.run(ask())


@needs_munge
def test_bad_credential_has_another_error_than_an_unavailable_munged(munged: Munged) -> None:
    async def ask() -> None:
        process = MungeProcess(munged.socket)
        with pytest.raises(BadCredential):
            await process.decode("MUNGE:AAAA:")
        await process.close()
        away = MungeProcess("/nonexistent/socket")
        with pytest.raises(MungeUnavailable):
            await away.decode("MUNGE:AAAA:")
        await away.close()

    asyncio.run(ask())


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer x",
        "Session",
        "Session zz 1 aa",
        "Session " + "a" * 32 + " -1 " + "b" * 64,
        "Munge MUNGE:AAAA",
        "Munge x\nMUNGE:A:",
        "Munge MUNGE:" + "A" * 9000 + ":",
    ],
)
def test_munge_port_refuses_a_request_without_proof(munged_free_port: Port, given: str) -> None:
    connection = Connection(f"http://127.0.0.1:{munged_free_port.number}", 10**6)
    assert report(connection, "n1", Authorization=given.replace("\n", " ")).status == 401
    assert (
        connection.post("/v1/session", b"", {"Authorization": given.replace("\n", " ") or "x"}, 5.0, 5.0).status == 401
    )
    assert munged_free_port.outcome("unauthorized") == 2
    assert not munged_free_port.reports
    connection.close()


class NoDecoder:
    """Nothing that these tests send gets as far as MUNGE."""

    async def decode(self, credential: str) -> Credential:
        raise AssertionError(f"MUNGE was asked about {credential[:40]}")

    async def close(self) -> None:
        return


@pytest.fixture
def munged_free_port() -> Iterator[Port]:
    with listening(identity=(Sessions(0, frozenset({0}), clock.monotonic), NoDecoder())) as port:
        yield port


def test_an_agent_says_what_is_wrong_when_the_two_ends_are_not_set_alike() -> None:
    with listening() as port:
        inner = Connection(f"http://127.0.0.1:{port.number}", 10**6)
        with pytest.raises(AuthenticationFailed, match=r"is security\.mode the same there"):
            report(ProvenConnection(inner, "n1", lambda payload: ""), "n1")


def test_a_program_munge_that_is_missing_or_fails_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationFailed, match="cannot be run"):
        Munge("0", program=str(tmp_path / "none")).encode(b"")
    program = tmp_path / "munge"
    program.write_text("#!/bin/sh\necho 'munge: Error: Unrecognized user \"slurm-watchdog\"' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(AuthenticationFailed, match=r"security\.controller_user, id -u slurm-watchdog there"):
        Munge("slurm-watchdog", program=str(program)).encode(b"")


@needs_munge
def test_the_sender_keeps_its_reports_until_munge_answers_again(port: Port, munged: Munged) -> None:
    connection = agent(port, munged)
    connection._encode = Munge("0", munged.socket, deadline_s=0.3).encode
    sender = Sender(f"http://127.0.0.1:{port.number}", Spool(10**6, 60), connection)
    munged.hang()
    try:
        sender.start()
        sender.put(Report(node="n1", boot_id="b", agent_id="a", sequence=1))
        until(lambda: "munge gave no answer" in sender.problem)
    finally:
        munged.go_on()
    connection._encode = Munge("0", munged.socket).encode
    until(lambda: [each.sequence for each in port.reports] == [1])
    sender.stop()


def test_sessions_are_bounded_and_each_node_has_one() -> None:
    now = [0.0]
    sessions = Sessions(7, frozenset({0}), lambda: now[0], most=3)
    mine: dict[str, Session] = {}
    for index, node in enumerate(("n1", "n2", "n1", "n3", "n4")):
        mine[node] = new_session(node, 0.0)
        beginning = sessions.check_credential(Credential(0, index, 7, True, encode_offer(mine[node], sessions.epoch)))
        sessions.begin(beginning, "10.0.0.1", index)
    assert len(sessions) == 3
    with pytest.raises(AuthenticationError, match="no such session"):
        sessions.claim(authorization(mine["n2"], "/v1/report", b""), "10.0.0.1")
    sessions.claim(authorization(mine["n4"], "/v1/report", b""), "10.0.0.1")
    older = Credential(0, 1, 7, True, encode_offer(new_session("n4", 0.0), sessions.epoch))
    with pytest.raises(AuthenticationError, match="older than one"):
        sessions.check_credential(older)
    now[0] = 3901.0
    with pytest.raises(AuthenticationError, match="no such session"):
        sessions.claim(authorization(mine["n4"], "/v1/report", b""), "10.0.0.1")


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"[1]", b'{"session":"x","key":"y","node":"n","epoch":"e"}', b"\xff", b"[" * 5000]
)
def test_a_payload_that_is_no_session_is_refused(payload: bytes) -> None:
    with pytest.raises(AuthenticationError, match="carries no"):
        Sessions(7, frozenset({0}), lambda: 0.0).check_credential(Credential(0, 1, 7, True, payload))


def test_keys_are_in_no_text_of_what_holds_them() -> None:
    mine = new_session("n1", 0.0)
    data = encode_offer(mine, "0" * 32)
    credential = Credential(0, 1, 7, True, data)
    shown = (
        repr(mine)
        + repr(credential)
        + repr(
            msgspec.json.decode(
                data,
                type=__import__("slurm_watchdog.identity.munge_protocol", fromlist=["SessionOffer"]).SessionOffer,
            )
        )
    )
    assert mine.key.hex() not in shown
    assert repr(mine.key) not in shown


def test_users_are_numbers_or_names() -> None:
    assert (uid_of("998"), uid_of("root"), uid_of("no-such-user-here")) == (998, 0, None)


@needs_munge
def test_a_session_s_key_is_in_no_log_metric_message_or_answer(
    port: Port, munged: Munged, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    tap, connection = tapped(port, munged)
    assert report(connection, "n1").status == 200
    session = connection._session
    assert session is not None
    said = [report(connection, "n2").body]
    credential = tap.seen[1][2]["Authorization"].removeprefix("Munge ")
    for headers in ({"Authorization": f"Munge {credential}"}, {"Authorization": "Munge MUNGE:AAAA:"}):
        said.append(tap.inner.post("/v1/session", b"", headers, 5.0, 10.0).body)
    with pytest.raises(AuthenticationFailed) as raised:
        report(ProvenConnection(tap.inner, "n1", lambda payload: "MUNGE:AAAA:"), "n1")
    known = repr(port.door._sessions.__dict__) + repr(connection.__dict__)
    shown = [
        caplog.text.encode(), port.metrics.text(), *said, str(raised.value).encode(), known.encode(),
        *(body + repr(headers).encode() for _, body, headers in tap.seen),
    ]  # fmt: skip
    for form in (session.key, session.key.hex().encode(), repr(session.key)[2:-1].encode()):
        assert not any(form in text for text in shown)
    connection.close()


@needs_munge
def test_an_agent_that_comes_from_another_of_its_addresses_begins_a_new_session(port: Port, munged: Munged) -> None:
    connection = agent(port, munged)
    assert report(connection, "n1").status == 200
    sessions = port.door._sessions
    assert sessions is not None
    (known,) = sessions._by_id.values()
    known.address = "127.0.0.9"
    assert report(connection, "n1", 2).status == 200
    assert [each.sequence for each in port.reports] == [1, 2]
    assert port.outcome("wrong_node") == 1
    connection.close()
