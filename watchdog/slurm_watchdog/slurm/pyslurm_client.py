"""The listings of jobs and nodes by pyslurm, in a process of its own. What is asked of one job or node, and what
changes something, goes by Slurm's commands all the same.

For that pyslurm (22.5 to 25.11) is no help: its requeue lacks the condition that keeps a finished job from
running again; it names jobs by number only, and the last element of an array has the number of the whole
array; and after a signal it raises the error that was left over from an earlier request. What it can't say in
a listing: that a job is STOPPED, SIGNALING, STAGE_OUT, REVOKED or RESV_DEL_HOLD (it cuts off the higher flags
of a state, and gives the state below them).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import OVER
from slurm_watchdog.slurm import parse, pyslurm_child
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.command_line import CommandLineSlurm
from slurm_watchdog.slurm.commands import ALWAYS, Commands, Right, clean_environment, first_line, run
from slurm_watchdog.slurm.listings import Listings, view_of
from slurm_watchdog.slurm.node_names import Fields, Listed, ParseError, expand_nodes
from slurm_watchdog.slurm.request_guard import Backoff, Observe

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Row = Mapping[str, Any]
NUMBER = re.compile("[0-9]{1,9}")
WITH_STEP = re.compile("([0-9]{1,9})-([0-9]{1,9}):([1-9][0-9]{0,8})")
"""As libslurm writes more than five elements that are equally far apart; scontrol takes no such list."""
TIMES = ("starttime", "submittime", "eligibletime", "timestamp")
ABSENT = dict.fromkeys(TIMES, "N/A") | {"prioritylong": parse.NO_VAL, "reason": "None"}
"""What Slurm's commands print where pyslurm says None, or of a time 0; of the other fields nothing."""
NODE_LISTS = ("nodelist", "reqnodes", "excluded")
NO_LIST = "["  # No list of nodes, so that one that cannot be read is unknown and not empty.


FIRST_ANSWER_S = 8.0
"""The first answer of pyslurm may take so long, well within the deadline of a request (slurm.deadline): one that was
built for another release of Slurm may hang."""
MAX_FAILURES = 3  # So many in a row, and the commands are asked too: slurmctld may have been upgraded under pyslurm.
LONGEST_PAUSE_S = 300.0  # Between two tries of a pyslurm that cannot be asked.


class Gone(SlurmUnavailable):
    """pyslurm cannot be asked at all: its process cannot be started, or ends by itself before it answers."""


class Answer(msgspec.Struct, frozen=True):
    """What the process printed."""

    jobs: list[dict[str, Any]] | None = None
    nodes: list[dict[str, Any]] | None = None
    failed: str = ""


