"""Near the end of a job's time nothing is started again: how near, and the words for it. Pure."""

from __future__ import annotations

from typing import Final

LAST_S: Final = 60.0
"""Before the end of the job's time nothing is started again."""
TOLD_S: Final = 600.0
"""A command that ends so long after SIGUSR1 or SIGUSR2 was passed to it has saved because of that, a checkpoint of many
GPUs included. A judgement."""


def late_words(left_s: float) -> str:
    """How near the end is, a part of a sentence. `left_s`: seconds until then."""
    return f"{max(0.0, left_s):.0f} s before the end of the job's time"
