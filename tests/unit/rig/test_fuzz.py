"""A bounded share of the fuzzing (`make fuzz N=10000000` is the whole of it): no body harms the controller,
and each is taken or refused."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_watchdog.wire.codec import MAX_BYTES, WireError, decode_reply, decode_report
from tests.builders.identity_door import body_of, listening, until
from tests.fuzz.bodies import BOMB, Bodies
from tests.fuzz.place import Place, Unharmed, fuzz

NUMBER = 2500
ON_THE_SOCKET = 400


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_a_body_says_it_is_taken_or_refused_and_the_controller_goes_on_judging(
    tmp_path: Path, seed: int
) -> None:
    place = Place(str(tmp_path / "journal.sqlite"))
    with place.time():
        asyncio.run(fuzz(place, NUMBER, seed))
    kinds = {name.split()[0] for name in place.outcomes}
    assert kinds >= {"valid", "nearly", "raw", "cut", "flipped", "spliced", "random", "bomb"}
    for kind in ("random", "bomb", "cut"):
        assert not place.outcomes[f"{kind} 200"]
    assert place.outcomes["valid 200"] > NUMBER / 10, "what keeps to the schema gets to where it could do harm"
    refused = sum(count for name, count in place.outcomes.items() if not name.endswith(" 200"))
    counted = place.counted()
    assert sum(counted.get(outcome, 0) for outcome in ("garbage", "too_often", "wrong_node", "too_large")) == refused


def test_a_body_that_does_harm_is_found(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "journal.sqlite"))

    async def break_it() -> None:
        await place.open()
        place.door._accept = lambda report, size: {}["missing"]  # type: ignore[assignment,misc,index]
        with pytest.raises(KeyError):
            await place.give("good", body_of("n1"))
        await place.close()

    with place.time():
        asyncio.run(break_it())
    assert issubclass(Unharmed, AssertionError)


@pytest.mark.parametrize("decode", [decode_report, decode_reply])
def test_both_ends_of_the_wire_refuse_what_they_can_t_read_with_one_kind_of_error(
    decode: Callable[[bytes], object],
) -> None:
    bodies = Bodies(5)
    for _ in range(1000):
        _, body = bodies.next()
        try:
            decode(body)
        except WireError as error:
            assert len(str(error)) < 2000
    for body in (b'{"controller_id":"\xb8","node":"\xb8"}', b"[" * 200_000, b" " * (MAX_BYTES + 1), BOMB):
        with pytest.raises(WireError):
            decode(body)


@pytest.mark.parametrize(
    ("number", "taken"),
    [(2**63 - 1, True), (-(2**63), True), (2**63, False), (10**30, False), (-(10**400), False)],
)
def test_a_whole_number_has_64_bits(number: int, taken: bool) -> None:
    """Python's have no end: one of 400 digits was kept, and ended a judgement later when it met a float."""
    body = b'{"node":"n1","boot_id":"b","agent_id":"a","sequence":1,"processes":[{"pid":1,"start_ticks":1,"job_id":"7","role":"rank","comm":"x","state":"S","uid":1,"io_bytes":%d}]}'
    if taken:
        assert decode_report(body % number).processes[0].io_bytes == number
        return
    with pytest.raises(WireError, match="64 bits"):
        decode_report(body % number)


def test_digits_in_a_text_are_no_number() -> None:
    assert decode_report(b'{"node":"%b","boot_id":"b","agent_id":"a","sequence":1}' % (b"7" * 40)).node == "7" * 40


def wrapped(rng: random.Random, body: bytes) -> bytes:
    """A body in a request, which may be as odd as the body."""
    lines = [
        b"POST /v1/report HTTP/1.1", b"Host: x", rng.choice((b"Content-Length: %d" % len(body),) * 6 + (
            b"Content-Length: %d" % (len(body) + 5), b"Content-Length: -1", b"Content-Length: 99999999999", b"content-length:0x10",
            b"Transfer-Encoding: chunked", b"Content-Length: 1\r\nContent-Length: 2", b"Content-Encoding: gzip\r\nContent-Length: 3", b"X: y",
        )),
    ]  # fmt: skip
    if rng.random() < 0.2:
        lines.insert(
            rng.randrange(3),
            rng.choice(
                (
                    b"",
                    b" folded",
                    b"no colon",
                    b": empty",
                    b"A: " + b"b" * 20_000,
                    b"\x00\xff: \x00",
                    b"Expect: 100-continue",
                )
            ),
        )
    request = b"\r\n".join(lines) + b"\r\n\r\n" + body
    return request[: rng.randrange(len(request))] if rng.random() < 0.1 else request


def test_the_same_over_a_socket_and_a_good_report_is_taken_in_between() -> None:
    rng, bodies, answers = random.Random(3), Bodies(3), Counter[bytes]()
    with listening() as port:
        for number in range(ON_THE_SOCKET):
            _, body = bodies.next()
            with socket.create_connection(("127.0.0.1", port.number), timeout=30) as sock:
                try:
                    sock.sendall(wrapped(rng, body))
                    sock.shutdown(socket.SHUT_WR)
                    answers[sock.recv(1 << 16)[9:12]] += 1
                except OSError as error:  # ENOTCONN: it was reset before the shutdown
                    if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                        raise
                    answers[b"reset"] += 1
            if number % 50 == 0:
                good = body_of("n3", number + 1)
                with socket.create_connection(("127.0.0.1", port.number), timeout=30) as sock:
                    sock.sendall(b"POST /v1/report HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(good) + good)
                    assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        until(lambda: port.do(lambda: len(port.server.connections)) == 0)
        assert port.do(lambda: (port.server.held, port.server.limits.total)) == (0, 0)
        assert b"500" not in answers
        assert set(answers) <= {
            b"100",
            b"200",
            b"400",
            b"403",
            b"411",
            b"413",
            b"415",
            b"429",
            b"431",
            b"",
            b"reset",
        }
        assert answers[b"400"] > 50
        assert port.outcome("garbage") + port.outcome("cut_off") + port.outcome("too_large") > ON_THE_SOCKET / 4
