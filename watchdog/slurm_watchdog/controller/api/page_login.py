"""Who looks at the page: nobody in particular, or where the site has a reverse proxy in front of it, which has the
page's password, the user that the proxy names (`security.page_proxy_header`). Root and the controller's own user do not
come in by it."""

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

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,63}\$?")


class Login:
    """Says who makes a request that has given the password, if there is one."""

    def __init__(
        self, security: Security, stranger: Person, now: Callable[[], float] = clock.monotonic,
        look_up: Callable[[str], Person] = person_called,
    ):  # fmt: skip
        """`stranger`: who looks, where nobody is named. `look_up` may hang."""
        self._header, self._proxies = security.page_proxy_header, security.page_proxies
        self._stranger, self._users = stranger, UserLookup(look_up, now)

    def who_tries(self, request: web.Request) -> str:
        """For whom a wrong password counts: the user that a proxy of the site names, so that nobody locks out all
        others who come by it; otherwise the address."""
        return f"{request.remote} {self._named(request)}" if self._by_proxy(request) else request.remote or ""

    async def person(self, request: web.Request) -> Person:
        """Who it is. Raises RequestRefused."""
        if not self._header:
            return self._stranger
        if not self._by_proxy(request):
            raise RequestRefused(403, "people log in at the site's proxy; this address is none (page_proxies)")
        name = self._named(request)
        if not name:
            raise RequestRefused(403, f"the proxy names nobody who has logged in (one header {self._header})")
        try:
            found = await self._users.find(name)
        except KeyError:
            raise RequestRefused(403, f"the controller's machine knows no user {name}") from None
        except TimeoutError:
            raise RequestRefused(503, f"who {name} is can't be looked up now: come again") from None
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
