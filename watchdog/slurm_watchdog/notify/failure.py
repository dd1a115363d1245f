"""Why a message could not be sent, in words without the receiver's address, which may be a secret."""

from __future__ import annotations

import os
import socket
import ssl


def why(error: Exception) -> str:
    """What a connection, or a file with a secret, failed with: `Connection refused`, `its host name is not known`."""
    cause = getattr(error, "os_error", None) or error
    if isinstance(cause, ssl.SSLError) or isinstance(error, ssl.SSLError):
        return "its certificate is not trusted, or its TLS not understood"
    if isinstance(cause, socket.gaierror) or "DNS" in type(error).__name__:
        return "its host name is not known"
    if isinstance(cause, UnicodeError):
        return "it is not UTF-8 text"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return type(error).__name__
