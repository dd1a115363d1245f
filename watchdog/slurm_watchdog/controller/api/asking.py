"""Who asks the controller, what that person may do, and how requests are read: for everything that answers people."""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import pwd
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.health.views import DETAILS_FOR, Sees
from slurm_watchdog.controller.policy import access
from slurm_watchdog.controller.policy.access import GROUP, Operators, Others, Person
from slurm_watchdog.model.actions import ActionRun
from slurm_watchdog.model.incidents import Incident, IncidentKind
from slurm_watchdog.model.slurm import SlurmJob, SlurmPerson

MAX_BODY_BYTES = 64 * 1024
MAX_SAID = 8  # Names in a sentence.
UNKNOWN_CALLER = "who is asking is not known"
KEPT_S = 60.0  # A user's number, name and groups are looked up again after this time.
MAX_KEPT = 256
LOOKUP_S = 5.0  # Half of the time that a command waits for its answer (slurm_watchdog.cli.client).
LOOKUPS = 2  # At once, in threads of this alone: those that hang hold up no one who reads Slurm.
_JOB = re.compile(r"\d{1,18}(_\d{1,9})?")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
B = TypeVar("B", bound=msgspec.Struct)
log = logging.getLogger(__name__)


class RequestRefused(Exception):
    """A request that cannot be served: status and a sentence, and a word for programs where there is more to
    do than to read it."""

    def __init__(self, status: int, sentence: str, code: str = ""):
        self.status, self.code = status, code
        super().__init__(sentence)


def operators_of(names: Iterable[str]) -> Operators:
    """Those of `security.operators`, with root and this process's user; one unknown here is logged."""
    found = _named(names, "security.operators")
    return Operators(found.uids | {0, os.geteuid()}, found.gids)


def _named(names: Iterable[str], option: str) -> Operators:
    uids, gids = set[int](), set[int]()
    for name in names:
        group = name.removeprefix(GROUP) if name.startswith(GROUP) else None
        try:
            if group is not None:
                gids.add(grp.getgrnam(group).gr_gid)
            else:
                uids.add(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            who = f"user {name!r}" if group is None else f"group {group!r}"
            log.error("%s: this machine has no %s, so that entry gives no right; correct the name", option, who)
    return Operators(frozenset(uids), frozenset(gids))


@dataclass(frozen=True)
class Asked:
    """One request: what for, and who makes it."""

    method: str
    target: str  # Path and query, as they were sent.
    person: Person
    body: bytes = b""
    only_own: int | None = None
    """The user of whose own jobs alone it may be answered, and who may do what their owner may, and nothing else."""
    named: Mapping[str, str] = field(default_factory=dict)  # The parts of the path that its route names.

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))


class Who:
    """What those who ask may see and do."""

    def __init__(self, config: Config, people: Callable[[], Iterable[SlurmPerson]]):
        """`people`: who is what in Slurm's accounting."""
        self._people = people
        slurm = {access.SLURM_OPERATOR, access.SLURM_COORDINATOR}
        self._others = {
            command: Others(_named({*names} - slurm, f"security.may.{command}"), frozenset(slurm & {*names}))
            for command, names in config.security.may.items()
        }
        self.operators = operators_of(config.security.operators)

    def only(self, asked: Asked) -> int | None:
        """The user whose own jobs alone are asked for, or may be shown; None: all."""
        return asked.person.uid if asked.only_own is None and asked.query.get("me") == "1" else asked.only_own

    def is_operator(self, asked: Asked) -> bool:
        """Whether all evidence may be shown."""
        return self.operators.include(asked.person)

    def sees(self, asked: Asked) -> Sees:
        """Whether the person who asks may see an incident's evidence."""
        return lambda incident: access.may_see_incident(incident, asked.person, self.operators)

    def follows(
        self, asked: Asked, incident: Incident, runs: Sequence[ActionRun], jobs: Mapping[str, SlurmJob]
    ) -> bool:
        """Whether the person who asks may see how far the actions (`runs`) of an incident are: who may see its
        evidence; and of a request for a job the one who made it, and all who may make it. `jobs`: those that run."""
        if self.sees(asked)(incident):
            return True
        if incident.kind != IncidentKind.OPERATOR_RESTART or asked.only_own is not None or asked.person.uid is None:
            return False
        known = (jobs.get(each) for each in incident.job_ids)
        accounts = {"" if each is None else each.account for each in known}
        made = self.name(asked) in {run.decision.asked_by for run in runs}
        return made or self.may(asked, "restart", incident.owners, accounts)

    def require_sight(self, asked: Asked, job: SlurmJob) -> None:
        """Raises RequestRefused unless the person who asks may see the evidence of a job."""
        if not access.may_see((job.uid,), asked.person, self.operators):
            raise RequestRefused(403, f"job {job.job_id} belongs to {job.user}: its evidence is for {DETAILS_FOR}")

    def name(self, asked: Asked) -> str:
        """The person who asks; who has asked the name service has done so before: it may hang. Raises RequestRefused
        where no one knows who that is."""
        person = asked.person
        if person.uid is None:
            raise RequestRefused(403, UNKNOWN_CALLER)
        return person.name or f"uid {person.uid}"

    def may(self, asked: Asked, command: str, owners: Iterable[int] = (), accounts: Iterable[str] = ()) -> bool:
        """Whether the person who asks may use a command on what belongs to `owners`, of these accounts."""
        person, right, others = asked.person, access.RIGHTS[command], self._others.get(command)
        is_owner = right.owner and set(owners) == {person.uid}
        if asked.only_own is not None or is_owner:
            return is_owner
        if person.uid in (0, os.geteuid()) or (right.operators and self.operators.include(person)):
            return True
        return others is not None and others.include(person, self.name(asked), accounts, self._people())

    def require(
        self, asked: Asked, command: str, owners: Iterable[int] = (), about: str = "", accounts: Iterable[str] = ()
    ) -> str:
        """The name of the person who asks. Raises RequestRefused unless this person `may`; `about` says whose it is."""
        name, right = self.name(asked), access.RIGHTS[command]
        if self.may(asked, command, owners, accounts):
            return name
        who = ["root", "the user that the controller runs as", *["its owner"] * right.owner]
        who += [*["security.operators"] * right.operators, f"security.may.{command}"]
        whose = "here only its owner" if asked.only_own is not None else f"only {', '.join(who)}"
        raise RequestRefused(403, f"{about}{': ' if about else ''}{whose} may {right.what}")


