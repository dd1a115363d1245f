"""Pure: what pyslurm's objects say, into the same values that the commands' listings give."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import msgspec

from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.slurm_states import OVER
from slurm_watchdog.slurm import node_names, parse
from slurm_watchdog.slurm.fields import Fields, ParseError, all_or_none
from slurm_watchdog.slurm.requeue_outcome import UNREADABLE, is_held
from slurm_watchdog.wire.redact_values import mask_words

T = TypeVar("T")
NO_HOST = frozenset({"", "n/a"})
NUMBER = re.compile("[0-9]{1,9}")
WITH_STEP = re.compile("([0-9]{1,9})-([0-9]{1,9}):([1-9][0-9]{0,8})")
"""As libslurm writes more than five elements that are equally far apart; scontrol takes no such list."""


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """pyslurm.Job's attributes. Times are seconds since the epoch, None or 0 for none; `time_limit` is minutes."""

    id: int
    state: str = UNREADABLE
    user_id: int = -1
    user_name: str = ""
    array_id: int | None = None
    array_task_id: int | None = None
    array_tasks_waiting: str | None = None
    heterogeneous_id: int | None = None
    heterogeneous_offset: int | None = None
    requeue_count: int = 0
    is_batch_job: bool = False
    is_requeueable: bool = False
    priority: int | None = None
    start_time: int | None = None
    submit_time: int | None = None
    eligible_time: int | None = None
    partition: str | None = None
    allocated_nodes: str | None = None
    batch_host: str | None = None
    required_nodes: str | None = None
    excluded_nodes: str | None = None
    num_nodes: int | None = None
    time_limit: int | None = None
    name: str | None = None
    state_reason: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    dependencies: dict[str, Any] | None = None
    command: str | None = None
    working_directory: str | None = None
    standard_output: str | None = None
    standard_error: str | None = None
    comment: str | None = None


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """pyslurm.Node's attributes."""

    name: str
    state: str = ""
    address: str | None = None
    reason: str | None = None
    reason_time: int | None = None
    reason_user: str | None = None
    partitions: list[str] | None = None


NAMES = {
    "user_id": "uid",
    "requeue_count": "restarts",
    "is_batch_job": "is_batch",
    "is_requeueable": "requeueable",
    "allocated_nodes": "nodes",
    "start_time": "start_at",
    "reason_time": "reason_at",
}
"""pyslurm's names of attributes, as `SlurmJob` and `SlurmNode` have them; the others are called the same, or
nothing is done by them."""
Row = TypeVar("Row", JobRow, NodeRow)


def read_jobs(rows: object) -> tuple[SlurmJob, ...]:
    """A listing of jobs, with their excluded nodes. Raises ParseError, also if a row has no id that can be read."""
    return all_or_none(list_jobs(rows))


def list_jobs(rows: object) -> tuple[tuple[SlurmJob, ...], tuple[str, ...]]:
    """The same without the rows of which not even the id can be read, and a sentence about each of those.
    Raises ParseError."""
    return _all(rows, "jobs", lambda row: _job(*convert(row, JobRow)))


def read_nodes(rows: object) -> tuple[SlurmNode, ...]:
    """A listing of nodes. Raises ParseError, also if a row has no name."""
    return all_or_none(list_nodes(rows))


def list_nodes(rows: object) -> tuple[tuple[SlurmNode, ...], tuple[str, ...]]:
    """The same without the rows that have no name, and a sentence about each of those. Raises ParseError."""
    return _all(rows, "nodes", lambda row: _node(*convert(row, NodeRow)))


def _all(rows: object, what: str, read: Callable[[object], T]) -> tuple[tuple[T, ...], tuple[str, ...]]:
    if not isinstance(rows, list):
        raise ParseError(f"pyslurm's {what} are not as expected: {type(rows).__name__}")
    found, dropped = [], []
    for row in rows:
        try:
            found.append(read(row))
        except (msgspec.ValidationError, ParseError) as error:
            dropped.append(f"pyslurm's {what} are not as expected: {error}")
    return tuple(found), tuple(dropped)


def convert(row: object, kind: type[Row]) -> tuple[Row, Fields]:
    """The row, and which of its attributes are not what they should be: those have their defaults. Raises
    msgspec.ValidationError."""
    try:
        return msgspec.convert(row, kind), Fields()
    except msgspec.ValidationError:
        if not isinstance(row, dict):
            raise
    good, fields = {}, Fields()
    for each in msgspec.structs.fields(kind):
        if each.name in row:
            try:
                good[each.name] = msgspec.convert(row[each.name], each.type)
            except msgspec.ValidationError:
                fields.unreadable.append(NAMES.get(each.name, each.name))
    return msgspec.convert(good, kind), fields


