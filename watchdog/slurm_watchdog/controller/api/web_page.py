"""The page of the controller: the cluster map, the jobs with their curves, an incident with its timeline and stacks.

An endpoint of its own, for people's browsers: nothing on it comes from outside. With a token
(`security.page_token_file`) the browser asks for it, under any user name: it is an operator's. Without one the page
shows what a stranger may see: the map, and of jobs and incidents what `status` tells everybody. It changes nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.resources import files
from ipaddress import ip_address, ip_network
from urllib.parse import quote

from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.config.security import Security
from slurm_watchdog.config.types import split_address
from slurm_watchdog.controller.api.answers import Api, CommandSources
from slurm_watchdog.controller.api.asking import Asked, RequestRefused, UserLookup, person_of
from slurm_watchdog.controller.api.page_html import rendered
from slurm_watchdog.controller.api.page_views import job_page, overview
from slurm_watchdog.controller.api.routes import ROUTES, Route, answer, document_of, refusal_of
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.model.page_documents import JobPage, Overview
from slurm_watchdog.wire.rate_limits import TokenBuckets

FRESH_S = 2.0
"""All browsers of one person are shown the same overview for so long: the map of 10,000 nodes costs some tens of
milliseconds."""
STATIC = {"page.js": "text/javascript", "page.css": "text/css"}
VIEWS = {
    "job": "/api/jobs/{}", "incident": "/api/incidents/{}", "incidents": "/api/incidents", "node": "/api/nodes/{}",
    "nodes": "/api/nodes", "cluster": "/api/overview",
}  # fmt: skip
"""Name in the address of the page -> which document is drawn."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TRIES = 20.0
"""Wrong passwords that one address, or one user behind a proxy, may send at once; afterwards nothing is looked at, the
right one neither, until it has waited."""
TRIES_PER_S = 0.1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,63}\$?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def make_page(controller: CommandSources, token: str, person: Person | None = None) -> web.Application:
    """Every route of the page; `token` empty: no one is asked for one, and everybody is a stranger, unless it
    is said who looks."""
    security = controller.config.security
    login = Login(security, person or Person(knows_password=bool(token)))
    page = Page(controller)
    # Who comes by a proxy asks for the site's name, and no one but the proxy knows the password.
    listen = "" if security.page_proxy_header else controller.config.controller.page_listen
    only_here = bool(listen) and split_address(listen)[0] in ("127.0.0.1", "::1", "localhost")
    wrong = TokenBuckets(TRIES, TRIES_PER_S)
    root = files("slurm_watchdog.controller.api") / "static"
    static = {f"/{name}": ((root / name).read_bytes(), kind) for name, kind in STATIC.items()}

    async def answered(request: web.Request) -> web.Response:
        host = request.host.lower()
        if only_here and host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
            # A page of someone else's that calls itself by our address (DNS rebinding) reads nothing here.
            return _refused(421, "ask for localhost")
        if token and wrong.left(who := login.who_tries(request), clock.monotonic()) < 1.0:
            return _refused(429, "too many wrong passwords: wait a minute", {"Retry-After": "60"})
        if token and not _knows(given := request.headers.get("Authorization", ""), token):
            if given:  # a browser asks without one first
                wrong.acquire(who, clock.monotonic())
            basic = {"WWW-Authenticate": 'Basic realm="slurm-watchdog", charset="UTF-8"'}
            return _refused(401, "the page's token is needed (as password, any user name)", basic)
        try:
            asked = Asked(request.method, request.raw_path, await login.person(request))
        except RequestRefused as error:
            return _refused(error.status, str(error))
        if request.path in static and request.method in ("GET", "HEAD"):
            body, kind = static[request.path]
            return _answer(body, kind)
        if request.path == "/" and request.method in ("GET", "HEAD"):
            status, body = await page.drawn(asked)
            response = _answer(body, "text/html", status)
            response.enable_compression()
            return response
        status, body = await answer(page.api, page.routes, asked)
        return web.Response(status=status, body=body, content_type="application/json")

    async def handle(request: web.Request) -> web.Response:
        response = await answered(request)
        response.headers.update(HEADERS)
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    return app


