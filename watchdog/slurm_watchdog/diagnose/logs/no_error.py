"""A run whose log has no error that ended it: it may hang, train on NaN, or have become worse. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration
from slurm_watchdog.diagnose.logs.case import LogCase, LogVerdict, Source, rank_words, sentence
from slurm_watchdog.diagnose.logs.progress import AVERAGED, BARS, main_facts

# The rank whose own log stops a step before those of all others, where every rank has one. In a job that trains in step
# no one can make more than the next step without the one that hangs, and who hangs between a step and the line about it
# has one line less than all others. Only logs that are written line by line tell so: what `print` writes into a file
# comes in blocks. A log that ends many steps before the others was cut off, or lost its end.
LEAST_FILES = 4  # One against three: two that differ show nothing.
ALIKE = 5  # So many last steps of the one behind have to be logged by all others as well.
FEW_LINES = 2  # More lines of steps than these the others cannot have made without it.
_BY_A_LOGGER = late_regex(r"\b(?:DEBUG|INFO|NOTICE)\b|\[NeMo I|^\W?I\d{4} ")
"""A level: such lines are flushed one by one."""


class Behind(Struct, kw_only=False):
    """Whose log stops first."""

    rank: int | None
    host: str | None
    reason: str


def stops_first(sources: Sequence[Source], world: int | None) -> Behind | None:
    """Whose log has its last step before that of all others, by one line or two; None: no one's, or not known."""
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
    if not facts or facts[-1].pattern in BARS | AVERAGED or not _BY_A_LOGGER.search(facts[-1].text[:160]):
        return []
    steps = [fact.step for fact in facts if fact.step is not None]
    return [] if any(one >= other for one, other in pairwise(steps)) else steps


STILL_TRAINS = frozenset({"loss_nan", "loss_spike", "slow_job"})  # Verdicts on a run that makes steps,
OF_NUMBERS = STILL_TRAINS | {"hang"}  # and those that no line of an error led to.
SPIKE_IS_NEWS = 100
"""Steps since the loss is as before: three times what most spikes take. A run that came so far has left it behind."""


def of_numbers(case: LogCase) -> LogVerdict | None:
    """Nothing failed: does it hang, does it train on what is no number, or is it worse than it was?"""
    sources = case.sources
    if any(source.progress.finished for source in sources):
        return _of_loss(case)
    silent = [(number, source.silence) for number, source in enumerate(sources) if source.silence is not None]
    talking = [each for each in sources if each.progress.rises and each.silence is None and each.part_of is None]
    if silent and not talking:
        # Of several files the one with the progress knows best.
        number, silence = max(silent, key=lambda each: len(sources[each[0]].progress.rises))
        assert silence is not None
        step = sources[number].progress.last_step
        after = f"after step {step}" if step is not None else "before its first step was logged"
        phase = f" (the log says {silence.phase})" if silence.phase else ""
        summary = (
            f"hang: no progress for {duration(silence.silent_s)} {after}{phase}, line {silence.line}; "
            f"{duration(silence.limit_s)} would be normal ({silence.reason})"
        )
        first = stops_first(sources, case.ranks.world)
        if first is None:
            return LogVerdict("hang", silence.line, number, sentence(summary))
        return LogVerdict(
            "hang", silence.line, number, f"{sentence(summary)} {sentence(first.reason)}", first.host, first.rank,
            missing=() if first.rank is None else (first.rank,), suspected=first.reason,
        )  # fmt: skip
    return _of_waiting(case) or _of_loss(case) or _of_words(case, "loss_spike") or _of_words(case, "slow_job")


def _of_waiting(case: LogCase) -> LogVerdict | None:
    waiting = [(number, source) for number, source in enumerate(case.sources) if source.waiting is not None]
    if not waiting or any(source.progress.rises and source.waiting is None for source in case.sources):
        return None
    number, source = waiting[0]
    found, step = source.waiting, source.progress.last_step
    assert found is not None
    after = f"after step {step}" if step is not None else "at start, before a first step"
    return LogVerdict(
        "hang", found.line, number,
        sentence(
            f"hang {after}: from line {found.line} to its end from outside (line {found.ended_line}) "
            f"only signs of life were logged, {found.times} times ({found.words})"
        ),
    )  # fmt: skip


def _of_loss(case: LogCase) -> LogVerdict | None:
    for number, source in enumerate(case.sources):
        bad = source.no_number
        if bad is not None:
            step = f"step {bad.step}" if bad.step is not None else f"line {bad.line}"
            summary = (
                f"the loss has been NaN or infinite since {step} (line {bad.line}), {bad.times} "
                "times in a row up to the end"
            )
            return LogVerdict("loss_nan", bad.line, number, sentence(summary))
    return None


def _of_words(case: LogCase, name: str) -> LogVerdict | None:
    """A loss that jumped and came back just now or never, or steps that surely take longer."""
    for number, source in enumerate(case.sources):
        jump, slower = source.loss_jump, source.slower
        if name == "loss_spike" and jump is not None and jump.steps_since <= SPIKE_IS_NEWS:
            return LogVerdict(name, jump.line, number, sentence(spike_words(source)))
        if name == "slow_job" and slower is not None and slower.sure:
            return LogVerdict(name, slower.line, number, sentence(slower_words(source)))
    return None


def spike_words(source: Source) -> str:
    """That the loss jumped; empty if it did not."""
    jump = source.loss_jump
    if jump is None:
        return ""
    at = f"step {jump.peak_step}" if jump.peak_step is not None else f"line {jump.line}"
    back = f"step {jump.back_step}" if jump.back_step is not None else "the end"
    after = "it is still high at the end" if jump.lasts else f"it was back by {back}"
    return f"the loss jumped from {jump.usual:.3g} to {jump.peak:.3g} at {at} (line {jump.line}); {after}"


def slower_words(source: Source) -> str:
    """That steps take longer than before; empty if they do not."""
    change = source.slower
    if change is None:
        return ""
    since = f"step {change.step}" if change.step is not None else f"line {change.line}"
    steps, noise = ("steps take", "") if change.sure else ("steps may take", "; its other steps vary as much")
    return (
        f"{steps} {change.percent:.1f} % longer since {since} (line {change.line}): "
        f"{change.after_s:.4g} s, {change.before_s:.4g} s before{noise}"
    )
