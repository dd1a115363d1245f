"""Somebody else holds the controller's address. Whatever he answers, no agent obeys him, and he learns no
secret and no report.

The rows are made of the transports that there are and of the commands that the protocol has: a new one of
either is attacked, too.
"""

from __future__ import annotations

import os
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from slurm_watchdog.agent.courier.munge import MungeController
from slurm_watchdog.agent.courier.process import controllers
from slurm_watchdog.agent.courier.streams import Controller, OwnSocket, TcpController
from slurm_watchdog.agent.delivery.spool import Spool
from slurm_watchdog.identity.transport import Transport
from slurm_watchdog.model.protocol import Command, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_reply
from slurm_watchdog.wire.frames import (
    BYE,
    HELLO,
    MAGIC,
    OPENED,
    ORDERS,
    PROOF,
    TAKEN,
    TO_AGENT,
    WELCOME,
    Inbox,
    Seal,
    pack,
)
from tests.as_user import as_user
from tests.builders.identity_door import until
from tests.builders.identity_files import issue, make_authority, node_files, revoke
from tests.builders.sending import DrivenSender, link_to
from tests.builders.wire_fill import filled
from tests.munged import THERE, Munged, munged
from tests.proven_server import serving

COMMANDS: tuple[Any, ...] = get_args(Command)
CONTROLLER, ORDINARY, MALLORY = 0, 1500, 65534
"""Users: of the controller, of one who calls `slurm-watchdog run`, and of the impostor."""
REPORT = Report(node="n1", boot_id="what-only-the-controller-may-read", agent_id="a", sequence=1)
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not THERE, reason="needs root, and the package munge")


def command_of(kind: Any) -> Command:
    """A command of this kind, every field filled."""
    found: Command = msgspec.convert(filled(inspect.type_info(kind)), kind)
    return found


@dataclass
class Impostor:
    """A server at the controller's address. `answers`: (kind of a frame, its body) -> what it says to it."""

    command: Command
    answers: Callable[[Impostor, bytes, bytes], bytes]
    heard: bytearray = field(default_factory=bytearray)
    address: Any = ("127.0.0.1", 0)

    @property
    def reply(self) -> bytes:
        return encode_reply(Reply(controller_id="c", commands=(self.command,)))

    @contextmanager
    def listening(self, uid: int = MALLORY, tls: ssl.SSLContext | None = None) -> Iterator[None]:
        """As a process of `uid` does."""
        impostor = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                inbox = Inbox(10**7)
                while data := self.request.recv(1 << 16):
                    impostor.heard += data
                    inbox.data += data
                    while (frame := inbox.take()) is not None:
                        self.request.sendall(impostor.answers(impostor, *frame))

        class Listening(socketserver.ThreadingMixIn, socketserver.TCPServer):
            daemon_threads = True
            address_family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
            allow_reuse_address = address_family == socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                impostor.heard += b"(hung up)"

        server = as_user(uid, lambda: Listening(self.address, Handler))
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        self.address = server.server_address
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)


def says_yes(impostor: Impostor, kind: bytes, body: bytes) -> bytes:
    """Opens the stream at once, and asks for what it likes."""
    if kind == HELLO:
        return pack(OPENED, b"") + pack(ORDERS, impostor.reply)
    return pack(TAKEN, impostor.reply)


def plays_the_session(impostor: Impostor, kind: bytes, body: bytes) -> bytes:
    """Gives a challenge, takes the credential, and proves what it says with a key of its own."""
    if kind == HELLO:
        return pack(WELCOME, b"0" * 32)
    if kind == PROOF:
        mine = Seal(b"m" * 32, TO_AGENT)
        return pack(OPENED, mine.mac(OPENED)) + pack(ORDERS, impostor.reply, mine)
    return pack(TAKEN, impostor.reply)


def refuses(impostor: Impostor, kind: bytes, body: bytes) -> bytes:
    """Says of everything that it is garbage."""
    return pack(BYE, b"garbage no")


