"""The local socket for the commands: who asks is known from the kernel, and written into the journal."""

from __future__ import annotations

import json
import logging
import os
import pwd
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.base.text import plural
from slurm_watchdog.controller.api import journal_view, node_views
from slurm_watchdog.controller.api.json_views import DETAILS_FOR, Sees, fields_of, left_out_json, status_json
from slurm_watchdog.controller.api.operators import operators_of
from slurm_watchdog.controller.incidents.judge import proves_stuck
from slurm_watchdog.controller.policy.access import Person, may_see, may_see_incident
from slurm_watchdog.controller.ports.commands import CommandSources
from slurm_watchdog.controller.state.evidence_collection import Collected, diagnosis_json, nodes_json
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.model.incidents import Incident, IncidentState
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.notify.notification import Delivery
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)

SO_PEERGROUPS = 59
"""asm-generic/socket.h; Python's `socket` has no name for it."""
MAX_GROUPS = 256
"""What Python's getsockopt takes: 1024 bytes."""
MAX_BODY_BYTES = 64 * 1024
MAX_REASON = 300
UNKNOWN_CALLER = "who is asking is not known"
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_JOB = re.compile(r"\d{1,18}(_\d{1,9})?")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestRefused(Exception):
    """A request that cannot be served: status and a sentence, and a word for programs where there is more to
    do than to read it."""

    def __init__(self, status: int, sentence: str, code: str = ""):
        self.status, self.code = status, code
        super().__init__(sentence)


def peer_person(request: web.Request) -> Person:
    """The process at the other end with its groups, as the kernel tells it."""
    sock = request.transport.get_extra_info("socket") if request.transport else None
    if sock is None:
        raise RequestRefused(403, UNKNOWN_CALLER)
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, gid = struct.unpack("3i", credentials)
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS * struct.calcsize("i"))
    except OSError:  # in more groups than fit, or a kernel before 4.13: its first group is known
        raw = b""
    return Person(uid, frozenset({gid, *struct.unpack(f"{len(raw) // 4}i", raw)}))


def without_kernel_lines(document: bytes) -> bytes:
    """What a node answered, for a job's owner: its kernel's log names other people's programs, too
    (kernel.dmesg_restrict)."""
    if b'"kernel_lines"' not in document:
        return document
    found = json.loads(document)
    if isinstance(found, dict) and found.pop("kernel_lines", None) is not None:
        return json.dumps(found).encode()
    return document


def reason_of(body: dict[str, Any]) -> str:
    """Why a person wants it, in the person's words, without the secrets that were pasted with them."""
    return mask_cut(str(body.get("reason", "")), MAX_REASON)


def job_id_of(body: dict[str, Any]) -> str:
    """The job that a request is about. Raises RequestRefused."""
    job_id = str(body.get("job_id", ""))
    if not _JOB.fullmatch(job_id):
        raise RequestRefused(400, f"{job_id[:40]!r} is no job id")
    return job_id


@web.middleware
async def _errors_as_sentences(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as error:
        more = {"code": error.code} if error.code else {}
        return web.json_response({"error": str(error), **more}, status=error.status)
    except JournalError as error:
        return web.json_response({"error": f"the journal does not work: {error}"}, status=503)
    except SlurmRefused as error:
        return web.json_response({"error": str(error)}, status=409)
    except SlurmUnavailable as error:
        return web.json_response({"error": f"Slurm: {error}"}, status=503)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return web.json_response({"error": "the request's body is no JSON"}, status=400)


def make_app(controller: CommandSources, person_of: Callable[[web.Request], Person] = peer_person) -> web.Application:
    """Every route of the local socket; `person_of` says who asks."""
    api = LocalApi(controller, person_of)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_sentences])
    app.router.add_get("/v1/status", api.status)
    app.router.add_get("/v1/incidents", api.incidents)
    app.router.add_get("/v1/incidents/{id}", api.explain)
    app.router.add_get("/v1/incidents/{id}/evidence/{number}", api.evidence)
    app.router.add_post("/v1/diagnose", api.start_diagnosis)
    app.router.add_get("/v1/diagnose/{id}", api.diagnosis)
    app.router.add_get("/v1/nodes", api.nodes)
    app.router.add_get("/v1/nodes/{node}", api.node)
    app.router.add_post("/v1/nodes/{node}/events", api.add_node_event)
    app.router.add_post("/v1/pause", api.pause)
    app.router.add_post("/v1/resume", api.resume)
    app.router.add_post("/v1/restart", api.restart)
    app.router.add_post("/v1/restart/cancel", api.cancel_restart)
    return app