def read_body(asked: Asked, kind: type[B]) -> B:
    """What a request has. Raises RequestRefused."""
    try:
        return msgspec.json.decode(asked.body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise RequestRefused(400, f"the request's body is wrong: {error}") from None
    except (ValueError, RecursionError):
        raise RequestRefused(400, "the request's body is not JSON") from None


def checked_job(job_id: str) -> str:
    """A job's id. Raises RequestRefused."""
    if not _JOB.fullmatch(job_id):
        raise RequestRefused(400, f"{job_id[:40]!r} is not a job id")
    return job_id


def checked_nodes(names: Iterable[str], known: Mapping[str, object] | None = None) -> tuple[str, ...]:
    """Names of nodes, each once; of those that Slurm knows, if `known` has them. Raises RequestRefused."""
    found = tuple(dict.fromkeys(names))
    wrong = [each for each in found if not _NODE.fullmatch(each)]
    if wrong:
        raise RequestRefused(400, f"{wrong[0][:40]!r} is not a node's name")
    unknown = [] if known is None else [each for each in found if each not in known]
    if unknown:
        raise RequestRefused(400, f"Slurm knows no node {', '.join(unknown[:MAX_SAID])}")
    return found


def person_of(key: str | int) -> Person:
    """A user with his groups, by name or number. Raises KeyError."""
    found = pwd.getpwnam(key) if isinstance(key, str) else pwd.getpwuid(key)
    return Person(found.pw_uid, frozenset(os.getgrouplist(found.pw_name, found.pw_gid)), name=found.pw_name)


class UserLookup:
    """Asks `look_up` in threads of its own, and keeps what it found for KEPT_S: the machine's name service may be a
    directory on the network, and hang. No request holds up another, nor the controller's loop."""

    def __init__(
        self, look_up: Callable[[Any], Person] = person_of, now: Callable[[], float] = clock.monotonic,
        deadline_s: float = LOOKUP_S,
    ):  # fmt: skip
        """`look_up` gets a name or a number; it may hang, and raises KeyError for what is not known."""
        self._look_up, self._now, self._deadline_s = look_up, now, deadline_s
        self._threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="user-lookup")
        self._known: dict[Hashable, tuple[float, Person]] = {}

    async def find(self, key: Hashable) -> Person:
        """The user. Raises KeyError, and TimeoutError where there is no answer in time."""
        known = self._known.get(key)
        if known is None or self._now() - known[0] > KEPT_S:
            looking = asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, key)
            found = await wait_for(looking, self._deadline_s)
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            known = self._known[key] = (self._now(), found)
        return known[1]

    async def named(self, person: Person) -> Person:
        """The same person with a name: `uid N` where the name service has none, or none in time, for the kernel has
        proven the number, and no one's pause waits for a directory."""
        if person.uid is None or person.name:
            return person
        try:
            return replace(person, name=(await self.find(person.uid)).name)
        except (KeyError, TimeoutError):
            return replace(person, name=f"uid {person.uid}")
