"""SlurmClient by way of squeue, sinfo, scontrol, scancel and sbatch.

It has to run as root, SlurmUser or an operator, or Slurm hides jobs (PrivateData) and refuses to change them.
What is asked about is checked first, and no exit code is believed where Slurm is known to be silent: the
world is read afterwards. What Slurm hides from the user that asks, its release, and how long that user's token
lasts are looked up, too.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import isfinite
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode, SlurmPerson, SlurmView
from slurm_watchdog.slurm import parse, submit_as_user
from slurm_watchdog.slurm.client import Refusal, SignalTo, SlurmRefused, SlurmUnavailable, Submission, parse_refusal
from slurm_watchdog.slurm.commands import ALWAYS, Answer, Commands, Right, first_line, run
from slurm_watchdog.slurm.listings import LISTING, Listings, listing_text, new_marks
from slurm_watchdog.slurm.node_names import Listed, ParseError, expand_nodes
from slurm_watchdog.slurm.options import OPTION_FIELDS, options_of
from slurm_watchdog.slurm.pyslurm_child import user_name
from slurm_watchdog.slurm.request_guard import (
    Observe,
    Requests,
    checked_elements,
    checked_job_id,
    checked_node,
    checked_option,
    checked_reservation,
    checked_signal,
    not_asked,
    one_line,
    raise_unless_requeued,
    require_running,
    require_unchanged,
)

TIMES = ("StartTime", "EndTime")


def list_reservations(text: str) -> Listed[Reservation]:
    """The answer of `scontrol --oneliner show reservation`, times as seconds since the epoch: the reservations, and
    a sentence about each that cannot be read and is left out. Raises ParseError for what is no such answer."""
    found, left_out = [], []
    for line in text.splitlines():
        if not line.strip() or line.startswith("No reservations"):
            continue
        row = _values(line)
        if not row.get("ReservationName"):
            raise ParseError(f"no reservation: {line[:80]!r}")
        try:
            found.append(_reservation(row))
        except (KeyError, ValueError) as error:
            name, times = row["ReservationName"], " ".join(f"{key}={row.get(key, '')}" for key in TIMES)
            left_out.append(f"Slurm's reservation {name[:80]} is left out, it cannot be read ({times[:80]}): {error}")
    return tuple(found), tuple(left_out)


def _values(line: str) -> dict[str, str]:
    """The first value of each key: a Comment, free text, comes last, and may have any `Nodes=` in it."""
    found: dict[str, str] = {}
    for word in line.split():
        key, is_value, value = word.partition("=")
        if is_value:
            found.setdefault(key, value)
    return found


def _reservation(row: Mapping[str, str]) -> Reservation:
    """Raises KeyError and ValueError."""
    begin, end = (float(row[key]) for key in TIMES)
    if not (isfinite(begin) and isfinite(end)):
        raise ValueError("its times are not dates")
    flags = tuple(row.get("Flags", "").split(","))
    return Reservation(
        name=row["ReservationName"], start_at=begin, end_at=end, nodes=expand_nodes(row.get("Nodes", "")), flags=flags
    )


PEOPLE_FORMAT = "format=user,adminlevel,coordinators"


def parse_people(text: str) -> tuple[SlurmPerson, ...]:
    """What `sacctmgr -nP show user withcoord` prints: `ann|None|vision,physics`. Raises ParseError."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        user, *more = line.split("|")
        if len(more) != 2 or not user:
            raise ParseError(f"no user of Slurm's accounting: {line[:80]!r}")
        operator, accounts = more[0] in ("Operator", "Administrator"), tuple(filter(None, more[1].split(",")))
        if operator or accounts:
            found.append(SlurmPerson(user=user, is_operator=operator, coordinates=accounts))
    return tuple(found)


log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

ACCESS_LASTS_S = 600.0
RESERVED_MINUTES = 24 * 60  # Of a reservation in which nodes are tested: longer than any test.

SIGNAL_OPTIONS = {SignalTo.STEPS: (), SignalTo.BATCH: ("--batch",), SignalTo.FULL: ("--full",)}


