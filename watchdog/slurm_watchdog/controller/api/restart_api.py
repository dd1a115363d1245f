"""What people ask of jobs: the restart of one, now or when it has saved, and the end of such a request; or the same of
many at once: which those are, and how far each is."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.base.text import plural
from slurm_watchdog.controller.api.asking import (
    ONLY_OWN,
    RequestRefused,
    Who,
    checked_job,
    job_id_of,
    read_body,
    reason_of,
)
from slurm_watchdog.controller.api.json_views import action_json, fields_of
from slurm_watchdog.controller.incidents.judge import proves_stuck
from slurm_watchdog.controller.ports.commands import CommandSources
from slurm_watchdog.model.actions import Wish
from slurm_watchdog.model.incidents import Incident
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RESTARTABLE

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


MAX_AT_ONCE: Final = 50
"""Jobs of one request: each is some writes to the disk, and the controller's other work waits for none of them."""
LONGEST_S: Final = 30 * 86400.0
MAX_FOLLOWED: Final = 1000
MAX_SAID: Final = 8
"""Names in a sentence."""


class SaveApi:
    """The handlers; each answers JSON."""

    def __init__(self, controller: CommandSources, who: Who):
        self._controller, self._who = controller, who

    async def selected(self, request: web.Request) -> web.Response:
        """The running jobs, each with why it cannot be asked to save."""
        running = [job for job in self._controller.state.jobs.values() if job.state in RESTARTABLE]
        return web.json_response({"jobs": [self._row(job) for job in running]})

    def _row(self, job: SlurmJob) -> dict[str, Any]:
        view = self._controller.state.job_view(job.job_id, clock.monotonic())
        return {
            **fields_of(job, "job_id", "user", "name", "partition", "nodes"),
            "step": view.progress.known_step if view is not None and view.progress is not None else None,
            "checkpoint_step": view.checkpoint.step if view is not None and view.checkpoint is not None else None,
            "why_not": self._why_deaf(job),
        }

    def _why_deaf(self, job: SlurmJob) -> str:
        """Why the job cannot see a kill switch, or is not to be asked, a sentence; empty: as far as is known it can."""
        alone = self._controller.decider.why_left_alone(job)
        if alone:
            return alone
        stuck = proves_stuck(self._controller.judge.incidents, job.job_id)
        if stuck is not None:
            return f"it hangs ({stuck.kind}, incident {stuck.id}): its loop cannot see a kill switch"
        view = self._controller.state.job_view(job.job_id, clock.monotonic())
        if view is None or view.silent_nodes:
            silent = "its nodes" if view is None else ", ".join(view.silent_nodes[:3])
            return f"no agent answers on {silent}: a kill switch cannot be written there"
        if not view.living_ranks:
            return "no process of a training is known in it"
        return ""

    async def ask(self, request: web.Request) -> web.Response:
        """Asks for the same of some jobs; each answer says what policy says to it. Others continue to be served."""
        body = await read_body(request)
        given = body.get("job_ids")
        if not isinstance(given, list) or not 0 < len(given) <= MAX_AT_ONCE:
            raise RequestRefused(400, f"job_ids has to be a list of 1 to {MAX_AT_ONCE} jobs")
        try:
            wish = Wish(body.get("wish", ""))
        except ValueError:
            raise RequestRefused(400, f"wish has to be one of {', '.join(Wish)}") from None
        exclude, before = nodes_of(body.get("exclude", [])), body.get("before")
        if before is not None and (isinstance(before, bool) or not isinstance(before, int | float)):
            raise RequestRefused(400, "before has to be a date, in seconds since the epoch")
        within_s = None if before is None else before - clock.wall()
        if within_s is not None and not within_s > 0:  # which no NaN is
            raise RequestRefused(400, "that time is over")
        if within_s is not None and within_s > LONGEST_S:
            raise RequestRefused(400, f"before has to be a date within the next {LONGEST_S / 86400:.0f} days")
        unknown = [node for node in exclude if node not in self._controller.state.node_addresses]
        if unknown:
            raise RequestRefused(400, f"Slurm knows no node {', '.join(unknown[:MAX_SAID])}")
        rows = []
        for job_id in map(checked_job, given):
            rows.append({"job_id": job_id} | self._ask_one(request, job_id, wish, exclude, reason_of(body), within_s))
            await asyncio.sleep(0)
        return web.json_response({"jobs": rows})

    def _ask_one(
        self, request: web.Request, job_id: str, wish: Wish, exclude: tuple[str, ...], reason: str,
        within_s: float | None,
    ) -> dict[str, Any]:  # fmt: skip
        job = self._controller.state.jobs.get(job_id)
        if job is None:
            return {"verdict": "refused", "reason": "Slurm does not list it any more"}
        try:
            name = self._who.require(request, "restart", (job.uid,), f"it belongs to {job.user}", (job.account,))
        except RequestRefused as error:
            return {"verdict": "refused", "reason": str(error)}
        why_not = self._why_deaf(job)
        if why_not:
            return {"verdict": "refused", "reason": why_not}
        incident, decision = self._controller.decider.ask_restart(
            job, exclude, reason, name, wish=wish, within_s=within_s
        )
        ids = {"incident_id": incident.id, "decision_id": decision.id}
        return ids | fields_of(decision, "verdict", "by", "reason")

    async def progress(self, request: web.Request) -> web.Response:
        """How far the actions of these incidents are: the newest of each."""
        given = (await read_body(request)).get("incident_ids")
        if not isinstance(given, list) or len(given) > MAX_FOLLOWED or not all(isinstance(n, str) for n in given):
            raise RequestRefused(400, f"incident_ids has to be a list of at most {MAX_FOLLOWED} ids")
        found = {}
        for incident_id in given:
            incident = self._controller.journal.incident(incident_id)
            runs = [] if incident is None else self._controller.journal.actions(incident_id)
            if (
                incident is not None
                and self._who.follows(request, incident, runs, self._controller.state.jobs)
                and runs
            ):
                found[incident_id] = action_json(runs[-1], self._controller.actions.waiting(runs[-1].decision.id))
            await asyncio.sleep(0)
        return web.json_response({"actions": found})
