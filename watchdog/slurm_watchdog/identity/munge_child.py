"""`python -m slurm_watchdog.identity.munge_child [SOCKET]`: decodes MUNGE credentials for the controller, one a line.

munged may hang, and libmunge waits for it: here only this process waits, which the controller ends when it is
late. A line of standard input is a credential, a line of standard output what came of it, as JSON. The
payload is a secret: it goes nowhere else.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
from typing import Any

LIBRARY = "libmunge.so.2"
CIPHER, ENCODE_TIME, SOCKET, UID_RESTRICTION = 0, 6, 8, 9  # munge_opt_t of munge.h.


def load() -> Any:
    """libmunge with the types of its functions. Raises OSError."""
    library = ctypes.CDLL(LIBRARY)
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    library.munge_strerror.restype = ctypes.c_char_p
    library.munge_decode.argtypes = [
        ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32),
    ]  # fmt: skip
    return library


def decode(library: Any, free: Any, credential: bytes, socket: bytes) -> dict[str, object]:
    """The credential: `uid` of its maker, `time`, `restricted_to`, `encrypted`, `payload`; or `error` and `code`."""
    context = ctypes.c_void_p(library.munge_ctx_create())
    if socket:
        library.munge_ctx_set(context, ctypes.c_int(SOCKET), ctypes.c_char_p(socket))
    data, size = ctypes.c_void_p(), ctypes.c_int()
    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    try:
        code = library.munge_decode(
            credential, context, ctypes.byref(data), ctypes.byref(size), ctypes.byref(uid), ctypes.byref(gid)
        )
        if code != 0:
            return {"code": code, "error": library.munge_strerror(code).decode(errors="replace")}
        made, restricted, cipher = ctypes.c_long(), ctypes.c_uint32(), ctypes.c_int()
        library.munge_ctx_get(context, ctypes.c_int(ENCODE_TIME), ctypes.byref(made))
        library.munge_ctx_get(context, ctypes.c_int(UID_RESTRICTION), ctypes.byref(restricted))
        library.munge_ctx_get(context, ctypes.c_int(CIPHER), ctypes.byref(cipher))
        payload = ctypes.string_at(data, size.value) if data.value else b""
        return {
            "uid": uid.value, "time": made.value, "restricted_to": restricted.value, "encrypted": cipher.value != 0,
            "payload": base64.b64encode(payload).decode(),
        }  # fmt: skip
    finally:
        if data.value:
            ctypes.memset(data, 0, size.value)
            free(data)
        library.munge_ctx_destroy(context)


def main() -> None:
    """Answers until its input ends."""
    try:
        library = load()
    except OSError as error:
        print(json.dumps({"failed": f"{LIBRARY}: {error}"}), flush=True)  # noqa: T201 -- its answer
        return
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    socket = os.fsencode(sys.argv[1]) if len(sys.argv) > 1 else b""
    print(json.dumps({"ready": os.getpid()}), flush=True)  # noqa: T201
    for line in sys.stdin.buffer:
        print(json.dumps(decode(library, free, line.strip(), socket)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
