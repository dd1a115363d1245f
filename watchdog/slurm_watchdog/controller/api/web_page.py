"""The page of the controller: the cluster map, the jobs with their curves, an incident with its timeline and stacks.

An endpoint of its own, for people's browsers: nothing on it comes from outside. With a token
(`security.page_token_file`) the browser asks for it, under any user name: it is an operator's. Without one the page
shows what a stranger may see: the map, and of jobs and incidents what `status` tells everybody. It changes nothing.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.config.types import split_address
from slurm_watchdog.controller.api.asking import Handler, RequestRefused, errors_as_sentences
from slurm_watchdog.controller.api.json_views import Sees
from slurm_watchdog.controller.api.local_socket import LocalApi
from slurm_watchdog.controller.api.overview import job_page_json, overview_json
from slurm_watchdog.controller.api.page_login import PERSON, Login
from slurm_watchdog.controller.api.page_views import doing_json, history_json, todo_json
from slurm_watchdog.controller.health.cluster import is_announced
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.controller.ports.commands import CommandSources
from slurm_watchdog.model.incidents import IncidentState
from slurm_watchdog.wire.rate_limits import TokenBuckets

log = logging.getLogger(__name__)

FRESH_S: Final = 2.0
"""All browsers of one person are shown the same overview for so long: the map of 10,000 nodes costs some tens of
milliseconds."""
STATIC: Final = {
    "": ("index.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "charts.js": ("charts.js", "text/javascript"),
    "dom.js": ("dom.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
SHOWN_INCIDENTS: Final = 200
TRIES: Final = 20.0
"""Wrong passwords that one address, or one user behind a proxy, may send at once; afterwards nothing is looked at, the
right one neither, until it has waited."""
TRIES_PER_S: Final = 0.1
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def make_page(controller: CommandSources, token: str, person: Person | None = None) -> web.Application:
    """Every route of the page; `token` empty: nobody is asked for one, and everybody is a stranger, unless it
    is said who looks."""
    security = controller.config.security
    login = Login(security, person or Person(knows_password=bool(token)))
    page = Page(controller, token)
    # Who comes by a proxy asks for the site's name, and nobody but the proxy knows the password.
    listen = "" if security.page_proxy_header else controller.config.controller.page_listen
    app = web.Application(middlewares=[_guarded(listen, token, login)])
    for name in STATIC:
        app.router.add_get(f"/{name}", page.static)
    app.router.add_get("/api/overview", page.overview)
    app.router.add_get("/api/incidents", page.incidents)
    app.router.add_get("/api/nodes", page.api.nodes)
    app.router.add_get("/api/nodes/{node}", page.api.node)
    app.router.add_get("/api/jobs/{id}", page.job)
    app.router.add_get("/api/incidents/{id}", page.incident)
    app.router.add_get("/api/incidents/{id}/evidence/{number}", page.evidence)
    return app


def _guarded(listen: str, token: str, login: Login) -> Any:
    """Who may come in, and what every answer says to the browser."""
    only_here = bool(listen) and split_address(listen)[0] in ("127.0.0.1", "::1", "localhost")
    wrong = TokenBuckets(TRIES, TRIES_PER_S)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        async def known(request: web.Request) -> web.StreamResponse:
            request[PERSON] = await login.person(request)
            return await handler(request)

        if (
            only_here
            and request.host.rpartition(":")[0].lower() not in LOOPBACK
            and request.host.lower() not in LOOPBACK
        ):
            # A page of somebody else's that calls itself by our address (DNS rebinding) reads nothing here.
            answer: web.StreamResponse = web.json_response({"error": "ask for localhost"}, status=421)
        elif token and wrong.left(who := login.who_tries(request), clock.monotonic()) < 1.0:
            answer = web.json_response({"error": "too many wrong passwords: wait a minute"}, status=429)
            answer.headers["Retry-After"] = "60"
        elif token and not _knows(given := request.headers.get("Authorization", ""), token):
            if given:  # a browser asks without one first
                wrong.acquire(who, clock.monotonic())
            answer = web.json_response({"error": "the page's token is needed (as password, any user name)"}, status=401)
            answer.headers["WWW-Authenticate"] = 'Basic realm="slurm-watchdog", charset="UTF-8"'
        else:
            answer = await errors_as_sentences(request, known)
        answer.headers.update(HEADERS)
        return answer

    return middleware


def _knows(authorization: str, token: str) -> bool:
    """Basic (what a browser sends) or Bearer (what a script sends)."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return hmac.compare_digest(value.encode(errors="surrogateescape"), token.encode())
    try:
        _, colon, password = base64.b64decode(value, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return False
    return scheme.lower() == "basic" and bool(colon) and hmac.compare_digest(password, token.encode())


class Page:
    """The handlers. What the local socket answers already is answered by it."""

    def __init__(self, controller: CommandSources, token: str):
        self._controller = controller
        self._waiting = controller.actions.waiting
        self._gives_evidence = bool(token)
        self.api = LocalApi(controller, lambda request: request[PERSON])
        self._overviews: dict[Person, tuple[float, bytes]] = {}
        root = files("slurm_watchdog.controller.api") / "static"
        self._files = {name: ((root / file).read_bytes(), kind) for name, (file, kind) in STATIC.items()}

    async def static(self, request: web.Request) -> web.Response:
        body, kind = self._files[request.path.lstrip("/")]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def overview(self, request: web.Request) -> web.Response:
        c, now, person = self._controller, clock.monotonic(), self.api.who.person(request)
        made_at, body = self._overviews.get(person, (float("-inf"), b""))
        if now - made_at > FRESH_S:
            self._overviews = {who: kept for who, kept in self._overviews.items() if now - kept[0] <= FRESH_S}
            resolved = sum(1 for i in c.journal.incidents() if i.state is IncidentState.RESOLVED)
            sees = self.api.who.sees(request)
            document = overview_json(c.judge.view, c.judge.limits_s, c.judge.incidents, resolved, sees, c.health())
            c.silences.show_in(document, whole=self.api.who.is_operator(request))
            document["cluster"] = c.config.cluster_name
            document["mode"] = c.config.mode
            document["slurm_seen"] = c.judge.view.slurm_age_s is not None
            paused = c.journal.paused()
            document["paused"] = None if paused is None else {"reason": paused[0], "by": paused[1]}
            under_way, quiet = c.journal.open_actions(), [each["id"] for each in document["open"] if each["quiet"]]
            document["doing"] = doing_json(under_way, self._waiting, lambda each: self._shows(each, sees))
            document["todo"] = todo_json(c.judge.incidents, quiet, under_way, c.journal, sees)
            document["at"] = clock.wall()
            document["tick_age_s"] = None if c.last_tick is None else now - c.last_tick
            body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
            self._overviews[person] = (now, body)
        return web.Response(body=body, content_type="application/json")

    def _shows(self, incident_id: str, sees: Sees) -> bool:
        found = self._controller.judge.incidents.get(incident_id) or self._controller.journal.incident(incident_id)
        return found is not None and sees(found)

    async def job(self, request: web.Request) -> web.Response:
        job_id = request.match_info["id"]
        found = next((job for job in self._controller.judge.view.jobs if job.job.job_id == job_id), None)
        if found is None:
            return web.json_response({"job_id": job_id, "ended": True, "history": self._past(request, job_id)})
        limit_s, may_see = (
            self._controller.judge.limits_s.get(job_id),
            self.api.who.may_see_job(request, found.job),
        )
        document = job_page_json(found, limit_s, self._controller.health().of(job_id), may_see=may_see)
        document["history"] = (
            history_json(self._controller.journal, job_id, self.api.who.sees(request)) if may_see else None
        )
        named = {
            each.rank
            for incident in self._controller.judge.incidents
            if job_id in incident.job_ids and is_announced(incident)
            for each in incident.culprits
        }
        document["ranks"] = [each | {"named": each["rank"] in named} for each in document["ranks"]]
        return web.json_response(document)

    def _past(self, request: web.Request, job_id: str) -> dict[str, Any]:
        """Of a job that does not run, for operators and its owner. Raises RequestRefused."""
        owners = {run.uid for run in self._controller.journal.run_records.of_job(job_id)}
        if not owners or not (self.api.who.is_operator(request) or owners == {self.api.who.person(request).uid}):
            raise RequestRefused(404, f"job {job_id[:40]!r} is not running, or not watched")
        return history_json(self._controller.journal, job_id, self.api.who.sees(request))

    async def incidents(self, request: web.Request) -> web.Response:
        """The newest ones, newest first."""
        answer = await self.api.incidents(request)
        documents = json.loads(answer.body if isinstance(answer.body, bytes) else b"[]")
        documents.sort(key=lambda each: each["opened_at"] or 0.0, reverse=True)
        return web.json_response(documents[:SHOWN_INCIDENTS])

    async def incident(self, request: web.Request) -> web.Response:
        """Who, why, since when, and what was done; the stacks' groups, if they were taken; the list of what
        else there is."""
        answer = await self.api.explain(request)
        document = json.loads(answer.body if isinstance(answer.body, bytes) else b"{}")
        evidence = document["evidence"]
        diagnosis: dict[str, Any] = next((each for each in reversed(evidence) if each["kind"] == "diagnosis"), {})
        document["diagnosis"], document["taken"] = diagnosis.get("document"), diagnosis.get("taken")
        document["evidence"] = [
            {key: each[key] for key in ("at", "kind", "number", "incident", "taken")} for each in evidence
        ]
        document["gives_evidence"] = self._gives_evidence
        return web.json_response(document)

    async def evidence(self, request: web.Request) -> web.Response:
        if not self._gives_evidence:
            raise RequestRefused(
                403,
                "evidence is given out only with a password: set security.page_token_file, or use explain --bundle",
            )
        answer = await self.api.evidence(request)
        name = f"{request.match_info['id'][:40]}-{request.match_info['number']}.json"
        answer.headers["Content-Disposition"] = f'attachment; filename="{name}"'
        return answer
