"""The page of the controller: the cluster map, the jobs with their curves, an incident with its timeline and stacks.

An endpoint of its own, for people's browsers: nothing on it comes from outside. With a token
(`security.page_token_file`) the browser asks for it, under any user name: it is an operator's. Without one the page
shows what a stranger may see: the map, and of jobs and incidents what `status` tells everybody. It changes nothing.
Its HTML is one template over the documents that the routes answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache, partial
from importlib.resources import files
from ipaddress import ip_address, ip_network
from operator import attrgetter
from typing import Any
from urllib.parse import quote

from aiohttp import web
from jinja2 import Environment, Template
from markupsafe import Markup

from slurm_watchdog.base import clock
from slurm_watchdog.base.text import duration, fold, one_line, plural
from slurm_watchdog.config.agent import Security
from slurm_watchdog.config.types import split_address
from slurm_watchdog.controller.api.answers import Api, CommandSources
from slurm_watchdog.controller.api.asking import MAX_BODY_BYTES, Asked, RequestRefused, UserLookup, person_of
from slurm_watchdog.controller.api.routes import PAGE_ROUTES, answer, document_of, refusal_of
from slurm_watchdog.controller.policy.access import Person
from slurm_watchdog.model.documents import Job, JobHealth
from slurm_watchdog.model.page_documents import MapNode
from slurm_watchdog.wire.rate_limits import TokenBuckets

STATIC = {"/page.js": "text/javascript", "/page.css": "text/css"}
OVERVIEW = "/v1/overview"
VIEWS = {
    "job": "/v1/jobs/{}", "incident": "/v1/incidents/{}", "incidents": "/v1/incidents", "node": "/v1/nodes/{}",
    "nodes": "/v1/nodes", "cluster": OVERVIEW,
}  # fmt: skip
"""Name in the address of the page -> which document is drawn."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TRIES = 20.0
"""Wrong passwords that one address, or one user behind a proxy, may send at once; afterwards nothing is looked at, the
right one neither, until it has waited."""
TRIES_PER_S = 0.1
MAX_TEXT = 10_000  # Characters of one value.
DRAWING = ThreadPoolExecutor(1, thread_name_prefix="page")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,63}\$?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def make_page(controller: CommandSources, token: str, person: Person | None = None) -> web.Application:
    """Every route of the page; `token` empty: no one is asked for one, and everybody is a stranger, unless it
    is said who looks."""
    api, security = Api(controller), controller.config.security
    login = Login(security, person or Person(knows_password=bool(token)))
    # Who comes by a proxy asks for the site's name, and no one but the proxy knows the password.
    listen = "" if security.page_proxy_header else controller.config.controller.page_listen
    only_here = bool(listen) and split_address(listen)[0] in ("127.0.0.1", "::1", "localhost")
    wrong = TokenBuckets(TRIES, TRIES_PER_S)
    static = {name: (files(__package__) / f"static{name}").read_bytes() for name in STATIC}

    async def answered(request: web.Request) -> web.Response:
        host = request.host.lower()
        if only_here and host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
            # A page of someone else's that calls itself by our address (DNS rebinding) reads nothing here.
            return _answer(refusal_of("ask for localhost"), 421)
        if token and wrong.left(who := login.who_tries(request), clock.monotonic()) < 1.0:
            return _answer(refusal_of("too many wrong passwords: wait a minute"), 429, {"Retry-After": "60"})
        if token and not _knows(given := request.headers.get("Authorization", ""), token):
            if given:  # a browser asks without one first
                wrong.acquire(who, clock.monotonic())
            basic = {"WWW-Authenticate": 'Basic realm="slurm-watchdog", charset="UTF-8"'}
            return _answer(refusal_of("the page's token is needed (as password, any user name)"), 401, basic)
        try:
            asked = Asked(request.method, request.raw_path, await login.person(request))
        except RequestRefused as error:
            return _answer(refusal_of(str(error)), error.status)
        reads = request.method in ("GET", "HEAD")
        if reads and request.path in static:
            return _answer(static[request.path], kind=STATIC[request.path])
        if reads and request.path == "/":
            status, body = await drawn(api, asked)
            response = _answer(body, status, kind="text/html")
            response.enable_compression()
            return response
        status, body = await answer(api, PAGE_ROUTES, asked)
        return _answer(body, status)

    async def handle(request: web.Request) -> web.Response:
        response = await answered(request)
        response.headers.update(HEADERS)
        return response

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


def _answer(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, kind: str = "application/json"
) -> web.Response:
    return web.Response(
        status=status, body=body, content_type=kind, charset="utf-8", headers=headers, zlib_executor_size=1 << 16
    )


