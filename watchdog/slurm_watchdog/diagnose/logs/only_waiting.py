"""A run that logs nothing but signs of life until its time limit ends it: it hangs, whoever ended it. Pure."""

from __future__ import annotations

import re

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.digest import Digest
from slurm_watchdog.diagnose.logs.line import Line
from slurm_watchdog.model.observations import EventKind

REPEATS = 10
LONGER = 3
"""Times the longest stretch of such lines that came before a step."""
_ALIVE = re.compile(
    r"\bheart-?beat|\bkeep-?alive|\bPULSE\b|\balive\b|\bno (?:output|progress|activity)\b"
    r"|\bstill (?:waiting|blocked|stuck|inside|in|running|initiali[sz]ing|connecting|trying)\b"
    r"|\bwaiting (?:for|on|to)\b|\bwaited \d|\bblocked (?:in|on|for)\b|\bno response (?:from|for)\b"
    r"|\bnot (?:yet )?(?:ready|responding|connected|joined)\b|\b(?:retrying|trying again|reconnecting)\b",
    re.IGNORECASE,
)
_LIMIT = re.compile(
    r"DUE TO TIME LIMIT|\bTIME ?OUT\b.*\bjob\b|\bPBS: job killed: walltime|TERM_RUNLIMIT", re.IGNORECASE
)
_INIT_BEGUN = re.compile(r"\bncclCommInitRank\w* comm \S+ rank \d+ .* - Init START\b")
_INIT_DONE = re.compile(r"\bncclCommInitRank\w* comm \S+ rank \d+ .* - Init COMPLETE\b")


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
    if end is None or not _LIMIT.search(end.raw):
        return None
    body = [line for line in digest.lines if line.number < ended and line.text.strip()]
    return _signs_of_life(digest, body, ended) or _unfinished_init(digest, body, ended)


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
    """NCCL's ranks that began to make a communicator, of which none has one, and nothing else was logged since."""
    begun = [line for line in body if _INIT_BEGUN.search(line.raw)]
    if digest.facts or not begun or any(_INIT_DONE.search(line.raw) for line in body):
        return None
    if any(line.number > begun[-1].number and "NCCL" not in line.raw for line in body):
        return None
    return Waiting(begun[-1].number, len(begun), ended, "ncclCommInitRank: Init START")
