"""A controller behind a socket that answers with documents of a test, and commands run against it."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from slurm_watchdog.cli.main import main
from slurm_watchdog.cli.options import ServicePaths

NO_SERVICE = ServicePaths("/nowhere/config.yaml", "/nowhere/controller.sock")
Answer = Callable[[str, str, Any], tuple[int, Any]]
"""(method, target, body) to (status, document); bytes are sent as they are."""


class FakeController:
    """Answers requests with `answer`, and remembers them."""

    def __init__(self, path: Path):
        self.path = path
        self.requests: list[tuple[str, str, Any]] = []
        self.answers: dict[tuple[str, str], Any] = {}
        self.answer: Answer = self._from_table
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                fake.requests.append((self.command, self.path, body))
                status, document = fake.answer(self.command, self.path, body)
                data = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def address_string(self) -> str:
                return "local"

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self._server = Server(str(path), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _from_table(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        answer = self.answers[method, target]
        return answer if isinstance(answer, tuple) else (200, answer)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def run(*arguments: str, socket: Path | None = None, **environment: str) -> Result:
    """One command, as from a pipe, on a machine without a service."""
    more = ["--socket", str(socket)] if socket else []
    return CliRunner(env={"SLURM_WATCHDOG_SOCKET": "", "COLUMNS": "100", **environment}).invoke(
        main, [*arguments, *more], obj=NO_SERVICE
    )


def has(found: Any, given: Any) -> bool:
    """Whether JSON has all that is `given`; it may have more keys."""
    if isinstance(given, dict):
        return isinstance(found, dict) and all(key in found and has(found[key], each) for key, each in given.items())
    if isinstance(given, list):
        return isinstance(found, list) and len(found) == len(given) and all(map(has, found, given))
    return bool(found == given)


def job(**changes: Any) -> dict[str, Any]:
    return {
        "job_id": "4711", "name": "gpt", "user": "ann", "state": "RUNNING", "nodes": ["n1", "n2", "n3"], "restarts": 1,
        "step": 120, "total_steps": 1000, "step_s": 4.2, "progress_age_s": 3.0, "limit_s": 60.0, "phase": "training",
        "ranks": 8, "ranks_alive": 8, "checkpoint_step": 100,
        "health": {"state": "training", "level": "ok", "reason": "", "todo": ""}, **changes,
    }  # fmt: skip


def status(**changes: Any) -> dict[str, Any]:
    return {
        "level": "ok",
        "headline": "1 job watched (1 training), 3 nodes reporting, mode observe.",
        "mode": "observe",
        "paused": None,
        "controller": {"version": "0.1.0", "started_at": 1.0, "last_tick_age_s": 0.4, "warming_up": False},
        "slurm": {"age_s": 3.0, "error": None},
        "nodes": {"reporting": ["n1", "n2", "n3"], "silent": []},
        "jobs": [job()],
        "incidents": {"firing": 0, "pending": 0, "resolved": 2},
        **changes,
    }


def incident(**changes: Any) -> dict[str, Any]:
    return {
        "id": "7f3a", "kind": "collective_hang", "state": "firing", "severity": "critical", "job_id": "4711",
        "opened_at": 1700000000.0, "detected_after_s": 62.0,
        "culprits": [{"node": "n3", "rank": 2, "pid": 471, "gpu_uuid": None, "mount": None,
                      "reason": "waits for its data loader"}],
        "summary": "Job 4711 hangs after step 120.", "evidence": ["7 ranks wait in all_reduce"],
        "decisions": [{"action": "requeue", "verdict": "observed", "by": "mode", "reason": "mode is observe",
                       "outcome": None}],
        **changes,
    }  # fmt: skip


def action(operations: list[dict[str, Any]], end: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "decision_id": "d1", "action": "graceful_restart", "verdict": "allowed", "by": "operator_restart",
        "reason": "no guard objects", "operations": operations, "end": end,
    }  # fmt: skip


def operation(name: str, outcome: str | None, detail: str = "", attempt: int = 1) -> dict[str, Any]:
    return {
        "operation": name, "attempt": attempt, "outcome": outcome, "detail": detail, "intent_at": 1700000000.0,
        "outcome_at": None if outcome is None else 1700000001.0,
    }  # fmt: skip


HOSTILE = "[red]x[/red]\x1b[31m\x1b]0;title\x07\x9b2J\n\rfake OK\u202e\u200b[link=http://x]y[/"


def explanation(**changes: Any) -> dict[str, Any]:
    return {
        "incident": incident(),
        "timeline": [{"at": 1700000000.0, "text": "pending: no step for 61 s"}],
        "evidence": [{"at": 1700000000.0, "kind": "stacks", "document": {"n3": ["wait (queue.py:171)"]}},
                     {"at": 1700000000.0, "kind": "log", "document": "\n".join(f"line {n}" for n in range(100))}],
        "actions": [action([operation("requeue_hold", "done", "held"), operation("exclude", None)], None)],
        **changes,
    }  # fmt: skip
