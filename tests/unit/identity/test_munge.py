"""MUNGE, with a munged of our own: who is believed, what can't be shown twice, and that a munged that hangs
holds nobody up."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.agent.courier.munge import Munge, MungeController
from slurm_watchdog.agent.courier.streams import AuthenticationFailed
from slurm_watchdog.controller.app import uid_of
from slurm_watchdog.controller.ingest.endpoint import AgentCredentials
from slurm_watchdog.identity.munge_library import (
    MAX_HANGING,
    BadCredential,
    Credential,
    MungeLibrary,
    MungeUnavailable,
)
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.frames import HELLO, PROOF, REPORT, TAKEN, FrameError, hello, offer, pack
from tests.builders.identity_door import Agent, Port, body_of, listening, until, url
from tests.builders.sending import sending
from tests.munged import THERE, Munged, munged

needs_munge = pytest.mark.skipif(
    os.geteuid() != 0 or not THERE, reason="a munged of our own needs root and the package munge"
)
NOBODY = 65534
Encode = Callable[[bytes], str]


@pytest.fixture(scope="module", name="munged")
def munged_of_this_module() -> Iterator[Munged]:
    with munged() as found:
        yield found


def opened(munged: Munged, agents: frozenset[int] = frozenset({0}), **limits: float) -> dict[str, Any]:
    return {"identity": AgentCredentials(0, agents, MungeLibrary(munged.socket, **limits))}


@pytest.fixture
def port(munged: Munged) -> Iterator[Port]:
    with listening(**opened(munged)) as port:
        yield port


def agent(port: Port, encode: Encode, node: str = "n1") -> Agent:
    return Agent(MungeController(url(port), node, encode))


def by(munged: Munged, user: str = "0", **options: Any) -> Encode:
    return Munge(user, munged.socket, **options).encode


@needs_munge
def test_a_node_proves_itself_once_and_then_each_report(port: Port, munged: Munged) -> None:
    one = agent(port, by(munged))
    for sequence in range(5):
        assert one.report("n1", sequence) == "taken"
    assert [each.sequence for each in port.reports] == [0, 1, 2, 3, 4]
    assert port.all_refused() == {}
    one.close()


@needs_munge
def test_a_stream_is_of_one_node(port: Port, munged: Munged) -> None:
    one = agent(port, by(munged))
    assert one.report("n1") == "taken"
    assert one.report("n2") == "wrong_node"
    assert [each.node for each in port.reports] == ["n1"]
    lying = agent(port, lambda payload: by(munged)(payload.replace(b" n1 ", b" n2 ")))
    assert (lying.report(), lying.why) == ("wrong_node", "the credential is of 'n2', and not of 'n1'")


@needs_munge
def test_another_user_s_credential_is_refused(port: Port, munged: Munged) -> None:
    command = Munge("0", munged.socket).argv

    def as_nobody(payload: bytes) -> str:
        done = subprocess.run(command, input=payload, capture_output=True, timeout=20, check=True, user=NOBODY)
        return done.stdout.decode().strip()

    thief = agent(port, as_nobody)
    assert thief.report() == "unauthorized"
    assert f"made by user {NOBODY}" in thief.why
    assert not port.reports


@needs_munge
def test_a_credential_that_others_could_have_read_or_that_is_not_for_us_is_refused(port: Port, munged: Munged) -> None:
    other = agent(port, by(munged, str(NOBODY)))
    assert other.report() == "unauthorized"
    assert "MUNGE says: Unauthorized credential" in other.why

    def for_anybody(*arguments: str) -> Encode:
        argv = ["munge", "--socket", munged.socket, *arguments]
        return lambda payload: (
            subprocess.run(argv, input=payload, capture_output=True, timeout=20, check=True).stdout.decode().strip()
        )

    for encode in (for_anybody(), for_anybody("--restrict-uid", "0", "--cipher", "none")):
        one = agent(port, encode)
        assert one.report() == "unauthorized"
        assert "not for user 0 alone" in one.why
    assert port.outcome("unauthorized") == 3


class Tap:
    """A socket that keeps what went through it, as somebody on the way would; `change` may make something else of it."""

    def __init__(self, inner: socket.socket, change: Callable[[bytes], bytes] = lambda data: data):
        self.inner, self.change = inner, change
        self.said: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.said.append(data)
        self.inner.sendall(data)

    def recv(self, size: int) -> bytes:
        return self.change(self.inner.recv(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Tapped(MungeController):
    change: Callable[[bytes], bytes] = staticmethod(lambda data: data)
    taps: list[Tap]

    def connect(self) -> socket.socket:
        self.taps = [*getattr(self, "taps", []), Tap(super().connect(), self.change)]
        return self.taps[-1]  # type: ignore[return-value]


@needs_munge
def test_nothing_that_was_heard_on_the_way_can_be_said_again(port: Port, munged: Munged) -> None:
    one = Agent(Tapped(url(port), "n1", by(munged)))
    assert one.report() == "taken"
    greeting, proof, report = one.controller.taps[0].said  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", port.number), timeout=20) as thief:
        thief.sendall(greeting + proof + report)
        while thief.recv(1 << 16):
            pass
    assert port.outcome("replayed") == 1, "the credential is for another stream"
    assert one.link is not None
    one.link._sock.sendall(report)
    until(lambda: port.outcome("unauthorized") == 1)  # on the same stream each frame has its own number
    assert len(port.reports) == 1
    assert one.report("n1", 2) in ("unauthorized", "taken")
    assert agent(port, by(munged)).report("n1", 3) == "taken"


@needs_munge
@pytest.mark.parametrize("change", ["changed", "cut", "swapped"])
def test_a_frame_that_is_changed_left_out_or_comes_out_of_its_turn_ends_the_stream(
    port: Port, munged: Munged, change: str
) -> None:
    one = agent(port, by(munged))
    assert one.report() == "taken"
    link = one.link
    assert link is not None and link._seal is not None
    first, second = (pack(REPORT, body_of("n1", number), link._seal) for number in (2, 3))
    said = {"changed": first[:-1] + bytes([first[-1] ^ 1]), "cut": second, "swapped": second + first}[change]
    link._sock.sendall(said)
    until(lambda: port.outcome("unauthorized") == 1)
    assert [each.sequence for each in port.reports] == [1]


@needs_munge
def test_answers_of_somebody_else_are_not_believed(port: Port, munged: Munged) -> None:
    """Commands to agents come in answers."""
    one = Agent(Tapped(url(port), "n1", by(munged)))
    assert one.report() == "taken"
    one.controller.taps[0].change = lambda data: pack(TAKEN, b"\x80" * 40)  # type: ignore[attr-defined]
    with pytest.raises(FrameError, match="changed on its way"):
        one.report("n1", 2)
    other = Tapped(url(port), "n1", by(munged))
    other.change = lambda data: data.replace(b"o", b"p") if len(data) == 21 else data
    with pytest.raises(AuthenticationFailed, match="another program answers"):
        other.open(5.0)


def key_in(credential: Credential, challenge: str = "c" * 32) -> bytes:
    return AgentCredentials(7, frozenset({0}), MungeLibrary()).key_in(credential, "n1", challenge)


OFFER = offer(b"\xaa" * 32, "n1", "c" * 32)


@pytest.mark.parametrize(
    ("credential", "outcome"),
    [
        (Credential(1, 7, True, OFFER), "unauthorized"),
        (Credential(0, 8, True, OFFER), "unauthorized"),
        (Credential(0, 7, False, OFFER), "unauthorized"),
        (Credential(0, 7, True, offer(b"\xaa" * 32, "n1", "d" * 32)), "replayed"),
        (Credential(0, 7, True, offer(b"\xaa" * 32, "n2", "c" * 32)), "wrong_node"),
        (Credential(0, 7, True, offer(b"\xaa", "n1", "c" * 32)), "unauthorized"),
        (Credential(0, 7, True, OFFER.replace(b"aa", b"zz")), "unauthorized"),
        (Credential(0, 7, True, OFFER + b" more"), "unauthorized"),
        *((Credential(0, 7, True, payload), "unauthorized")
          for payload in (b"", b"{}", b"  ", b"\xff", b" " * 5000)),
    ],
)  # fmt: skip
def test_a_credential_opens_the_stream_that_it_was_made_for_and_no_other(credential: Credential, outcome: str) -> None:
    good = Credential(0, 7, True, OFFER)
    assert key_in(good) == b"\xaa" * 32
    with pytest.raises(FrameError) as raised:
        key_in(credential)
    assert raised.value.args[0] == outcome
    with pytest.raises(FrameError):
        key_in(good, "")  # no challenge was given


def late_answer(port: Port, credential: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port.number), timeout=20) as late:
        late.sendall(pack(HELLO, hello("n2")))
        late.recv(1000)
        late.sendall(pack(PROOF, credential.encode()))
        return b"".join(iter(lambda: late.recv(1000), b""))


@needs_munge
def test_a_munged_that_hangs_holds_up_neither_the_controller_nor_the_agent(munged: Munged) -> None:
    with listening(**opened(munged, deadline_s=0.5, pause_s=0.2)) as port:
        known = agent(port, by(munged))
        assert known.report() == "taken"
        credential = by(munged)(b"x")
        munged.hang()
        try:
            with pytest.raises(AuthenticationFailed, match="munge gave no answer within"):
                by(munged, deadline_s=0.5)(b"x")
            assert b"no_munge" in late_answer(port, credential)
            assert known.report("n1", 2) == "taken", "a stream that was opened goes on"
            assert port.outcome("no_munge") >= 1
        finally:
            munged.go_on()
        until(lambda: agent(port, by(munged), "n3").report("n3") == "taken", 60)


@needs_munge
def test_clients_that_go_away_take_no_thread_each(munged: Munged) -> None:
    before = set(threading.enumerate())
    with listening(**opened(munged)) as port:
        for _ in range(20):
            credential = by(munged)(b"x")
            with socket.create_connection(("127.0.0.1", port.number), timeout=10) as sock:
                sock.sendall(pack(HELLO, hello("n1")))
                sock.recv(100)
                sock.sendall(pack(PROOF, credential.encode()))
        assert agent(port, by(munged), "n2").report("n2") == "taken"
        assert len(set(threading.enumerate()) - before) <= 3, "the port's own, and one of libmunge"


@needs_munge
def test_a_munged_that_hangs_is_not_asked_by_ever_more_threads(munged: Munged) -> None:
    async def ask() -> None:
        library = MungeLibrary(munged.socket, deadline_s=0.05, pause_s=0.0)
        before = set(threading.enumerate())
        munged.hang()
        try:
            for _ in range(3 * MAX_HANGING):
                with pytest.raises(MungeUnavailable):
                    await library.decode("MUNGE:AAAA:")
            assert len(set(threading.enumerate()) - before) <= MAX_HANGING
        finally:
            munged.go_on()
        for _ in range(100):
            with pytest.raises(BadCredential):
                await library.decode("MUNGE:AAAA:")

    asyncio.run(ask())


def test_without_munge_it_is_said_and_is_not_tried_all_the_time(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        library = MungeLibrary(name="libmunge.so.999")
        for _ in range(3):
            with pytest.raises(MungeUnavailable, match="libmunge"):
                await library.decode("MUNGE:AAAA:")

    asyncio.run(ask())
    assert caplog.text.count("cannot verify") == 1


@needs_munge
def test_what_is_made_for_one_user_is_read_by_him_alone(munged: Munged) -> None:
    async def ask() -> None:
        library = MungeLibrary(munged.socket)
        mine = await library.decode(made := await library.encode(b"a secret", os.geteuid()))
        assert (mine.uid, mine.restricted_to, mine.encrypted, mine.payload) == (0, 0, True, b"a secret")
        with pytest.raises(BadCredential) as raised:
            await library.decode(made)
        assert raised.value.replayed
        with pytest.raises(BadCredential, match="Unauthorized"):
            await library.decode(await library.encode(b"a secret", NOBODY))

    asyncio.run(ask())


@needs_munge
def test_bad_credential_has_another_error_than_an_unavailable_munged(munged: Munged) -> None:
    async def ask() -> None:
        process = MungeLibrary(munged.socket)
        with pytest.raises(BadCredential):
            await process.decode("MUNGE:AAAA:")
        away = MungeLibrary("/nonexistent/socket")
        with pytest.raises(MungeUnavailable):
            await away.decode("MUNGE:AAAA:")

    asyncio.run(ask())


def test_an_agent_says_what_is_wrong_when_the_two_ends_are_not_set_alike() -> None:
    with listening() as port, pytest.raises(AuthenticationFailed, match=r"is security\.mode the same there"):
        agent(port, lambda payload: "").report()


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
    ours = MungeController(url(port), "n1", by(munged, deadline_s=0.3))
    with sending(ours) as (sender, _):
        munged.hang()
        try:
            sender.put(Report(node="n1", boot_id="b", agent_id="a", sequence=1))
            until(lambda: "munge gave no answer" in sender.problem)
        finally:
            munged.go_on()
        ours.encode = by(munged)
        until(lambda: [each.sequence for each in port.reports] == [1])


def test_users_are_numbers_or_names() -> None:
    assert (uid_of("998"), uid_of("root"), uid_of("no-such-user-here")) == (998, 0, None)


@needs_munge
def test_a_stream_s_key_is_in_no_log_metric_message_or_answer(
    port: Port, munged: Munged, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    offers: list[bytes] = []

    def encode(payload: bytes) -> str:
        offers.append(payload)
        return by(munged)(payload)

    one = Agent(Tapped(url(port), "n1", encode))
    assert one.report() == "taken"
    said = b"".join(one.controller.taps[0].said)  # type: ignore[attr-defined]
    assert one.report("n2") == "wrong_node"
    (made,) = offers
    credential, key = Credential(0, 7, True, made), made.split()[0].decode()
    shown = [caplog.text.encode(), port.metrics.text(), one.why.encode(), said, repr(credential).encode()]
    for form in (bytes.fromhex(key), key.encode(), repr(bytes.fromhex(key))[2:-1].encode()):
        assert not any(form in text for text in shown)
