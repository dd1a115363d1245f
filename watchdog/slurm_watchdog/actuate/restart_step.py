"""An order to a job's supervisor: written on the batch host as the job's owner, answered in the supervisor's status."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slurm_watchdog.actuate.kill_switch import Ask
from slurm_watchdog.base import clock
from slurm_watchdog.model.actions import Decision, OperationOutcome, Outcome, answer_shown
from slurm_watchdog.model.kill_switch import compose_line
from slurm_watchdog.model.protocol import RemoveKillSwitch, WriteKillSwitch
from slurm_watchdog.model.supervisor import (
    FRESH_S,
    GRACE_S,
    HUNG_GRACE_S,
    ORDER_LIFETIME_S,
    ORDER_PREFIX,
    WRITE_EVERY_S,
    RestartOrder,
    Sighting,
    order_fields,
    run_directory,
)

POLL_S = 0.5
SURELY_LATER_S = 2.0
"""A supervisor looks for orders twice a second, and writes that it takes one before it does anything: a status that was
written so long after the order was removed, and does not name it, is that of one that will never carry it out."""
SEEN_WITHIN_S = 3 * WRITE_EVERY_S
"""For such a status to come by way of its agent."""

Seen = Callable[[], Sighting | None]
"""The last word of the supervisor, on the clock `now`; None: none is known."""


@dataclass(frozen=True)
class Time:
    """The clock that an order waits by."""

    now: Callable[[], float] = clock.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def write_order(ask: Ask, decision: Decision, batch_host: str, deadline_s: float, seen: Seen) -> Outcome:
    """Done when the supervisor can read the order, or has read it. To write the same one again does no harm."""
    if _shown(decision, seen) is not None:
        return OperationOutcome.DONE, "the supervisor has read the order"
    try:
        write, _ = _commands(decision, deadline_s)
    except ValueError as error:
        return OperationOutcome.FAILED, str(error)
    result = await ask(batch_host, write, deadline_s)
    if not result.ok:
        return OperationOutcome.UNKNOWN, f"the order was not written on {batch_host}: {result.error}"
    return OperationOutcome.DONE, f"written on {batch_host}"


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
    _, remove = _commands(decision, deadline_s)
    result = await ask(batch_host, remove, deadline_s)
    if not result.ok:
        return OperationOutcome.UNKNOWN, f"the order was not removed again on {batch_host}: {result.error}"
    removed_at = time.now()

    def final() -> Outcome | None:
        known = seen()
        if known is None:
            return None
        taken = _is_taken(decision, known)
        # One that was stopped, or killed, does not write; the order that it has not taken by now it would refuse.
        lapsed = not taken and known.read_at >= refused_from + SURELY_LATER_S
        died = _died_over(decision, known) and known.read_at >= removed_at
        if known.written_at < removed_at + SURELY_LATER_S and not (lapsed or died):
            return None
        did = "took the order, and did not come to its end" if taken else "did not take the order"
        why = f"the supervisor {did} within {limit_s:.0f} s"
        if died:
            why = "the supervisor took the order, and died, or was stopped, before it started the command again"
        return answer_shown(decision, known.status) or (OperationOutcome.FAILED, why)

    answer = await _until(final, SURELY_LATER_S + SEEN_WITHIN_S, time)
    return answer or (OperationOutcome.UNKNOWN, f"nothing is heard of the supervisor on {batch_host}")


def _commands(decision: Decision, deadline_s: float) -> tuple[WriteKillSwitch, RemoveKillSwitch]:
    """To write the order, and to take it back. Raises ValueError if no order can say it."""
    assert decision.fence is not None
    order = order_fields(
        RestartOrder(
            decision=decision.id,
            step_id=decision.step_id,
            start=decision.start,
            avoid=decision.avoid,
            resume_from=decision.resume_from,
            grace_s=HUNG_GRACE_S if decision.loop_turns is False else GRACE_S,
        )
    )
    job_id, restarts = decision.process_job_id or decision.fence.job_id, decision.fence.restarts
    path, uid = f"{run_directory(job_id, restarts)}/{ORDER_PREFIX}{decision.id}", decision.uid
    fields = {"by": "slurm-watchdog", "why": decision.by, "incident": decision.incident_id, "decision": decision.id}
    write = WriteKillSwitch(
        id=uuid.uuid4().hex, job_id=job_id, restarts=restarts, path=path, uid=-1 if uid is None else uid,
        content=compose_line(fields | order), expires_s=deadline_s,
    )  # fmt: skip
    remove = RemoveKillSwitch(id=uuid.uuid4().hex, job_id=job_id, path=path, uid=write.uid, content=write.content)
    return write, remove


def _shown(decision: Decision, seen: Seen) -> Outcome | None:
    known = seen()
    return answer_shown(decision, None if known is None else known.status)


def _is_taken(decision: Decision, known: Sighting | None) -> bool:
    return known is not None and known.status.order == decision.id


def _died_over(decision: Decision, known: Sighting | None) -> bool:
    """Whether it took the order, and is dead or stopped since: its file is read, and not written. It writes that it
    starts the command before it does so: where that is not written, no step of this order runs."""
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