async def drawn(api: Api, asked: Asked) -> tuple[int, bytes]:
    """(status, HTML) of the view that the address names: the overview in each, and the view's own document."""
    wanted = asked.query
    view = next((each for each in VIEWS if each in wanted), "cluster")
    target = VIEWS[view].format(quote(wanted.get(view, ""), safe=""))
    status, whole = await document_of(api, PAGE_ROUTES, replace(asked, method="GET", target=OVERVIEW))
    found = whole
    if status == 200 and target != OVERVIEW:
        status, found = await document_of(api, PAGE_ROUTES, replace(asked, method="GET", target=target))
    about = {"view": view, "all": whole, "found": found, "status": status, "wanted": wanted, "unjudged": JobHealth()}
    draw = partial(template().render, about, query=wanted.get("q", ""))
    return status, (await asyncio.get_running_loop().run_in_executor(DRAWING, draw)).encode()


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


# ------------------------------------------------------------------------------------------------ HTML


@cache
def template() -> Template:
    environment = Environment(autoescape=True, finalize=shown, trim_blocks=True, lstrip_blocks=True)
    filters = (cells, date, duration, figure, fold, grouped, having, known, label, nearest_first, part, plural, points)
    environment.filters |= {each.__name__: each for each in (*filters, split_by)}
    environment.globals["ticks"] = ticks
    return environment.from_string((files(__package__) / "static/page.html.j2").read_text("utf-8"))


def shown(value: object) -> object:
    """A value on one line, without invisible characters and those that turn text around; escaping follows."""
    return value if isinstance(value, Markup) else "-" if value is None else one_line(str(value), MAX_TEXT)


def part(value: object) -> str:
    """A part of an address."""
    return quote(one_line(str(value), MAX_TEXT), safe="")


def known(value: object) -> object:
    return "-" if value is None else value


def date(at: float | None, shape: str = "%Y-%m-%d %H:%M:%S") -> str:
    """As in a terminal and in Slurm's logs: where the controller is."""
    return datetime.fromtimestamp(at, tz=timezone.utc).astimezone().strftime(shape) if at else "-"


def figure(value: float | None, shape: str, factor: float = 1.0) -> str:
    return shape % (value * factor) if isinstance(value, float | int) else "-"


def split_by(groups: Sequence[Mapping[str, Any]], named: Collection[int]) -> tuple[list[Any], list[Any]]:
    """Groups with a rank that is named, and the others."""
    odd = [each for each in groups if not set(named).isdisjoint(each["ranks"])]
    return odd, [each for each in groups if each not in odd]


def points(rows: Iterable[Any], name: str) -> list[tuple[int, float]]:
    """(step, value) of each that has a finite one."""
    return [(each.step, value) for each in rows if math.isfinite(value := getattr(each, name))]


def grouped(rows: Iterable[Any], name: str) -> list[tuple[Any, list[Any]]]:
    """Rows that have the same, in the order in which each is seen first."""
    found: dict[Any, list[Any]] = {}
    for each in rows:
        found.setdefault(attrgetter(name)(each), []).append(each)
    return list(found.items())


def having(rows: Iterable[Any], query: str, *names: str) -> list[Any]:
    """Rows that have every word of the filter in one of these fields."""
    words = query.lower().split()
    if not words:
        return list(rows)
    texts = ((each, " ".join(str(getattr(each, name)) for name in names).lower()) for each in rows)
    return [each for each, text in texts if all(word in text for word in words)]


def nearest_first(jobs: Iterable[Job]) -> list[Job]:
    """Those that are nearest to their limit, or beyond it, come first, as in `status --watch`."""
    return sorted(jobs, key=lambda each: -((2 * (each.progress_age_s or 0.0)) // (each.limit_s or math.inf)))


def label(node: MapNode, words: Mapping[str, str], gpu_words: Mapping[str, str]) -> str:
    """A node of the map in words."""
    state = ": ".join(filter(None, (words.get(node.state, ""), node.reason)))
    gpus = ", ".join(f"{node.gpus.count(each)} GPU {gpu_words[each]}" for each in dict.fromkeys(node.gpus))
    return "; ".join(filter(None, (node.node, state, gpus, f"job {', '.join(node.jobs)}" if node.jobs else "")))


@cache
def cells(gpus: str) -> Markup:
    """A box for each GPU: of thousands of nodes most have the same."""
    return Markup("").join(
        Markup('<i class="gpu {}">{}</i>').format(each, each if each in "xetu" else "") for each in gpus
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about six."""
    raw = max(high - low, abs(high) * 1e-3, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= raw * 0.999999)
    first = math.floor(low / step + 1e-9)
    return [
        float(f"{(first + number) * step:.12g}") for number in range(max(2, math.ceil(high / step - 1e-9) - first + 1))
    ]
