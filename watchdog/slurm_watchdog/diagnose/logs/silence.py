"""How long a log was silent before its end, by the rhythm that it had. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from slurm_watchdog.analysis.learned_limit import Limit, learnt_limit
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.digest import Digest, shape
from slurm_watchdog.diagnose.logs.progress import BUSY_SHAPES, RECENT, Progress, main_facts, steps_between
from slurm_watchdog.diagnose.logs.timestamps import on_scale_of
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.model.observations import EventKind

COMPARED = 20
CLOCKS_APART_S = 60.0
"""Two files that log the same steps so close in time have the same clock; zones differ by 15 min and more."""


class Silence(Struct, frozen=True, kw_only=True):
    silent_s: float
    limit_s: float
    reason: str
    line: int
    phase: str | None


def read_silence(
    digest: Digest, progress: Progress, seen_at: float | None, written_at: float | None, limits: PhaseLimits
) -> Silence | None:
    """A run that says nothing of progress any more, for longer than is normal; None if it cannot be told.

    `seen_at`: when the log was looked at, on its own clock; None: its last line's time counts. `written_at`: the file's
    modification time, which stands for a log whose lines have no times, and only together with `seen_at`.
    """
    if progress.finished:
        return None
    rises = {line for line, _ in progress.rises}
    active = [f for f in digest.facts if f.line in rises or f.fact.kind in (EventKind.PHASE, EventKind.CHECKPOINT)]
    last = max(active, key=lambda fact: fact.line) if active else None
    line = last.line if last is not None else 1
    ends = digest.ends(line)
    end = seen_at if seen_at is not None else ends
    since = last.at if last is not None else digest.begins
    if since is None and seen_at is not None and written_at is not None:
        since = written_at
    if since is None or end is None:
        return None
    end = max(end if seen_at is None else on_scale_of(end, digest.clock, ends), ends or since)
    if _says_much_new(digest, line):
        return None
    phase = last.fact.phase if last is not None and last.fact.kind is EventKind.PHASE else None
    limit = _limit(digest, progress, phase, limits)
    silent_s = end - since
    if silent_s <= limit.seconds:
        return None
    return Silence(
        silent_s=silent_s,
        limit_s=limit.seconds,
        reason=limit.reason,
        line=progress.last_line or line,
        phase=phase,
    )


def _limit(digest: Digest, progress: Progress, phase: str | None, limits: PhaseLimits) -> Limit:
    times = [at for _, at in progress.rises if at is not None]
    intervals = [b - a for a, b in pairwise(times) if b > a][-RECENT:]
    if not intervals and progress.step_seconds_median:
        intervals = [_interval_by_steps(digest, progress)]
    return learnt_limit(len(progress.rises), intervals, phase, limits)


def _interval_by_steps(digest: Digest, progress: Progress) -> float:
    """Seconds between two lines of progress where they have no times: steps between them x seconds of a step."""
    facts = main_facts(digest)
    return (progress.step_seconds_median or 0.0) * steps_between([(fact, 0.0) for fact in facts])


def _says_much_new(digest: Digest, line: int) -> bool:
    """Whether lines of many new sorts came after `line`: it does something, although we do not know what."""
    before = {shape(each.text) for each in digest.lines if each.number <= line}
    new = {shape(each.text) for each in digest.lines if each.number > line} - before
    return len(new) >= BUSY_SHAPES


def last_words(digests: Sequence[Digest]) -> list[float | None]:
    """Of each file when another one of the job was last written to; None if none logs the same steps at the same times,
    for another clock says nothing of this one."""
    if len(digests) < 2:
        return [None] * len(digests)
    steps = [_last_steps(digest) for digest in digests]
    latest = sorted(
        (place for place, found in enumerate(steps) if found and digests[place].stamped),
        key=lambda place: -digests[place].stamped[-1][1],
    )
    words: list[float | None] = []
    for place in range(len(digests)):
        others = (other for other in latest if other != place and digests[other].clock == digests[place].clock)
        alike = (other for other in others if _is_one_clock(steps[place], steps[other]))
        other = next(alike, None) if steps[place] else None
        words.append(None if other is None else digests[other].stamped[-1][1])
    return words


def _is_one_clock(mine: Mapping[int, float], others: Mapping[int, float]) -> bool:
    apart = [abs(at - mine[step]) for step, at in others.items() if step in mine]
    return bool(apart) and max(apart) <= CLOCKS_APART_S


def _last_steps(digest: Digest) -> dict[int, float]:
    """The last steps, each with its time; none where times are without a date."""
    if digest.clock not in ("zoned", "local"):
        return {}
    facts = main_facts(digest)[-COMPARED:]
    return {fact.fact.step: fact.at for fact in facts if fact.fact.step is not None and fact.at is not None}