def request(
    method: Callable[Concatenate[CommandLineSlurm, P], Awaitable[T]],
) -> Callable[Concatenate[CommandLineSlurm, P], Coroutine[Any, Any, T]]:
    """A request of the client's, by its name: checked, within the deadline, and counted by how it ended."""

    @wraps(method)
    async def carried_out(self: CommandLineSlurm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.requests.carry_out(method.__name__, lambda: method(self, *args, **kwargs))

    return carried_out


class CommandLineSlurm:
    """Slurm's commands, each request within `deadline_s`; see SlurmClient for what they do and raise.

    `bin_directory`: where they are, empty for PATH. `environ`: the environment to start from (SLURM_CONF,
    PATH); None for our own. `observe(call, outcome)` is called with how each request ended: ok, refused or
    unavailable. `listings`: what answers questions, by default squeue and sinfo. `token_file`: holds
    SLURM_JWT, read for each command. `uid`: the user that asks, None for our own: what Slurm hides from it is
    looked up, and nothing is hidden from root.
    """

    def __init__(
        self,
        bin_directory: str = "",
        deadline_s: float = 20.0,
        environ: Mapping[str, str] | None = None,
        observe: Observe = lambda call, outcome: None,
        listings: Listings | None = None,
        token_file: str = "",
        uid: int | None = None,
        right: Right = ALWAYS,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._commands = Commands(bin_directory, environ, token_file, right)
        self._listings = listings or Listings(self._commands)
        self.requests = Requests(deadline_s, observe)
        self._uid = os.geteuid() if uid is None else uid
        self._access: tuple[float, Access] | None = None
        self.left_out_reservations: tuple[str, ...] = ()  # A sentence about each that could not be read.

    # -- questions

    def notes(self) -> tuple[str, ...]:
        token = token_note(self._commands.token, clock.wall())
        return (*filter(None, (self._listings.note,)), *token, *self.left_out_reservations)

    async def read_view(self) -> SlurmView:
        return await self.requests.carry_out_repeated("read_view", self._view)

    async def _view(self) -> SlurmView:
        view = await self._listings.view()
        het = any(job.het_job_id for job in view.jobs)
        hidden = hides_jobs(await self._known_access(), self._uid) if self._uid else ""
        if hidden:
            view = replace(view, partial="; ".join(filter(None, (view.partial, hidden))))
        if not het:
            return view
        why = why_not_requeue_het((await self._known_access()).version)
        return replace(
            view,
            jobs=tuple(replace(job, not_requeueable=why) if job.het_job_id else job for job in view.jobs),
        )

    @request
    async def read_job(self, job_id: str) -> SlurmJob | None:
        job = await self._listings.job(checked_job_id(job_id))
        if job is None and self._uid and (hidden := hides_jobs(await self._known_access(), self._uid)):
            raise SlurmUnavailable(hidden, answered=True)
        if job is None or not job.het_job_id:
            return job
        return replace(job, not_requeueable=why_not_requeue_het((await self._known_access()).version))

    async def _known_access(self) -> Access:
        """Read again after ACCESS_LASTS_S: slurmctld may be reconfigured or upgraded."""
        now = clock.monotonic()
        if self._access is None or now - self._access[0] > ACCESS_LASTS_S:
            self._access = now, await read_access(self._commands, self._uid, user_name(self._uid))
        return self._access[1]

    @request
    async def read_node(self, node: str) -> SlurmNode | None:
        return await self._listings.node(checked_node(node))

    @request
    async def read_reservations(self) -> tuple[Reservation, ...]:
        answer = await self._commands.run("scontrol", "--oneliner", "show", "reservation")
        found, left_out = list_reservations(listing_text(answer, "scontrol"))
        for each in left_out:
            if each not in self.left_out_reservations:
                log.warning("%s", each)
        self.left_out_reservations = left_out
        return found

    @request
    async def read_people(self) -> tuple[SlurmPerson, ...]:
        """Operators and coordinators of Slurm's accounting: everybody who is more than a user."""
        answer = await self._commands.run("sacctmgr", "-nP", "show", "user", "withcoord", PEOPLE_FORMAT)
        return parse_people(listing_text(answer, "sacctmgr"))

    @request
    async def read_script(self, job_id: str) -> bytes:
        answer = await self._commands.run("scontrol", "write", "batch_script", checked_job_id(job_id), "-")
        if answer.output and not answer.code:
            return answer.output
        raise failure("scontrol", answer)  # it exits with 0 also if there is none

    # -- a job

    @request
    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        condition = ("Incomplete",) if only_unfinished else ()
        await self._change("scontrol", "requeuehold", *condition, checked_job_id(job_id))
        if only_unfinished:
            raise_unless_requeued(await self._listings.job(job_id))

    @request
    async def set_excluded_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        excluded = ",".join(map(checked_node, nodes))
        await self._change("scontrol", "update", f"JobId={checked_job_id(job_id)}", f"ExcNodeList={excluded}")

    @request
    async def release(self, job_id: str) -> None:
        await self._change("scontrol", "release", checked_elements(job_id))

    @request
    async def hold(self, job_id: str) -> None:
        await self._change("scontrol", "hold", checked_elements(job_id))

    @request
    async def cancel(self, job_id: str) -> None:
        await self._change("scancel", checked_job_id(job_id))  # it exits with 0 for one that is unknown or has ended

    @request
    async def send_signal(self, job_id: str, signal: str, to: SignalTo) -> None:
        # scancel waits long for a pending job to change, and exits with 0 for a finished one: so read the job first.
        name = checked_signal(signal)
        job = require_running(await self._listings.job(checked_job_id(job_id)), job_id)
        if to is SignalTo.BATCH and not job.is_batch:
            raise SlurmRefused(f"job {job_id} has no batch script", Refusal.NOT_BATCH)
        answer = await self._commands.change("scancel", "--verbose", f"--signal={name}", *SIGNAL_OPTIONS[to], job_id)
        if answer.code or "error:" in answer.stderr:
            raise failure("scancel", answer)

    @request
    async def submit(self, submission: Submission) -> str:
        options = [checked_option(option) for option in submission.options]
        if not submission.workdir.startswith("/") or "\0" in submission.workdir:
            raise not_asked(f"{submission.workdir[:80]!r} is not an absolute path of a working directory")
        if submission.like:
            options = [*await self._options_of(checked_job_id(submission.like)), *options]
        await self._commands.require_right()
        answer = await run(
            [
                sys.executable, "-I", submit_as_user.__file__, str(submission.uid), self._commands.path("sbatch"),
                "--get-user-env", "--parsable", f"--chdir={submission.workdir}", *options,
            ],
            self._commands.environ,
            submission.script,
        )  # fmt: skip
        if answer.code == submit_as_user.CANNOT:
            raise SlurmRefused(first_line(answer.stderr), Refusal.NO_PERMISSION)
        if answer.code:
            raise failure("sbatch", answer)
        return parse.parse_submitted(answer.stdout)

    async def _options_of(self, job_id: str) -> Sequence[str]:
        marks = new_marks()
        answer = await self._commands.run(
            "squeue", *LISTING, "--jobs", job_id, SQUEUE_FORMAT2=parse.long_format(OPTION_FIELDS, marks)
        )
        if answer.code:
            raise failure("squeue", answer)
        return options_of(answer.stdout, marks, job_id)

    # -- a node

    @request
    async def drain_node(self, node: str, reason: str) -> None:
        await self._update_node(node, "State=DRAIN", f"Reason={one_line(reason)}")

    @request
    async def undrain_node(self, node: str, reason: str, reason_at: float | None) -> None:
        require_unchanged(await self._listings.node(checked_node(node)), node, reason, reason_at)
        await self._update_node(node, "State=UNDRAIN")

    @request
    async def reserve_nodes(self, name: str, nodes: Sequence[str]) -> None:
        which = f"Nodes={','.join(map(checked_node, nodes))}", f"Users={user_name(self._uid)}"
        times = ("StartTime=now", f"Duration={RESERVED_MINUTES}", "Flags=MAINT,IGNORE_JOBS")
        reservation = f"ReservationName={checked_reservation(name)}"
        await self._change("scontrol", "create", "reservation", reservation, *which, *times)

    @request
    async def delete_reservation(self, name: str) -> None:
        await self._change("scontrol", "delete", f"reservation={checked_reservation(name)}")

    @request
    async def set_node_down(self, node: str, reason: str) -> None:
        await self._update_node(node, "State=DOWN", f"Reason={one_line(reason)}")

    async def _update_node(self, node: str, *changes: str) -> None:
        await self._change("scontrol", "update", f"NodeName={checked_node(node)}", *changes)

    async def _change(self, command: str, *arguments: str) -> None:
        """Run a command that changes something; raises SlurmRefused, SlurmUnavailable unless it says that it did."""
        answer = await self._commands.change(command, *arguments)
        if answer.code:
            raise failure(command, answer)


def failure(command: str, answer: Answer) -> SlurmRefused | SlurmUnavailable:
    """What a command that did not do it says: no for good, or nothing certain."""
    refusal = parse_refusal(answer.stderr)
    if refusal is not None:
        return SlurmRefused(*refusal)
    return SlurmUnavailable(f"{command} ended with exit code {answer.code}: {first_line(answer.stderr)}")


TOKEN_WARNING_S = 600.0  # A token that ends so soon is reported: `scontrol token` gives one for 30 min.
CANCELS_HET_JOBS = ((25, 5), (26, 5))
"""Releases from the first up to, without, the second: 25.11.7 cancels a running heterogeneous job with an
srun over its components when it is requeued (12 of 12); 22.05.8, 24.11.5 and 26.05.5 requeue it. 25.05 was
not tried."""


@dataclass(frozen=True)
class Access:
    """What is known of it; a field that is empty or None is not known."""

    version: tuple[int, int] | None = None
    private: frozenset[str] = frozenset()  # Words of PrivateData: `jobs`, `nodes`, …
    slurm_user: int | None = None
    admin_level: str = ""  # Of the user that asks, in Slurm's accounting; empty where there is none.


def parse_config(text: str) -> Access:
    """From what `scontrol show config` prints."""
    values = dict(re.findall(r"^(\w+)\s+= (.*)$", text, re.MULTILINE))
    version = re.match(r"(\d+)\.(\d+)", values.get("SLURM_VERSION", ""), re.ASCII)
    user = re.search(r"\((\d+)\)", values.get("SlurmUser", ""), re.ASCII)
    words = re.split(r"[,\s]+", values.get("PrivateData", "none").lower())
    return Access(
        version=(int(version[1]), int(version[2])) if version else None,
        private=frozenset(words) - {"", "none"},
        slurm_user=int(user[1]) if user else None,
    )


async def read_access(commands: Commands, uid: int, user: str) -> Access:
    """The same, asked for; with the level of `user` where PrivateData makes that matter. Raises SlurmUnavailable."""
    answer = await commands.run("scontrol", "show", "config")
    access = parse_config(answer.stdout if not answer.code else "")
    if uid in (0, access.slurm_user) or "jobs" not in access.private:
        return access
    level = await commands.run("sacctmgr", "-nP", "show", "user", user, "format=adminlevel")
    words = level.stdout.split() if not level.code else []
    return Access(access.version, access.private, access.slurm_user, words[0] if words else "")


def hides_jobs(access: Access, uid: int) -> str:
    """Why other users' jobs are not in the listing of `uid`, a sentence; empty if they are."""
    if "jobs" not in access.private or uid in (0, access.slurm_user):
        return ""
    if access.admin_level.startswith(("Operator", "Admin")):
        return ""
    return (
        "PrivateData=jobs hides other users' jobs, and the controller's user is not an operator of Slurm: a job "
        "that is not listed may exist all the same; run it as SlurmUser, or `sacctmgr modify user NAME set "
        "adminlevel=operator`"
    )


def why_not_requeue_het(version: tuple[int, int] | None) -> str:
    """Why a heterogeneous job is not requeued under this release, a sentence; empty if it may be."""
    first, until = CANCELS_HET_JOBS
    if version is not None and not first <= version < until:
        return ""
    which = "a Slurm of unknown release" if version is None else f"Slurm {version[0]}.{version[1]:02}"
    return f"{which} may cancel a heterogeneous job instead of requeueing it, and its work would be lost"


def token_ends_at(token: str) -> float | None:
    """When a JSON Web Token ends, seconds since the epoch, unchecked; None if it does not say."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (binascii.Error, ValueError, TypeError, KeyError, msgspec.DecodeError):
        return None


def token_note(token: str, now: float) -> Sequence[str]:
    """What to know of the token at the date `now`: nothing as long as it lasts."""
    ends_at = token_ends_at(token) if token else None
    if ends_at is None or ends_at - now > TOKEN_WARNING_S:
        return ()
    how = "write a new one to slurm.token_file before that (scontrol token lifespan=…)"
    if ends_at <= now:
        return (
            f"the token SLURM_JWT ended {(now - ends_at) / 60:.0f} min ago, and Slurm refuses what it is asked: {how}",
        )
    return (f"the token SLURM_JWT ends in {(ends_at - now) / 60:.0f} min, and with it the sight of Slurm: {how}",)
