"""An agent's streams where nodes prove themselves by MUNGE.

The program munge makes the credential, in a child with a deadline: munged may hang.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable

import msgspec

from slurm_watchdog.agent.delivery.stream import AuthenticationFailed, ProvenStream, TcpController
from slurm_watchdog.identity.munge_protocol import KEY_BYTES, TO_AGENT, TO_CONTROLLER, Seal, SessionOffer
from slurm_watchdog.wire.frames import OPENED, PROOF, WELCOME, Welcome, unpack

MUNGE_S = 10.0
CREDENTIAL = re.compile(rb"MUNGE:[A-Za-z0-9+/=]+:")
MAX_LEFT = 3  # Children that could not be ended, and may still be there; with more of them no one else is sent.

Encode = Callable[[bytes], str]  # Payload -> credential. Raises Unproven.


class Munge:
    """The program munge, for credentials that `user` alone can decode."""

    def __init__(self, user: str, socket: str = "", deadline_s: float = MUNGE_S, program: str = "munge"):
        self._argv = [program, "--restrict-uid", user, "--cipher", "aes128", *(["--socket", socket] if socket else [])]
        self._user, self._deadline_s = user, deadline_s
        self._left: list[subprocess.Popen[bytes]] = []

    def encode(self, payload: bytes) -> str:
        """The credential. Raises Unproven."""
        self._left = [child for child in self._left if child.poll() is None]
        if len(self._left) >= MAX_LEFT:
            raise AuthenticationFailed("munge hangs: is munged well?")
        try:
            child = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
                start_new_session=True
            )  # fmt: skip
        except OSError as error:
            raise AuthenticationFailed(f"the program munge cannot be run: {error.strerror}") from error
        try:
            out, said = child.communicate(payload, self._deadline_s)
        except subprocess.TimeoutExpired as error:
            child.kill()
            self._left.append(child)
            raise AuthenticationFailed(
                f"munge gave no answer within {self._deadline_s:g} s: is munged well?"
            ) from error
        if child.returncode != 0 or not CREDENTIAL.fullmatch(out.strip()):
            raise AuthenticationFailed(f"munge failed: {_first_line(said)}{self._advice(said)}")
        return out.strip().decode("ascii")

    def _advice(self, said: bytes) -> str:
        unknown = b"nrecognized" in said and self._user.encode() in said
        return (
            f" (give the number of the controller's user: security.controller_user, id -u {self._user} there)"
            if unknown
            else ""
        )


def _first_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[0][:200] if lines else "it says nothing"


class MungeController(TcpController):
    """Its streams are begun with a credential of MUNGE, and each of their frames is proven from then on: only who
    could decode the credential, the user of the controller, knows the key."""

    def __init__(self, url: str, node: str, encode: Encode):
        super().__init__(url, node)
        self._encode = encode

    def connect(self) -> socket.socket:
        if self.https:
            raise AuthenticationFailed("controller begins with https://, and expert.security.mode is not tls")
        return super().connect()

    def prove(self, link: ProvenStream, kind: bytes, body: bytes) -> None:
        if kind != WELCOME:
            raise AuthenticationFailed("the controller asks for no credential: is security.mode the same there?")
        key = os.urandom(KEY_BYTES)  # not secrets: that one brings the module random along, a quarter of a megabyte
        offer = SessionOffer(key.hex(), self.node, unpack(body, Welcome).challenge)
        link.send(PROOF, self._encode(msgspec.json.encode(offer)).encode())
        answer, incoming = link.receive(), Seal(key, TO_AGENT)
        if answer is None or answer[0] != OPENED or not incoming.is_of(answer[1], OPENED):
            raise AuthenticationFailed(
                "the answer does not come from the controller: another program answers at its address"
            )
        link.seal(incoming, Seal(key, TO_CONTROLLER))