@dataclass
class Stage:
    """What an attack needs."""

    place: Path
    ca: Path
    munge: Munged
    keys: list[bytes] = field(default_factory=list)
    """Of the sessions that the agent wanted to begin."""

    def controller(self, transport: Transport, address: Any) -> Controller:
        """As an agent has it that is set to this transport."""
        if transport == "unix":
            return OwnSocket(address, "n1", ORDINARY)
        url = f"{'https' if transport == 'tls' else 'http'}://localhost:{address[1]}"
        place = str(self.ca / "nodes" / "n1") if transport == "tls" else f"{CONTROLLER}:{self.munge.socket}"
        (found,) = controllers("n1", transport, place, [url])
        if isinstance(found, MungeController):
            encode = found.encode

            def noted(payload: bytes) -> str:
                self.keys.append(bytes.fromhex(payload.split()[0].decode()))
                return encode(payload)

            found.encode = noted  # type: ignore[method-assign]
        return found


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    place = Path(f"/tmp/impostors-{os.getpid()}")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    place.chmod(0o777)
    ca = make_authority(tmp_path_factory.mktemp("impostors") / "ca", time.time())
    node_files(ca, "n1", time.time())
    with munged() as munge:
        yield Stage(place, ca, munge)
    shutil.rmtree(place)


