"""The text of an OSError."""

from __future__ import annotations

import errno


def describe(error: OSError) -> str:
    """`EACCES: Permission denied: '/x'`: the name of the error, which people search for, and its words."""
    name = errno.errorcode.get(error.errno or 0, "error")
    where = f": {error.filename!r}" if error.filename is not None else ""
    return f"{name}: {error.strerror or error}{where}"
