"""A child that does not answer: what it does instead, and whether that says something about its resource."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from slurm_watchdog.agent.workers.answer_types import ThreadFacts
from slurm_watchdog.agent.workers.child_state import APART_S, STARVED, Look, look_at, why_no_answer
from slurm_watchdog.agent.workers.worker import Answer, Worker, record_look

STARVED_LOOKS = 3  # In a row, before a hung child counts as one without CPU: with a second between them.
RESTED_S = 5.0  # A hung child is left so long after its deadline before it counts as one without CPU.
LOOK_AT_CHILDREN = "look:children"
"""The child that reads, for an agent without rights, the calls of the helper's children."""

CallThen = Callable[[Answer[list[ThreadFacts | None]]], None]
AskForCall = Callable[[int, CallThen, float], object]
"""Given a pid, what to do with the answer, and now: requests the call in which that process is."""


@dataclass(frozen=True)
class Silence:
    """Looks at children that are at work."""

    ask_for_call: AskForCall | None  # None: this agent sees the calls of all its children by itself.

    def look_at(self, worker: Worker, now: float) -> None:
        """One look at a child that has been at work for a while; what only the helper may see of it is asked for."""
        if not worker.born or worker.pid <= 0 or now - max(worker.looked_at, worker.asked_at) < APART_S:
            return
        worker.looked_at = now
        look = look_at(worker.pid, worker.start_ticks, now)
        seen = look.call or look.state not in ("D", "S")
        if seen or self.ask_for_call is None or worker.key == LOOK_AT_CHILDREN:
            record_look(worker, look)
        else:  # in a call that only the helper may see: a look without it would count as another call
            self.ask_for_call(worker.pid, partial(_apply_call, worker, worker.request, look), now)


def why_silent(worker: Worker, now: float) -> str | None:
    """Why a child that has passed its deadline says nothing about its resource; None where it may hang on it."""
    if not worker.born or worker.pid <= 0:
        return None
    why = why_no_answer(look_at(worker.pid, worker.start_ticks, now))
    seen_waiting = worker.last_look is not None and not worker.running
    return None if why == STARVED and seen_waiting else why


def why_given_up(worker: Worker, now: float) -> str | None:
    """Why a hung child, stopped meanwhile or computing again, is to be ended, so that the next question goes
    to a fresh one; else None."""
    look = worker.last_look
    if not worker.born or look is None or look.at != now or (why := why_no_answer(look)) is None:
        return None
    if why == STARVED and (now - worker.deadline < RESTED_S or worker.running < STARVED_LOOKS):
        return None  # it may be about to answer, or polls in a call that does not return
    return why


def _apply_call(worker: Worker, request: int | None, look: Look, answer: Answer[list[ThreadFacts | None]]) -> None:
    found = (answer.value or [None])[0]
    if found is not None and found.call is not None and worker.request == request:
        record_look(worker, replace(look, call=found.call.line))
