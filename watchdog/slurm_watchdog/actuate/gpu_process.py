"""Ends a process that outlived its job on a GPU, by way of its node's agent, who looks at everything again
before it does."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from slurm_watchdog.model.actions import OperationOutcome, Outcome
from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.protocol import Command, CommandResult, EndProcess, ProcessEnd

Ask = Callable[[str, Command, float], Awaitable[CommandResult]]
"""(node, command, deadline in seconds) -> result; never raises."""


async def query(ask: Ask, process: GpuProcess, deadline_s: float) -> ProcessEnd | None:
    """What its node says of it; None if it does not answer."""
    return (await ask(process.node, _command(process, "look", deadline_s), deadline_s)).process


async def send(ask: Ask, process: GpuProcess, how: str, deadline_s: float) -> Outcome:
    """Sends SIGTERM (`term`) or SIGKILL (`kill`). `skipped`: it is sure that nothing was sent; what the node
    objects to may pass (a job of its user's that is just ending)."""
    result = await ask(process.node, _command(process, how, deadline_s), deadline_s)
    said = result.process
    if said is None:
        return OperationOutcome.UNKNOWN, f"it may have been sent: {result.error}"
    if said.refusal:
        return OperationOutcome.SKIPPED, said.refusal
    if said.gone:
        return (
            OperationOutcome.DONE,
            f"SIG{how.upper()} sent: it has ended" if said.sent else "it had ended before",
        )
    if said.released:
        return OperationOutcome.SKIPPED, "nothing was sent: it holds no GPU any more"
    if not said.sent:
        return OperationOutcome.SKIPPED, "nothing was sent: it could not be looked at"
    where = f"state {said.state or '?'}" + (f" in {said.wchan}" if said.wchan else "")
    return OperationOutcome.DONE, f"SIG{how.upper()} sent: it is still there, {where}"


def _command(process: GpuProcess, how: str, deadline_s: float) -> EndProcess:
    return EndProcess(
        id=uuid.uuid4().hex, boot_id=process.boot_id, pid=process.pid, start_ticks=process.start_ticks, uid=process.uid,
        comm=process.comm, job_id=process.job_id, minors=process.minors, how=how, expires_s=deadline_s,
    )  # fmt: skip
