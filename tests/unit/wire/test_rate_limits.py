"""What one client may take of the agents' port: connections, pace, bytes and time; and that all others are
served meanwhile."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path

import pytest

from slurm_watchdog.agent.courier.streams import Refused
from slurm_watchdog.base import clock
from slurm_watchdog.controller.ingest.endpoint import BYTES_AT_ONCE, REPORTS_AT_ONCE, read_page_token
from slurm_watchdog.wire.frames import HELLO, LENGTH, MAX_BYTES, MAX_UNPROVEN, OPENED, ORDERS, REPORT, hello, pack
from slurm_watchdog.wire.rate_limits import Limits, TokenBuckets, is_loopback, most_connections
from tests.builders.identity_door import Port, agent, body_of, listening, lost, until

HI = pack(HELLO, hello("n1"))


def ask(port: Port, *said: bytes) -> bytes:
    """The beginning of what is answered, to everything in a connection of its own."""
    with socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
        for each in said:
            sock.sendall(each)
        return sock.recv(1 << 16)


def served(port: Port, node: str = "good") -> bool:
    one = agent(port, node)
    try:
        return one.report(node) == "taken"
    finally:
        one.close()


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
    reports, sizes = (TokenBuckets(burst, 0.0) for burst in (REPORTS_AT_ONCE, BYTES_AT_ONCE))
    assert all(reports.acquire("n1", 0.0) and sizes.acquire("n1", 0.0, size) for _ in range(kept))
    with listening(interval_s=0.1) as port:
        assert port.door._reports.per_s == 40.0, "and one that reports ten times a second may"


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
                sock.sendall(HI)
                assert OPENED in sock.recv(1000)
        assert port.refused("too_many") == 1
        until(lambda: port.do(lambda: port.server.limits.total) == 0)
        assert served(port)


def test_a_connection_on_which_nothing_comes_is_closed_after_the_time_of_a_request() -> None:
    with listening() as port, socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
        until(lambda: port.do(lambda: len(port.server.connections)) == 1)
        port.do(lambda: [each.check(each.since + 21.0) for each in list(port.server.connections)])
        assert sock.recv(10) == b""


@pytest.mark.parametrize(
    "part",
    [b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Le", HI[:2], HI[:-1], HI + LENGTH.pack(100) + b"{"],
)
def test_what_comes_slowly_is_ended_wherever_it_is(part: bytes) -> None:
    with listening() as port, socket.create_connection(("127.0.0.1", port.number), timeout=20) as sock:
        for byte in part:
            sock.sendall(bytes([byte]))
        until(lambda: port.do(lambda: port.server.held) == len(part.removeprefix(HI)))
        port.do(lambda: [each.check(clock.monotonic() + 21.0) for each in list(port.server.connections)])
        said = b"".join(iter(lambda: sock.recv(1000), b""))
        assert b"has to arrive" in said or (part.startswith(b"GET") and not said)
        assert port.outcome("too_slow") == (0 if part.startswith(b"GET") else 1)
        assert served(port)


def test_a_frame_that_is_too_large_is_refused_before_it_comes() -> None:
    with listening() as port:
        assert b"too_large" in ask(port, LENGTH.pack(MAX_UNPROVEN + 1)), "before it is known who comes"
        one = agent(port).controller.open(20.0)
        one._sock.sendall(LENGTH.pack(MAX_BYTES + 100))
        with pytest.raises(Refused, match="the limit is"):
            one.receive()
        assert ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n").startswith(
            b"HTTP/1.1 413 "
        )
        assert port.outcome("too_large") == 2
        assert served(port)


def test_all_that_is_arriving_together_is_bounded() -> None:
    with listening() as port:
        port.server.limits.held_bytes = 100_000
        streams = [agent(port, f"n{number}").controller.open(20.0) for number in range(8)]
        for each in streams:
            each._sock.sendall(LENGTH.pack(1_000_000) + b" " * 20_000)
        until(lambda: port.outcome("busy") >= 1)
        assert port.do(lambda: port.server.held) <= 100_000
        assert served(port)
        for each in streams:
            each.close()
        until(lambda: port.do(lambda: port.server.held) == 0)


def test_a_node_that_reports_without_end_is_held_back_and_no_other_is() -> None:
    with listening() as port:
        one, answers = agent(port), Counter[str]()
        for _ in range(2500):
            answers[one.report()] += 1
        assert answers["taken"] >= 300
        assert port.outcome("too_often") == answers["too_often"] > 50
        assert served(port, "n2")


def test_reports_of_an_address_are_counted_before_they_are_read() -> None:
    with listening(address_of={"n1": "127.0.0.1"}.get, is_own=lambda address: False) as port:
        one = agent(port)
        assert one.report() == "taken"
        outcomes = [one.say(b"\xc1" * 8_000_000) for _ in range(10)]
        assert outcomes[0] == "garbage" and outcomes[-1] == "too_often"


def test_an_agent_that_does_not_read_is_closed_and_counted() -> None:
    with listening() as port:
        port.server.limits.unread_bytes = 100_000
        one = agent(port).controller.open(20.0)
        one._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.send(REPORT, body_of("n1"))
        until(lambda: port.do(lambda: port.door._streams["n1"].is_heard))
        stream = port.door._streams["n1"]
        port.do(lambda: [stream.send(ORDERS, b"x" * 10_000) for _ in range(1000)] and None)
        until(lambda: lost(port, "slow_reader") == 1)
        assert served(port)


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
    with listening(address_of=known.get, knows_nodes=lambda: bool(known), is_own=lambda address: False) as port:
        assert agent(port).report() == "busy"
        known["n1"] = "127.0.0.1"
        assert [agent(port, node).report(node) for node in ("n1", "n2")] == ["taken", "wrong_node"]
        assert (port.outcome("busy"), port.outcome("wrong_node")) == (1, 1)
