"""The kill switch: a file on every node of the job, written as its owner, removed by us before the restart."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from slurm_watchdog.base.text import plural
from slurm_watchdog.model.actions import Decision, OperationOutcome, Outcome
from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.protocol import Command, CommandResult, RemoveKillSwitch, WriteKillSwitch

Ask = Callable[[str, Command, float], Awaitable[CommandResult]]
"""(node, command, deadline in seconds) -> result; never raises."""


def content_for(decision_id: str, incident_id: str, reason: str, asked_by: str | None) -> str:
    """The one JSON line that the file holds: who, why, which incident. By it we know our own file again."""
    who = f"slurm-watchdog for {asked_by}" if asked_by else "slurm-watchdog"
    return compose_line({"by": who, "why": reason, "incident": incident_id, "decision": decision_id})


async def write(ask: Ask, decision: Decision, deadline_s: float, batch_host: str | None = None) -> Outcome:
    """Done when every node of the job has it: a trainer polls it on whichever node it likes. Where the job has a
    supervisor, its `batch_host` gets it before the others: there the supervisor looks, once its command has ended,
    whether it was asked to; a trainer that saves quickly would be taken for one that has finished."""
    assert decision.fence is not None
    command = partial(WriteKillSwitch, restarts=decision.fence.restarts)
    first = [node for node in decision.nodes if decision.step_id and node == batch_host]
    rounds = [nodes for nodes in (first, [node for node in decision.nodes if node not in first]) if nodes]
    outcome: Outcome = (OperationOutcome.DONE, "the job has no nodes")
    for nodes in rounds:
        outcome = await _ask_nodes(ask, decision, nodes, command, deadline_s)
        if outcome[0] is not OperationOutcome.DONE:
            return outcome
    return outcome[0], f"{decision.kill_switch} written on {plural(len(decision.nodes), 'node')}"


async def remove(ask: Ask, decision: Decision, reporting: frozenset[str], deadline_s: float) -> Outcome:
    """Done when it is gone from every node. A silent node is passed over only where the path names the run,
    so that the file can never be taken for the next run's."""
    assert decision.fence is not None
    fence, path = decision.fence, decision.kill_switch or ""
    harmless = f"{decision.process_job_id or fence.job_id}.{fence.restarts}" in path
    nodes = [node for node in decision.nodes if node in reporting or not harmless]
    outcome, why = await _ask_nodes(ask, decision, nodes, RemoveKillSwitch, deadline_s)
    gone = f"{path} removed on {len(nodes)} of {plural(len(decision.nodes), 'node')}"
    return outcome, gone if outcome is OperationOutcome.DONE else why


async def _ask_nodes(
    ask: Ask, decision: Decision, nodes: Iterable[str], command: Callable[..., Command], deadline_s: float
) -> Outcome:
    """The same command to each of `nodes`, at once."""
    assert decision.fence is not None
    assert decision.kill_switch is not None
    job_id = decision.process_job_id or decision.fence.job_id
    same = {
        "job_id": job_id, "path": decision.kill_switch, "uid": decision.kill_switch_uid or 0,
        "content": decision.kill_switch_content, "expires_s": deadline_s,
    }  # fmt: skip
    requests = (ask(node, command(id=uuid.uuid4().hex, **same), deadline_s) for node in nodes)
    results = await asyncio.gather(*requests)
    errors = [f"{result.error}" for result in results if not result.ok]
    if errors:
        return OperationOutcome.UNKNOWN, f"{len(errors)} of {len(results)} nodes failed: {errors[0]}"
    return OperationOutcome.DONE, ""
