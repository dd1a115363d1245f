"""Silences, as people make, list and end them."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from aiohttp import web

from slurm_watchdog.base import clock
from slurm_watchdog.controller.api.asking import RequestRefused, Who, checked_job, read_body, reason_of
from slurm_watchdog.controller.api.restart_api import nodes_of
from slurm_watchdog.controller.ports.commands import CommandSources
from slurm_watchdog.detect.registry import KINDS
from slurm_watchdog.model.silence import Silence
from slurm_watchdog.model.slurm import SlurmJob

MAX_SILENCES: Final = 500
"""Each is looked at for each message."""
MAX_OF_OWNER: Final = 10
"""Of one user who may silence what is about his own jobs alone."""
MAX_NAMED: Final = 1000
"""Kinds, jobs or nodes of one silence."""
LONGEST_S: Final = 30 * 86400.0
"""What is to be quiet for longer is a matter of the configuration: a silence of a year is forgotten, not wanted."""


class SilenceApi:
    """The handlers; each answers JSON."""

    def __init__(self, controller: CommandSources, who: Who):
        self._controller, self._who = controller, who

    async def listed(self, request: web.Request) -> web.Response:
        """Those that hold."""
        return self._answer(request)

    async def add(self, request: web.Request) -> web.Response:
        """Quiets messages about some kinds, jobs or nodes."""
        body, now = await read_body(request), clock.wall()
        for_s = body.get("for_s")
        if isinstance(for_s, bool) or not isinstance(for_s, int | float) or not 0 < for_s <= LONGEST_S:
            raise RequestRefused(400, f"a silence lasts longer than 0 s and at most {LONGEST_S / 86400:.0f} days")
        kinds, jobs = _words(body, "kinds"), tuple(map(checked_job, _words(body, "jobs")))
        unknown = [each for each in kinds if each not in KINDS]
        if unknown:
            raise RequestRefused(400, f"{unknown[0][:60]!r} is no kind of incident; known: {', '.join(KINDS)}")
        nodes = nodes_of(body.get("nodes", []))
        if not (kinds or jobs or nodes):
            raise RequestRefused(400, "name what is silenced: --kind, --job or --node")
        known = elements_of(jobs, self._controller.state.jobs)
        owners = {each.uid for of_one in known for each in of_one} if all(known) else set()
        accounts = {each.account for of_one in known for each in of_one} if owners else set()
        name = self._who.require(request, "silence", owners, accounts=accounts)
        owner = self._who.person(request).uid if self._who.is_only_owner(request, "silence", accounts) else None
        self._require_room(owner)
        made = Silence(
            id=uuid.uuid4().hex[:8], by=name, at=now, reason=reason_of(body), until=now + for_s,
            kinds=kinds, jobs=jobs, nodes=nodes, owner=owner,
        )  # fmt: skip
        self._controller.silences.add(made)
        return self._answer(request, made.id)

    def _require_room(self, owner: int | None) -> None:
        """Raises RequestRefused: nobody's silences leave no room for others'."""
        most = MAX_SILENCES if owner is None else MAX_OF_OWNER
        mine = sum(each.owner == owner for each in self._controller.silences.listed())
        if mine >= most:
            raise RequestRefused(429, f"there are {most} silences already: end some")

    async def end(self, request: web.Request) -> web.Response:
        """Ends a silence."""
        given = request.match_info["id"]
        found = next((each for each in self._controller.silences.listed() if each.id == given), None)
        if found is None:
            raise RequestRefused(404, f"no silence {given[:40]!r} holds; `slurm-watchdog silence` lists them")
        name = self._who.name(request)
        if name != found.by:
            name = self._who.require(request, "silence", about=f"silence {found.id} was made by {found.by}")
        self._controller.silences.end(found, f"ended by {name}")
        return self._answer(request)

    def _answer(self, request: web.Request, made: str | None = None) -> web.Response:
        document: dict[str, Any] = {"open": []}
        self._controller.silences.show_in(document, whole=self._who.is_operator(request))
        return web.json_response({"id": made, "silences": document["silences"]})


def elements_of(job_ids: Iterable[str], jobs: Mapping[str, SlurmJob]) -> list[list[SlurmJob]]:
    """Of each id the jobs that it stands for, none if Slurm lists no such: an array's for its elements, too."""
    arrays = defaultdict[str, list[SlurmJob]](list)
    for job in jobs.values():
        array, _, element = job.job_id.partition("_")
        if element:
            arrays[array].append(job)
    return [[*([jobs[each]] if each in jobs else []), *arrays.get(each, ())] for each in job_ids]


def _words(body: dict[str, Any], key: str) -> tuple[str, ...]:
    value = body.get(key, [])
    if not isinstance(value, list) or len(value) > MAX_NAMED or not all(isinstance(each, str) for each in value):
        raise RequestRefused(400, f"{key} has to be a list of at most {MAX_NAMED} words")
    return tuple(dict.fromkeys(value))
