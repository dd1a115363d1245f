"""Asks a controller on another machine: HTTP, each request and each answer in a credential of MUNGE."""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.base.failure import Failure
from slurm_watchdog.cli.http_request import ask_once, error_text
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
    """The controllers at addresses such as `munge://mgmt1:9768,munge://watchdog@mgmt2:9768`, of which one is active.
    $SLURM_WATCHDOG_MUNGE_SOCKET: munged's, where it is not the usual one."""

    def __init__(self, addresses: str, deadline_s: float):
        """Raises Failure for what is no such address."""
        self._all = [_parsed(each if each.startswith(SCHEME) else SCHEME + each) for each in addresses.split(",")]
        self._deadline_s = deadline_s
        self._connect_s = min(CONNECT_S, deadline_s) if len(self._all) > 1 else deadline_s
        munge_socket = os.environ.get("SLURM_WATCHDOG_MUNGE_SOCKET")
        self._socket = ["--socket", munge_socket] if munge_socket else []

    def __call__(self, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        """The first answer; from then on the one that gave it is asked first. What changes something is asked of
        another one only if the one before has not taken it. Raises Failure."""
        failures: list[Failure] = []
        for address in tuple(self._all):
            try:
                answer = self._ask(address, method, target, body)
            except Failure as error:
                failures.append(error)
                if method != "GET" and not error.untaken:
                    break
            else:
                self._all = [address, *(each for each in self._all if each != address)]
                return answer
        if len(failures) == 1:
            raise failures[0]
        todo = "One of them has to be active: systemctl status slurm-watchdog-controller, on each."
        raise Failure(" ".join(each.what for each in failures), todo)

    def _ask(self, address: tuple[str, str, int], method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        """(status, its words, body) of the answer of one of them. Raises Failure."""
        user, host, port = address
        where = f"{host}:{port}"
        uid, digest = _uid(user, where), request_digest(method, target, body)
        argv = ["munge", "--restrict-uid", str(uid), "--cipher", "aes128", *self._socket]
        credential = _run(argv, digest.encode()).strip()
        status, answer = self._send(host, port, method, target, body, f"Authorization: Munge {credential}\r\n")
        if status != 200:  # said before who asks was known: no one vouches for it, and nothing follows from it
            what = f"{where} refuses: {error_text(answer, 'error') or 'it gives no reason'}"
            if error_text(answer, "code") == STANDBY:
                raise Failure(what, f"Name both controllers: {SCHEME}{where},{SCHEME}OTHER:{port}", untaken=True)
            raise Failure(what, "Who may ask is in docs/security.md.")
        head, _, payload = _run(["unmunge", *self._socket], answer).partition("\n\n")
        made_by = MADE_BY.search(head)
        try:
            if made_by is None or int(made_by[1]) != uid:
                raise ValueError
            sealed = msgspec.json.decode(payload.strip(), type=SealedAnswer)
        except (ValueError, RecursionError) as error:
            raise Failure(f"What answers on {where} is not the controller.", "Tell an administrator.") from error
        if sealed.digest != digest:
            raise Failure(f"{where} has answered another request.", "Try again.")
        return sealed.status, "", sealed.body.encode()

    def _send(self, host: str, port: int, method: str, target: str, body: bytes, header: str) -> tuple[int, bytes]:
        is_connected = False
        try:
            with socket.create_connection((host, port), timeout=self._connect_s) as sock:
                is_connected = True
                sock.settimeout(self._deadline_s)
                end = clock.monotonic() + self._deadline_s
                named = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                status, _, answer = ask_once(sock, method, named, target, body, header, MAX_BYTES, end)
                return status, answer
        except OSError as error:
            what = f"The controller on {host}:{port} cannot be asked: {str(error) or type(error).__name__}."
            todo = "Is controller.user_listen set there, and the port open?"
            raise Failure(what, todo, untaken=not is_connected) from error


def _parsed(address: str) -> tuple[str, str, int]:
    """The controller's user, its host, its port. Raises Failure for what is no address."""
    found = ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[3]) < 65536:
        raise Failure(f"{address[:80]!r} is not a controller's address.", "munge://HOST:PORT is one.")
    return found[1] or DEFAULT_USER, found[2].strip("[]"), int(found[3])


def _uid(user: str, where: str) -> int:
    """Whose credentials are the controller's. Raises Failure."""
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise Failure(
            f"This machine knows no user {user}, who runs the controller.",
            f"Give its number (id -u on the management node): munge://NUMBER@{where}",
        ) from None


def _run(argv: list[str], given: bytes) -> str:
    """What munge or unmunge prints, in English. Raises Failure."""
    environ = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(argv, input=given, capture_output=True, timeout=MUNGE_S, check=False, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = f"The program {argv[0]} gives no answer ({type(error).__name__})."
        raise Failure(what, "Is munged well?") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[:1]
        raise Failure(f"{argv[0]} failed: {' '.join(said)[:200]}", "Is munged well, and the clock right?")
    return done.stdout.decode(errors="replace")
