"""The agents' port: what it understands, what it refuses, and that nobody can hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slurm_watchdog.wire.port import MAX_HEAD, Port, refusal
from slurm_watchdog.wire.rate_limits import Limits

MAX_BODY = 1000
Talk = Callable[["Place"], Awaitable[Any]]


class Place:
    """A server on a free port, what it was asked and what it refused."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes([web.route("*", "/later", self.later), web.route("*", "/fails", self.fails)])
        app.add_routes([web.get("/much", self.much), web.route("*", "/{path:.*}", self.handle)])
        self.server = Port(app, admit=self.admit)
        self.port = 0
        self.much_bytes = 1_000_000

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(request)
        return web.Response(body=b"got %d" % len(await request.read()))

    async def later(self, request: web.Request) -> web.Response:
        await asyncio.sleep(0.01)
        return web.Response(body=b"later")

    async def fails(self, request: web.Request) -> web.Response:
        raise RuntimeError("a defect")

    async def much(self, request: web.Request) -> web.Response:
        return web.Response(body=b"x" * self.much_bytes)

    def admit(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != "Bearer wrong":
            return None
        return refusal(401, "no")

    def later_by(self, seconds: float) -> None:
        for connection in list(self.server.connections):
            connection.check(self.server.now() + seconds)

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


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x00\xff\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"no header\r\n\r\n", 400),
        (HEAD + b"name : value\r\n\r\n", 400),
        (HEAD + b"Content-Length: -5\r\n\r\n", 400),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1001\r\n\r\n", 413),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * MAX_HEAD, None),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"X: " + b"x" * MAX_HEAD, 400),
        (HEAD + b"A: b\r\n" * MAX_HEAD, None),
        (HEAD + b"Authorization: Bearer wrong\r\nContent-Length: 900\r\n\r\n", 401),
    ],
)
def test_garbage_on_the_port_is_refused_and_the_connection_closed(said: bytes, status: int | None) -> None:
    async def talk(place: Place) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(said)
        if status is not None:
            assert (await asyncio.wait_for(read_answer(reader), 10))[0] == status
        with contextlib.suppress(ConnectionError):  # what it sent beyond was not read
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        await until(lambda: not place.server.connections)
        assert not place.requests

    with_server(talk)


def test_a_body_that_is_packed_is_not_unpacked() -> None:
    """A kilobyte may hold a megabyte."""

    async def talk(place: Place) -> None:
        packed = gzip.compress(bytes(1_000_000), 9)[:900]
        assert await place.say(post(packed, b"Content-Encoding: gzip")) == [(200, b"got 900")]

    with_server(talk)


async def until(seen: Callable[[], bool]) -> None:
    for _ in range(1000):
        if seen():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


@pytest.mark.parametrize("said", [HEAD[:-2], b"G"])
def test_a_request_that_does_not_end_and_a_connection_that_nobody_uses_are_closed(said: bytes) -> None:
    async def talk(place: Place) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", place.port)
        used, used_writer = await asyncio.open_connection("127.0.0.1", place.port)
        used_writer.write(post(b"x"))
        assert await read_answer(used) == (200, b"got 1")
        writer.write(said)
        await until(lambda: place.server.held == len(said))
        place.later_by(19.0)
        place.later_by(21.0)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        assert await asyncio.wait_for(idle.read(), 10) == b""
        used_writer.write(post(b"xy"))
        assert await read_answer(used) == (200, b"got 2"), "one that is kept may wait for longer"
        place.later_by(121.0)
        assert await asyncio.wait_for(used.read(), 10) == b""
        assert place.server.held == 0
        for each in (writer, idle_writer, used_writer):
            each.close()

    with_server(talk)


def test_a_body_that_does_not_end_is_answered_and_what_comes_later_is_none() -> None:
    async def talk(place: Place) -> None:
        place.server.deadline_s = 0.2
        assert [status for status, _ in await place.say(post(b"abc")[:-1])] == [408]
        await until(lambda: not place.server.connections)
        assert not place.requests

    with_server(talk)


def test_a_request_that_waited_for_us_is_not_found_slow() -> None:
    async def talk(place: Place) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(post(b"abc")[:20])
        await until(lambda: place.server.held > 0)
        place.server.record_lag(14.0)
        place.later_by(16.0)
        writer.write(post(b"abc")[20:])
        assert await read_answer(reader) == (200, b"got 3")
        writer.close()

    with_server(talk)


def test_a_connection_that_breaks_in_the_middle_leaves_nothing() -> None:
    async def talk(place: Place) -> None:
        for said in (post(b"abc")[:-1], HEAD):
            _, writer = await asyncio.open_connection("127.0.0.1", place.port)
            writer.write(said)
            await until(lambda: bool(place.server.connections))
            writer.close()
            await until(lambda: not place.server.connections)
        assert place.server.held == 0

    with_server(talk)


def test_a_client_that_does_not_read_holds_a_bounded_part_of_what_it_asked_for_and_not_for_long() -> None:
    async def talk(place: Place) -> None:
        place.server.limits.unread_bytes = 100_000
        _, writer = await asyncio.open_connection("127.0.0.1", place.port, limit=1)
        writer.write(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
        (connection,) = place.server.connections
        await until(lambda: unread(connection) > 100_000)
        await asyncio.sleep(0.2)
        assert unread(connection) < 2_000_000
        place.later_by(121.0)
        await until(lambda: not place.server.connections)
        assert await place.say(post(b"x")) == [(200, b"got 1")]
        writer.close()

    def unread(connection: Any) -> int:
        return int(connection.transport.get_write_buffer_size())

    with_server(talk)


@pytest.mark.parametrize("is_own", [False, True])
def test_on_a_unix_socket_the_connections_of_one_user_are_bounded_but_for_the_controllers(
    tmp_path: Path, is_own: bool
) -> None:
    """One member of the group left no operator a connection to pause by."""

    async def go() -> None:
        refused: Counter[str] = Counter()
        limits = Limits(most=5, most_of_one=2, is_own=lambda who: is_own and who == f"user {os.geteuid()}")
        port = Port(web.Application(), limits=limits, count=lambda reason: refused.update((reason,)))
        await port.start_unix(str(tmp_path / "s"))
        clients = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(3)]
        await until(lambda: len(port.connections) == 3 or bool(refused))
        await until(lambda: limits.total == (3 if is_own else 2))
        assert refused == ({} if is_own else {"too_many_of_one_address": 1})
        for _, writer in clients:
            writer.close()
        await port.cleanup()

    asyncio.run(go())


def test_the_client_says_whether_the_connection_stays() -> None:
    async def talk(place: Place) -> None:
        for said, stays in (
            (b"GET / HTTP/1.0\r\n\r\n", False),
            (post(b"", b"Connection: Close"), False),
            (post(b""), True),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
            writer.write(said)
            await read_answer(reader)
            if stays:
                writer.write(said)
                await read_answer(reader)
            else:
                assert await reader.read() == b""
            writer.close()

    with_server(talk)


def test_a_port_that_is_closed_lets_an_answer_under_way_be_sent() -> None:
    async def talk(place: Place) -> None:
        asking = asyncio.create_task(place.say(post(b"", path=b"/later")))
        await until(lambda: bool(place.server.connections))
        await until(lambda: place.server.held == 0)
        await place.server.cleanup()
        assert await asking == [(200, b"later")]

    with_server(talk)
