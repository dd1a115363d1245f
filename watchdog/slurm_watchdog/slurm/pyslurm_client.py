"""Listings by pyslurm, in a process of its own; what changes something goes by Slurm's commands all the same.

For that pyslurm (22.5 to 25.11) is no help: its requeue lacks the condition that keeps a finished job from
running again; it names jobs by number only, and the last element of an array has the number of the whole
array; and after a signal it raises the error that was left over from an earlier request. What it can't say in
a listing: that a job is STOPPED, SIGNALING, STAGE_OUT, REVOKED or RESV_DEL_HOLD (it cuts off the higher flags
of a state, and gives the state below them).
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import OVER
from slurm_watchdog.slurm import parse, pyslurm_child
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.commands import clean_environment, first_line, run
from slurm_watchdog.slurm.fields import Fields, Listed, ParseError, all_or_none
from slurm_watchdog.slurm.listings import merge_components, one_job, view_of
from slurm_watchdog.slurm.node_names import expand_nodes

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


class Gone(SlurmUnavailable):
    """pyslurm cannot be asked at all: its process cannot be started, or ends by itself before it answers."""


class Answer(msgspec.Struct, frozen=True):
    """What the process printed."""

    jobs: list[dict[str, Any]] | None = None
    nodes: list[dict[str, Any]] | None = None
    refused: str = ""
    failed: str = ""


class PyslurmListings:
    """By pyslurm, which `python` (empty: our interpreter) has to have, built for the site's release."""

    note = ""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        # The file and not the module: it may not be able to import ours.
        self._argv = (python or sys.executable, "-I", pyslurm_child.__file__)
        self._environ = clean_environment(environ)

    async def view(self) -> SlurmView:
        """With the excluded nodes of all jobs."""
        answer = await self._ask("view")
        return view_of(
            await asyncio.to_thread(list_jobs, answer.jobs), await asyncio.to_thread(list_nodes, answer.nodes)
        )

    async def job(self, job_id: str) -> SlurmJob | None:
        """An element of an array, and one that is not found at once, is looked for among all."""
        number, _, element = job_id.partition("_")
        if not element:
            answer = await self._ask("job", number)
            if not answer.refused and (found := all_or_none(list_jobs(answer.jobs))) and not found[0].het_job_id:
                return one_job(found, job_id)
        answer = await self._ask("jobs")
        listed = ((), ()) if answer.refused else await asyncio.to_thread(list_jobs, answer.jobs)
        jobs = merge_components(all_or_none(listed))
        like = tuple(job for job in jobs if job_id in (job.job_id, job.raw_id) or job.array_job_id == job_id)
        return one_job(like, job_id)

    async def node(self, name: str) -> SlurmNode | None:
        """Looked for among all: pyslurm's error for an unknown one says only that something was wrong."""
        nodes = (await self._ask("nodes")).nodes
        found = all_or_none(list_nodes(nodes and [row for row in nodes if row.get("nodelist") == name]))
        return found[0] if found else None

    async def _ask(self, *question: str) -> Answer:
        """The answer, `refused` only if Slurm says that there is no such job. Raises Gone, SlurmUnavailable."""
        try:
            printed = await run([*self._argv, *question], self._environ, setting="slurm.pyslurm_python")
        except SlurmUnavailable as error:
            raise Gone(f"pyslurm's process: {error}") from error
        if printed.code:
            said = first_line((printed.stderr.strip().splitlines() or [""])[-1])
            raise Gone(f"pyslurm's process ended with exit code {printed.code}: {said}")
        try:
            answer = await asyncio.to_thread(msgspec.json.decode, printed.output, type=Answer)
        except msgspec.DecodeError as error:
            raise SlurmUnavailable(f"pyslurm's process gave no listing: {error}") from error
        if answer.failed or (answer.refused and not parse.is_unknown_job(answer.refused)):
            raise SlurmUnavailable(f"pyslurm: {(answer.failed or answer.refused)[:300]}")
        return answer


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
