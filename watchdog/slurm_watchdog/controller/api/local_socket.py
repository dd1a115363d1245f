"""The local socket for the commands: who asks is known from the kernel, and written into the journal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.controller.api import journal_view, node_views
from slurm_watchdog.controller.api.asking import (
    Handler,
    RequestRefused,
    Who,
    errors_as_sentences,
    job_id_of,
    peer_person,
    read_body,
    reason_of,
)
from slurm_watchdog.controller.api.json_views import DETAILS_FOR, left_out_json, own_status, status_json
from slurm_watchdog.controller.api.report_api import ReportApi
from slurm_watchdog.controller.api.restart_api import RestartApi, SaveApi, node_of
from slurm_watchdog.controller.api.silence_api import SilenceApi
from slurm_watchdog.controller.api.user_lookup import UserLookup, name_of
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.controller.ports.commands import CommandSources
from slurm_watchdog.controller.state.evidence_collection import Collected, diagnosis_json, nodes_json
from slurm_watchdog.model.incidents import Incident, IncidentState
from slurm_watchdog.model.node_events import NodeEventKind
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.notify.notification import Delivery

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
PERSON: Final = web.RequestKey("local_person", Person)


def without_kernel_lines(document: bytes) -> bytes:
    """What a node answered, for a job's owner: its kernel's log names other people's programs, too
    (kernel.dmesg_restrict)."""
    if b'"kernel_lines"' not in document:
        return document
    found = json.loads(document)
    if isinstance(found, dict) and found.pop("kernel_lines", None) is not None:
        return json.dumps(found).encode()
    return document


def make_app(
    controller: CommandSources, person_of: Callable[[web.Request], Person] = peer_person,
    name_of: Callable[[int], Person] = name_of,
) -> web.Application:  # fmt: skip
    """Every route of the local socket; `person_of` says who asks, and `name_of`, which may hang, how he is called."""
    users = UserLookup(name_of)

    @web.middleware
    async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
        person = person_of(request)
        needs_name = request.method != "GET" or "id" in request.match_info
        request[PERSON] = await users.named(person) if needs_name else person
        return await handler(request)

    api = LocalApi(controller, lambda request: request[PERSON])
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_sentences, named])
    app.router.add_get("/v1/status", api.status)
    app.router.add_get("/v1/incidents", api.incidents)
    app.router.add_get("/v1/incidents/{id}", api.explain)
    app.router.add_get("/v1/incidents/{id}/evidence/{number}", api.evidence)
    app.router.add_get("/v1/report", ReportApi(controller, api.who).report)
    app.router.add_post("/v1/diagnose", api.start_diagnosis)
    app.router.add_get("/v1/diagnose/{id}", api.diagnosis)
    app.router.add_get("/v1/nodes", api.nodes)
    app.router.add_get("/v1/nodes/{node}", api.node)
    app.router.add_post("/v1/nodes/{node}/events", api.add_node_event)
    silences, restarts = SilenceApi(controller, api.who), RestartApi(controller, api.who)
    app.router.add_get("/v1/silences", silences.listed)
    app.router.add_post("/v1/silences", silences.add)
    app.router.add_post("/v1/silences/{id}/end", silences.end)
    app.router.add_post("/v1/pause", api.pause)
    app.router.add_post("/v1/resume", api.resume)
    app.router.add_post("/v1/restart", restarts.restart)
    many = SaveApi(controller, api.who)
    app.router.add_get("/v1/requests/jobs", many.selected)
    app.router.add_post("/v1/requests", many.ask)
    app.router.add_post("/v1/requests/progress", many.progress)
    app.router.add_post("/v1/restart/cancel", restarts.cancel)
    return app


class LocalApi:
    """The handlers; each answers JSON."""

    def __init__(self, controller: CommandSources, person_of: Callable[[web.Request], Person] = peer_person):
        """`person_of` says who asks; what is answered depends on it."""
        self._controller = controller
        self.who = Who(controller.config, lambda: controller.state.people, person_of)

    async def status(self, request: web.Request) -> web.Response:
        c, now = self._controller, clock.monotonic()
        only = self.who.only(request)
        resolved = sum(each.state is IncidentState.RESOLVED for each in c.journal.incidents(owner=only))
        known = (c.judge.view, c.judge.limits_s, c.judge.incidents, resolved)
        if only is None:
            answer = status_json(*known, self.who.sees(request), c.health())
        else:
            answer = own_status(*known, c.health(), only)
        answer["mode"] = c.config.mode
        answer["paused"] = self._paused()
        answer["controller"] = {
            "version": __version__,
            "started_at": c.started_at,
            "last_tick_age_s": None if c.last_tick is None else now - c.last_tick,
            "warming_up": now - c.warm_up_began < c.config.controller.warm_up,
            "journal_error": c.journal_error,
        }
        if only is not None:
            return web.json_response(answer | {"slurm": {"age_s": c.judge.view.slurm_age_s}})
        answer["left_out"] = left_out_json(c.left_out(now))
        answer["slurm"] = {
            "age_s": c.judge.view.slurm_age_s, "error": c.slurm_error, "notes": c.slurm_notes(),
        }  # fmt: skip
        answer["waiting"] = c.actions.stuck()
        c.silences.show_in(answer, whole=self.who.is_operator(request))
        answer["deliveries"] = msgspec.to_builtins(self._deliveries(request))
        return web.json_response(answer)

    def _deliveries(self, request: web.Request) -> list[Delivery]:
        """How messages fare; what a receiver answered is for operators, for it may repeat a message."""
        is_operator = self.who.is_operator(request)
        found = self._controller.notifier.deliveries()
        return [each if is_operator else msgspec.structs.replace(each, error="") for each in found]

    def _paused(self) -> dict[str, Any] | None:
        paused = self._controller.journal.paused()
        return None if paused is None else {"reason": paused[0], "by": paused[1], "at": paused[2]}

    async def incidents(self, request: web.Request) -> web.Response:
        open_now = self._controller.judge.incidents
        sees = self.who.sees(request)
        job_id, only = request.query.get("job"), self.who.only(request)
        return web.json_response(journal_view.listed(self._controller.journal, job_id, sees, open_now, only))

    async def explain(self, request: web.Request) -> web.Response:
        incident = self._find(request, request.match_info["id"])
        current = self._controller.judge.incidents.get(incident.id) or incident
        jobs = self._controller.state.jobs
        return web.json_response(
            journal_view.explained(
                self._controller.journal, incident, current, self.who.sees(request), self._waiting,
                lambda about, runs: self.who.follows(request, about, runs, jobs),
            )
        )  # fmt: skip

    def _waiting(self, decision_id: str) -> tuple[str, float | None] | None:
        return self._controller.actions.waiting(decision_id)

    async def evidence(self, request: web.Request) -> web.Response:
        """The document of one piece of evidence."""
        incident, number = self._find(request, request.match_info["id"]), request.match_info["number"]
        if not self.who.sees(request)(incident):
            raise RequestRefused(403, f"the evidence of incident {incident.id} is for {DETAILS_FOR}")
        if not number.isascii() or not number.isdecimal() or len(number) > 18:
            raise RequestRefused(400, f"{number[:40]!r} is no number of a piece of evidence")
        document = self._controller.journal.evidence.document(incident.id, int(number))
        if document is None:
            raise RequestRefused(404, f"incident {incident.id} has no piece of evidence {number}; it may be too old")
        if not self.who.is_operator(request):
            document = without_kernel_lines(document)
        return web.Response(body=document, content_type="application/json")

    async def start_diagnosis(self, request: web.Request) -> web.Response:
        """Asks every node of a job for evidence, now; how far that is, and the diagnosis, are read by the
        answer's id."""
        job_id = job_id_of(await read_body(request))
        now = clock.monotonic()
        only, job = self.who.only(request), self._controller.state.jobs.get(job_id)
        if only is not None and (job is None or job.uid != only):
            raise RequestRefused(403, f"job {job_id} is none of yours")
        view = self._controller.state.job_view(job_id, now)
        if view is None or view.job.state not in RUNNING:
            state = "it is not watched" if view is None else f"it is {view.job.state}"
            raise RequestRefused(404, f"job {job_id} has no ranks to be asked: {state}. See: slurm-watchdog status")
        self.who.require_sight(request, view.job)
        return web.json_response(self._progress(self._controller.collector.collect(view.job, now)))

    async def diagnosis(self, request: web.Request) -> web.Response:
        found = self._controller.collector.known(request.match_info["id"])
        if found is None:
            raise RequestRefused(404, "that diagnosis is not known any more: start it again")
        self.who.require_sight(request, found.job)
        return web.json_response(self._progress(found))

    def _progress(self, found: Collected) -> dict[str, Any]:
        over = found.finished.is_set()
        return {
            "id": found.id,
            "job_id": found.job.job_id,
            "state": "done" if over else "collecting",
            "age_s": clock.monotonic() - found.began if found.took_s is None else found.took_s,
            "nodes": nodes_json(found),
            "diagnosis": diagnosis_json(found) if over and found.diagnosis is not None else None,
        }

    def _find(self, request: web.Request, given: str) -> Incident:
        """The incident with this id, or the only one whose id begins so, of those that may be shown. Raises
        RequestRefused."""
        journal, only = self._controller.journal, self.who.only(request)
        try:
            return journal_view.find(journal, given, self._controller.judge.incidents, only)
        except journal_view.NotFound as error:
            raise RequestRefused(error.status, str(error)) from error

    async def nodes(self, request: web.Request) -> web.Response:
        sees = self.who.is_operator(request)
        return web.json_response(node_views.nodes_json(self._controller.ledger.suspicions(), clock.wall(), sees=sees))

    async def node(self, request: web.Request) -> web.Response:
        """The history of one node."""
        node, person = node_of(request), self.who.person(request)
        events = self._controller.ledger.history(node)
        if not events and node not in self._controller.state.node_addresses:
            raise RequestRefused(404, f"Slurm knows no node {node}, and nothing is remembered of one")
        return web.json_response(node_views.node_json(node, events, clock.wall(), person, self.who.operators))

    async def add_node_event(self, request: web.Request) -> web.Response:
        """A test's result, or that a node is mended."""
        node, body, now = node_of(request), await read_body(request), clock.wall()
        if node not in self._controller.state.node_addresses:
            raise RequestRefused(404, f"Slurm knows no node {node}")
        name, is_operator = self.who.name(request), self.who.is_operator(request)
        if body.get("kind") == NodeEventKind.MENDED and not is_operator:
            self.who.require(request, "mend")
            is_operator = True
        if not node_views.has_room(self._controller.ledger, now, is_operator=is_operator):
            raise RequestRefused(429, "so many events were added today that no more is taken")
        try:
            event = node_views.event_of(node, body, now, name, is_operator=is_operator)
        except node_views.Unfit as error:
            raise RequestRefused(400, str(error)) from error
        self._controller.ledger.record(event)
        return web.json_response({"node": node, "kind": event.kind, "key": event.key})

    async def pause(self, request: web.Request) -> web.Response:
        body, name = await read_body(request), self.who.require(request, "pause")
        self._controller.journal.pause(reason_of(body), name, clock.wall())
        return web.json_response({"paused": self._paused()})

    async def resume(self, request: web.Request) -> web.Response:
        self._controller.journal.resume(self.who.require(request, "pause"), clock.wall())
        return web.json_response({"paused": self._paused()})
