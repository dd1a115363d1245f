"""Sessions by MUNGE for thousands of agents in one process: credentials by libmunge itself, for the program
munge would be started for each."""

from __future__ import annotations

import ctypes
import os

from slurm_watchdog.identity.munge_library import AES128, CIPHER, SOCKET, UID_RESTRICTION, load
from slurm_watchdog.wire.frames import KEY_BYTES, offer
from tests.munged import Munged


class Client:
    """The end of all agents, whose user is our own."""

    def __init__(self, munged: Munged, reader_uid: int | None = None):
        """`reader_uid`: the controller's user; None: our own."""
        self._library = load()
        self._context = ctypes.c_void_p(self._library.munge_ctx_create())
        for option, value in (
            (SOCKET, ctypes.c_char_p(os.fsencode(munged.socket))),
            (UID_RESTRICTION, ctypes.c_uint32(os.geteuid() if reader_uid is None else reader_uid)),
            (CIPHER, ctypes.c_int(AES128)),
        ):
            self._library.munge_ctx_set(self._context, ctypes.c_int(option), value)

    def begin(self, node: str, challenge: str) -> tuple[bytes, bytes]:
        """The key of a stream of `node`, and the credential that tells the controller. Raises OSError."""
        key, text = os.urandom(KEY_BYTES), ctypes.c_char_p()
        payload = offer(key, node, challenge)
        code = self._library.munge_encode(ctypes.byref(text), self._context, payload, len(payload))
        if code != 0 or text.value is None:
            raise OSError(f"munged makes no credential: {code}")
        return key, text.value
