"""Drains that people ask for, and their end."""

from __future__ import annotations

from aiohttp import web

from slurm_watchdog.controller.api.asking import RequestRefused, Who, read_body, reason_of
from slurm_watchdog.controller.api.restart_api import node_of
from slurm_watchdog.controller.ports.commands import CommandSources, NotDone


class DrainApi:
    """The handlers; each answers JSON."""

    def __init__(self, controller: CommandSources, who: Who):
        self._controller, self._who = controller, who

    async def drain(self, request: web.Request) -> web.Response:
        """Drains one node; with `force` beyond the budget, which is a right of its own."""
        node, body = node_of(request), await read_body(request)
        force, reason = body.get("force") is True, reason_of(body).strip()
        by = self._who.require(request, "force_drain" if force else "drain")
        if not reason:
            raise RequestRefused(400, "a node is drained for a reason: give one with --reason")
        self._require_known(node)
        try:
            kept = await self._controller.actions.drains.drain(node, reason, by, force=force)
        except NotDone as error:
            raise RequestRefused(409, str(error)) from error
        return web.json_response({"node": node, "drained": True, "reason": kept, "by": by})

    async def undrain(self, request: web.Request) -> web.Response:
        """Gives one node back that we have drained."""
        node = node_of(request)
        await read_body(request)
        by = self._who.require(request, "drain")
        self._require_known(node)
        try:
            had = await self._controller.actions.drains.undrain(node, by)
        except NotDone as error:
            raise RequestRefused(409, str(error)) from error
        return web.json_response({"node": node, "drained": False, "reason": had, "by": by})

    def _require_known(self, node: str) -> None:
        if node not in self._controller.state.node_addresses:
            raise RequestRefused(404, f"Slurm knows no node {node}")
