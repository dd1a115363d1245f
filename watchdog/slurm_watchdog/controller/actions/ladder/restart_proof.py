"""Whether a restarted run really trains again, and how many steps the restart cost. Pure.

A line that merely appears proves nothing: a bar begins at `0/90`, a trainer prints the step of the checkpoint
that it has loaded, and a run that hangs again has written both.
"""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration
from slurm_watchdog.model.cluster_view import JobView

PROOF = 2  # Steps above the one that was loaded that have to be seen.


UNSEEN = 3  # Lines of a new run that may be missed: until Slurm lists it, what its log says counts for the run before.


class StepsLost(Struct):
    """Steps that were made and have to be made again: what the logs prove, and what they leave open."""

    at_least: int
    at_most: int

    @property
    def words(self) -> str:
        """`9 steps lost`, `1 step lost`, `8 to 17 steps lost`."""
        if self.at_least == self.at_most:
            return f"{self.at_least} step{'' if self.at_least == 1 else 's'} lost"
        return f"{self.at_least} to {self.at_most} steps lost"


def work_words(lost: StepsLost, step_s: float) -> str:
    """The time that these steps took at `step_s` seconds a step, the median of the run that was ended: `3 s`,
    `4 s to 12 min`. An estimate."""
    low, high = (_time(steps * step_s) for steps in (lost.at_least, lost.at_most))
    return high if low == high else f"{low} to {high}"


def _time(seconds: float) -> str:
    if 0 < seconds < 1:
        return "1 s"
    return duration(seconds)


def first_step_if_proven(view: JobView | None, loaded_step: int | None) -> int | None:
    """The first step that a new run made, once two steps above `loaded_step` were seen; 0 where it counts no
    steps but something else that rose twice; None as long as it is not proven to train."""
    progress = view.progress if view is not None else None
    if progress is None:
        return None
    if not progress.step_known:
        return 0 if progress.rises >= PROOF else None
    first = progress.first_step
    if first is None or (loaded_step is not None and progress.step <= loaded_step):
        return None
    above = 1 if loaded_step is not None and first > loaded_step else 0
    return first if progress.rises + above >= PROOF else None


def steps_lost(
    last_step: int,
    stride: int,
    first_step: int,
    next_stride: int,
    loaded_step: int | None,
    *,
    by_epochs: bool = False,
    unseen: int = UNSEEN,
) -> StepsLost:
    """What a restart cost. The old run logged `last_step` last, a line every `stride` steps, the new one
    `first_step` first, a line every `next_stride`; `loaded_step` is the newest complete checkpoint that is
    known. It continues from there if its first line fits, else from somewhere before that line, or from the
    checkpoint if a few lines before it may have been missed; without a known checkpoint these lines make a
    range. `by_epochs`: it counts by epochs, and may have
    begun one of them again in its log alone (ignite, fastai), so that nothing is known to be lost unless that
    checkpoint fits. `unseen`: lines before its first one that may have been missed."""
    pace = max(1, stride, next_stride)  # the new run has written too few lines to show it
    earliest, latest = max(0, first_step - pace), max(0, first_step - 1)
    confirmed = loaded_step is not None and earliest <= loaded_step <= latest
    if loaded_step is not None and confirmed:
        earliest = latest = loaded_step
    elif loaded_step is None:
        earliest = max(0, earliest - unseen * pace)
    elif 0 < earliest - loaded_step <= unseen * pace:
        earliest = loaded_step
    # Between two lines one step more where it counts from 0: the line of step 50 is then written after 51.
    made_at_most = last_step + (pace if pace > 1 else 0)
    at_least = 0 if by_epochs and not confirmed else max(0, last_step - latest)
    return StepsLost(at_least=at_least, at_most=max(at_least, made_at_most - earliest))
