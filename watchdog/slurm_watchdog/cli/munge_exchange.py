"""Asks a controller on another machine: HTTP, each request and each answer in a credential of MUNGE."""

from __future__ import annotations

import http.client
import os
import pwd
import re
import subprocess
from collections.abc import Mapping

import msgspec

from slurm_watchdog.cli.options import ClientError, error_text
from slurm_watchdog.identity.munge_protocol import STANDBY, SealedAnswer, request_digest

SCHEME = "munge://"
ADDRESS = re.compile(r"munge://(?:([A-Za-z0-9._-]{1,64})@)?([A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:]+\]):(\d{1,5})/?")
DEFAULT_USER = "slurm-watchdog"
MUNGE_S = 10.0
MAX_BYTES = 2 * 1024**2  # Of an answer: a credential holds no more.
MADE_BY = re.compile(r"^UID:\s.*\((\d+)\)$", re.MULTILINE)


CONNECT_S = 3.0
"""For a connection where another controller can be asked instead: one whose machine is gone answers nothing."""


class MungeExchanges:
    """The controllers at addresses such as `munge://mgmt1:9768,munge://mgmt2:9768`, of which one is active."""

    def __init__(self, addresses: str, deadline_s: float):
        """Raises ClientError for what is no such address."""
        each = [part if part.startswith(SCHEME) else SCHEME + part for part in addresses.split(",")]
        connect_s = min(CONNECT_S, deadline_s) if len(each) > 1 else deadline_s
        self._all = [MungeExchange(address, deadline_s, connect_s) for address in each]

    def __call__(self, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        """The first answer; from then on the one that gave it is asked first. What changes something is asked of
        another one only if the one before has not taken it. Raises ClientError."""
        failures: list[ClientError] = []
        for exchange in tuple(self._all):
            try:
                answer = exchange(method, target, body)
            except ClientError as error:
                failures.append(error)
                if method != "GET" and not error.untaken:
                    break
            else:
                self._all = [exchange, *(each for each in self._all if each is not exchange)]
                return answer
        if len(failures) == 1:
            raise failures[0]
        todo = "One of them has to be active: systemctl status slurm-watchdog-controller, on each."
        raise ClientError(" ".join(each.what for each in failures), todo)


class MungeExchange:
    """The controller at an address such as `munge://mgmt1:9768`, or with its user `munge://watchdog@mgmt1:9768`."""

    def __init__(self, address: str, deadline_s: float, connect_s: float | None = None):
        """`connect_s`: for the connection alone. $SLURM_WATCHDOG_MUNGE_SOCKET: munged's, where it is not the usual one.
        Raises ClientError for what is no such address."""
        munge_socket = os.environ.get("SLURM_WATCHDOG_MUNGE_SOCKET", "")
        found = ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[3]) < 65536:
            raise ClientError(f"{address[:80]!r} is not a controller's address.", "munge://HOST:PORT is one.")
        self._host, self._port, self._deadline_s = found[2].strip("[]"), int(found[3]), deadline_s
        self._connect_s = deadline_s if connect_s is None else connect_s
        self._user = found[1] or DEFAULT_USER
        self._socket = ["--socket", munge_socket] if munge_socket else []

    def __call__(self, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        """(status, its words, body) of the answer. Raises ClientError."""
        digest = request_digest(method, target, body)
        uid = self._uid()
        argv = ["munge", "--restrict-uid", str(uid), "--cipher", "aes128", *self._socket]
        credential = self._run(argv, digest.encode()).strip()
        status, answer = self._send(method, target, body, {"Authorization": f"Munge {credential}"})
        if status != 200:  # said before who asks was known: no one vouches for it, and nothing follows from it
            what = f"{self._host} refuses: {error_text(answer, 'error') or 'it gives no reason'}"
            if error_text(answer, "code") == STANDBY:
                todo = f"Name both controllers: {SCHEME}{self._host}:{self._port},{SCHEME}OTHER:{self._port}"
                raise ClientError(what, todo, untaken=True)
            raise ClientError(what, "Who may ask is in docs/security.md.")
        sealed = self._opened(answer, uid)
        if sealed.digest != digest:
            raise ClientError(f"{self._host} has answered another request.", "Try again.")
        return sealed.status, "", sealed.body.encode()

    def _uid(self) -> int:
        if self._user.isdecimal():
            return int(self._user)
        try:
            return pwd.getpwnam(self._user).pw_uid
        except KeyError:
            raise ClientError(
                f"This machine knows no user {self._user}, who runs the controller.",
                f"Give its number (id -u on the management node): munge://NUMBER@{self._host}:{self._port}",
            ) from None

    def _run(self, argv: list[str], given: bytes, more: Mapping[str, str] | None = None) -> str:
        try:
            done = subprocess.run(
                argv, input=given, capture_output=True, timeout=MUNGE_S, check=False, env={**os.environ, **(more or {})}
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClientError(
                f"The program {argv[0]} gives no answer ({type(error).__name__}).", "Is munged well?"
            ) from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()[:1]
            raise ClientError(f"{argv[0]} failed: {' '.join(said)[:200]}", "Is munged well, and the clock right?")
        return done.stdout.decode(errors="replace")

    def _opened(self, answer: bytes, uid: int) -> SealedAnswer:
        """The answer, if the controller's user has made it. Raises ClientError."""
        no_answer = ClientError(
            f"What answers on {self._host}:{self._port} is not the controller.", "Tell an administrator."
        )
        said = self._run(["unmunge", *self._socket], answer, {"LC_ALL": "C"})
        head, _, payload = said.partition("\n\n")
        made_by = MADE_BY.search(head)
        if made_by is None or int(made_by[1]) != uid:
            raise no_answer
        try:
            return msgspec.json.decode(payload.strip(), type=SealedAnswer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise no_answer from error

    def _send(self, method: str, target: str, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._connect_s)
        connected = False
        try:
            connection.connect()
            connected = True
            connection.sock.settimeout(self._deadline_s)
            connection.request(method, target, body=data or None, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            what = f"The controller on {self._host}:{self._port} cannot be asked: {str(error) or type(error).__name__}."
            todo = "Is controller.user_listen set there, and the port open?"
            raise ClientError(what, todo, untaken=not connected) from error
        finally:
            connection.close()