def _job(row: JobRow, fields: Fields) -> SlurmJob:
    job_id, raw_id = parse.checked_id(job_id_of(row)), str(row.id)
    state = fields.read("state", parse.checked_state, row.state, UNREADABLE)
    waiting, element = _waiting(row), _element(row)
    has_files = row.is_batch_job and not row.array_tasks_waiting
    host = row.batch_host or ""
    batch_host = host if row.is_batch_job and host not in NO_HOST else None
    names = node_names.Names(raw_id, job_id, row.user_name, row.name or "", batch_host or "")
    workdir, reason = row.working_directory or "", row.state_reason or "None"
    return SlurmJob(
        job_id=job_id,
        raw_id=raw_id,
        state=state,
        reason=mask_words(reason),
        name=mask_words(row.name or ""),
        user=row.user_name,
        uid=row.user_id,
        account=row.account or "",
        partition=row.partition or "",
        nodes=fields.read("nodes", node_names.expand_nodes, row.allocated_nodes or "", ()),
        batch_host=batch_host,
        restarts=row.requeue_count,
        start_at=None if row.state == "PENDING" else _time(row.start_time),
        is_batch=row.is_batch_job,
        requeueable=row.is_requeueable,
        held=is_held(row.state, reason, row.priority),
        stdout=parse.expand_path(row.standard_output or "", workdir, names) if has_files else None,
        stderr=parse.expand_path(row.standard_error or row.standard_output or "", workdir, names)
        if has_files
        else None,
        workdir=workdir or None,
        comment=row.comment or "",
        excluded_nodes=fields.read("excluded_nodes", node_names.expand_nodes, row.excluded_nodes or "", ()),
        required_nodes=fields.read("required_nodes", node_names.expand_nodes, row.required_nodes or "", ()),
        node_count=row.num_nodes,
        time_limit_s=None if row.time_limit is None else row.time_limit * 60.0,
        qos=row.qos or "",
        reservation=row.reservation or "",
        dependency=dependency_text(row.dependencies),
        submit_at=_time(row.submit_time),
        eligible_at=_time(row.eligible_time),
        array_job_id=str(row.array_id) if waiting or element is not None else "",
        array_tasks=waiting if element is None else str(element),
        het_job_id=str(row.heterogeneous_id) if row.heterogeneous_id else "",
        het_offset=(row.heterogeneous_offset or 0) if row.heterogeneous_id else None,
        unreadable=tuple(dict.fromkeys(fields.unreadable)),
    )


def job_id_of(row: JobRow) -> str:
    """As squeue writes it: `12`, `12_3`, `12_[4-9]`, `12+1`; the first component of a heterogeneous job is `12`."""
    if (element := _element(row)) is not None:
        return f"{row.array_id}_{element}"
    if waiting := _waiting(row):
        return f"{row.array_id}_[{waiting}]"
    if row.heterogeneous_id and row.heterogeneous_offset:
        return f"{row.heterogeneous_id}+{row.heterogeneous_offset}"
    return str(row.id)


def _element(row: JobRow) -> int | None:
    """Which element of its array it is, also the only one that has not started. pyslurm says None for the element 0,
    for a job that is none, and for the record of an array that ended before its last elements had started."""
    if not row.array_id or _waiting(row):
        return None
    if row.array_tasks_waiting:
        return int(row.array_tasks_waiting)
    if row.id == row.array_id and row.state in OVER and not row.allocated_nodes:
        return row.array_task_id
    return row.array_task_id or 0


def _waiting(row: JobRow) -> str:
    """The elements that have not started, if they are several: `2-9,12`."""
    tasks = row.array_tasks_waiting or ""
    if step := WITH_STEP.fullmatch(tasks):
        elements = range(int(step[1]), int(step[2]) + 1, int(step[3]))
        tasks = ",".join(map(str, islice(elements, parse.REST_LIMIT)))
    return "" if NUMBER.fullmatch(tasks) else parse.cut_rest(tasks)


def dependency_text(dependencies: dict[str, Any] | None) -> str:
    """Slurm's words for it, put together again from pyslurm's dictionary."""
    if not dependencies:
        return ""
    mark = "?" if dependencies.get("satisfy") == "any" else ","
    parts = ["singleton"] if dependencies.get("singleton") else []
    parts += [
        f"{kind}:{':'.join(str(job) for job in jobs)}"
        for kind, jobs in dependencies.items()
        if isinstance(jobs, list) and jobs
    ]
    return mark.join(parts)


def _node(row: NodeRow, fields: Fields) -> SlurmNode:
    if not parse.NODE_NAME.fullmatch(row.name):
        raise ParseError(f"no name of a node: {row.name[:80]!r}")
    reason = "" if row.reason in {None, "none"} else row.reason or ""
    return SlurmNode(
        name=row.name,
        address=row.address or "",
        state=row.state.upper(),
        reason=mask_words(reason),
        reason_at=_time(row.reason_time),
        reason_user=(row.reason_user or "") if row.reason_time else "",
        partitions=tuple(sorted(set(row.partitions or ()))),
        unreadable=tuple(fields.unreadable),
    )


def _time(value: int | None) -> float | None:
    return float(value) if value else None
