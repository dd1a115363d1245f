"""The rank whose own log stops a step before those of all others, where every rank has one. Pure.

In a job that trains in step nobody can make more than the next step without the one that hangs, and who hangs between
a step and the line about it has one line less than all others. Only logs that are written line by line tell so: what
`print` writes into a file comes in blocks, whose ends depend on every line before. A log that ends many steps before
the others was cut off, or lost its end: the others could not have made these steps without that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.case import Source, rank_words
from slurm_watchdog.diagnose.logs.progress import AVERAGED, BARS, main_facts

LEAST_FILES = 4  # One against three: two that differ show nothing.
ALIKE = 5  # So many last steps of the one behind have to be logged by all others as well.
FEW_LINES = 2  # More lines of steps than these the others cannot have made without it.
_BY_A_LOGGER = late_regex(r"\b(?:DEBUG|INFO|NOTICE)\b|\[NeMo I|^\W?I\d{4} ")
"""A level: such lines are flushed one by one."""


class Behind(Struct, frozen=True):
    """Whose log stops first."""

    rank: int | None
    host: str | None
    reason: str


def stops_first(sources: Sequence[Source], world: int | None) -> Behind | None:
    """Whose log has the last step before that of all others, by one line or two; None if nobody's has, or if it cannot
    be told."""
    steps = {}
    for source in (each for each in sources if each.part_of is None):
        who = (source.rank, source.host if source.rank is None else None)
        found = _last_steps(source)
        if who == (None, None) or (found and who in steps):
            return None
        if found:
            steps[who] = found
    ranks = sorted(rank for rank, _ in steps if rank is not None)
    whole = ranks == list(range(len(steps))) and world in (None, len(ranks))
    if len(steps) < LEAST_FILES or not (whole or not ranks):
        return None
    first = min(steps, key=lambda who: steps[who][-1])
    mine, others = steps[first], [found for who, found in steps.items() if who != first]
    more = [[step for step in found if step > mine[-1]] for found in others]
    alike = all(
        found[: len(found) - len(beyond)][-ALIKE:] == mine[-ALIKE:] for found, beyond in zip(others, more, strict=True)
    )
    rank, host = first
    if all(found[0] > mine[-1] and found[-1] == others[0][-1] for found in others):
        return Behind(
            None,
            None,
            f"the log of {rank_words(rank, host)} ends at step {mine[-1]}, long before all others': its "
            "end may be missing as well, so no rank is identified",
        )
    if len(mine) < ALIKE or not alike or not 1 <= min(map(len, more)) <= max(map(len, more)) <= FEW_LINES:
        return None
    there = f"step {others[0][-1]}" if len({found[-1] for found in others}) == 1 else "a later one"
    return Behind(
        rank, host, f"{rank_words(rank, host)} is suspect: its log stops at step {mine[-1]}, all others' at {there}"
    )


def _last_steps(source: Source) -> list[int]:
    """The last steps of its last run, as a logger wrote them; none where anything else wrote the last of them."""
    facts = main_facts(source.digest)[-ALIKE - FEW_LINES - 1 :]
    if not facts or facts[-1].fact.pattern in BARS | AVERAGED or not _BY_A_LOGGER.search(facts[-1].text[:160]):
        return []
    steps = [fact.fact.step for fact in facts if fact.fact.step is not None]
    return [] if any(one >= other for one, other in pairwise(steps)) else steps