class LocalApi:
    """The handlers; each answers JSON."""

    def __init__(self, controller: CommandSources, person_of: Callable[[web.Request], Person] = peer_person):
        """`person_of` says who asks; what is answered depends on it."""
        self._controller = controller
        self._person_of = person_of
        self._operators = operators_of(controller.config.security.operators)

    def sees(self, request: web.Request) -> Sees:
        """Whether the person who asks may see an incident's evidence."""
        person = self._person_of(request)
        return lambda incident: may_see_incident(incident, person, self._operators)

    def may_see_job(self, request: web.Request, job: SlurmJob) -> bool:
        """Whether the person who asks may see the evidence of a job."""
        return may_see((job.uid,), self._person_of(request), self._operators)

    def _caller(self, request: web.Request) -> tuple[int, str]:
        """uid and name of the person who asks. Raises RequestRefused where nobody knows who that is."""
        uid = self._person_of(request).uid
        if uid is None:
            raise RequestRefused(403, UNKNOWN_CALLER)
        try:
            return uid, pwd.getpwuid(uid).pw_name
        except KeyError:
            return uid, f"uid {uid}"

    def _require_owner(self, request: web.Request, job: SlurmJob) -> None:
        """Raises RequestRefused unless the person who asks may see the evidence of a job."""
        if not self.may_see_job(request, job):
            raise RequestRefused(403, f"job {job.job_id} belongs to {job.user}: its evidence is for {DETAILS_FOR}")

    async def status(self, request: web.Request) -> web.Response:
        c, now = self._controller, clock.monotonic()
        resolved = sum(1 for i in c.journal.incidents() if i.state is IncidentState.RESOLVED)
        sees = self.sees(request)
        answer = status_json(c.judge.view, c.judge.limits_s, c.judge.incidents, resolved, sees, c.health())
        answer["mode"] = c.config.mode
        answer["paused"] = self._paused()
        answer["controller"] = {
            "version": __version__,
            "started_at": c.started_at,
            "last_tick_age_s": None if c.last_tick is None else now - c.last_tick,
            "warming_up": now - c.warm_up_began < c.config.controller.warm_up,
            "journal_error": c.journal_error,
        }
        answer["left_out"] = left_out_json(c.state.left_out.lately(now))
        answer["slurm"] = {
            "age_s": c.judge.view.slurm_age_s, "error": c.slurm_error, "notes": c.slurm_notes(),
        }  # fmt: skip
        answer["waiting"] = c.actions.stuck()
        answer["deliveries"] = msgspec.to_builtins(self._deliveries(request))
        return web.json_response(answer)

    def _deliveries(self, request: web.Request) -> list[Delivery]:
        """How messages fare; what a receiver answered is for operators, for it may repeat a message."""
        is_operator = may_see((), self._person_of(request), self._operators)
        found = self._controller.notifier.deliveries()
        return [each if is_operator else msgspec.structs.replace(each, error="") for each in found]

    def _paused(self) -> dict[str, Any] | None:
        paused = self._controller.journal.paused()
        return None if paused is None else {"reason": paused[0], "by": paused[1], "at": paused[2]}

    async def incidents(self, request: web.Request) -> web.Response:
        open_now = self._controller.judge.incidents
        found = journal_view.listed(self._controller.journal, request.query.get("job"), self.sees(request), open_now)
        return web.json_response(found)

    async def explain(self, request: web.Request) -> web.Response:
        incident = self._find(request.match_info["id"])
        current = self._controller.judge.incidents.get(incident.id) or incident
        return web.json_response(
            journal_view.explained(self._controller.journal, incident, current, self.sees(request), self._waiting)
        )

    def _waiting(self, decision_id: str) -> tuple[str, float | None] | None:
        return self._controller.actions.waiting(decision_id)

    async def evidence(self, request: web.Request) -> web.Response:
        """The document of one piece of evidence."""
        incident, number = self._find(request.match_info["id"]), request.match_info["number"]
        if not self.sees(request)(incident):
            raise RequestRefused(403, f"the evidence of incident {incident.id} is for {DETAILS_FOR}")
        if not number.isascii() or not number.isdecimal() or len(number) > 18:
            raise RequestRefused(400, f"{number[:40]!r} is no number of a piece of evidence")
        document = self._controller.journal.evidence.document(incident.id, int(number))
        if document is None:
            raise RequestRefused(404, f"incident {incident.id} has no piece of evidence {number}; it may be too old")
        if not self._operators.include(self._person_of(request)):
            document = without_kernel_lines(document)
        return web.Response(body=document, content_type="application/json")

    async def start_diagnosis(self, request: web.Request) -> web.Response:
        """Asks every node of a job for evidence, now; how far that is, and the diagnosis, are read by the
        answer's id."""
        job_id = job_id_of(await self._body(request))
        now = clock.monotonic()
        view = self._controller.state.job_view(job_id, now)
        if view is None or view.job.state not in RUNNING:
            state = "it is not watched" if view is None else f"it is {view.job.state}"
            raise RequestRefused(404, f"job {job_id} has no ranks to be asked: {state}. See: slurm-watchdog status")
        self._require_owner(request, view.job)
        return web.json_response(self._progress(self._controller.collector.collect(view.job, now)))

    async def diagnosis(self, request: web.Request) -> web.Response:
        found = self._controller.collector.known(request.match_info["id"])
        if found is None:
            raise RequestRefused(404, "that diagnosis is not known any more: start it again")
        self._require_owner(request, found.job)
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

    def _find(self, given: str) -> Incident:
        """The incident with this id, or the only one whose id begins so. Raises Refused."""
        try:
            return journal_view.find(self._controller.journal, given, self._controller.judge.incidents)
        except journal_view.NotFound as error:
            raise RequestRefused(error.status, str(error)) from error

    async def nodes(self, request: web.Request) -> web.Response:
        sees = self._operators.include(self._person_of(request))
        return web.json_response(node_views.nodes_json(self._controller.ledger.suspicions(), clock.wall(), sees=sees))

    async def node(self, request: web.Request) -> web.Response:
        """The history of one node."""
        node, person = self._node(request), self._person_of(request)
        events = self._controller.ledger.history(node)
        if not events and node not in self._controller.state.node_addresses:
            raise RequestRefused(404, f"Slurm knows no node {node}, and nothing is remembered of one")
        return web.json_response(node_views.node_json(node, events, clock.wall(), person, self._operators))

    async def add_node_event(self, request: web.Request) -> web.Response:
        """A test's result, or that a node is mended."""
        node, body, now = self._node(request), await self._body(request), clock.wall()
        if node not in self._controller.state.node_addresses:
            raise RequestRefused(404, f"Slurm knows no node {node}")
        if not node_views.has_room(self._controller.ledger, now):
            raise RequestRefused(429, "so many events were added today that no more is taken")
        _, name = self._caller(request)
        is_operator = self._operators.include(self._person_of(request))
        try:
            event = node_views.event_of(node, body, now, name, is_operator=is_operator)
        except node_views.Unfit as error:
            raise RequestRefused(400, str(error)) from error
        self._controller.ledger.record(event)
        return web.json_response({"node": node, "kind": event.kind, "key": event.key})

    def _node(self, request: web.Request) -> str:
        node = request.match_info["node"]
        if not _NODE.fullmatch(node):
            raise RequestRefused(400, f"{node[:40]!r} is no node's name")
        return node

    async def pause(self, request: web.Request) -> web.Response:
        body, name = await self._body(request), self._administrator(request)
        self._controller.journal.pause(reason_of(body), name, clock.wall())
        return web.json_response({"paused": self._paused()})

    async def resume(self, request: web.Request) -> web.Response:
        self._controller.journal.resume(self._administrator(request), clock.wall())
        return web.json_response({"paused": self._paused()})

    async def restart(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        job_id, exclude = job_id_of(body), body.get("exclude", [])
        if not isinstance(exclude, list) or not all(isinstance(n, str) and _NODE.fullmatch(n) for n in exclude):
            raise RequestRefused(400, "exclude has to be a list of node names")
        unknown = [node for node in exclude if node not in self._controller.state.node_addresses]
        if unknown:
            raise RequestRefused(400, f"Slurm knows no node {', '.join(unknown)}")
        job = await self._controller.slurm.read_job(job_id)
        if job is None:
            raise RequestRefused(404, f"Slurm knows no job {job_id}")
        uid, name = self._caller(request)
        if uid not in (0, os.geteuid(), job.uid):
            raise RequestRefused(
                403, f"job {job_id} belongs to {job.user}: only its owner and administrators may restart it"
            )
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

    async def cancel_restart(self, request: web.Request) -> web.Response:
        """Ends an operator's restart that still waits for the job to save; its kill switch is removed."""
        job_id = job_id_of(await self._body(request))
        job = self._controller.state.jobs.get(job_id)
        uid, name = self._caller(request)
        if uid not in (0, os.geteuid(), job.uid if job is not None else 0):
            raise RequestRefused(403, f"job {job_id} belongs to another user: only its owner and administrators may")
        problem = self._controller.actions.abandon(job_id, name)
        if problem is not None:
            raise RequestRefused(409, problem)
        return web.json_response({"cancelled": True, "job_id": job_id})

    async def _body(self, request: web.Request) -> dict[str, Any]:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        if not isinstance(body, dict):
            raise RequestRefused(400, "the request's body has to be a JSON object")
        return body

    def _administrator(self, request: web.Request) -> str:
        uid, name = self._caller(request)
        if uid not in (0, os.geteuid()):
            raise RequestRefused(403, "only root, or the user that the controller runs as, may pause and resume")
        return name
