"""Requests as children get them: from JSON, checked for their type, and done by the function in the table."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

from slurm_watchdog.agent.children.become_user import Kind
from slurm_watchdog.agent.children.child import Task, decode, encode
from slurm_watchdog.agent.children.requests import Request, WorkerState, answer_type
from slurm_watchdog.agent.tasks import TASKS

BY_NAME = {task.request.task: task for task in TASKS}


def do(name: str, fields: Any, state: WorkerState | None = None) -> Any:
    """What a child answers, nobody's rights being checked."""
    task = BY_NAME[name]
    return task.do(decode(encode(fields), task.request), state or WorkerState())


def answer_to(request: Request[Any], state: WorkerState | None = None) -> Any:
    """The same as it arrives in the agent: through JSON, to and fro."""
    return decode(encode(do(request.task, request, state)), answer_type(type(request)))


class PlainRequest(Request[Any], frozen=True):
    """For functions of a test: `value` is anything."""

    value: Any = None


_KINDS: dict[str, type[PlainRequest]] = {}


def plain_kind(name: str) -> type[PlainRequest]:
    if name not in _KINDS:
        kind = types.new_class(name, (PlainRequest,), {"frozen": True}, lambda body: body.update(task=name))
        kind.__orig_bases__ = PlainRequest.__orig_bases__  # type: ignore[attr-defined]
        _KINDS[name] = cast("type[PlainRequest]", kind)
    return _KINDS[name]


def plain_request(name: str, value: Any = None) -> PlainRequest:
    """A request for the function of this name."""
    return plain_kind(name)(value)


def plain(function: Callable[[Any, WorkerState], Any], kind: Kind = Kind.OWN, name: str = "") -> Task:
    """A task of this name that hands the function the value alone."""
    return Task(plain_kind(name or function.__name__), lambda request, state: function(request.value, state), kind)


def tasks(*names: str, **instead: Callable[[Any, WorkerState], Any]) -> tuple[Task, ...]:
    """Those of the real table; with another function where one is given."""
    chosen = [BY_NAME[name] for name in (*names, *instead)]
    return tuple(Task(each.request, instead.get(each.request.task, each.do), each.kind) for each in chosen)
