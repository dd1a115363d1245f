"""The last test of nodes, for the page: `test-nodes` of an operator hands it over, and it is kept until the next one,
or until the controller ends: what counts of a test is in the history of its nodes."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from aiohttp import web

from slurm_watchdog.base.text import one_line
from slurm_watchdog.controller.api.asking import RequestRefused, Who
from slurm_watchdog.controller.ports.commands import CommandSources
from slurm_watchdog.model.node_comparison import KeptComparison, NodeComparison

PATH: Final = re.compile(r"(?<![\w.])/[^\s;,]*")
"""A mount or a directory, which a user may have named."""


def parse_comparison(data: bytes) -> NodeComparison:
    """Raises RequestRefused."""
    try:
        found = msgspec.json.decode(data, type=NodeComparison)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestRefused(400, f"it is no test of nodes: {error}") from error
    if any(len(each.values) != len(found.nodes) for each in found.figures):
        raise RequestRefused(400, "each figure needs a value, or null, for each node")
    return found


def comparison_json(kept: KeptComparison | None, *, sees: bool) -> dict[str, Any]:
    """As the page draws it. Whoever does not see everything reads no reasons and no paths."""
    if kept is None:
        return {"test": None, "by": ""}
    document: dict[str, Any] = msgspec.to_builtins(kept.comparison)
    document["sentence"] = one_line(document["sentence"], 400)
    for each in document["nodes"]:
        each["why"] = one_line(each.get("why", ""), 400) if sees else ""
    if not sees:
        document["sentence"] = PATH.sub("a directory", document["sentence"])
    document.setdefault("figures", [])
    document.setdefault("left_out", 0)
    return {"test": document, "by": kept.by}


class ComparisonApi:
    """Its handlers."""

    def __init__(self, controller: CommandSources, who: Who):
        self._controller, self._who = controller, who

    async def keep(self, request: web.Request) -> web.Response:
        """Of operators: anybody may test nodes, but the page shows no stranger's picture of them."""
        name = self._who.name(request)
        if not self._who.is_operator(request):
            raise RequestRefused(403, "the page shows tests of operators (security.operators)")
        found = parse_comparison(await request.read())
        known = self._controller.state.node_addresses
        if unknown := next((each.name for each in found.nodes if each.name not in known), None):
            raise RequestRefused(404, f"Slurm knows no node {unknown[:64]}")
        self._controller.ledger.keep_comparison(KeptComparison(comparison=found, by=name))
        return web.json_response({"nodes": len(found.nodes)})

    async def last(self, request: web.Request) -> web.Response:
        """The last one."""
        kept = self._controller.ledger.comparison
        return web.json_response(comparison_json(kept, sees=self._who.is_operator(request)))
