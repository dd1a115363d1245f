"""The socket of one ordinary user: whoever else comes, or listens, is no agent and no controller."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.courier.streams import OwnSocket
from slurm_watchdog.controller.ingest.endpoint import OwnUser
from slurm_watchdog.identity.transport import AnotherUser, check_directory, check_peer
from tests.as_user import as_user
from tests.builders.identity_door import Agent, Port, until

OWN, MALLORY = 1500, 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture
def place() -> Iterator[Path]:
    # pytest's own directories are closed to others.
    place = Path(f"/tmp/own-socket-{os.getpid()}")
    place.mkdir(mode=0o700)
    os.chown(place, OWN, OWN)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def port(place: Path) -> Iterator[Port]:
    """A controller of OWN that listens in `place`."""
    port = Port(identity=OwnUser(OWN, str(place / "agents.sock")))
    port.server.only_uid = OWN
    threading.Thread(target=lambda: as_user(OWN, port.loop.run_forever), daemon=True).start()
    port.wait(port.server.start_unix(str(place / "agents.sock"), 10))
    yield port
    port.wait(port.server.cleanup())
    port.loop.call_soon_threadsafe(port.loop.stop)


def said_as(uid: int, path: Path) -> str:
    """What a process of `uid` hears that reports for n1; empty where it gets no connection."""

    def say() -> str:
        agent = Agent(OwnSocket(str(path), "n1", OWN))
        try:
            return agent.report()
        except ConnectionError:
            return ""
        finally:
            agent.close()

    heard: str = as_user(uid, say)
    return heard


def test_reports_of_the_same_user_are_taken_and_its_answers_are_believed(port: Port, place: Path) -> None:
    assert said_as(OWN, place / "agents.sock") == "taken"
    assert [each.node for each in port.reports] == ["n1"]


def test_another_user_gets_no_connection_not_even_with_an_open_directory_and_root_none_either(
    port: Port, place: Path
) -> None:
    with pytest.raises(PermissionError):
        said_as(MALLORY, place / "agents.sock")
    place.chmod(0o777)
    (place / "agents.sock").chmod(0o777)
    assert said_as(MALLORY, place / "agents.sock") == ""
    assert said_as(0, place / "agents.sock") == ""
    until(lambda: port.refused("another_user") == 2)
    assert port.reports == []
    assert said_as(OWN, place / "agents.sock") == "taken"
    assert port.do(lambda: port.server.limits.total) <= 1


@pytest.mark.parametrize("owner_and_mode", [(OWN, 0o755), (OWN, 0o710), (MALLORY, 0o700), (0, 0o700)])
def test_a_directory_that_others_may_enter_or_own_is_refused(place: Path, owner_and_mode: tuple[int, int]) -> None:
    owner, mode = owner_and_mode
    os.chown(place, owner, owner)
    place.chmod(mode)
    with pytest.raises(AnotherUser, match="mode 0700"):
        check_directory(str(place), OWN)


def test_socket_of_root_is_for_root_alone_and_root_is_no_peer_of_a_user() -> None:
    one, _other = socket.socketpair(socket.AF_UNIX)  # both ends are this process's user
    check_peer(one, os.geteuid())
    with pytest.raises(AnotherUser, match="belongs to user"):
        check_peer(one, os.geteuid() + 1)


def test_what_is_one_user_s_is_on_no_port_and_a_port_s_door_on_no_socket(tmp_path: Path) -> None:
    own = Port(identity=OwnUser(OWN, str(tmp_path / "s"))).door.server()
    with pytest.raises(ValueError, match="not served on a port"):
        asyncio.run(own.start("127.0.0.1", 0, 1))
    own.only_uid = None
    with pytest.raises(ValueError, match="the socket's owner"):
        asyncio.run(own.start_unix(str(tmp_path / "s"), 1))
