"""Requests as workers get them: from JSON, checked for their type, and done by the function in the table."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from slurm_watchdog.agent.own_requests import OWN_TASKS
from slurm_watchdog.agent.workers.child import Function


def do(name: str, args: Any, state: dict[str, Any] | None = None) -> Any:
    """What a worker answers, nobody's rights being checked."""
    task = OWN_TASKS[name]
    return task.do(msgspec.convert(args, task.type), {} if state is None else state)


def functions(*names: str) -> dict[str, Function]:
    """For a WorkerPool whose workers do these alone."""
    return {name: partial(do, name) for name in names}
