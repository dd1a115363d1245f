"""A run whose log has no error that ended it: whether it hangs, or trains on a loss that is no number. Pure."""

from __future__ import annotations

from slurm_watchdog.base.text import duration
from slurm_watchdog.diagnose.logs.behind import stops_first
from slurm_watchdog.diagnose.logs.case import LogCase, LogVerdict, sentence


def of_numbers(case: LogCase) -> LogVerdict | None:
    """Nothing failed: does it hang, or does it train on what is no number?"""
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
    return _of_loss(case)


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
