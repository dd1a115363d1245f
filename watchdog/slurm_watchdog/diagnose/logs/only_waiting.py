"""A run that logs nothing but signs of life until its time limit ends it: it hangs, whoever ended it. Pure."""

from __future__ import annotations

import re

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.digest import Digest
from slurm_watchdog.diagnose.logs.line import Line
from slurm_watchdog.model.observations import EventKind

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


class Waiting(Struct, frozen=True):
    """From which line on nothing else was logged, and how many such lines; `words`: what they say."""

    line: int
    times: int
    ended_line: int
    words: str


def read_waiting(digest: Digest) -> Waiting | None:
    """The signs of life that the log ends with before its time limit; None if it ends otherwise, or tells more."""
    ended = digest.ended_line
    if ended is None:
        return None
    end = next((line for line in digest.lines if line.number == ended), None)
    body = [line for line in digest.lines if line.number < ended and line.text.strip()]
    by_limit = end is not None and _LIMIT.search(end.raw) is not None
    waiting = _signs_of_life(digest, body, ended)
    if waiting is not None and (by_limit or _counted_s(waiting, body) >= LONG_S):
        return waiting
    return _unfinished_init(digest, body, ended) if by_limit else None


def _counted_s(waiting: Waiting, body: list[Line]) -> float:
    """The time between the first and the last sign of life, where each says how much has passed; 0 if they do not."""
    said = [_ELAPSED.search(line.text) for line in body if line.number >= waiting.line]
    times = [float(match[1]) * _UNITS[match[2][0]] for match in said if match is not None]
    return times[-1] - times[0] if len(times) == len(said) and times == sorted(times) else 0.0


def _signs_of_life(digest: Digest, body: list[Line], ended: int) -> Waiting | None:
    steps = {fact.line for fact in digest.facts if fact.fact.kind is EventKind.PROGRESS}
    longest = current = 0
    for line in body:
        if line.number in steps:
            longest, current = max(longest, current), 0
        elif _ALIVE.search(line.text):
            current += 1
    tail: list[Line] = []
    for line in reversed(body):
        if line.number in steps or not _ALIVE.search(line.text):
            break
        tail.append(line)
    if len(tail) < max(REPEATS, LONGER * longest):
        return None
    return Waiting(tail[-1].number, len(tail), ended, tail[0].text.strip()[:80])


def _unfinished_init(digest: Digest, body: list[Line], ended: int) -> Waiting | None:
    """NCCL's lines of ranks that make communicators, of which none was complete, and nothing else since."""
    begun = [line for line in body if _OF_NCCL.search(line.raw)]
    if digest.facts or len(begun) < 2 or any(_INIT_DONE.search(line.raw) for line in body):
        return None
    if any(line.number > begun[0].number and not _OF_NCCL.search(line.raw) for line in body):
        return None
    return Waiting(begun[0].number, len(begun), ended, "NCCL makes its communicators")
