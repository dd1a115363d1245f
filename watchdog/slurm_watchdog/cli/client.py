"""Asks the controller over its local socket: HTTP with the standard library, every request with a deadline."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from slurm_watchdog.cli.options import ClientError, error_text

if TYPE_CHECKING:
    from slurm_watchdog.cli.munge_exchange import MungeExchanges

T = TypeVar("T")

DEADLINE_S = 10.0  # For one whole request, from connecting to the last byte.
MAX_BYTES = 64 * 1024**2  # Stacks of a thousand ranks are a few MiB; more than this is not an answer of ours.

SERVICE_SOCKET = "/run/slurm-watchdog/controller.sock"
"""The service's socket; any other one usually belongs to a user's `run`."""
_IS_IT_RUNNING = (
    "Is the controller running, on this machine? systemctl status slurm-watchdog-controller; from other machines: "
    "--socket munge://HOST:PORT (controller.user_listen)"
)
_SEE_ITS_LOG = "See its log: journalctl -u slurm-watchdog-controller -n 50"
_HAS_IT_ENDED = "Has that `run` ended? Its journal answers: slurm-watchdog incidents --journal {}"
Exchange = Callable[[str, str, bytes], tuple[int, str, bytes]]  # (method, target, body) to (status, its words, body).


class _UnixConnection(http.client.HTTPConnection):
    """HTTP/1.1 over a socket in the filesystem, cut off when the deadline passes."""

    def __init__(self, path: str, deadline_s: float):
        super().__init__("localhost", timeout=deadline_s)
        self._path = path
        self.overdue = threading.Event()
        self._timer = threading.Timer(deadline_s, self._cut_off)
        self._timer.daemon = True

    def connect(self) -> None:
        self._timer.start()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def _cut_off(self) -> None:
        # The socket's own timeout restarts with each byte; this one does not.
        self.overdue.set()
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was closed a moment ago: nothing left to cut

    def close(self) -> None:
        self._timer.cancel()
        super().close()


class Client:
    """The controller behind one socket. Every method raises ClientError."""

    def __init__(self, path: str, deadline_s: float = DEADLINE_S, exchange: Exchange | None = None):
        """`exchange` answers in the place of a socket: a journal does."""
        self.path = path
        self._deadline_s = deadline_s
        self._munge: MungeExchanges | None = None
        self._exchange = exchange or (self._over_munge if path.startswith("munge://") else self._over_socket)

    def get(self, kind: type[T], path: str, *parts: object, **query: object) -> T:
        """A document of this type. `path` has `{}` for each of `parts`; what of `query` is None is not asked for."""
        asked = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", _filled(path, parts) + (f"?{urlencode(asked)}" if asked else ""), kind, b"")

    def post(self, kind: type[T], path: str, *parts: object, body: msgspec.Struct | None = None) -> T:
        """What is answered to a request that changes something, or has much in it."""
        given = {} if body is None else msgspec.to_builtins(body)
        # Half a character, as of a terminal that is not in UTF-8, becomes a question mark.
        return self._ask(
            "POST", _filled(path, parts), kind, json.dumps(given, ensure_ascii=False).encode(errors="replace")
        )

    def _ask(self, method: str, target: str, kind: type[T], body: bytes) -> T:
        status, reason, data = self._exchange(method, target, body)
        if status >= 400:
            raise ClientError(
                error_text(data, "error") or f"The controller answered {status} {reason} to {method} {target}.",
                "" if status < 500 else _SEE_ITS_LOG,
                status,
                error_text(data, "code"),
            )
        try:
            return msgspec.json.decode(data, type=kind)
        except (ValueError, RecursionError) as error:
            raise ClientError(
                f"The controller's answer to {method} {target} is not what this release expects: {error}",
                "Are the command and the controller of one release? Compare: slurm-watchdog --version",
            ) from error

    def _over_munge(self, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        from slurm_watchdog.cli.munge_exchange import MungeExchanges

        self._munge = self._munge or MungeExchanges(self.path, self._deadline_s)
        return self._munge(method, target, body)

    def _over_socket(self, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        connection = _UnixConnection(self.path, self._deadline_s)
        headers = {"Accept": "application/json", "Connection": "close", "Content-Type": "application/json"}
        try:
            connection.request(method, target, body=body or None, headers=headers)
            response = connection.getresponse()
            answer = response.read(MAX_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise self._explain(error, connection.overdue.is_set()) from error
        finally:
            connection.close()
        if connection.overdue.is_set():
            raise self._explain(TimeoutError(), True)
        if len(answer) > MAX_BYTES:
            raise ClientError(f"The controller's answer to {method} {target} exceeds {MAX_BYTES} bytes.", _SEE_ITS_LOG)
        return response.status, response.reason, answer

    def _explain(self, error: Exception, overdue: bool) -> ClientError:
        own = Path(self.path).parent
        is_own = self.path != SERVICE_SOCKET and os.path.isfile(own / "journal.sqlite")
        look = _HAS_IT_ENDED.format(own) if is_own else _IS_IT_RUNNING
        if overdue or isinstance(error, TimeoutError):
            return ClientError(
                f"The controller did not answer on {self.path} within {self._deadline_s:g} s.",
                "It may be busy, or stopped." if is_own else f"{look}; {_SEE_ITS_LOG[0].lower()}{_SEE_ITS_LOG[1:]}",
            )
        if isinstance(error, FileNotFoundError):
            return ClientError(f"The controller's socket {self.path} does not exist.", look)
        if isinstance(error, ConnectionRefusedError):
            return ClientError(f"No controller listens on the socket {self.path}.", look)
        if isinstance(error, PermissionError):
            return ClientError(
                f"You may not use the controller's socket {self.path}.",
                "Ask an administrator to add you to the group of that socket (ls -l shows it), such as "
                "slurm-watchdog-users.",
            )
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return ClientError(f"Talking to the controller on {self.path} failed: {reason}.", look)


def _filled(path: str, parts: tuple[object, ...]) -> str:
    return path.format(*(quote(str(each), safe="") for each in parts))
