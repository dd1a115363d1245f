"""Words for culprits in sentences: `rank 2 (pid 4711 on n3) and 3 more`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.model.incidents import Culprit


def describe(culprit: Culprit) -> str:
    """`rank 2 (pid 4711 on n3)`, or what of it is known."""
    who = f"rank {culprit.rank}" if culprit.rank is not None else "a process"
    if culprit.is_worker and culprit.rank is not None:
        who = f"a worker of rank {culprit.rank}"
    where = f"pid {culprit.pid} on {culprit.node}" if culprit.pid is not None else f"on {culprit.node}"
    return f"{who} ({where})"


def and_more(number: int) -> str:
    """` and 3 more`, of so many of which one has been named; empty if that was all."""
    return f" and {number - 1} more" if number > 1 else ""


def describe_all(culprits: Sequence[Culprit]) -> str:
    """The first one, and how many more there are."""
    return describe(culprits[0]) + and_more(len(culprits))


def what_they_do(culprits: Sequence[Culprit]) -> str:
    """The first one with the reason for which it is named, and how many more there are."""
    more = f" (likewise {len(culprits) - 1} more)" if len(culprits) > 1 else ""
    return f"{describe(culprits[0])} {culprits[0].reason}{more}"
