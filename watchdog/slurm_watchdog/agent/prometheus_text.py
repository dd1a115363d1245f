"""Prometheus' text format, and a listener that answers with it: so little is needed that its library, of 14
MiB, is not loaded.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

from slurm_watchdog.agent.collectors.presentation import Family
from slurm_watchdog.base import clock, loop

log = logging.getLogger(__name__)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_REQUEST: Final = 16 * 1024
CLIENT_S: Final = 2.0
"""One scrape, from the first byte of the request to the last of the answer: a slow reader delays the next by
no more."""


def escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def format_value(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def format_family(prefix: str, family: Family) -> list[str]:
    """The lines of one metric; none if it has no series. Bytes of names that are no UTF-8 become question marks."""
    name, lines = prefix + family.name, []
    for values, value in family.series:
        pairs = ",".join(f'{key}="{escape_label(each)}"' for key, each in zip(family.labels, values, strict=True))
        lines.append(f"{name}{{{pairs}}} {format_value(value)}" if pairs else f"{name} {format_value(value)}")
    return [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}", *lines] if lines else []


def histogram(name: str, text: str, bounds: tuple[float, ...], counts: list[int], total: float) -> list[str]:
    """The lines of a histogram without labels; `counts` has one more than `bounds`, for what is above them all."""
    lines, below = [f"# HELP {name} {text}", f"# TYPE {name} histogram"], 0
    for bound, count in zip((*(repr(each) for each in bounds), "+Inf"), counts, strict=True):
        below += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
    return [*lines, f"{name}_sum {total!r}", f"{name}_count {below}"]


def serve(host: str, port: int, render: Callable[[], bytes]) -> int | None:
    """Answers on this address from a thread of its own; returns the port, or None, with a warning, where it
    is taken."""
    try:
        family_of_host = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family_of_host, backlog=16)
    except OSError as error:
        log.warning("no metrics: %s:%d can't be listened on (%s); set agent.metrics_listen", host, port, error)
        return None
    threading.Thread(target=_serve_for_ever, args=(listener, render), name="metrics", daemon=True).start()
    found: int = listener.getsockname()[1]
    return found


def _serve_for_ever(listener: socket.socket, render: Callable[[], bytes]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # no descriptor left: they come back
            loop.sleep(1.0)
            continue
        with client:
            try:
                _answer(client, render)
            except OSError:
                pass  # it went away, or was too slow
            except Exception:
                log.exception("the metrics could not be rendered")


def _answer(client: socket.socket, render: Callable[[], bytes]) -> None:
    end = clock.monotonic() + CLIENT_S
    request = b""
    while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST:
        client.settimeout(max(0.001, end - clock.monotonic()))
        data = client.recv(4096)
        if not data:
            return
        request += data
    method, path, _ = (*request.split(b"\r\n", 1)[0].split(b" "), b"", b"")[:3]
    found = method in (b"GET", b"HEAD") and path.partition(b"?")[0] in (b"/metrics", b"/")
    body = render() if found else b"/metrics is here, nothing else\n"
    status = "200 OK" if found else "404 Not Found"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    client.settimeout(CLIENT_S)
    client.sendall(head.encode() + (b"" if method == b"HEAD" else body))
