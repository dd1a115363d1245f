"""What was found in a log, as events on their way to the agent: plain dictionaries, few enough for a report."""

from __future__ import annotations

from math import isfinite
from typing import Any

from slurm_watchdog.diagnose.logs.timestamps import stamp_of
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.fact import LogFact
from slurm_watchdog.parse.training_log.text import kept_line

MAX_EVENTS = 50
"""Of each kind, a file and a report."""

Item = dict[str, Any]
"""One event: the fields of model.Event without job and source."""


def event_item(line: str, fact: LogFact, age_s: float) -> Item:
    """`line`, which was written `age_s` ago, and what it says. A loss that is no number is said apart: JSON
    has no word for it."""
    loss = fact.loss if fact.loss is None or isfinite(fact.loss) else None
    return {
        "kind": fact.kind.value, "age_s": age_s, "line": kept_line(line), "step": fact.step, "count": fact.count,
        "total_steps": fact.total_steps, "step_s": fact.step_s, "loss": loss, "loss_is_no_number": loss is not fact.loss, "phase": fact.phase,
        "pattern": fact.pattern, "rank": fact.rank, "initial": fact.initial,
        "written_s": _written_s(line) if fact.kind is EventKind.PROGRESS and fact.step_s is None else None,
    }  # fmt: skip


def _written_s(line: str) -> float | None:
    stamp = stamp_of(line.lstrip())
    return None if stamp is None else stamp.seconds


def condense(items: list[Item], limit: int = MAX_EVENTS) -> tuple[list[Item], int]:
    """At most `limit` events of each kind, in order, and how many were left out.

    Of progress the last and an even choice of the others stay. Of errors, phases and checkpoints the first of
    each pattern,
    for one cause may stand in the middle of another's consequences, and the last; then the first that each
    rank says of a
    pattern, for who is silent in a cascade is what matters; then the first ones.
    """
    if len(items) <= limit:
        return items, 0
    keep: set[int] = set()
    for kind in EventKind:
        at = [index for index, item in enumerate(items) if item["kind"] == kind]
        if len(at) > limit:
            if kind is EventKind.PROGRESS:
                at = [at[(place + 1) * len(at) // limit - 1] for place in range(limit)]
            else:
                firsts = {items[index]["pattern"]: index for index in reversed(at)}
                of_ranks = {
                    (items[index]["pattern"], items[index].get("rank")): index for index in reversed(at)
                }
                order = dict.fromkeys([*sorted(firsts.values()), at[-1], *sorted(of_ranks.values()), *at])
                at = list(order)[:limit]
        keep.update(at)
    kept = [item for index, item in enumerate(items) if index in keep]
    return kept, len(items) - len(kept)
