"""The controller's end of sessions by MUNGE, for servers of tests: a real agent tells them what it would tell
a controller."""

from __future__ import annotations

import base64
import ctypes
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.identity.munge_child import decode, load
from slurm_watchdog.identity.munge_decoder import Credential
from slurm_watchdog.identity.munge_protocol import CREDENTIAL, answer_mac
from slurm_watchdog.identity.munge_sessions import AuthenticationError, Sessions
from tests.munged import Munged

HERE = "here"
"""All agents of a test come from one address."""


class Proof:
    """Begins sessions, and proves answers. `agents`: whose credentials are taken, besides our own user's."""

    def __init__(self, munged: Munged, agents: frozenset[int] = frozenset()):
        own = os.geteuid()
        self.sessions = Sessions(own, agents | {own}, clock.monotonic)
        self._munged, self._library, self._free = munged, load(), ctypes.CDLL(None).free
        self._free.argtypes = [ctypes.c_void_p]
        self._lock = threading.Lock()

    def answer(
        self, path: str, authorization: str, body: bytes, take: Callable[[bytes], bytes]
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of the answer to a POST; `take` is handed each report that is proven."""
        with self._lock:
            try:
                if path == "/v1/session":
                    return self._begin(authorization)
                session, counter = self.sessions.authenticate(authorization, HERE, path, body)
            except AuthenticationError as doubt:
                return 401, {}, str(doubt).encode()
        said = take(body)
        return 200, {"Authentication-Info": answer_mac(session.key, 200, counter, said)}, said

    def _begin(self, authorization: str) -> tuple[int, dict[str, str], bytes]:
        match = CREDENTIAL.fullmatch(authorization)
        if match is None:
            return 200, {}, msgspec.json.encode({"epoch": self.sessions.epoch})
        found: Any = decode(self._library, self._free, match[1].encode(), os.fsencode(self._munged.socket))
        if "code" in found:
            return 401, {}, str(found["error"]).encode()
        payload = base64.b64decode(found.pop("payload"))
        credential = Credential(found["uid"], found["time"], found["restricted_to"], found["encrypted"], payload)
        session = self.sessions.begin(self.sessions.check_credential(credential), HERE, credential.made_at)
        said = b'{"session":true}'
        return 200, {"Authentication-Info": answer_mac(session.key, 200, 0, said)}, said


def handler(proof: Proof, take: Callable[[bytes], bytes]) -> type[BaseHTTPRequestHandler]:
    """For an HTTP server: `take` is handed each report, and returns what is answered."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, headers, said = proof.answer(self.path, self.headers.get("Authorization", ""), body, take)
            lines = {**headers, "Content-Type": "application/json", "Content-Length": str(len(said))}
            head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            self.wfile.write(f"HTTP/1.1 {status} as said\r\n{head}\r\n".encode() + said)

        def log_message(self, format: str, *args: object) -> None:
            return

    return Handler
