"""Requests as workers get them: from JSON, checked for their type, and done by the function in the table."""

from __future__ import annotations

import os
import types
from functools import partial
from typing import Any, cast

import msgspec

from slurm_watchdog.agent.context import OWN_TASKS
from slurm_watchdog.agent.helper.requests import TASKS, Dispatch
from slurm_watchdog.agent.workers.child import Function, decode, encode
from slurm_watchdog.agent.workers.request_types import Request, WorkerState, answer_type


def check_request(name: str, fields: Any, uid: int, is_here: bool = True, prefixes: tuple[str, ...] = ()) -> None:
    """What a helper's child of this user checks first. Raises RefusedError."""
    Dispatch(TASKS, is_here, lambda reason: None, prefixes).check(name, fields, uid)


def do(name: str, fields: Any, worker: WorkerState | None = None) -> Any:
    """What a worker answers, nobody's rights being checked."""
    task = OWN_TASKS[name]
    return task.do(msgspec.convert(fields, task.request), worker or WorkerState())


def answer_to(request: Request[Any], worker: WorkerState | None = None) -> Any:
    """The same as it arrives in the agent: through JSON, to and fro."""
    value = do(request.task, decode(encode(request)), worker)
    return msgspec.convert(decode(encode(value)), answer_type(type(request)))


def parts_of(request: Request[Any]) -> list[Any]:
    """What a worker of this user sends ahead of the answer."""
    parts: list[Any] = []
    do(request.task, decode(encode(request)), WorkerState(own_uid=os.getuid(), send_part=parts.append))
    return [msgspec.convert(decode(encode(each)), request.part) for each in parts]


class PlainRequest(Request[Any], frozen=True):
    """For functions of a test: `value` is anything."""

    part = Any
    value: Any = None


def plain_request(name: str, value: Any = None) -> PlainRequest:
    """A request for the function of this name."""
    kind = types.new_class(name, (PlainRequest,), {"frozen": True}, lambda body: body.update(task=name))
    return cast("PlainRequest", kind(value))


def plain(function: Function) -> Function:
    """The same for the function itself: it gets the value alone."""
    return lambda fields, worker: function(fields["value"], worker)


def functions(*names: str) -> dict[str, Function]:
    """For a WorkerPool whose workers do these alone."""
    return {name: partial(do, name) for name in names}
