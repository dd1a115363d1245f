"""Who looks at the page, and which requests from a browser may change something.

Somebody is known where the site says so: who gives the page's password acts as one user (`security.page_acts_as`),
or the site's reverse proxy, which has the password, names who has logged in there (`security.page_proxy_header`).
Root and the controller's own user come in by neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address, ip_network
from typing import Final

from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.config.security import Security
from slurm_watchdog.controller.api.asking import RequestRefused
from slurm_watchdog.controller.api.user_lookup import UserLookup, person_called
from slurm_watchdog.controller.policy.access import Person

PERSON: Final = web.RequestKey("page_person", Person)
MARK: Final = "X-Slurm-Watchdog-Page"
"""A header that another site's page can't send: the browser would ask here first, and is not answered."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,63}\$?")


class Login:
    """Says who makes a request that has given the password, if there is one."""

    def __init__(
        self, security: Security, stranger: Person, now: Callable[[], float] = clock.monotonic,
        look_up: Callable[[str], Person] = person_called,
    ):  # fmt: skip
        """`stranger`: who looks, where nobody is named. `look_up` may hang."""
        self._security, self._stranger, self._users = security, stranger, UserLookup(look_up, now)

    @property
    def may_act(self) -> bool:
        """Whether somebody may be known, and so do something."""
        return bool(self._security.page_acts_as or self._security.page_proxy_header)

    async def person(self, request: web.Request) -> Person:
        """Who it is. Raises RequestRefused."""
        header = self._security.page_proxy_header
        if header:
            if not is_trusted(request.remote, self._security.page_proxies):
                raise RequestRefused(403, "people log in at the site's proxy; this address is none (page_proxies)")
            names = request.headers.getall(header, [])
            if len(names) != 1 or not _NAME.fullmatch(names[0]):
                raise RequestRefused(403, f"the proxy names nobody who has logged in (one header {header})")
            return await self._looked_up(names[0])
        if self._security.page_acts_as and request.method == "POST":
            return await self._looked_up(self._security.page_acts_as)  # with his rights: the password is to see more
        return self._stranger

    async def _looked_up(self, name: str) -> Person:
        try:
            found = await self._users.find(name)
        except KeyError:
            raise RequestRefused(403, f"the controller's machine knows no user {name}") from None
        except TimeoutError:
            raise RequestRefused(503, f"who {name} is can't be looked up now: come again") from None
        if found.uid in (0, os.geteuid()):
            raise RequestRefused(403, f"{name} does nothing from the page: use the commands on the management node")
        return found


def is_trusted(address: str | None, proxies: Iterable[str]) -> bool:
    """Whether a request from this address may name who has logged in."""
    return address is not None and any(ip_address(address) in ip_network(each, strict=False) for each in proxies)


def why_foreign(request: web.Request) -> str | None:
    """Why a request that changes something may come from another site's page in the person's browser; None: it
    does not."""
    if request.content_type != "application/json" or request.headers.get(MARK) != "1":
        return f"a request that changes something is JSON with the header {MARK}: 1"
    host = request.headers.get("Origin", f"://{request.host}").partition("://")[2]
    if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin" or host.lower() != request.host.lower():
        return "the request comes from another site's page (or the proxy changes the header Host: it has to pass it on)"
    return None