class PyslurmListings(Listings):
    """By pyslurm, which `python` (empty: our interpreter) has to have, built for the site's release, as long as it
    answers at all; otherwise by the commands, unless `alone`.

    That Slurm does not answer is no reason to change: but as long as pyslurm has never once answered, or not the last
    few times, it is unknown whether Slurm or pyslurm is at fault, and so the commands are asked as well. One that
    cannot be asked at all is tried ever more rarely.
    """

    def __init__(self, commands: Commands, python: str, environ: Mapping[str, str], *, alone: bool = False) -> None:
        super().__init__(commands)
        # The file and not the module: it may not be able to import ours.
        self._argv = (python or sys.executable, "-I", pyslurm_child.__file__)
        self._environ = clean_environment(environ)
        self._alone = alone
        self._answered = False
        self._failures = 0
        self._gone = Backoff(first_s=2.0, most_s=LONGEST_PAUSE_S)

    async def view(self) -> SlurmView:
        """With the excluded nodes of all jobs. Raises Gone, SlurmUnavailable."""
        if self._alone:
            return await self.by_pyslurm()
        if self._gone.wait_s(clock.monotonic()) > 0:
            return await self.by_commands()
        try:
            async with timeout(None if self._answered else FIRST_ANSWER_S):
                view = await self.by_pyslurm()
        except (SlurmUnavailable, TimeoutError) as error:
            self._failures += 1
            if gone := isinstance(error, Gone):
                self._gone.failed(clock.monotonic())
            elif self._answered and self._failures < MAX_FAILURES:
                raise
            view = await self.by_commands()  # raises what is wrong with Slurm itself, if anything is
            why = str(error) or f"no answer within {FIRST_ANSWER_S:g} s"
            why += "" if gone else "; its commands do answer: is pyslurm built for the release of slurmctld?"
            if not self.note:
                LOG.warning("Slurm is asked by its commands: %s", why)
            self.note = f"Slurm is asked by its commands, not by pyslurm: {why}"
            return view
        self._answered, self._failures, self.note = True, 0, ""
        self._gone.succeeded()
        return view

    async def by_commands(self) -> SlurmView:
        """By squeue and sinfo."""
        return await super().view()

    async def by_pyslurm(self) -> SlurmView:
        """By pyslurm. Raises Gone, SlurmUnavailable."""
        try:
            printed = await run(self._argv, self._environ, setting="slurm.pyslurm_python")
        except SlurmUnavailable as error:
            raise Gone(f"pyslurm's process: {error}") from error
        if printed.code:
            said = first_line((printed.stderr.strip().splitlines() or [""])[-1])
            raise Gone(f"pyslurm's process ended with exit code {printed.code}: {said}")
        try:
            answer = await asyncio.to_thread(msgspec.json.decode, printed.output, type=Answer)
        except msgspec.DecodeError as error:
            raise SlurmUnavailable(f"pyslurm's process gave no listing: {error}") from error
        if answer.failed:
            raise SlurmUnavailable(f"pyslurm: {answer.failed[:300]}")
        jobs = await asyncio.to_thread(list_jobs, answer.jobs)
        return view_of(jobs, await asyncio.to_thread(list_nodes, answer.nodes))


def is_importable() -> bool:
    """Whether our own interpreter has pyslurm. It is not imported: that may end the process."""
    return importlib.util.find_spec("pyslurm") is not None


def make_client(
    choice: Literal["auto", "pyslurm", "command_line"],
    *,
    bin_directory: str = "",
    deadline_s: float = 20.0,
    pyslurm_python: str = "",
    token_file: str = "",
    environ: Mapping[str, str] | None = None,
    observe: Observe = lambda call, outcome: None,
    right: Right = ALWAYS,
) -> CommandLineSlurm:
    """A client for the site's Slurm.

    `pyslurm`: listings come from pyslurm, and without it nothing is known. `auto`: they do if `pyslurm_python`,
    or our own interpreter where that is empty, has it, and by the commands whenever it cannot be started.
    `right`: see Commands.
    `command_line`: never, nor with a `token_file`: the token changes, and pyslurm does not read it.
    """
    environ = os.environ if environ is None else environ
    commands = Commands(bin_directory, environ, token_file, right)
    wanted = choice == "pyslurm" or (choice == "auto" and not token_file and (pyslurm_python or is_importable()))
    listings = PyslurmListings(commands, pyslurm_python, environ, alone=choice == "pyslurm") if wanted else None
    LOG.info("Slurm is asked by %s", "pyslurm" if wanted else "its commands")
    return CommandLineSlurm(bin_directory, deadline_s, environ, observe, listings, token_file, right=right)


# ------------------------------------------------------------------------------------------------- rows


def list_jobs(rows: Sequence[Row] | None) -> Listed[SlurmJob]:
    """The jobs without the rows of which not even the id can be read, and a sentence about each of those. Raises
    ParseError if there is no listing."""
    return _all(rows, _job)


def list_nodes(rows: Sequence[Row] | None) -> Listed[SlurmNode]:
    """The same of nodes."""
    return _all(rows, _node)


def _all(rows: Sequence[Row] | None, read: Callable[[Row], T]) -> Listed[T]:
    if rows is None:
        raise ParseError("pyslurm's process gave no listing")
    found, dropped = [], []
    for row in rows:
        try:
            found.append(read(row))
        except (ParseError, KeyError) as error:  # the program may be of the release that is just being installed
            dropped.append(f"pyslurm's rows are not as expected: {error}")
    return tuple(found), tuple(dropped)