def _answer(body: bytes, kind: str, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, content_type=kind, charset="utf-8", zlib_executor_size=1 << 16)


def _refused(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=refusal_of(sentence), content_type="application/json", headers=headers)


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


class Login:
    """Who looks at the page, having given the password, if there is one: no one in particular, or where the site has a
    reverse proxy in front of it, which has the password, the user that the proxy names
    (`security.page_proxy_header`). Root and the controller's own user do not come in by it."""

    def __init__(self, security: Security, stranger: Person, look_up: Callable[[str], Person] = person_of):
        """`stranger`: who looks, where no rank is identified. `look_up` may hang."""
        self._header, self._proxies = security.page_proxy_header, security.page_proxies
        self._stranger, self._users = stranger, UserLookup(look_up)

    def who_tries(self, request: web.Request) -> str:
        """For whom a wrong password counts: the user that a proxy of the site names, so that no one locks out all
        others who come by it; otherwise the address."""
        return f"{request.remote} {self._named(request)}" if self._by_proxy(request) else request.remote or ""

    async def person(self, request: web.Request) -> Person:
        """Who it is. Raises RequestRefused."""
        if not self._header:
            return self._stranger
        if not self._by_proxy(request):
            raise RequestRefused(403, "people log in at the site's proxy; this address is not one (page_proxies)")
        name = self._named(request)
        if not name:
            raise RequestRefused(403, f"the proxy sends no logged-in user (one header {self._header})")
        try:
            found = await self._users.find(name)
        except KeyError:
            raise RequestRefused(403, f"the controller's machine knows no user {name}") from None
        except TimeoutError:
            raise RequestRefused(503, f"who {name} is cannot be looked up now: retry") from None
        if found.uid in (0, os.geteuid()):
            raise RequestRefused(403, f"{name} is not shown the page: use the commands on the management node")
        return found

    def _by_proxy(self, request: web.Request) -> bool:
        return bool(self._header) and is_trusted(request.remote, self._proxies)

    def _named(self, request: web.Request) -> str:
        names = request.headers.getall(self._header, [])
        return names[0] if len(names) == 1 and _NAME.fullmatch(names[0]) else ""


def is_trusted(address: str | None, proxies: Iterable[str]) -> bool:
    """Whether a request from this address may name who has logged in."""
    return address is not None and any(ip_address(address) in ip_network(each, strict=False) for each in proxies)


class Page:
    """What the page is drawn from, beside what the commands are answered."""

    def __init__(self, controller: CommandSources):
        self.api = Api(controller)
        own = (
            Route("GET", "/api/overview", self._overview, Overview),
            Route("GET", "/api/jobs/{id}", job_page, JobPage),
        )
        shared = (each._replace(path=each.path.replace("/v1/", "/api/", 1)) for each in ROUTES if each.page)
        self.routes = (*own, *shared)
        self._overviews: dict[Person, tuple[float, Overview]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page")

    def _overview(self, api: Api, asked: Asked) -> Overview:
        now, person = clock.monotonic(), asked.person
        made_at, found = self._overviews.get(person, (float("-inf"), None))
        if found is None or now - made_at > FRESH_S:
            self._overviews = {who: kept for who, kept in self._overviews.items() if now - kept[0] <= FRESH_S}
            found = overview(api, asked)
            self._overviews[person] = (now, found)
        return found

    async def drawn(self, asked: Asked) -> tuple[int, bytes]:
        """(status, HTML) of the view that the address names: the overview in each, and the view's own document."""
        wanted = asked.query
        view = next((each for each in VIEWS if each in wanted), "cluster")
        target = VIEWS[view].format(quote(wanted.get(view, ""), safe=""))
        status, whole = await document_of(self.api, self.routes, replace(asked, method="GET", target="/api/overview"))
        found = whole
        if status == 200 and view != "cluster":
            status, found = await document_of(self.api, self.routes, replace(asked, method="GET", target=target))
        draw = partial(
            rendered, view=view, all=whole, found=found, status=status, wanted=wanted, query=wanted.get("q", "")
        )
        return status, await asyncio.get_running_loop().run_in_executor(self._thread, draw)
