"""Work as another user in this process: a thread whose effective user alone is changed. Needs root."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from typing import Any

SETRESUID = {"x86_64": 117, "aarch64": 147}[platform.machine()]
"""Of asm/unistd.h. The library's own function changes all threads."""


def as_user(uid: int, work: Callable[[], Any]) -> Any:
    """What `work` returns, done as `uid`: sockets that it makes are that user's. Modules that it needs have
    to be loaded before."""
    found: list[Any] = []

    def run() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).syscall(SETRESUID, -1, uid, -1) != 0:
                raise PermissionError(f"errno {ctypes.get_errno()}: it takes root to become user {uid}")
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
