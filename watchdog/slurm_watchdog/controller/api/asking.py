"""Who asks the controller, what that person may do, and how requests are read: for everything that answers people."""

from __future__ import annotations

import grp
import json
import logging
import os
import pwd
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from slurm_watchdog import __version__
from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.api.json_views import DETAILS_FOR, Sees
from slurm_watchdog.controller.policy.access import GROUP, Operators, Person, may_see, may_see_incident
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.model.actions import ActionRun
from slurm_watchdog.model.incidents import Incident, IncidentKind
from slurm_watchdog.model.slurm import SlurmJob, SlurmPerson
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

SO_PEERGROUPS: Final = 59
"""asm-generic/socket.h; Python's `socket` has no name for it."""
MAX_GROUPS: Final = 256
"""What Python's getsockopt takes: 1024 bytes."""
MAX_REASON: Final = 300
UNKNOWN_CALLER: Final = "who is asking is not known"
_JOB = re.compile(r"\d{1,18}(_\d{1,9})?")

ONLY_OWN: Final = web.RequestKey("only_own", int)
"""In a request: the user of whose own jobs alone it may be answered, and who may do what their owner may, and
nothing else."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


log = logging.getLogger(__name__)

SLURM_OPERATOR, SLURM_COORDINATOR = "slurm:operator", "slurm:coordinator"
"""Words of `security.may`: operators and administrators of Slurm; coordinators, for jobs of their accounts."""


@dataclass(frozen=True)
class Others:
    """Who may use one command, beside those who may anyway."""

    named: Operators
    slurm: frozenset[str] = frozenset()
    """SLURM_OPERATOR, SLURM_COORDINATOR."""

    def include(self, person: Person, user: str, accounts: Iterable[str], known: Iterable[SlurmPerson]) -> bool:
        """Whether `person`, called `user`, may use it on jobs of these accounts. `known`: of Slurm's accounting."""
        if person.uid in self.named.uids or not self.named.gids.isdisjoint(person.groups):
            return True
        found = next((each for each in known if each.user == user), None) if self.slurm else None
        if found is None:
            return False
        of = set(accounts)
        return (found.is_operator and SLURM_OPERATOR in self.slurm) or (
            SLURM_COORDINATOR in self.slurm and bool(of) and of.issubset(found.coordinates)
        )


def operators_of(names: Iterable[str]) -> Operators:
    """Those of `security.operators`, with root and this process's user; one unknown here is logged."""
    found = _named(names, "security.operators")
    return Operators(found.uids | {0, os.geteuid()}, found.gids)


def others_of(names: Iterable[str], command: str) -> Others:
    """Those of `security.may` for one command; one unknown here is logged."""
    words = frozenset(names)
    slurm = words & {SLURM_OPERATOR, SLURM_COORDINATOR}
    return Others(_named(words - slurm, f"security.may.{command}"), slurm)


def _named(names: Iterable[str], option: str) -> Operators:
    uids, gids = set[int](), set[int]()
    for name in names:
        try:
            if name.startswith(GROUP):
                gids.add(grp.getgrnam(name.removeprefix(GROUP)).gr_gid)
            elif name.isdecimal():
                uids.add(int(name))
            else:
                uids.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            log.error(
                "%s: this machine has no %s, so that entry gives no right; correct the name",
                option,
                f"group {name.removeprefix(GROUP)!r}" if name.startswith(GROUP) else f"user {name!r}",
            )
    return Operators(frozenset(uids), frozenset(gids))


@dataclass(frozen=True)
class Right:
    """Who may use a command, beside root and the controller's user."""

    what: str
    """What it does, after "may"."""
    owner: bool = False
    """The owner of all that it is about."""
    operators: bool = False
    """Those of `security.operators`."""


RIGHTS: Final = {
    "pause": Right("pause and resume actions"),
    "restart": Right("restart the job", owner=True),
    "silence": Right("silence this", owner=True, operators=True),
    "mend": Right("say that a node is mended", operators=True),
}


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


