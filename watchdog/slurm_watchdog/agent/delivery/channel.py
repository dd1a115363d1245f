"""The agent's ways to the controller. What a channel returns as Proven comes from the controller; nothing
else becomes a command.

A Proven is made by the channels alone (tests/architecture/test_proven_commands.py): here, and in
slurm_watchdog.agent.delivery.munge_connection.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.identity.transport import check_peer
from slurm_watchdog.model.protocol import JobWatch, Reply
from slurm_watchdog.wire.codec import WireError, decode_reply
from slurm_watchdog.wire.http_client import Connection, Response

UNIX = "unix:"  # What `controller_url` begins with where it names a socket; `slurm-watchdog run` sets it, no file can.
SERVER_ERROR = 500  # From here on it is about the controller, not about the report (RFC 9110, 15.6).


@dataclass(frozen=True)
class Proven:
    """The answer 200 of a peer that has proven to be the controller."""

    body: bytes
    status: int = 200


class Channel:
    """One way to the controller, over the connection `inner`. Not for two threads."""

    def __init__(self, inner: Connection):
        self._inner = inner

    def post(
        self, path: str, body: bytes, headers: dict[str, str], connect_s: float, answer_s: float
    ) -> Proven | Response:
        """Sends `body`. A Response is a refusal (any status but 200), and may come from anybody. Raises OSError, among
        them Unproven: the peer has not proven to be the controller, or we can't prove ourselves."""
        raise NotImplementedError

    def close(self) -> None:
        self._inner.close()

    def certificates(self) -> dict[str, float]:
        """See Connection.certificates."""
        return self._inner.certificates()

    def recheck_files(self) -> None:
        self._inner.recheck_files()


class DirectChannel(Channel):
    """Over a connection whose other end is proven first. Made by `tls_channel` and `unix_channel` alone."""

    def post(
        self, path: str, body: bytes, headers: dict[str, str], connect_s: float, answer_s: float
    ) -> Proven | Response:
        answer = self._inner.post(path, body, headers, connect_s, answer_s)
        return Proven(answer.body) if answer.status == 200 else answer


class InTurn(Channel):
    """Several channels, one to each controller: after whatever kept one from taking a report, the next is asked."""

    def __init__(self, channels: Sequence[Channel]):
        self._channels = deque(channels)

    def post(
        self, path: str, body: bytes, headers: dict[str, str], connect_s: float, answer_s: float
    ) -> Proven | Response:
        channel = self._channels[0]
        self._channels.rotate(-1)
        answer = channel.post(path, body, headers, connect_s, answer_s)
        if isinstance(answer, Proven) or answer.status < SERVER_ERROR:
            self._channels.rotate(1)
        return answer

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def certificates(self) -> dict[str, float]:
        return self._channels[0].certificates()

    def recheck_files(self) -> None:
        for channel in self._channels:
            channel.recheck_files()


def tls_channel(url: str, max_body: int, files: TlsFiles) -> DirectChannel:
    """To the controller at `url`, by certificates of the authority in `files` on both ends; no traffic yet."""
    return DirectChannel(Connection(url, max_body, files=files))


def unix_channel(path: str, max_body: int, own_uid: int | None = None) -> DirectChannel:
    """To the controller of this very user (`own_uid`: another one, for tests), at the socket `path`; no traffic yet."""
    uid = os.geteuid() if own_uid is None else own_uid

    def connect(address: object, timeout: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(path)
            check_peer(sock, uid)
        except BaseException:
            sock.close()
            raise
        return sock

    return DirectChannel(Connection("http://localhost", max_body, connect))


log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1024**2  # 512 jobs with 2 kB each.
MAX_JOBS = 512  # Watched on one node: there is no node with more CPUs to give away one by one.
MAX_LOGS = 64  # Named by the controller for one job; it names two.
MAX_PLACES = 16  # Directories and trackers of checkpoints of one job.
MAX_COMMANDS = 256  # In one reply, and waiting to be carried out.


def parse_reply(answer: Proven) -> Reply:
    """The reply in an answer of the controller, of which nothing exceeds the bounds above. Raises WireError. Commands
    of a kind that this release does not know are left out: the rest of the reply is still good."""
    data = answer.body
    if len(data) > MAX_REPLY_BYTES:
        raise WireError(f"reply of {len(data)} bytes: the limit is {MAX_REPLY_BYTES}")
    return bound(decode_reply(data))


def bound(reply: Reply) -> Reply:
    """`reply`, cut to what one agent can do. What is left out is said in the log: it is a mistake, or an attack."""
    watch = tuple(_bound_job(each) for each in reply.watch[:MAX_JOBS])
    commands = reply.commands[:MAX_COMMANDS]
    if len(watch) < len(reply.watch) or len(commands) < len(reply.commands):
        log.warning(
            "the controller named %d jobs and %d commands: the first %d and %d are taken",
            len(reply.watch), len(reply.commands), len(watch), len(commands),
        )  # fmt: skip
    if watch == reply.watch and commands == reply.commands:
        return reply
    return replace(reply, watch=watch, commands=commands)


def _bound_job(watch: JobWatch) -> JobWatch:
    return replace(
        watch,
        log_paths=watch.log_paths[:MAX_LOGS],
        log_offsets=watch.log_offsets[:MAX_LOGS],
        checkpoint_trackers=watch.checkpoint_trackers[:MAX_PLACES],
        checkpoint_directories=watch.checkpoint_directories[:MAX_PLACES],
        progress_files=watch.progress_files[:MAX_PLACES],
    )
