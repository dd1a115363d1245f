"""A courier's streams where nodes prove themselves by MUNGE.

The program munge makes the credential, in a child with a deadline: munged may hang.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable

from slurm_watchdog.agent.courier.streams import AuthenticationFailed, ProvenStream, TcpController
from slurm_watchdog.base import clock
from slurm_watchdog.wire.frames import KEY_BYTES, OPENED, PROOF, TO_AGENT, TO_CONTROLLER, WELCOME, Seal, offer

MUNGE_S = 10.0
MAX_SAID = 8192  # Bytes of what munge prints.
MAX_LEFT = 3  # Children that could not be ended, and may still be there; with more of them no one else is sent.


class Munge:
    """The program munge, for credentials that `user` alone can decode."""

    def __init__(self, user: str, socket: str = "", deadline_s: float = MUNGE_S, program: str = "munge"):
        self.argv = [program, "--restrict-uid", user, "--cipher", "aes128", *(["--socket", socket] if socket else [])]
        self._user, self._deadline_s = user, deadline_s
        self._left: list[int] = []

    def encode(self, payload: bytes) -> str:
        """The credential. Raises AuthenticationFailed."""
        self._left = [child for child in self._left if os.waitpid(child, os.WNOHANG)[0] == 0]
        if len(self._left) >= MAX_LEFT:
            raise AuthenticationFailed("munge hangs: is munged well?")
        given, (heard, say) = os.memfd_create("payload"), os.pipe()
        try:
            os.pwrite(given, payload, 0)
            places = [(os.POSIX_SPAWN_DUP2, given, 0), (os.POSIX_SPAWN_DUP2, say, 1), (os.POSIX_SPAWN_DUP2, say, 2)]
            child = os.posix_spawnp(self.argv[0], self.argv, os.environ, file_actions=places)
        except OSError as error:
            os.close(heard)
            raise AuthenticationFailed(f"the program munge cannot be run: {error.strerror}") from error
        finally:
            os.close(given)
            os.close(say)
        try:
            said = self._listen(heard)
        finally:
            os.close(heard)
        if said is None:
            os.kill(child, signal.SIGKILL)
            self._left.append(child)
            raise AuthenticationFailed(f"munge gave no answer within {self._deadline_s:g} s: is munged well?")
        lines = said.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        found = [each for each in lines if each.startswith("MUNGE:") and each.endswith(":") and each.isascii()]
        if os.waitpid(child, 0)[1] != 0 or not found:
            raise AuthenticationFailed(f"munge failed: {lines[0][:200]}{self._advice(lines[0])}")
        return found[0]

    def _listen(self, fd: int) -> bytes | None:
        """All that the child prints until it ends; None: it did not end in time."""
        said, poll, end = b"", select.poll(), clock.monotonic() + self._deadline_s
        poll.register(fd, select.POLLIN)
        while poll.poll(max(0.0, end - clock.monotonic()) * 1000):
            data = os.read(fd, MAX_SAID)
            if not data:
                return said
            said = (said + data)[:MAX_SAID]
        return None

    def _advice(self, said: str) -> str:
        unknown = "nrecognized" in said and self._user in said
        return (
            f" (give the number of the controller's user: security.controller_user, id -u {self._user} there)"
            if unknown
            else ""
        )


class MungeController(TcpController):
    """Its streams are begun with a credential of MUNGE, and each of their frames is proven from then on: only who
    could decode the credential, the user of the controller, knows the key."""

    def __init__(self, url: str, node: str, encode: Callable[[bytes], str]):
        """`encode`: payload -> credential, as of Munge."""
        super().__init__(url, node)
        self.encode = encode

    def connect(self) -> socket.socket:
        if self.https:
            raise AuthenticationFailed("controller begins with https://, and expert.security.mode is not tls")
        return super().connect()

    def prove(self, link: ProvenStream, kind: bytes, body: bytes) -> None:
        if kind != WELCOME:
            raise AuthenticationFailed("the controller asks for no credential: is security.mode the same there?")
        key = os.urandom(KEY_BYTES)  # not secrets: that one brings the module random along, a quarter of a megabyte
        link.send(PROOF, self.encode(offer(key, self.node, body.decode("ascii", "replace"))).encode())
        answer, incoming = link.receive(), Seal(key, TO_AGENT)
        if answer[0] != OPENED or not incoming.is_of(answer[1], OPENED):
            raise AuthenticationFailed(
                "the answer does not come from the controller: another program answers at its address"
            )
        link.seal(incoming, Seal(key, TO_CONTROLLER))
