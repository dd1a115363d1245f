"""Asks the controller over its local socket: HTTP with the standard library, every request with a deadline."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from slurm_watchdog.cli.munge_exchange import SCHEME, ExchangeFailed, MungeExchanges
from slurm_watchdog.model.diagnosis_documents import DiagnosisProgress
from slurm_watchdog.model.documents import (
    Accepted,
    ActionRun,
    Answered,
    AnsweredAll,
    Explanation,
    Incident,
    Paused,
    Progress,
    Selected,
    SelectedJob,
    Silences,
    Status,
)
from slurm_watchdog.model.lost_time import Report
from slurm_watchdog.model.node_documents import NodeEventRequest, NodeHistory, NodeTable

T = TypeVar("T")

DEADLINE_S: Final = 10.0
"""For one whole request, from connecting to the last byte."""
MAX_BYTES: Final = 64 * 1024**2
"""Stacks of a thousand ranks are a few MiB; more than this is not an answer of ours."""

MAX_FOLLOWED: Final = 500
"""Incidents of one request: the controller takes 1,000, and 64 KiB."""

SERVICE_SOCKET: Final = "/run/slurm-watchdog/controller.sock"
"""The service's socket; any other one usually belongs to a user's `run` or `attach`."""
_IS_IT_RUNNING = (
    "Is the controller running, on this machine? systemctl status slurm-watchdog-controller; from other machines: "
    "--socket munge://HOST:PORT (controller.user_listen)"
)
_SEE_ITS_LOG = "See its log: journalctl -u slurm-watchdog-controller -n 50"
_HAS_IT_ENDED = "Has that `run` or `attach` ended? Its journal answers: slurm-watchdog incidents --journal {}"
Exchange = Callable[[str, str, object], tuple[int, str, bytes]]
"""(method, target, body) to (status, its words, body)."""


class ClientError(Exception):
    """A request that got no good answer: `what` failed, and what `todo` next, each a sentence."""

    def __init__(self, what: str, todo: str = "", http_status: int | None = None, code: str = ""):
        super().__init__(what)
        self.what = what
        self.todo = todo
        self.http_status = http_status
        """Set when the controller itself answered with an error."""
        self.code = code
        """The controller's word for programs, such as `hangs`."""

    @property
    def is_final(self) -> bool:
        """Whether the controller has refused the request itself: to ask again changes nothing. 429: ask later."""
        return self.http_status is not None and 400 <= self.http_status < 500 and self.http_status != 429


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
        self._exchange = exchange or (self._over_munge if path.startswith(SCHEME) else self._over_socket)

    def status(self, *, me: bool = False) -> tuple[Status, Any]:
        """The state of everything, or of the caller's own jobs, and the same as the plain document."""
        return self._ask("GET", "/v1/status?me=1" if me else "/v1/status", Status)

    def incidents(self, job_id: str | None) -> tuple[list[Incident], Any]:
        """The incidents, of one job or of all."""
        query = f"?{urlencode({'job': job_id})}" if job_id else ""
        return self._ask("GET", f"/v1/incidents{query}", list[Incident])

    def incident(self, incident_id: str) -> tuple[Explanation, Any]:
        """One incident with its timeline, evidence and actions."""
        return self._ask("GET", f"/v1/incidents/{quote(incident_id, safe='')}", Explanation)

    def piece(self, explanation: Any, piece: Any) -> Any:
        """The document of one piece of `explanation["evidence"]`, read from the incident that it is stored with."""
        return self.evidence(piece.get("incident") or explanation["incident"]["id"], piece["number"])

    def evidence(self, incident_id: str, number: int) -> Any:
        """The document of one piece of an incident's evidence."""
        return self._ask("GET", f"/v1/incidents/{quote(incident_id, safe='')}/evidence/{number}", dict[str, Any])[1]

    def start_diagnosis(self, job_id: str) -> tuple[DiagnosisProgress, Any]:
        """Has evidence collected from every rank of a job, now."""
        return self._ask("POST", "/v1/diagnose", DiagnosisProgress, {"job_id": job_id})

    def diagnosis(self, diagnosis_id: str) -> tuple[DiagnosisProgress, Any]:
        """How far that is, and the diagnosis when it is over."""
        return self._ask("GET", f"/v1/diagnose/{quote(diagnosis_id, safe='')}", DiagnosisProgress)

    def nodes(self) -> tuple[NodeTable, Any]:
        """Every node that anything is to be said against."""
        return self._ask("GET", "/v1/nodes", NodeTable)

    def node(self, name: str) -> tuple[NodeHistory, Any]:
        """One node with its history."""
        return self._ask("GET", f"/v1/nodes/{quote(name, safe='')}", NodeHistory)

    def add_node_event(self, name: str, event: NodeEventRequest) -> Any:
        """Adds a test's result, or that it was mended, to what is remembered of a node."""
        body = msgspec.to_builtins(event)
        return self._ask("POST", f"/v1/nodes/{quote(name, safe='')}/events", dict[str, Any], body)[1]

    def report(self, asked: Mapping[str, str]) -> tuple[Report, Any]:
        """What the time of the jobs went to. `asked`: `from`, `to`, `user`, `account`, `partition`, `job`."""
        return self._ask("GET", f"/v1/report?{urlencode(asked)}", Report)

    def pause(self, reason: str) -> tuple[Paused, Any]:
        """No action anywhere from now on."""
        return self._ask("POST", "/v1/pause", Paused, {"reason": reason})

    def resume(self) -> tuple[Paused, Any]:
        """Actions are allowed again."""
        return self._ask("POST", "/v1/resume", Paused, {})

    def silences(self) -> tuple[Silences, Any]:
        """What people are not notified of."""
        return self._ask("GET", "/v1/silences", Silences)

    def silence(self, selectors: Mapping[str, list[str]], for_s: float, reason: str) -> tuple[Silences, Any]:
        """No messages about these `kinds`, `jobs` and `nodes` for so long."""
        return self._ask("POST", "/v1/silences", Silences, {**selectors, "for_s": for_s, "reason": reason})

    def end_silence(self, silence_id: str) -> tuple[Silences, Any]:
        """Ends a silence."""
        return self._ask("POST", f"/v1/silences/{quote(silence_id, safe='')}/end", Silences, {})

    def restart(self, job_id: str, exclude: list[str], reason: str, now: bool = False) -> tuple[Accepted, Any]:
        """Asks for a restart, graceful unless `now`; the answer says whether policy allows it."""
        body = {"job_id": job_id, "exclude": exclude, "reason": reason, "now": now}
        return self._ask("POST", "/v1/restart", Accepted, body)

    def running_jobs(self) -> tuple[SelectedJob, ...]:
        """All jobs that run, each with why it cannot be asked to save."""
        return self._ask("GET", "/v1/requests/jobs", Selected)[0].jobs

    def ask_jobs(self, body: Mapping[str, Any]) -> tuple[Answered, ...]:
        """Asks for the same of some jobs; the answers say what policy allows."""
        return self._ask("POST", "/v1/requests", AnsweredAll, body)[0].jobs

    def progress(self, incident_ids: Sequence[str]) -> dict[str, ActionRun]:
        """How far the actions of these incidents are, of those that the controller shows to the caller."""
        found: dict[str, ActionRun] = {}
        for start in range(0, len(incident_ids), MAX_FOLLOWED):
            body = {"incident_ids": list(incident_ids[start : start + MAX_FOLLOWED])}
            found |= self._ask("POST", "/v1/requests/progress", Progress, body)[0].actions
        return found

    def cancel_restart(self, job_id: str) -> Any:
        """Ends a restart that still waits for the job to save."""
        return self._ask("POST", "/v1/restart/cancel", dict[str, Any], {"job_id": job_id})[1]

    def _ask(self, method: str, target: str, kind: type[T], body: object = None) -> tuple[T, Any]:
        status, reason, data = self._exchange(method, target, body)
        if status >= 400:
            raise ClientError(
                _error(data, "error") or f"The controller answered {status} {reason} to {method} {target}.",
                "" if status < 500 else _SEE_ITS_LOG,
                status,
                _error(data, "code"),
            )
        try:
            return msgspec.json.decode(data, type=kind), json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ClientError(
                f"The controller's answer to {method} {target} is not what this release expects: {error}",
                "Are the command and the controller of one release? Compare: slurm-watchdog --version",
            ) from error

    def _over_munge(self, method: str, target: str, body: object) -> tuple[int, str, bytes]:
        try:
            self._munge = self._munge or MungeExchanges(self.path, self._deadline_s)
            return self._munge(method, target, body)
        except ExchangeFailed as error:
            raise ClientError(error.what, error.todo) from error

    def _over_socket(self, method: str, target: str, body: object) -> tuple[int, str, bytes]:
        connection = _UnixConnection(self.path, self._deadline_s)
        headers = {"Accept": "application/json", "Connection": "close"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, target, body=data, headers=headers)
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
            return ClientError(f"Nobody listens on the controller's socket {self.path}.", look)
        if isinstance(error, PermissionError):
            return ClientError(
                f"You may not use the controller's socket {self.path}.",
                "Ask an administrator to add you to the group of that socket (ls -l shows it), such as "
                "slurm-watchdog-users.",
            )
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return ClientError(f"Talking to the controller on {self.path} failed: {reason}.", look)


def _error(data: bytes, key: str) -> str:
    """One text of an error's document: its sentence, or its word for programs."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    return str(document.get(key) or "") if isinstance(document, dict) else ""
