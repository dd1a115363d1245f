"""Restarts that people ask for: one job, now or when it has saved; and the end of such a request."""

from __future__ import annotations

import re
from typing import Any, Final

from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.base.text import plural
from slurm_watchdog.controller.api.asking import ONLY_OWN, RequestRefused, Who, job_id_of, read_body, reason_of
from slurm_watchdog.controller.api.json_views import fields_of
from slurm_watchdog.controller.incidents.judge import proves_stuck
from slurm_watchdog.controller.ports.commands import CommandSources
from slurm_watchdog.model.incidents import Incident

NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class RestartApi:
    """The handlers; each answers JSON."""

    def __init__(self, controller: CommandSources, who: Who):
        self._controller, self._who = controller, who

    async def restart(self, request: web.Request) -> web.Response:
        """Asks for the restart of one job; the answer says what policy says to it."""
        body = await read_body(request)
        job_id, exclude = job_id_of(body), body.get("exclude", [])
        if not isinstance(exclude, list) or not all(isinstance(n, str) and NODE.fullmatch(n) for n in exclude):
            raise RequestRefused(400, "exclude has to be a list of node names")
        job = await self._controller.slurm.read_job(job_id)
        if job is None:  # who may know his own jobs alone learns of no other whether it is there
            raise RequestRefused(404 if ONLY_OWN not in request else 403, f"Slurm knows no job {job_id}")
        name = self._who.require(request, "restart", (job.uid,), f"job {job_id} belongs to {job.user}", (job.account,))
        unknown = [node for node in exclude if node not in self._controller.state.node_addresses]
        if unknown:
            raise RequestRefused(400, f"Slurm knows no node {', '.join(unknown)}")
        self._controller.state.apply_job(job, clock.monotonic(), clock.wall())
        reason, at_once = reason_of(body), body.get("now") is True
        hang = proves_stuck(self._controller.judge.incidents, job.job_id)
        if hang is not None and not at_once:
            raise RequestRefused(409, self._needs_now(hang, job.job_id), code="hangs")
        incident, decision = self._controller.decider.ask_restart(
            job, tuple(dict.fromkeys(exclude)), reason, name, at_once=at_once
        )
        ids = {"incident_id": incident.id, "decision_id": decision.id}
        return web.json_response(ids | fields_of(decision, "verdict", "by", "reason"))

    def _needs_now(self, hang: Incident, job_id: str) -> str:
        """Why a graceful restart is not begun: the loop that would have to see the kill switch is stuck."""
        view = self._controller.state.job_view(job_id, clock.monotonic())
        saved = view.checkpoint if view is not None else None
        step = view.progress.known_step if view is not None and view.progress is not None else None
        from_where = "its last complete checkpoint" if saved is None else f"checkpoint {saved.step}"
        lost = "" if saved is None or step is None else f", {plural(max(0, step - saved.step), 'step')} lost"
        return (
            f"job {job_id} hangs ({hang.kind}, incident {hang.id}): its loop cannot see a kill switch. "
            f"It can be requeued now, from {from_where}{lost}: ask with --now"
        )

    async def cancel(self, request: web.Request) -> web.Response:
        """Ends an operator's restart that still waits for the job to save; its kill switch is removed."""
        job_id = job_id_of(await read_body(request))
        job = self._controller.state.jobs.get(job_id)
        whose = ((job.uid,), f"job {job_id} belongs to {job.user}", (job.account,)) if job is not None else ()
        problem = self._controller.actions.abandon(job_id, self._who.require(request, "restart", *whose))
        if problem is not None:
            raise RequestRefused(409, problem)
        return web.json_response({"cancelled": True, "job_id": job_id})


def node_of(request: web.Request) -> str:
    """The node that a request's path names. Raises RequestRefused."""
    node = request.match_info["node"]
    if not NODE.fullmatch(node):
        raise RequestRefused(400, f"{node[:40]!r} is no node's name")
    return node


def nodes_of(value: Any) -> tuple[str, ...]:
    """Names of nodes. Raises RequestRefused."""
    if not isinstance(value, list) or not all(isinstance(each, str) and NODE.fullmatch(each) for each in value):
        raise RequestRefused(400, "nodes have to be a list of node names")
    return tuple(dict.fromkeys(value))
