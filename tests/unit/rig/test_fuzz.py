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

import msgspec
import pytest
from msgspec import inspect

from slurm_watchdog.model.observations import Process
from slurm_watchdog.wire.codec import WireError, decode_reply, decode_report
from slurm_watchdog.wire.frames import HELLO, MAX_BYTES, PROOF, REPORT, hello, pack
from tests.builders.identity_door import agent, body_of, listening, until
from tests.builders.wire_fill import filled
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
        assert not place.outcomes[f"{kind} taken"]
    assert place.outcomes["valid taken"] > NUMBER / 10, "what keeps to the schema gets to where it could do harm"
    refused = sum(count for name, count in place.outcomes.items() if not name.endswith(" taken"))
    counted = place.counted()
    assert sum(counted.get(outcome, 0) for outcome in ("garbage", "too_often", "wrong_node", "too_large")) == refused


def test_a_body_that_does_harm_is_found(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "journal.sqlite"))

    async def break_it() -> None:
        await place.open()
        place.door._take = lambda report, before: {}["missing"]  # type: ignore[assignment,misc,index]
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
    for body in (b"\x82\xadcontroller_id\xa1\xb8\xa4node\xa1\xb8", b"\x91" * 200_000, b" " * (MAX_BYTES + 1), BOMB):
        with pytest.raises(WireError):
            decode(body)


@pytest.mark.parametrize(
    ("number", "taken"),
    [
        (2**63 - 1, True), (-(2**63), True), (2**63, False), (2**64 - 1, False), (1e300, True), (-1e300, True),
        (float("nan"), False), (float("inf"), False), (float("-inf"), False),
    ],
)  # fmt: skip
def test_a_number_is_finite_and_a_whole_one_has_64_bits(number: float, taken: bool) -> None:
    """One that is larger ends in no journal, and with none of these can anything be compared."""
    key = "io_bytes" if isinstance(number, int) else "cpu_s"
    row = filled(inspect.type_info(Process))
    row[Process.__struct_fields__.index(key)] = number
    message = {"node": "n1", "boot_id": "b", "agent_id": "a", "sequence": 1, "processes": [row]}
    body = msgspec.msgpack.encode(message)
    if taken:
        assert getattr(decode_report(body).processes[0], key) == number
        return
    with pytest.raises(WireError, match="a number in it"):
        decode_report(body)


def streamed(rng: random.Random, body: bytes) -> bytes:
    """A body in a frame of a stream, which may be as odd as the body."""
    said = pack(HELLO, hello("n1")) + pack(rng.choice((REPORT,) * 9 + (PROOF, b"?")), body)
    if rng.random() < 0.2:
        at = rng.randrange(40)
        said = said[:at] + rng.randbytes(rng.choice((1, 4, 100))) + said[at + rng.randrange(5) :]
    return said[: rng.randrange(len(said))] if rng.random() < 0.1 else said


def test_the_same_over_a_socket_and_a_good_report_is_taken_in_between() -> None:
    rng, bodies, answers = random.Random(3), Bodies(3), Counter[str]()
    with listening() as port:
        for number in range(ON_THE_SOCKET):
            _, body = bodies.next()
            with socket.create_connection(("127.0.0.1", port.number), timeout=30) as sock:
                heard = b""
                try:
                    sock.sendall(streamed(rng, body))
                    sock.shutdown(socket.SHUT_WR)
                    while more := sock.recv(1 << 16):
                        heard += more
                except OSError as error:  # ENOTCONN: it was reset before the shutdown
                    if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                        raise
                answers[next((each for each in ("failed", "garbage", "wrong_node") if each.encode() in heard), "")] += 1
            if number % 50 == 0:
                assert agent(port, "n3").report("n3", number + 1) == "taken"
        until(lambda: port.do(lambda: len(port.server.connections)) == 0)
        assert port.do(lambda: (port.server.held, port.server.limits.total)) == (0, 0)
        assert not answers["failed"]
        assert answers["garbage"] > 50
        assert port.outcome("garbage") + port.outcome("cut_off") + port.outcome("too_large") > ON_THE_SOCKET / 4
