"""Why a message was not sent is said in words, and never with the address."""

from __future__ import annotations

import errno
import socket
import ssl

import pytest

from slurm_watchdog.notify.http import why


class Connector(OSError):
    """As aiohttp's: the cause is inside."""

    def __init__(self, cause: OSError):
        super().__init__(cause.errno, "Cannot connect to host secret.example:443")
        self.os_error = cause


class ConnectorDNS(Connector):
    """As aiohttp's ClientConnectorDNSError, whose cause has no number."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "secret.example"), "Connection refused"),
        (Connector(OSError(errno.EHOSTUNREACH, "secret.example")), "No route to host"),
        (ConnectorDNS(OSError(None, "secret.example")), "its host name is not known"),
        (socket.gaierror(-2, "secret.example"), "its host name is not known"),
        (ssl.SSLCertVerificationError("secret.example"), "its certificate is not trusted, or its TLS not understood"),
        (FileNotFoundError(errno.ENOENT, "x", "/etc/slack"), "No such file or directory"),
        (ValueError("secret.example"), "ValueError"),
    ],
)
def test_what_failed_is_said_without_the_address(error: Exception, words: str) -> None:
    assert why(error) == words
