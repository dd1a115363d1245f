"""What was lost and what was kept, as the controller answers it: counted in a thread, so that nobody waits for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from aiohttp import web

from slurm_watchdog.controller.api.asking import RequestRefused, Who
from slurm_watchdog.controller.api.report_view import Unfit, report_asked
from slurm_watchdog.controller.ports.commands import CommandSources

MAX_WAITING: Final = 4
"""Reports that are made or wait: one at a time, in a thread of their own."""


class ReportApi:
    """The handler."""

    def __init__(self, controller: CommandSources, who: Who):
        self._controller, self._who = controller, who
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._waiting = 0

    async def report(self, request: web.Request) -> web.Response:
        """Of all jobs for operators, of their own jobs for others."""
        uid = None if self._who.is_operator(request) else self._who.person(request).uid
        if uid is None and not self._who.is_operator(request):
            raise RequestRefused(403, "who is asking is not known")
        url = self._controller.journal.url
        if self._waiting >= MAX_WAITING:
            raise RequestRefused(429, "other reports are being made: ask again in a moment")
        self._waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self._thread, report_asked, url, dict(request.query), uid)
        work.add_done_callback(self._done)
        try:
            return web.json_response(await work)
        except Unfit as error:
            raise RequestRefused(400, str(error)) from error

    def _done(self, work: asyncio.Future[dict[str, Any]]) -> None:
        """Also of one for which nobody waits any more."""
        self._waiting -= 1
