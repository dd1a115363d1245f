"""What Slurm's answer to a request makes of an operation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from slurm_watchdog.model.actions import OperationOutcome, Outcome
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

P = ParamSpec("P")


def refusal(error: SlurmRefused) -> Outcome:
    """A no for good ends the operation; one that the job's next state may lift is tried again."""
    return (OperationOutcome.FAILED if error.terminal else OperationOutcome.UNKNOWN), str(error)


def answered(operation: Callable[P, Awaitable[Outcome]]) -> Callable[P, Coroutine[Any, Any, Outcome]]:
    """`operation`, where a refusal of Slurm's that it does not handle itself is a `refusal`, and silence `unknown`."""

    @wraps(operation)
    async def carried_out(*args: P.args, **kwargs: P.kwargs) -> Outcome:
        try:
            return await operation(*args, **kwargs)
        except SlurmRefused as error:
            return refusal(error)
        except SlurmUnavailable as error:
            return OperationOutcome.UNKNOWN, str(error)

    return carried_out