class Who:
    """Knows those who ask. `person_of` says who that is."""

    def __init__(
        self, config: Config, people: Callable[[], Iterable[SlurmPerson]],
        person_of: Callable[[web.Request], Person] = peer_person,
    ):  # fmt: skip
        """`people`: who is what in Slurm's accounting."""
        self.person, self._people = person_of, people
        self._others = {command: others_of(names, command) for command, names in config.security.may.items()}
        self.operators = operators_of(config.security.operators)

    def only(self, request: web.Request) -> int | None:
        """The user whose own jobs alone are asked for, or may be shown; None: all."""
        forced: int | None = request.get(ONLY_OWN)
        return self.person(request).uid if forced is None and request.query.get("me") == "1" else forced

    def is_operator(self, request: web.Request) -> bool:
        """Whether all evidence may be shown."""
        return self.operators.include(self.person(request))

    def sees(self, request: web.Request) -> Sees:
        """Whether the person who asks may see an incident's evidence."""
        person = self.person(request)
        return lambda incident: may_see_incident(incident, person, self.operators)

    def follows(
        self, request: web.Request, incident: Incident, runs: Sequence[ActionRun], jobs: Mapping[str, SlurmJob]
    ) -> bool:
        """Whether the person who asks may see how far the actions (`runs`) of an incident are: who may see its
        evidence; and of a request for a job the one who made it, and all who may make it. `jobs`: those that run."""
        if self.sees(request)(incident):
            return True
        if incident.kind != IncidentKind.OPERATOR_RESTART or ONLY_OWN in request or self.person(request).uid is None:
            return False
        if self.name(request) in {run.decision.asked_by for run in runs}:
            return True
        known = [jobs.get(each) for each in incident.job_ids]
        accounts = {"" if each is None else each.account for each in known}
        return self._may(request, "restart", incident.owners, accounts)

    def may_see_job(self, request: web.Request, job: SlurmJob) -> bool:
        """Whether the person who asks may see the evidence of a job."""
        return may_see((job.uid,), self.person(request), self.operators)

    def require_sight(self, request: web.Request, job: SlurmJob) -> None:
        """Raises RequestRefused unless the person who asks may see the evidence of a job."""
        if not self.may_see_job(request, job):
            raise RequestRefused(403, f"job {job.job_id} belongs to {job.user}: its evidence is for {DETAILS_FOR}")

    def name(self, request: web.Request) -> str:
        """The person who asks; who has asked the name service has done so before: it may hang. Raises RequestRefused
        where nobody knows who that is."""
        person = self.person(request)
        if person.uid is None:
            raise RequestRefused(403, UNKNOWN_CALLER)
        return person.name or f"uid {person.uid}"

    def is_only_owner(self, request: web.Request, command: str, accounts: Iterable[str] = ()) -> bool:
        """Whether the person who asks may use a command on his own jobs alone."""
        return not self._may(request, command, (), accounts)

    def _may(self, request: web.Request, command: str, owners: Iterable[int], accounts: Iterable[str]) -> bool:
        try:
            self.require(request, command, owners, accounts=accounts)
        except RequestRefused:
            return False
        return True

    def require(
        self, request: web.Request, command: str, owners: Iterable[int] = (), about: str = "",
        accounts: Iterable[str] = (),
    ) -> str:  # fmt: skip
        """The name of the person who asks. Raises RequestRefused if this person may not use a command of RIGHTS on what
        belongs to `owners`, of these Slurm accounts; `about` says whose it is."""
        name, person, right = self.name(request), self.person(request), RIGHTS[command]
        own: int | None = request.get(ONLY_OWN)
        if own is not None:
            if right.owner and set(owners) == {own}:
                return name
            raise RequestRefused(403, f"{about + ': ' if about else ''}here only its owner may {right.what}")
        others = self._others.get(command)
        if others is not None and others.include(person, name, accounts, self._people()):
            return name
        if person.uid in (0, os.geteuid()) or (right.operators and self.operators.include(person)):
            return name
        if right.owner and set(owners) == {person.uid}:
            return name
        who = ["root", "the user that the controller runs as"]
        who += ["its owner"] * right.owner + ["security.operators"] * right.operators + [f"security.may.{command}"]
        raise RequestRefused(403, f"{about + ': ' if about else ''}only {', '.join(who)} may {right.what}")


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request. Raises RequestRefused."""
    raw = await request.read()
    try:
        body = json.loads(raw, parse_constant=_refuse) if raw else {}
        if b"\\ud" in raw.lower():  # half a character, which no database takes, is "?"
            body = json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):  # also of a number of thousands of digits
        raise RequestRefused(400, "the request's body is no JSON") from None
    if not isinstance(body, dict):
        raise RequestRefused(400, "the request's body has to be a JSON object")
    return body


def _refuse(word: str) -> None:
    raise RequestRefused(400, f"{word} is no number")


def reason_of(body: dict[str, Any]) -> str:
    """Why a person wants it, in the person's words, without the secrets that were pasted with them."""
    return mask_cut(str(body.get("reason", "")), MAX_REASON)


def job_id_of(body: dict[str, Any]) -> str:
    """The job that a request is about. Raises RequestRefused."""
    return checked_job(body.get("job_id", ""))


def checked_job(given: object) -> str:
    """A job's id. Raises RequestRefused."""
    if not _JOB.fullmatch(job_id := str(given)):
        raise RequestRefused(400, f"{job_id[:40]!r} is no job id")
    return job_id


@web.middleware
async def errors_as_sentences(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure that a person can do something about, as a sentence with its status."""
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
    except web.HTTPException as error:
        return web.json_response({"error": _http_sentence(request, error)}, status=error.status)


def _http_sentence(request: web.Request, error: web.HTTPException) -> str:
    """What the HTTP library refuses by itself."""
    if error.status in (404, 405):
        asked = f"{request.method} {request.path[:80]}"
        return f"{asked} is no request that is answered here (release {__version__})"
    return "the request is too large" if error.status == 413 else error.reason
