"""One controller at a time on a journal in a file: two would decide about the same jobs, each without the other."""

from __future__ import annotations

import fcntl
import os

import sqlalchemy as sa

from slurm_watchdog.journal.database import private_file
from slurm_watchdog.journal.error import JournalError


class Alone:
    """Holds the SQLite journal at `url` until it is closed or this process ends. Raises JournalError if another process
    holds it, OSError if that cannot be found out.

    The lock is POSIX's: no child inherits it, so that one that hangs in the kernel keeps no later controller out.
    """

    def __init__(self, url: str):
        address = sa.make_url(url)
        path = address.database
        self._fd: int | None = None
        if path in (None, "", ":memory:") or "uri" in address.query:
            return
        self._fd = private_file(f"{path}.lock")
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise JournalError(
                f"Another controller has the journal {path}: stop it first, or set another controller.state_directory."
            ) from error

    def close(self) -> None:
        """Lets the next one have it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
