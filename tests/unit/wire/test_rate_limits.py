"""What one client may take of the agents' port: connections, pace, bytes and time; and that all others are
served meanwhile."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slurm_watchdog.controller.ingest.endpoint import read_page_token
from slurm_watchdog.wire.codec import MAX_BYTES
from slurm_watchdog.wire.http_messages import Answer, Request
from slurm_watchdog.wire.rate_limits import Limits, TokenBuckets, is_loopback, most_connections, report_rate
from tests.builders.identity_door import Port, body_of, listening, until


def request(body: bytes, *lines: bytes, path: bytes = b"/v1/report", size: int | None = None) -> bytes:
    head = b"".join(
        line + b"\r\n" for line in (b"Host: x", b"Content-Length: %d" % (len(body) if size is None else size), *lines)
    )
    return b"POST %b HTTP/1.1\r\n%b\r\n%b" % (path, head, body)


def ask(port: Port, *said: bytes) -> bytes:
    """The beginning of what is answered, to everything in a connection of its own."""
    with socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
        for each in said:
            sock.sendall(each)
        return sock.recv(1 << 16)


def served(port: Port, node: str = "good") -> bool:
    return ask(port, request(body_of(node))).startswith(b"HTTP/1.1 200 ")


# -- bookkeeping -------------------------------------------------------------------------------------------------


def test_a_bucket_gives_its_burst_at_once_and_then_its_pace() -> None:
    bucket = TokenBuckets(burst=3, per_s=0.5)
    assert [bucket.acquire("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.acquire("b", 0.0), "each has his own"
    assert not bucket.acquire("a", 1.9)
    assert bucket.acquire("a", 2.0)
    assert bucket.left("a", 1000.0) == 3


def test_asking_too_often_does_not_put_the_next_one_off() -> None:
    bucket = TokenBuckets(burst=1, per_s=1.0)
    assert bucket.acquire("a", 0.0)
    assert not any(bucket.acquire("a", moment / 10) for moment in range(1, 10))
    assert bucket.acquire("a", 1.0)


def test_token_buckets_of_many_names_forget_the_one_used_longest_ago() -> None:
    bucket = TokenBuckets(burst=1, per_s=0.0, most_names=10)
    for number in range(1000):
        bucket.acquire(str(number), 0.0)
    assert len(bucket._known) == 10
    assert not bucket.acquire("999", 0.0)


def test_an_agent_that_was_cut_off_may_send_all_that_it_has_kept() -> None:
    kept, size = 120, 8 * 1024**2 // 120
    limit = report_rate(5.0)
    assert all(limit.acquire("n1", size, 0.0) for _ in range(kept))
    assert report_rate(0.1).reports.per_s == 40.0, "and one that reports ten times a second may"


def test_connections_are_bounded_in_all_and_by_address_but_for_this_machine_s_own() -> None:
    limits = Limits(most=10, most_of_one=2)
    assert [limits.opened("10.0.0.1", 0.0) for _ in range(3)] == ["", "", "too_many_of_one_address"]
    limits.closed("10.0.0.1")
    limits.closed("10.0.0.1")
    assert limits.opened("10.0.0.1", 0.0) == ""
    assert [limits.opened("127.0.0.1", 0.0) for _ in range(8)] == [""] * 8
    assert limits.opened("10.0.0.2", 0.0) == "too_many"
    for address in ["10.0.0.1"] * 2 + ["127.0.0.1"] * 8 + ["10.0.0.2"]:
        limits.closed(address)
    assert (limits.total, len(limits._open)) == (0, 0)


def test_address_with_twenty_failed_handshakes_has_to_wait() -> None:
    limits = Limits(most=100)
    for _ in range(20):
        limits.failed("10.0.0.1", 0.0)
        limits.failed("127.0.0.1", 0.0)
    assert limits.opened("10.0.0.1", 0.0) == "too_many_failures"
    assert limits.opened("10.0.0.2", 0.0) == ""
    assert limits.opened("127.0.0.1", 0.0) == ""
    assert limits.opened("10.0.0.1", 10.0) == ""


def test_behind_address_translation_one_address_is_many_nodes() -> None:
    limits = Limits(most=500, by_address=False)
    for _ in range(100):
        limits.failed("10.0.0.1", 0.0)
    assert [limits.opened("10.0.0.1", 0.0) for _ in range(500)] == [""] * 500
    assert limits.opened("10.0.0.1", 0.0) == "too_many"
    with listening() as port:
        head = parse(request(b"", size=8 * 1024**2))
        assert all(port.door.admit(head, "10.0.0.1") is None for _ in range(100))


def test_no_more_connections_are_allowed_than_there_are_descriptors() -> None:
    assert 16 <= most_connections() <= 32_768


@pytest.mark.parametrize(
    ("address", "own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False), ("", False), ("x", False)],
)
def test_this_machine_s_addresses_are_known(address: str, own: bool) -> None:
    assert is_loopback(address) is own


# -- on the socket -----------------------------------------------------------------------------------------------


def test_a_connection_too_many_is_closed_and_counted_and_the_others_stay() -> None:
    with listening() as port:
        port.server.limits.most = 2
        with (
            socket.create_connection(("127.0.0.1", port.number), timeout=20) as first,
            socket.create_connection(("127.0.0.1", port.number), timeout=20) as second,
        ):
            until(lambda: port.do(lambda: port.server.limits.total) == 2)
            with socket.create_connection(("127.0.0.1", port.number), timeout=20) as third:
                try:
                    assert third.recv(10) == b""
                except ConnectionError:
                    pass
            for sock in (first, second):
                sock.sendall(request(body_of("n1")))
                assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert port.refused("too_many") == 1
        until(lambda: port.do(lambda: port.server.limits.total) == 0)
        assert served(port)


def test_a_connection_on_which_nothing_comes_is_closed_after_the_time_of_a_request() -> None:
    with listening() as port, socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
        until(lambda: port.do(lambda: len(port.server.connections)) == 1)
        port.do(lambda: [each.check(each._since + 21.0) for each in list(port.server.connections)])
        assert sock.recv(10) == b""


@pytest.mark.parametrize("part", [b"POST /v1/rep", b"POST /v1/report HTTP/1.1\r\nContent-Le", request(b"{", size=100)])
def test_a_request_that_comes_slowly_is_ended_wherever_it_is(part: bytes) -> None:
    with listening() as port, socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
        for byte in part:
            sock.sendall(bytes([byte]))
        until(lambda: port.do(lambda: any(each._inbox for each in port.server.connections)))
        port.do(lambda: [each.check(each._since + 21.0) for each in list(port.server.connections)])
        assert sock.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert port.outcome("too_slow") == 1
        assert served(port)


def test_a_body_that_is_too_large_is_refused_before_it_comes() -> None:
    with listening() as port:
        assert ask(port, request(b"", size=MAX_BYTES + 1)).startswith(b"HTTP/1.1 413 ")
        assert ask(port, request(b"", size=5000, path=b"/metrics")).startswith(b"HTTP/1.1 413 ")
        assert port.outcome("too_large") == 2
        assert served(port)


def test_nothing_is_unpacked() -> None:
    with listening() as port:
        assert ask(port, request(b"\x1f\x8b" * 50, b"Content-Encoding: gzip")).startswith(b"HTTP/1.1 415 ")
        assert port.outcome("garbage") == 1


def test_all_that_is_arriving_together_is_bounded() -> None:
    with listening() as port:
        port.server.limits.held_bytes = 100_000
        socks = [socket.create_connection(("127.0.0.1", port.number), timeout=20) for _ in range(8)]
        for sock in socks:
            sock.sendall(request(b" " * 20_000, size=1_000_000))
        until(lambda: port.outcome("busy") >= 1)
        assert port.do(lambda: port.server.held) <= 100_000
        assert served(port)
        for sock in socks:
            sock.close()
        until(lambda: port.do(lambda: port.server.held) == 0)


def test_a_node_that_reports_without_end_is_held_back_and_no_other_is() -> None:
    with listening() as port:
        body = body_of("n1")
        with socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
            answers = b""
            for _ in range(2500):
                sock.sendall(request(body))
                answers += sock.recv(1 << 16)
        assert answers.count(b"HTTP/1.1 200 ") >= 300
        assert port.outcome("too_often") == answers.count(b"HTTP/1.1 429 ") > 50
        assert served(port, "n2")


def test_reports_of_an_address_are_counted_before_their_bodies_come() -> None:
    with listening(address_of={}.get) as port:
        door, head = port.door, parse(request(b"", size=8 * 1024**2))
        outcomes = [door.admit(head, "10.0.0.1") for _ in range(10)]
        assert [each is None for each in outcomes] == [True] * 8 + [False] * 2
        assert door.admit(head, "10.0.0.2") is None
        assert door.admit(head, "127.0.0.1") is None


def parse(data: bytes):  # type: ignore[no-untyped-def]
    from slurm_watchdog.wire.http_messages import parse_head

    return parse_head(data.partition(b"\r\n\r\n")[0])


def test_a_client_that_does_not_read_its_answers_is_closed() -> None:
    with listening() as port:
        port.server.limits.unread_bytes = 100_000
        ask_without_reading(port)


def ask_without_reading(port: Port) -> None:
    with socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            for _ in range(3000):
                sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 20)
                if not port.do(lambda: port.server.connections):
                    break
        except OSError:
            pass
        until(lambda: not port.do(lambda: port.server.connections))
        assert served(port)


def test_a_body_in_very_many_pieces_costs_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = []
    from slurm_watchdog.wire import http_server

    real = http_server.parse_head
    monkeypatch.setattr(http_server, "parse_head", lambda data: (heads.append(1), real(data))[1])
    with listening() as port, socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request(body_of("n1")):
            sock.sendall(bytes([byte]))
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert len(heads) == 1


@pytest.mark.parametrize(
    ("mode", "taken"),
    [(0o600, True), (0o640, True), (0o440, True), (0o644, False), (0o620, False), (0o660, False)],
)
def test_the_page_s_password_may_be_read_by_its_group_and_by_nobody_else(
    tmp_path: Path, mode: int, taken: bool
) -> None:
    file = tmp_path / "token"
    file.write_text("s" * 32 + "\n")
    file.chmod(mode)
    if taken:
        assert read_page_token(str(file)) == "s" * 32
        return
    with pytest.raises(ValueError, match="chmod 600"):
        read_page_token(str(file))


def test_until_slurm_has_said_which_nodes_there_are_agents_keep_their_reports() -> None:
    """A controller that starts refused them for good, and they were dropped."""
    known: dict[str, str] = {}
    with listening(address_of=known.get, knows_nodes=lambda: bool(known)) as port:
        early = port.door.answer(Request("POST", "/v1/report", "", body_of("n1"), "10.0.0.1"))
        assert isinstance(early, Answer)
        assert early.status == 503
        known["n1"] = "10.0.0.1"
        answers = [
            port.door.answer(Request("POST", "/v1/report", "", body_of(node), "10.0.0.1")) for node in ("n1", "n2")
        ]
        assert [each.status for each in answers if isinstance(each, Answer)] == [200, 403]
        assert (port.outcome("busy"), port.outcome("wrong_node")) == (1, 1)
