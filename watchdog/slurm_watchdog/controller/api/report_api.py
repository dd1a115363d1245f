"""What was lost and what was kept, as the controller answers it: counted in a thread, so that nobody waits for it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from slurm_watchdog.controller.api.asking import RequestRefused, Who
from slurm_watchdog.controller.api.report_view import Unfit, report_asked
from slurm_watchdog.controller.ports.commands import CommandSources


class ReportApi:
    """The handler."""

    def __init__(self, controller: CommandSources, who: Who):
        self._controller, self._who = controller, who

    async def report(self, request: web.Request) -> web.Response:
        """Of all jobs for operators, of their own jobs for others."""
        uid = None if self._who.is_operator(request) else self._who.person(request).uid
        if uid is None and not self._who.is_operator(request):
            raise RequestRefused(403, "who is asking is not known")
        url = self._controller.journal.url
        try:
            return web.json_response(await asyncio.to_thread(report_asked, url, dict(request.query), uid))
        except Unfit as error:
            raise RequestRefused(400, str(error)) from error
