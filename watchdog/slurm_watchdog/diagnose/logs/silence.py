"""How long a log was silent before its end, by the rhythm that it had. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.text import duration
from slurm_watchdog.diagnose.logs.digest import Digest
from slurm_watchdog.diagnose.logs.line import Line
from slurm_watchdog.diagnose.logs.progress import BUSY_SHAPES, RECENT, Note, Progress, main_facts, steps_between
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.timestamps import on_scale_of
from slurm_watchdog.parse.training_log.line_scan import letters

if TYPE_CHECKING:
    from slurm_watchdog.analysis.progress_limit import Limit

# A run that logs nothing but signs of life until its time limit ends it: it hangs, whatever ended it.
REPEATS = 10
LONGER = 3  # Times the longest stretch of such lines that came before a step.
_ALIVE = late_regex(
    r"\bheart-?beat|\bkeep-?alive|\bPULSE\b|\balive\b|\bno (?:output|progress|activity)\b"
    r"|\bstill (?:waiting|blocked|stuck|inside|in|running|initiali[sz]ing|connecting|trying)\b"
    r"|\bwaiting (?:for|on|to)\b|\bwaited \d|\bblocked (?:in|on|for)\b|\bno response (?:from|for)\b"
    r"|\bnot (?:yet )?(?:ready|responding|connected|joined)\b|\b(?:will retry|retrying|trying again|reconnecting)\b",
    re.IGNORECASE,
)
_LIMIT = late_regex(
    r"DUE TO TIME LIMIT|\bTIME ?OUT\b.*\bjob\b|\bPBS: job killed: walltime|TERM_RUNLIMIT", re.IGNORECASE
)
_OF_NCCL = late_regex(r"\[\d+\] (?:NCCL|RCCL) (?:INFO|WARN|TRACE)\b|\bncclCommInitRank")
_INIT_DONE = late_regex(r"\bInit COMPLETE\b")
_ELAPSED = late_regex(r"(?<![\d.:])(\d{1,7}(?:\.\d+)?) ?(s|sec|seconds|min|minutes|h|hours)\b")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LONG_S = 3600.0  # By the lines' own count of the time that passed: as long as a start may take.


def read_waiting(digest: Digest, step: int | None) -> Note | None:
    """The signs of life that the log ends with before its time limit; None if it ends otherwise, or tells more. `step`:
    the last one."""
    ended = digest.ended_line
    if ended is None:
        return None
    end = next((line for line in digest.lines if line.number == ended), None)
    body = [line for line in digest.lines if line.number < ended and line.text.strip()]
    by_limit = end is not None and _LIMIT.search(end.raw) is not None
    waiting = _signs_of_life(digest, body)
    what = waiting[-1].text.strip()[:80] if waiting else "NCCL makes its communicators"
    if not (by_limit or _counted_s(waiting) >= LONG_S):
        return None
    waiting = waiting or _unfinished_init(digest, body)
    if not waiting:
        return None
    after = f"after step {step}" if step is not None else "at start, before a first step"
    began = waiting[0].number
    words = f"hang {after}: from line {began} to its end from outside (line {ended}) only signs of life were logged"
    return Note(began, f"{words}, {len(waiting)} times ({what})")


def _counted_s(waiting: list[Line]) -> float:
    """The time between the first and the last sign of life, where each says how much has passed; 0 if they do not."""
    said = [match for line in waiting if (match := _ELAPSED.search(line.text)) is not None]
    times = [float(match[1]) * _UNITS[match[2][0]] for match in said]
    return times[-1] - times[0] if times and len(times) == len(waiting) and times == sorted(times) else 0.0


def _signs_of_life(digest: Digest, body: list[Line]) -> list[Line]:
    """The lines at the end that say nothing else, where they are more than ever before a step."""
    steps = {fact.line for fact in digest.facts if fact.kind is EventKind.PROGRESS}
    longest = current = 0
    for line in body:
        if line.number in steps:
            longest, current = max(longest, current), 0
        elif _ALIVE.search(line.text):
            current += 1
    tail = list(takewhile(lambda line: line.number not in steps and _ALIVE.search(line.text), reversed(body)))
    return tail[::-1] if len(tail) >= max(REPEATS, LONGER * longest) else []


def _unfinished_init(digest: Digest, body: list[Line]) -> list[Line]:
    """NCCL's lines of ranks that make communicators, of which none was complete, and nothing else since."""
    begun = [line for line in body if _OF_NCCL.search(line.raw)]
    if digest.facts or len(begun) < 2 or any(_INIT_DONE.search(line.raw) for line in body):
        return []
    others = any(line.number > begun[0].number and not _OF_NCCL.search(line.raw) for line in body)
    return [] if others else begun


COMPARED = 20
CLOCKS_APART_S = 60.0
"""Two files that log the same steps so close in time have the same clock; zones differ by 15 min and more."""


def read_silence(
    digest: Digest, progress: Progress, seen_at: float | None, written_at: float | None, limits: PhaseLimits
) -> Note | None:
    """A run that says nothing of progress any more, for longer than is normal; None if it cannot be told.

    `seen_at`: when the log was looked at, on its own clock; None: its last line's time counts. `written_at`: the file's
    modification time, which stands for a log whose lines have no times, and only together with `seen_at`.
    """
    if progress.finished:
        return None
    rises = {line for line, _ in progress.rises}
    active = [f for f in digest.facts if f.line in rises or f.kind in (EventKind.PHASE, EventKind.CHECKPOINT)]
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
    phase = last.phase if last is not None and last.kind is EventKind.PHASE else None
    limit = _limit(digest, progress, phase, limits)
    silent_s = end - since
    if silent_s <= limit.seconds:
        return None
    after = f"after step {progress.last_step}" if progress.last_step is not None else "before its first step was logged"
    said = f" (the log says {phase})" if phase else ""
    line = progress.last_line or line
    words = f"hang: no progress for {duration(silent_s)} {after}{said}, line {line}; "
    return Note(line, f"{words}{duration(limit.seconds)} would be normal ({limit.reason})")


def _limit(digest: Digest, progress: Progress, phase: str | None, limits: PhaseLimits) -> Limit:
    from slurm_watchdog.analysis.progress_limit import learnt_limit  # a third of a start, and few logs need it

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
    before = {letters(each.text) for each in digest.lines if each.number <= line}
    new = {letters(each.text) for each in digest.lines if each.number > line} - before
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
    if digest.clock not in ("zoned", "local"):
        return {}
    facts = main_facts(digest)[-COMPARED:]
    return {fact.step: fact.at for fact in facts if fact.step is not None and fact.at is not None}
