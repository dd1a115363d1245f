"""A controller on another machine: what is believed of an answer, with programs in the place of munge and unmunge."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.base.failure import Failure
from slurm_watchdog.cli.munge_exchange import MungeExchanges
from slurm_watchdog.identity.munge_protocol import request_digest

MUNGE = "#!/bin/sh\nread -r digest; echo MUNGE:$digest:\n"
UNMUNGE = """#!/bin/sh
printf 'STATUS:          Success (0)\\nENCODE_HOST:     m (127.0.0.1)\\nUID:             controller (%s)\\nLENGTH: 9\\n\\n' "${MADE_BY}"
cat
"""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the other end answers: `status`, `body`; it keeps what it got."""
    for name, text in (("munge", MUNGE), ("unmunge", UNMUNGE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MADE_BY", "77")
    given: dict[str, Any] = {"status": 200, "body": b""}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given["authorization"] = self.headers["Authorization"]
            given["asked"] = given.get("asked", 0) + 1
            self.send_response(given["status"])
            self.send_header("Content-Length", str(len(given["body"])))
            self.end_headers()
            self.wfile.write(given["body"])

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        given["address"] = f"munge://77@127.0.0.1:{server.server_address[1]}"
        yield given
        server.shutdown()


def sealed(digest: str) -> bytes:
    return json.dumps({"digest": digest, "status": 404, "body": '{"error": "no"}'}).encode()


DIGEST = request_digest("GET", "/v1/status", b"")
NOT_TAKEN = b'{"error": "This controller is the standby; the active one is mgmt2.", "code": "standby"}'


def test_an_answer_of_the_controllers_user_to_this_request_is_believed(answers: dict[str, Any]) -> None:
    answers["body"] = sealed(DIGEST)
    assert MungeExchanges(answers["address"], 5.0)("GET", "/v1/status", b"") == (404, "", b'{"error": "no"}')
    assert answers["authorization"] == f"Munge MUNGE:{DIGEST}:"


def test_no_other_answer_is(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ask = MungeExchanges(answers["address"], 5.0)
    for body, words in (
        (sealed("0" * 64), "another request"),
        (b"{}", "is not the controller"),
        (b"", "is not the controller"),
    ):
        answers["body"] = body
        with pytest.raises(Failure, match=words):
            ask("GET", "/v1/status", b"")
    answers["body"] = sealed(DIGEST)
    monkeypatch.setenv("MADE_BY", "78")
    with pytest.raises(Failure, match="is not the controller"):
        ask("GET", "/v1/status", b"")
    answers["status"], answers["body"] = 403, b'{"error": "this door is for users"}'
    with pytest.raises(Failure, match="refuses: this door is for users"):
        ask("GET", "/v1/status", b"")


@pytest.mark.usefixtures("answers")
def test_nobody_who_listens_is_said_with_what_to_look_at() -> None:
    with pytest.raises(Failure, match="cannot be asked") as caught:
        MungeExchanges(NOBODY_THERE, 1.0)("GET", "/", b"")
    assert "controller.user_listen" in caught.value.todo
    with pytest.raises(Failure, match="knows no user no-such-user-here"):
        MungeExchanges("munge://no-such-user-here@127.0.0.1:1", 1.0)("GET", "/", b"")


@contextlib.contextmanager
def a_port(said: bytes | None = NOT_TAKEN) -> Iterator[str]:
    """An address at which each request gets 503 and `said`; None: its connection is closed without an answer."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if said is not None:
                self.send_response(503)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"munge://77@127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        assert len(asked) <= 1, "the one that answered is asked first from then on"


NOBODY_THERE = "munge://77@127.0.0.1:1"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("first", ["the standby", "nobody"])
def test_of_two_controllers_the_active_one_answers(answers: dict[str, Any], method: str, first: str) -> None:
    answers["body"] = sealed(request_digest(method, "/v1/status", b""))
    with a_port() as standby:
        addresses = (
            f"{standby if first == 'the standby' else NOBODY_THERE},{answers['address'].removeprefix('munge://')}"
        )
        ask = MungeExchanges(addresses, 5.0)
        for _ in range(2):
            assert ask(method, "/v1/status", b"")[0] == 404
    assert answers["asked"] == 2


def test_a_restart_that_one_may_have_taken_is_not_asked_of_the_other(answers: dict[str, Any]) -> None:
    answers["body"] = sealed(DIGEST)
    with a_port(None) as cut_off:
        with pytest.raises(Failure, match="cannot be asked"):
            MungeExchanges(f"{cut_off},{answers['address']}", 5.0)("POST", "/v1/restart", b"{}")
        assert "asked" not in answers
    with a_port(None) as cut_off:
        assert MungeExchanges(f"{cut_off},{answers['address']}", 5.0)("GET", "/v1/status", b"")[0] == 404


def test_without_an_active_one_both_say_why(answers: dict[str, Any]) -> None:
    with a_port() as standby, pytest.raises(Failure, match=r"is the standby.*cannot be asked") as caught:
        MungeExchanges(f"{standby},{NOBODY_THERE}", 5.0)("GET", "/v1/status", b"")
    assert "has to be active" in caught.value.todo
    with a_port() as standby, pytest.raises(Failure, match="is the standby") as caught:
        MungeExchanges(standby, 5.0)("GET", "/v1/status", b"")
    assert caught.value.todo.startswith("Name both controllers: munge://127.0.0.1:")
    with pytest.raises(Failure, match="is not a controller's address"):
        MungeExchanges(f"{NOBODY_THERE},", 5.0)
