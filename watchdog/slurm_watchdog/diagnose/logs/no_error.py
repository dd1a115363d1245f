"""A run whose log has no error that ended it: whether it hangs, trains on a loss that is no number, or became worse.
Pure."""

from __future__ import annotations

from slurm_watchdog.base.text import duration
from slurm_watchdog.diagnose.logs.behind import stops_first
from slurm_watchdog.diagnose.logs.case import LogCase, LogVerdict, Source, sentence

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
    return _of_waiting(case) or _of_loss(case) or _of_spike(case) or _of_speed(case)


def _of_waiting(case: LogCase) -> LogVerdict | None:
    """Every file that logs anything ends with signs of life alone, or with less."""
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


def _of_spike(case: LogCase) -> LogVerdict | None:
    for number, source in enumerate(case.sources):
        jump = source.loss_jump
        if jump is not None and jump.steps_since <= SPIKE_IS_NEWS:
            return LogVerdict("loss_spike", jump.line, number, sentence(spike_words(source)))
    return None


def _of_speed(case: LogCase) -> LogVerdict | None:
    for number, source in enumerate(case.sources):
        if source.slower is not None and source.slower.sure:
            return LogVerdict("slow_job", source.slower.line, number, sentence(slower_words(source)))
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
