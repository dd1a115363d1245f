"""Sessions by MUNGE for thousands of agents in one process: credentials by libmunge itself, for the program
munge would be started for each."""

from __future__ import annotations

import ctypes
import os

from slurm_watchdog.base import clock
from slurm_watchdog.identity.munge_child import CIPHER, SOCKET, UID_RESTRICTION, load
from slurm_watchdog.identity.munge_protocol import Session, authorization, encode_offer, new_session
from tests.munged import Munged

AES128 = 4
"""MUNGE_CIPHER_AES128 of munge.h: what agents ask for."""
PATH = "/v1/session"


class Client:
    """The end of all agents, whose user is our own."""

    def __init__(self, munged: Munged, reader_uid: int | None = None):
        """`reader_uid`: the controller's user; None: our own."""
        self._library = load()
        self._library.munge_encode.argtypes = [
            ctypes.POINTER(ctypes.c_char_p), ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int,
        ]  # fmt: skip
        self._context = ctypes.c_void_p(self._library.munge_ctx_create())
        for option, value in (
            (SOCKET, ctypes.c_char_p(os.fsencode(munged.socket))),
            (UID_RESTRICTION, ctypes.c_uint32(os.geteuid() if reader_uid is None else reader_uid)),
            (CIPHER, ctypes.c_int(AES128)),
        ):
            self._library.munge_ctx_set(self._context, ctypes.c_int(option), value)

    def begin(self, node: str, epoch: str) -> tuple[Session, str]:
        """A session of `node`, and the header that begins it. Raises OSError."""
        session = new_session(node, clock.monotonic())
        payload, text = encode_offer(session, epoch), ctypes.c_char_p()
        code = self._library.munge_encode(ctypes.byref(text), self._context, payload, len(payload))
        if code != 0 or text.value is None:
            raise OSError(f"munged makes no credential: {code}")
        return session, f"Authorization: Munge {text.value.decode()}\r\n"

    def proof(self, session: Session, body: bytes) -> str:
        """The header of a report."""
        return f"Authorization: {authorization(session, '/v1/report', body)}\r\n"
