"""A run whose log has no error that ended it: it may hang, train on NaN, or have become worse. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.case import LogCase, LogVerdict, Source, rank_words, sentence
from slurm_watchdog.diagnose.logs.digest import Digest
from slurm_watchdog.diagnose.logs.progress import (
    AVERAGED,
    BARS,
    Note,
    main_facts,
    read_loss_jump,
    read_no_number,
    read_slower,
)
from slurm_watchdog.diagnose.logs.silence import read_waiting

# The rank whose own log stops a step before those of all others, where every rank has one. In a job that trains in step
# no one can make more than the next step without the one that hangs, and who hangs between a step and the line about it
# has one line less than all others. Only logs that are written line by line tell so: what `print` writes into a file
# comes in blocks. A log that ends many steps before the others was cut off, or lost its end.
LEAST_FILES = 4  # One against three: two that differ show nothing.
ALIKE = 5  # So many last steps of the one behind have to be logged by all others as well.
FEW_LINES = 2  # More lines of steps than these the others cannot have made without it.
_BY_A_LOGGER = late_regex(r"\b(?:DEBUG|INFO|NOTICE)\b|\[NeMo I|^\W?I\d{4} ")
"""A level: such lines are flushed one by one."""


def stops_first(sources: Sequence[Source], world: int | None) -> tuple[int | None, str | None, str] | None:
    """(rank, host, half a sentence) of whose log has its last step before that of all others, by one line or two; None:
    no one's, or not known."""
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
        words = f"the log of {rank_words(rank, host)} ends at step {mine[-1]}, long before all others': its end may be "
        return None, None, f"{words}missing as well, so no rank is identified"
    if len(mine) < ALIKE or not alike or not 1 <= min(map(len, more)) <= max(map(len, more)) <= FEW_LINES:
        return None
    there = f"step {others[0][-1]}" if len({found[-1] for found in others}) == 1 else "a later one"
    return rank, host, f"{rank_words(rank, host)} is suspect: its log stops at step {mine[-1]}, all others' at {there}"


def _last_steps(source: Source) -> list[int]:
    """The last steps of its last run, as a logger wrote them; none where anything else wrote the last of them."""
    facts = main_facts(source.digest)[-ALIKE - FEW_LINES - 1 :]
    if not facts or facts[-1].pattern in BARS | AVERAGED or not _BY_A_LOGGER.search(facts[-1].text[:160]):
        return []
    steps = [fact.step for fact in facts if fact.step is not None]
    return [] if any(one >= other for one, other in pairwise(steps)) else steps


STILL_TRAINS = frozenset({"loss_nan", "loss_spike", "slow_job"})  # Verdicts on a run that makes steps,
OF_NUMBERS = STILL_TRAINS | {"hang"}  # and those that no line of an error led to.


def of_numbers(case: LogCase) -> LogVerdict | None:
    """Nothing failed: does it hang, does it train on what is no number, or is it worse than it was?"""
    sources = case.sources
    if any(source.progress.finished for source in sources):
        return _first(case, "loss_nan", read_no_number)
    silent = [(number, source.silence) for number, source in enumerate(sources) if source.silence is not None]
    talking = [each for each in sources if each.progress.rises and each.silence is None and each.part_of is None]
    if silent and not talking:
        # Of several files the one with the progress knows best.
        number, silence = max(silent, key=lambda each: len(sources[each[0]].progress.rises))
        first = stops_first(sources, case.ranks.world)
        if first is None:
            return LogVerdict("hang", silence.line, number, sentence(silence.words))
        rank, host, reason = first
        return LogVerdict(
            "hang", silence.line, number, f"{sentence(silence.words)} {sentence(reason)}", host, rank,
            missing=() if rank is None else (rank,), suspected=reason,
        )  # fmt: skip
    waiting = [
        None if source.digest.pasted else read_waiting(source.digest, source.progress.last_step) for source in sources
    ]
    if not any(source.progress.rises and found is None for source, found in zip(sources, waiting, strict=True)):
        for number, found in enumerate(waiting):
            if found is not None:
                return LogVerdict("hang", found.line, number, sentence(found.words))
    return (
        _first(case, "loss_nan", read_no_number)
        or _first(case, "loss_spike", read_loss_jump)
        or _first(case, "slow_job", read_slower)
    )


def _first(case: LogCase, name: str, read: Callable[[Digest], Note | None]) -> LogVerdict | None:
    for number, source in enumerate(case.sources):
        note = read(source.digest)
        if note is not None and note.sure:
            return LogVerdict(name, note.line, number, sentence(note.words))
    return None


def notes_of(source: Source) -> list[str]:
    """What became worse in a run of which nothing is wrong: its loss jumped, its steps take longer."""
    return [note.words for read in (read_loss_jump, read_slower) if (note := read(source.digest)) is not None]
