"""The agents' port: what it understands, what it refuses, and that nobody can hold it up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slurm_watchdog.wire.http_messages import MAX_HEAD, Answer, BadRequest, Head, Request, parse_head
from slurm_watchdog.wire.http_server import Server

MAX_BODY = 1000
Talk = Callable[["Place"], Awaitable[Any]]


class Place:
    """A server on a free port, what it was asked and what it refused."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.refused: Counter[str] = Counter()
        self.server = Server(self.handle, self.admit, self.refuse, MAX_BODY, deadline_s=20.0)
        self.port = 0

    def handle(self, request: Request) -> Answer | Awaitable[Answer]:
        self.requests.append(request)
        if request.path == "/later":
            return self.later(request)
        if request.path == "/fails":
            raise RuntimeError("a defect")
        return Answer(b"got %d" % len(request.body))

    async def later(self, request: Request) -> Answer:
        await asyncio.sleep(0.01)
        return Answer(b"later")

    def admit(self, head: Head, remote: str) -> Answer | None:
        return self.refuse("unauthorized", 401, "no") if head.authorization == "Bearer wrong" else None

    def refuse(self, outcome: str, status: int, sentence: str) -> Answer:
        self.refused[outcome] += 1
        return Answer(sentence.encode(), status)

    async def say(self, *parts: bytes, answers: int = 1) -> list[tuple[int, bytes]]:
        """Sends parts with a pause between them; returns the status and body of that many answers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.01)
            return [await asyncio.wait_for(read_answer(reader), 10) for _ in range(answers)]
        finally:
            writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split()[1])
    size = int(head.lower().partition(b"content-length:")[2].split()[0])
    return status, await reader.readexactly(size)


def with_server(talk: Talk) -> Any:
    async def run() -> Any:
        place = Place()
        place.port = await place.server.start("127.0.0.1", 0, 10)
        try:
            return await talk(place)
        finally:
            await place.server.cleanup()

    return asyncio.run(run())


def post(body: bytes, *lines: bytes, path: bytes = b"/v1/report") -> bytes:
    head = b"".join(line + b"\r\n" for line in (b"Host: x", b"Content-Length: %d" % len(body), *lines))
    return b"POST %b HTTP/1.1\r\n%b\r\n%b" % (path, head, body)


def test_requests_on_one_connection_are_answered_in_their_order_however_they_are_cut() -> None:
    async def talk(place: Place) -> None:
        two = post(b"abc") + post(b"12345")
        assert await place.say(two, answers=2) == [(200, b"got 3"), (200, b"got 5")]
        assert await place.say(*(two[i : i + 7] for i in range(0, len(two), 7)), answers=2) == [
            (200, b"got 3"),
            (200, b"got 5"),
        ]
        assert {request.remote for request in place.requests} == {"127.0.0.1"}

    with_server(talk)


def test_an_answer_that_takes_its_time_does_not_change_the_order() -> None:
    async def talk(place: Place) -> None:
        both = post(b"", path=b"/later") + post(b"x")
        assert await place.say(both, answers=2) == [(200, b"later"), (200, b"got 1")]

    with_server(talk)


def test_a_request_that_fails_is_an_answer_and_the_next_one_is_served() -> None:
    async def talk(place: Place) -> None:
        both = post(b"", path=b"/fails") + post(b"x")
        first, second = await place.say(both, answers=2)
        assert (first[0], second) == (500, (200, b"got 1"))

    with_server(talk)


@pytest.mark.parametrize(
    ("said", "status", "outcome"),
    [
        (b"\x00\xff\x00\r\n\r\n", 400, "garbage"),
        (b"GET /\r\n\r\n", 400, "garbage"),
        (b"GET / HTTP/2.0\r\n\r\n", 400, "garbage"),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400, "garbage"),
        (b"GET / HTTP/1.1\r\nname : value\r\n\r\n", 400, "garbage"),
        (b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400, "garbage"),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "garbage"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411, "garbage"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413, "too_large"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", 400, "garbage"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD + 10), 431, "garbage"),
        (
            b"POST / HTTP/1.1\r\nAuthorization: Bearer wrong\r\nContent-Length: 900\r\n\r\n",
            401,
            "unauthorized",
        ),
    ],
)
def test_garbage_on_the_port_is_refused_counted_and_the_connection_closed(
    said: bytes, status: int, outcome: str
) -> None:
    async def talk(place: Place) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(said)
        assert (await asyncio.wait_for(read_answer(reader), 10))[0] == status
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert place.refused == {outcome: 1}
        assert not place.requests

    with_server(talk)


def test_a_request_that_does_not_end_and_a_connection_that_nobody_uses_are_closed() -> None:
    async def talk(place: Place) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(post(b"abc")[:-1])
        await asyncio.sleep(0.05)
        for connection in list(place.server.connections):
            connection.check(connection._since + 21.0)
        assert (await asyncio.wait_for(read_answer(reader), 10))[0] == 408
        assert place.refused == {"too_slow": 1}
        for connection in list(place.server.connections):
            connection.check(connection._since + 121.0)
        assert await asyncio.wait_for(idle.read(), 10) == b""
        writer.close()
        idle_writer.close()

    with_server(talk)


def test_a_connection_that_breaks_in_the_middle_is_counted() -> None:
    async def talk(place: Place) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(post(b"abc")[:-1])
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        assert place.refused == {"cut_off": 1}
        assert not place.server.connections

    with_server(talk)


def test_the_client_says_whether_the_connection_stays() -> None:
    assert parse_head(b"GET / HTTP/1.1").keep
    assert not parse_head(b"GET / HTTP/1.0").keep
    assert not parse_head(b"GET / HTTP/1.1\r\nConnection: Close").keep
    assert parse_head(b"GET /metrics?x=1 HTTP/1.1").path == "/metrics"
    with pytest.raises(BadRequest):
        parse_head(b"")
