"""Our words in a job's `--comment`, and the limits of `run` that they may set. Pure.

#SBATCH --comment="watchdog: max_restarts=5,spares=1"
"""

from __future__ import annotations

import re

RUN_LIMITS = ("max_restarts", "spares")
"""Of `slurm-watchdog run`, as its options are named; no one else has a use for them."""
MOST = 1000
_BEGIN = re.compile(r"(?:^|[\s,;|])watchdog\s*[:=]\s*", re.IGNORECASE)
_END = re.compile(r"[;|\n\r]")  # Where the wish ends and something else that the comment holds begins.


def words_in(comment: str) -> str | None:
    """What stands after `watchdog:` or `watchdog=`, up to a semicolon, a bar or the end of the line; None: nothing."""
    begin = _BEGIN.search(comment)
    return None if begin is None else _END.split(comment[begin.end() :], maxsplit=1)[0]


def limit_of(key: str, value: str) -> int:
    """The number that `value` is. Raises ValueError, with a sentence, where it is none."""
    if not (value.isascii() and value.isdecimal() and int(value[:9]) <= MOST and len(value) <= 9):
        raise ValueError(f"{key}: {value[:40]!r} is not a number from 0 to {MOST}")
    return int(value)


def run_limits(comment: str) -> dict[str, int]:
    """Limits of `run` by name, those that the comment has. Raises ValueError, with a sentence, for one that is none."""
    found = {}
    for word in (words_in(comment) or "").split(","):
        key, _, value = word.strip().strip("\"'").partition("=")
        key = key.strip().lower().replace("-", "_")
        if key in RUN_LIMITS:
            found[key] = limit_of(key, value.strip())
    return found
