"""Which controller a command asks, and one request to it, with a deadline: this machine's over its socket, one of
another machine over MUNGE, otherwise a `run` of the same user or its journal."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.base.failure import Failure
from slurm_watchdog.cli import options
from slurm_watchdog.cli.http_request import ask_once, error_text
from slurm_watchdog.cli.options import Asked, ClientError, Refusal, warn
from slurm_watchdog.model.documents import Explanation
from slurm_watchdog.report.words import moment
from slurm_watchdog.standalone.own_runs import OwnRun, ended_runs, home_directory, is_absent, running_runs, state_home

T = TypeVar("T")
Exchange = Callable[[str, str, bytes], tuple[int, str, bytes]]  # (method, target, body) to (status, its words, body).

DEADLINE_S = 10.0  # For one whole request, from connecting to the last byte.
MAX_BYTES = 64 * 1024**2  # Stacks of a thousand ranks are a few MiB; more than this is not an answer of ours.
_IS_IT_RUNNING = (
    "Is the controller running, on this machine? systemctl status slurm-watchdog-controller; from other machines: "
    "--socket munge://HOST:PORT (controller.user_listen)"
)
_LOG = "ee its log: journalctl -u slurm-watchdog-controller -n 50"


@contextmanager
def told() -> Iterator[None]:
    """What fails in here ends the command. Raises ClientError."""
    try:
        yield
    except Failure as error:
        raise ClientError(error.what, error.todo, 400 if error.is_usage else None) from error


class Client:
    """The controller behind one socket or address. Every method raises ClientError."""

    def __init__(self, path: str, deadline_s: float = DEADLINE_S, exchange: Exchange | None = None):
        """`exchange` answers in the place of a socket: a journal does."""
        self.path = path
        self._deadline_s = deadline_s
        if exchange is None and path.startswith("munge://"):
            from slurm_watchdog.cli.munge_exchange import MungeExchanges

            with told():
                exchange = MungeExchanges(path, deadline_s)
        self._exchange = exchange or self._over_socket

    def get(self, kind: type[T], path: str, *parts: object, **query: object) -> T:
        """A document of this type. `path` has `{}` for each of `parts`; what of `query` is None is not asked for."""
        asked = urlencode({name: value for name, value in query.items() if value is not None})
        return self._ask("GET", path, parts, f"?{asked}" if asked else "", kind, b"")

    def post(self, kind: type[T], path: str, *parts: object, body: msgspec.Struct | None = None) -> T:
        """What is answered to a request that changes something, or has much in it."""
        given = json.dumps({} if body is None else msgspec.to_builtins(body), ensure_ascii=False)
        # Half a character, as of a terminal that is not in UTF-8, becomes a question mark.
        return self._ask("POST", path, parts, "", kind, given.encode(errors="replace"))

    def _ask(self, method: str, path: str, parts: tuple[object, ...], query: str, kind: type[T], body: bytes) -> T:
        target = path.format(*(quote(str(each), safe="") for each in parts)) + query
        with told():
            status, reason, data = self._exchange(method, target, body)
        if status >= 400:
            what = error_text(data, "error") or f"The controller answered {status} {reason} to {method} {target}."
            raise ClientError(what, "" if status < 500 else f"S{_LOG}", status, error_text(data, "code"))
        try:
            return msgspec.json.decode(data, type=kind)
        except (ValueError, RecursionError) as error:
            raise ClientError(
                f"The controller's answer to {method} {target} is not what this release expects: {error}",
                "Are the command and the controller of one release? Compare: slurm-watchdog --version",
            ) from error

    def _over_socket(self, method: str, target: str, body: bytes) -> tuple[int, str, bytes]:
        end = clock.monotonic() + self._deadline_s
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(self._deadline_s)
                sock.connect(self.path)
                answer = ask_once(sock, method, "localhost", target, body, "", MAX_BYTES, end)
        except OSError as error:
            raise self._failed(error) from error
        if len(answer[2]) > MAX_BYTES:
            raise ClientError(f"The controller's answer to {method} {target} exceeds {MAX_BYTES} bytes.", f"S{_LOG}")
        return answer

    def _failed(self, error: OSError) -> ClientError:
        """What went wrong on the socket, and what to look at."""
        own = Path(self.path).parent
        is_own = self.path != options.DEFAULT_SOCKET and os.path.isfile(own / "journal.sqlite")
        ended = f"Has that `run` ended? Its journal answers: slurm-watchdog incidents --journal {own}"
        look = ended if is_own else _IS_IT_RUNNING
        known: dict[type[OSError], tuple[str, str]] = {
            TimeoutError: (
                f"The controller did not answer on {self.path} within {self._deadline_s:g} s.",
                "It may be busy, or stopped." if is_own else f"{look}; s{_LOG}",
            ),
            FileNotFoundError: (f"The controller's socket {self.path} does not exist.", look),
            ConnectionRefusedError: (f"No controller listens on the socket {self.path}.", look),
            PermissionError: (
                f"You may not use the controller's socket {self.path}.",
                "Ask an administrator to add you to the group of that socket (ls -l shows it), such as "
                "slurm-watchdog-users.",
            ),
        }
        reason = error.strerror or str(error) or type(error).__name__
        return ClientError(
            *known.get(type(error), (f"Talking to the controller on {self.path} failed: {reason}.", look))
        )


def find(asked: Asked, incident_id: str | None = None) -> Client:
    """The controller that was named, this machine's, or the user's own and only run; where a journal can answer else
    that of the user's newest run that has ended, or of the newest that has the incident. Raises ClientError, and
    Refusal if there are several runs."""
    if asked.journal is not None:
        return _past(asked.journal)
    own, place = own_instead(asked), own_place()
    if len(own) > 1:
        known = [line for each in own for line in (f"  {describe(each)}", f"    --socket {shlex.quote(each.socket)}")]
        raise Refusal([f"{len(own)} of your runs answer; name one with --socket:", *known])
    if own:
        return Client(own[0].socket)
    ended = ended_runs(place) if _is_absent(asked) else []
    for run in ended if asked.or_journal and options.readable_config() is None else ():
        try:
            client = _past(run.directory)
            if incident_id is not None:
                client.get(Explanation, "/v1/incidents/{}", incident_id)
        except ClientError:
            continue
        warn(f"From the journal of your {describe(run)}")
        return client
    for run in ended[:1]:
        warn(f"Your newest {describe(run)}")
        warn(f"Ask its journal: slurm-watchdog incidents --journal {shlex.quote(run.directory)}")
    return Client(find_socket(asked))


def find_socket(asked: Asked) -> str:
    """The socket that the options, the environment or the configuration name, in this order."""
    if asked.socket:
        return asked.socket
    if asked.config is not None:
        return options.load_or_exit(asked.config, with_knowledge=False).controller.socket
    file, usual = options.readable_config(), options.service_paths().socket
    if file is None:
        return usual
    import yaml

    try:  # this key alone: errors elsewhere must not keep anybody from `pause`, and to check all takes a second
        known = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        return str(known.get("expert", known)["controller"]["socket"])  # without `expert`: the release before
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return usual


def own_instead(asked: Asked) -> list[OwnRun]:
    """The user's own runs that answer, where nothing was named and no controller of this machine answers."""
    return running_runs(own_place()) if _is_absent(asked) else []


def _is_absent(asked: Asked) -> bool:
    return not asked.socket and asked.config is None and is_absent(find_socket(Asked()))


def _past(journal: str) -> Client:
    from slurm_watchdog.report.past import open_journal

    with told():
        file, exchange = open_journal(journal)
    return Client(file, exchange=exchange)


def own_place() -> Path:
    """Where the user's own runs are written down."""
    return state_home(home_directory(), os.environ)


def describe(run: OwnRun) -> str:
    """One run in a few words."""
    when = f"since {moment(run.started_at)}" if run.ended_at is None else f"ended {moment(run.ended_at)}"
    return f"`run` of {run.what} ({when}), {run.directory}"
