"""The door for agents: who may report for which node, in what size; and /metrics, /healthz beside it."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from aiohttp import ClientError, web

from watchdog.controller.metrics import ControllerMetrics
from watchdog.model import Reply, Report
from watchdog.wire import MAX_BYTES, WireError, decode_report, encode_reply

log = logging.getLogger(__name__)

BODY_DEADLINE_S = 20.0
"""A report has to arrive whole within this time: a slow sender holds no connection open."""


class Door:
    """Checks a report at the edge and hands it on. Refusals are counted and change nothing else."""

    def __init__(
        self,
        *,
        token: str,
        address_of: Callable[[str], str | None] | None,
        accept: Callable[[Report], Reply],
        metrics: ControllerMetrics,
        healthy: Callable[[], tuple[bool, str]],
    ):
        self._token = token.encode()
        self._address_of = address_of
        self._accept = accept
        self._metrics = metrics
        self._healthy = healthy
        self._resolved: dict[str, frozenset[str]] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_post("/v1/report", self._report)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/healthz", self._health)
        return app

    async def _report(self, request: web.Request) -> web.Response:
        if self._token and not self._token_fits(request.headers.get("Authorization", "")):
            return self._refuse("unauthorized", 401, "the token is missing or wrong; see security.token_file")
        try:
            body = await asyncio.wait_for(request.read(), BODY_DEADLINE_S)
            report = decode_report(body)
        except WireError as error:
            return self._refuse("garbage", 400, str(error))
        except web.HTTPRequestEntityTooLarge:
            return self._refuse("too_large", 413, f"a report may have {MAX_BYTES} bytes")
        except (ConnectionError, ClientError):
            return self._refuse("cut_off", 400, "the connection broke before the report had arrived")
        except TimeoutError:
            return self._refuse("too_slow", 408, f"a report has to arrive within {BODY_DEADLINE_S:.0f} s")
        problem = await self._wrong_node(report.node, request.remote)
        if problem:
            return self._refuse("wrong_node", 403, problem)
        return web.Response(body=encode_reply(self._accept(report)), content_type="application/json")

    def _token_fits(self, header: str) -> bool:
        scheme, _, given = header.partition(" ")
        return scheme == "Bearer" and hmac.compare_digest(given.strip().encode(), self._token)

    async def _wrong_node(self, node: str, remote: str | None) -> str:
        """Why this address may not speak for this node; empty if it may. A node speaks only for itself."""
        if self._address_of is None or remote is None:
            return ""
        if ipaddress.ip_address(remote).is_loopback:
            return ""
        address = self._address_of(node)
        if address is None:
            return f"Slurm knows no node {node!r}"
        if remote not in await self._addresses(address):
            return f"{remote} is not the address that Slurm has for {node}"
        return ""

    async def _addresses(self, name: str) -> frozenset[str]:
        try:
            return frozenset({str(ipaddress.ip_address(name))})
        except ValueError:
            pass
        if name not in self._resolved:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
            except OSError:
                return frozenset()
            self._resolved[name] = frozenset(str(entry[4][0]) for entry in found)
        return self._resolved[name]

    def _refuse(self, outcome: str, status: int, sentence: str) -> web.Response:
        self._metrics.reports.labels(outcome).inc()
        return web.json_response({"error": sentence}, status=status)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _health(self, _: web.Request) -> web.Response:
        good, sentence = self._healthy()
        return web.json_response({"healthy": good, "detail": sentence}, status=200 if good else 503)


def read_token(file: str) -> str:
    """The secret in `file`, empty without a file. Raises ValueError if the file holds none, or others may read it."""
    if not file:
        return ""
    path = Path(file)
    try:
        if path.stat().st_mode & 0o077:
            raise ValueError(f"security.token_file {file} can be read by others: chmod 600 {file}")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"security.token_file {file} cannot be read: {error}") from error
    if len(token) < 16:
        raise ValueError(
            f"security.token_file {file} holds fewer than 16 characters: openssl rand -hex 32 > {file}"
        )
    return token