def _job(said: Row) -> SlurmJob:
    """From the texts that squeue would print for it. Raises ParseError."""
    row, fields = _texts(said)
    waiting, element = _waiting(row["waiting"]), _element(row)
    het, offset = row["hetjobid"].lstrip("0"), row["hetjoboffset"] or "0"
    row["jobarrayid"] = row["jobid"]
    if waiting or element:
        row["jobarrayid"] = f"{row['arrayjobid']}_{element or f'[{waiting}]'}"
    elif het and offset != "0":
        row["jobarrayid"] = f"{het}+{offset}"
    row["arraytaskid"] = element or waiting or "N/A"
    row |= {"hetjobid": het, "hetjoboffset": offset} if het else {"hetjobid": "N/A", "hetjoboffset": "N/A"}
    if NUMBER.fullmatch(row["timelimit"]):
        row["timelimit"] += ":00"  # minutes
    if row["waiting"]:
        row |= {"stdout": "", "stderr": ""}
    excluded: tuple[str, ...] = fields.read("excluded_nodes", expand_nodes, row["excluded"], ())
    job = parse.read_job(row)
    return replace(job, excluded_nodes=excluded, unreadable=tuple(dict.fromkeys((*job.unreadable, *fields.unreadable))))


def _node(said: Row) -> SlurmNode:
    row, fields = _texts({**said, "partitionname": None, "reason": said["reason"] or "none"})
    if row["timestamp"] == "N/A":
        row["user"] = ""
    node = parse.read_node(row)
    partitions: tuple[str, ...] = fields.read("partitions", _partitions, said["partitionname"], ())
    return replace(node, partitions=partitions, unreadable=(*node.unreadable, *fields.unreadable))


def _partitions(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | None):
        raise ParseError("no list of partitions")
    return tuple(sorted(set(map(str, value or ()))))


def _texts(said: Row) -> tuple[dict[str, str], Fields]:
    """Each value as Slurm's commands print it, and which of them pyslurm gives in no form that can be read."""
    fields = Fields()
    row = {}
    for name, value in said.items():
        if value is None or (name in TIMES and value == 0):
            row[name] = ABSENT.get(name, "")
        else:
            rule = dependency_text if name == "dependency" else _text
            row[name] = fields.read(name, rule, value, NO_LIST if name in NODE_LISTS else "")
    return row, fields


def _text(value: object) -> str:
    if not isinstance(value, (int, str)):
        raise ParseError(f"neither a text nor a number: {value!r:.80}")
    return str(int(value)) if isinstance(value, bool) else str(value)


def _element(row: Mapping[str, str]) -> str:
    """Which element of its array it is, also the only one that has not started. pyslurm says None for the element 0,
    for a job that is none, and for the record of an array that ended before its last elements had started."""
    array, waiting, element = row["arrayjobid"], row["waiting"], row["arraytaskid"]
    if array in ("", "0") or _waiting(waiting):
        return ""
    if waiting or (row["jobid"] == array and row["state"] in OVER and not row["nodelist"]):
        return waiting or element
    return element or "0"


def _waiting(tasks: str) -> str:
    """The elements that have not started, if they are several: `2-9,12`."""
    if step := WITH_STEP.fullmatch(tasks):
        elements = range(int(step[1]), int(step[2]) + 1, int(step[3]))
        tasks = ",".join(map(str, islice(elements, parse.REST_LIMIT)))
    return "" if NUMBER.fullmatch(tasks) else parse.cut_rest(tasks)


def dependency_text(dependencies: dict[str, Any]) -> str:
    """Slurm's words for it, put together again from pyslurm's dictionary."""
    if not isinstance(dependencies, dict):
        raise ParseError("no dictionary")
    mark = "?" if dependencies.get("satisfy") == "any" else ","
    parts = ["singleton"] if dependencies.get("singleton") else []
    parts += [
        f"{kind}:{':'.join(str(job) for job in jobs)}"
        for kind, jobs in dependencies.items()
        if isinstance(jobs, list) and jobs
    ]
    return mark.join(parts)
