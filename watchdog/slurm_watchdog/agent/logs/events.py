"""Events of logs: made from the facts of lines, and condensed to as many as a report has room for. Pure."""

from __future__ import annotations

from math import isfinite

from slurm_watchdog.base.structs import picked
from slurm_watchdog.diagnose.logs.timestamps import stamp_of
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.parse.training_log.fact import LogFact
from slurm_watchdog.parse.training_log.text import kept_line

MAX_EVENTS = 50  # Of each kind, a file and a report.


def make_event(line: str, fact: LogFact, age_s: float) -> Event:
    """`line`, which was written `age_s` ago, and what it says; without job and source, which the agent adds.

    A loss that is NaN or infinite has a field of its own: JSON has no word for it.
    """
    loss = fact.loss if fact.loss is None or isfinite(fact.loss) else None
    return picked(
        Event, fact, job_id="", source="", age_s=age_s, line=kept_line(line), loss=loss,
        loss_is_no_number=loss is not fact.loss,
        written_s=_written_s(line) if fact.kind is EventKind.PROGRESS and fact.step_s is None else None,
    )  # fmt: skip


def _written_s(line: str) -> float | None:
    stamp = stamp_of(line.lstrip())
    return None if stamp is None else stamp.seconds


def condense(events: list[Event], limit: int = MAX_EVENTS) -> tuple[list[Event], int]:
    """At most `limit` events of each kind, in order, and how many were left out.

    Of progress the last and an even choice of the others stay. Of errors, phases and checkpoints the first of
    each pattern, for one cause may stand in the middle of another's consequences, and the last; then the
    first that each rank says of a pattern, for who is silent in a cascade is what matters; then the first
    ones.
    """
    if len(events) <= limit:
        return events, 0
    keep: set[int] = set()
    for kind in EventKind:
        at = [index for index, event in enumerate(events) if event.kind is kind]
        if len(at) > limit:
            if kind is EventKind.PROGRESS:
                at = [at[(place + 1) * len(at) // limit - 1] for place in range(limit)]
            else:
                firsts = {events[index].pattern: index for index in reversed(at)}
                of_ranks = {(events[index].pattern, events[index].rank): index for index in reversed(at)}
                order = dict.fromkeys([*sorted(firsts.values()), at[-1], *sorted(of_ranks.values()), *at])
                at = list(order)[:limit]
        keep.update(at)
    return [event for index, event in enumerate(events) if index in keep], len(events) - len(keep)
