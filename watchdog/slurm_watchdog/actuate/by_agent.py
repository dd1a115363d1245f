"""Levers that the agents pull on their nodes: the kill switch, an order to a supervisor, the end of a process that
outlived its job on a GPU."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from slurm_watchdog.base import clock
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import plural
from slurm_watchdog.model.actions import Decision, OperationOutcome, Outcome, answer_shown
from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.protocol import (
    Command,
    CommandResult,
    EndProcess,
    GiveOrder,
    ProcessEnd,
    RemoveKillSwitch,
    WithdrawOrder,
    WriteKillSwitch,
)
from slurm_watchdog.model.supervisor import (
    FRESH_S,
    GRACE_S,
    HUNG_GRACE_S,
    ORDER_LIFETIME_S,
    WRITE_EVERY_S,
    RestartOrder,
    Sighting,
)

Ask = Callable[[str, Command, float], Awaitable[CommandResult]]  # (node, command, deadline in seconds); never raises.


def content_for(decision_id: str, incident_id: str, reason: str, asked_by: str | None) -> str:
    """The one JSON line that the file holds: who, why, which incident. By it we know our own file again."""
    who = f"slurm-watchdog for {asked_by}" if asked_by else "slurm-watchdog"
    return compose_line({"by": who, "why": reason, "incident": incident_id, "decision": decision_id})


async def write_kill_switch(ask: Ask, decision: Decision, deadline_s: float, batch_host: str | None = None) -> Outcome:
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


async def remove_kill_switch(ask: Ask, decision: Decision, reporting: frozenset[str], deadline_s: float) -> Outcome:
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


POLL_S = 0.5
SURELY_LATER_S = 2.0
"""A supervisor says that it takes an order before it does anything: a status that came so long after the order was
withdrawn, and does not name it, is that of one that will never carry it out."""
SEEN_WITHIN_S = 3 * WRITE_EVERY_S  # For such a status to come by way of its agent.

Seen = Callable[[], Sighting | None]  # The last word of the supervisor, on the clock `now`; None: none is known.


@dataclass(frozen=True)
class Time:
    """The clock that an order waits by."""

    now: Callable[[], float] = clock.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def write_order(ask: Ask, decision: Decision, batch_host: str, deadline_s: float, seen: Seen) -> Outcome:
    """Done when the agent hands the order to the supervisor, or that has read it. To give the same one again does no
    harm."""
    if _shown(decision, seen) is not None:
        return OperationOutcome.DONE, "the supervisor has read the order"
    assert decision.fence is not None
    order = picked(
        RestartOrder, decision, *("step_id", "start", "avoid", "resume_from"), decision=decision.id, why=decision.by,
        grace_s=HUNG_GRACE_S if decision.loop_turns is False else GRACE_S,
    )  # fmt: skip
    job_id, uid = decision.process_job_id or decision.fence.job_id, -1 if decision.uid is None else decision.uid
    give = GiveOrder(
        id=uuid.uuid4().hex, job_id=job_id, restarts=decision.fence.restarts, uid=uid, order=order,
        expires_s=deadline_s,
    )  # fmt: skip
    result = await ask(batch_host, give, deadline_s)
    if not result.ok:
        return OperationOutcome.UNKNOWN, f"the order was not given on {batch_host}: {result.error}"
    return OperationOutcome.DONE, f"given on {batch_host}"


async def restart_step(
    ask: Ask, decision: Decision, batch_host: str, deadline_s: float, limit_s: float, seen: Seen, time: Time
) -> Outcome:
    """Done when the supervisor says that the new step runs; failed when it refuses, or is known not to carry the
    order out within `limit_s`, or has died over it; unknown while it may do so yet."""
    refused_from = time.now() + ORDER_LIFETIME_S
    answer = await _until(lambda: _shown(decision, seen), min(limit_s, ORDER_LIFETIME_S), time)
    if answer is None and _is_taken(decision, seen()) and not _died_over(decision, seen()):  # any other is too late
        answer = await _until(lambda: _shown(decision, seen), limit_s - ORDER_LIFETIME_S, time)
    if answer is not None:
        return answer
    assert decision.fence is not None
    job_id = decision.process_job_id or decision.fence.job_id
    withdraw = WithdrawOrder(id=uuid.uuid4().hex, job_id=job_id, decision=decision.id, expires_s=deadline_s)
    result = await ask(batch_host, withdraw, deadline_s)
    if not result.ok:
        return OperationOutcome.UNKNOWN, f"the order was not withdrawn on {batch_host}: {result.error}"
    withdrawn_at = time.now()

    def final() -> Outcome | None:
        known = seen()
        if known is None:
            return None
        taken = _is_taken(decision, known)
        # One that was stopped, or killed, does not write; the order that it has not taken by now it would refuse.
        lapsed = not taken and known.read_at >= refused_from + SURELY_LATER_S
        died = _died_over(decision, known) and known.read_at >= withdrawn_at
        if known.written_at < withdrawn_at + SURELY_LATER_S and not (lapsed or died):
            return None
        did = "took the order, and did not come to its end" if taken else "did not take the order"
        why = f"the supervisor {did} within {limit_s:.0f} s"
        if died:
            why = "the supervisor took the order, and died, or was stopped, before it started the command again"
        return answer_shown(decision, known.status) or (OperationOutcome.FAILED, why)

    answer = await _until(final, SURELY_LATER_S + SEEN_WITHIN_S, time)
    return answer or (OperationOutcome.UNKNOWN, f"no news from the supervisor on {batch_host}")


def _shown(decision: Decision, seen: Seen) -> Outcome | None:
    known = seen()
    return answer_shown(decision, None if known is None else known.status)


def _is_taken(decision: Decision, known: Sighting | None) -> bool:
    return known is not None and known.status.order == decision.id


def _died_over(decision: Decision, known: Sighting | None) -> bool:
    """Whether it took the order, and is dead or stopped since: it is looked at, and says nothing. It says that it
    starts the command before it does so: where that was not said, no step of this order runs."""
    return (
        known is not None
        and _is_taken(decision, known)
        and known.status.starts <= decision.start
        and known.read_at - known.written_at >= FRESH_S
    )


async def _until(found: Callable[[], Outcome | None], limit_s: float, time: Time) -> Outcome | None:
    """What `found` says, as soon as it says anything within `limit_s`."""
    until = time.now() + limit_s
    answer = found()
    while answer is None and time.now() < until:
        await time.sleep(POLL_S)
        answer = found()
    return answer


async def look_at_process(ask: Ask, process: GpuProcess, deadline_s: float) -> ProcessEnd | None:
    """What its node says of it; None if it does not answer."""
    return (await ask(process.node, _end(process, "look", deadline_s), deadline_s)).process


async def end_process(ask: Ask, process: GpuProcess, how: str, deadline_s: float) -> Outcome:
    """Sends SIGTERM (`term`) or SIGKILL (`kill`) by way of the node's agent, who looks at everything again before.
    `skipped`: it is sure that nothing was sent; what the node objects to may pass (a job of its user's that is just
    ending)."""
    result = await ask(process.node, _end(process, how, deadline_s), deadline_s)
    said = result.process
    if said is None:
        return OperationOutcome.UNKNOWN, f"it may have been sent: {result.error}"
    if said.refusal:
        return OperationOutcome.SKIPPED, said.refusal
    if said.gone:
        return (OperationOutcome.DONE, f"SIG{how.upper()} sent: it has ended" if said.sent else "it had ended before")
    if said.released:
        return OperationOutcome.SKIPPED, "nothing was sent: it holds no GPU any more"
    if not said.sent:
        return OperationOutcome.SKIPPED, "nothing was sent: it could not be looked at"
    where = f"state {said.state or '?'}" + (f" in {said.wchan}" if said.wchan else "")
    return OperationOutcome.DONE, f"SIG{how.upper()} sent: it is still there, {where}"


def _end(process: GpuProcess, how: str, deadline_s: float) -> EndProcess:
    return picked(EndProcess, process, id=uuid.uuid4().hex, how=how, expires_s=deadline_s)
