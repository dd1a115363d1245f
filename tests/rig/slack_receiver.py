"""A Slack that keeps what is posted."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class SlackReceiver:
    """Stands in for Slack's incoming webhook: keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.answer = 200
        messages, receiver = self.messages, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if receiver.answer == 200:
                    messages.append(json.loads(body))
                self.send_response(receiver.answer)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/services/T/B/secret"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def texts(self) -> list[str]:
        """The first line of every message, as Slack would show it in a notification."""
        return [str(message.get("text", "")) for message in self.messages]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