def server_tls(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def of_another_authority(stage: Stage) -> ssl.SSLContext:
    other = stage.place / "other"
    if not other.exists():
        make_authority(other, time.time())
    files = other / "controllers" / "localhost"
    return server_tls(str(files / "controller.crt"), str(files / "controller.key"))


def of_a_node_called_localhost(stage: Stage) -> ssl.SSLContext:
    """A node's certificate is of the same authority, and Mallory has taken that node over."""
    files = node_files(stage.ca, "localhost", time.time())
    return server_tls(files.certificate, files.key)


def stolen_and_revoked(stage: Stage) -> ssl.SSLContext:
    """The controller's own of last year, which was taken back since."""
    files = stage.ca / "controllers" / "stolen"
    if not files.exists():
        issue(stage.ca, "controller", "stolen", time.time(), 30, ("localhost",))
        context = server_tls(str(files / "controller.crt"), str(files / "controller.key"))
        revoke(stage.ca, "stolen")
        shutil.rmtree(files)
        shutil.copy(stage.ca / "ca.crl", stage.ca / "nodes" / "n1" / "ca.crl")
        STOLEN.append(context)
        files.mkdir()
    return STOLEN[0]


STOLEN: list[ssl.SSLContext] = []
Tls = Callable[[Stage], ssl.SSLContext] | None
IMPOSTORS: dict[Transport, dict[str, tuple[Any, Tls]]] = {
    "tls": {
        "without TLS": (says_yes, None),
        "with a certificate of another authority": (says_yes, of_another_authority),
        "with a certificate of a node": (says_yes, of_a_node_called_localhost),
        "with a certificate that was revoked": (says_yes, stolen_and_revoked),
    },
    "munge": {"who says yes to all": (says_yes, None), "who plays the session": (plays_the_session, None)},
    "unix": {"of another user": (says_yes, None)},
}
ROWS = [
    pytest.param(transport, name, kind, id=f"{transport}, {name}, {kind.__name__}")
    for transport in get_args(Transport)
    for name in IMPOSTORS[transport]
    for kind in COMMANDS
]


def attack(
    stage: Stage,
    impostor: Impostor,
    controller: Callable[[Any], Controller],
    uid: int,
    tls: ssl.SSLContext | None = None,
) -> tuple[list[tuple[Command, ...]], str]:
    """What the agent's loop was asked, and what its sender says is wrong, after it tried to report to the impostor."""
    with impostor.listening(uid, tls):
        sender = DrivenSender(Spool(), link_to([controller(impostor.address)]))
        sender.start()
        sender.put(REPORT)
        found: list[tuple[Command, ...]] = []

        def asked() -> bool:
            found.extend(each.commands for each in (*sender.orders(), *sender.replies()))
            return len(found) >= 2 or bool(sender.problem)

        until(asked)
        sender.stop()
        return found, sender.problem


@pytest.mark.parametrize(("transport", "name", "kind"), ROWS)
def test_an_impostor_at_the_controller_s_address_is_not_obeyed_and_learns_nothing(
    stage: Stage, transport: Transport, name: str, kind: Any
) -> None:
    answers, tls = IMPOSTORS[transport][name]
    impostor = Impostor(command_of(kind), answers)
    if transport == "unix":
        impostor.address = str(stage.place / f"s{len(os.listdir(stage.place))}")
    context = None if tls is None else tls(stage)
    found, problem = attack(stage, impostor, lambda address: stage.controller(transport, address), MALLORY, context)
    assert found == [] and problem
    assert b"what-only-the-controller-may-read" not in impostor.heard
    for key in stage.keys:
        assert key not in impostor.heard and key.hex().encode() not in impostor.heard
    for credential in [word for word in bytes(impostor.heard).split() if word.startswith(b"MUNGE:")]:
        done = subprocess.run(
            ["unmunge", "--socket", stage.munge.socket], input=credential, capture_output=True, user=MALLORY
        )
        assert done.returncode != 0 and not any(key.hex().encode() in done.stdout for key in stage.keys)
    stage.keys.clear()


def trusting(address: Any) -> Controller:
    """Asks for no proof. Nothing of the product can make such a one without a socket of the user's own."""
    return TcpController(f"http://localhost:{address[1]}", "n1")


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_same_impostor_is_obeyed_by_an_agent_that_asks_for_no_proof(stage: Stage, kind: Any) -> None:
    """The attack works: it is the proof that stops it."""
    impostor = Impostor(command_of(kind), says_yes)
    found, _ = attack(stage, impostor, trusting, MALLORY)
    assert found == [(impostor.command,)] * 2
    assert b"what-only-the-controller-may-read" in impostor.heard


def test_a_stolen_key_of_the_controller_is_obeyed_until_the_list_of_revoked_ones_is_there(
    stage: Stage,
) -> None:
    """So what refuses it above is that list."""
    context, listed = stolen_and_revoked(stage), stage.ca / "nodes" / "n1" / "ca.crl"
    listed.unlink()
    impostor = Impostor(command_of(COMMANDS[0]), says_yes)
    found, _ = attack(stage, impostor, lambda address: stage.controller("tls", address), MALLORY, context)
    shutil.copy(stage.ca / "ca.crl", listed)
    assert found == [(impostor.command,)] * 2


@pytest.mark.parametrize("answers", [says_yes, plays_the_session, refuses])
def test_who_takes_the_port_of_a_stream_that_has_ended_gets_no_report_and_destroys_none(
    stage: Stage, answers: Callable[[Impostor, bytes, bytes], bytes]
) -> None:
    """The stream of before is closed, and the agent comes again: to somebody else."""
    impostor = Impostor(command_of(COMMANDS[0]), answers)
    with serving(stage.munge, lambda report: Reply(controller_id="c")) as port:
        address = ("127.0.0.1", port.number)
        counts: list[str] = []
        sender = DrivenSender(Spool(), link_to([stage.controller("munge", address)]), counts.append)
        sender.start()
        sender.put(REPORT)
        until(lambda: [each.sequence for each in port.reports] == [1] and "sent" in counts)
        port.wait(port.server.cleanup())
        until(lambda: bool(sender.problem))
        impostor.address = address
        with impostor.listening():
            sender.put(msgspec.structs.replace(REPORT, sequence=2))
            until(lambda: counts.count("failed") >= 1 and MAGIC in impostor.heard)
        assert b"what-only-the-controller-may-read" not in impostor.heard
        assert "rejected" not in counts and [each.sequence for each in sender.left()] == [2]
        sender.stop()
        assert [each.commands for each in sender.replies()] == [()] and sender.orders() == []


def test_at_a_socket_of_the_same_user_the_same_answer_is_the_controller_s(stage: Stage) -> None:
    impostor = Impostor(command_of(COMMANDS[0]), says_yes, address=str(stage.place / "own"))
    found, _ = attack(stage, impostor, lambda address: stage.controller("unix", address), ORDINARY)
    assert found == [(impostor.command,)] * 2


def test_an_agent_of_root_believes_no_ordinary_user_at_its_socket(stage: Stage) -> None:
    impostor = Impostor(command_of(COMMANDS[0]), says_yes, address=str(stage.place / "root"))
    found, problem = attack(stage, impostor, lambda address: OwnSocket(address, "n1", 0), ORDINARY)
    assert found == [] and str(ORDINARY) in problem
