"""Words for culprits in sentences: `rank 2 (pid 4711 on n3) and 3 more`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.base.text import listed
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
    """The first one with what is known of it, and the others by their ranks."""
    return describe(culprits[0]) + (f" and {_others(culprits)}" if len(culprits) > 1 else "")


def what_they_do(culprits: Sequence[Culprit]) -> str:
    """The first one with the reason for which it is named, and the others by their ranks."""
    more = f" (likewise {_others(culprits)})" if len(culprits) > 1 else ""
    return f"{describe(culprits[0])} {culprits[0].reason}{more}"


def _others(culprits: Sequence[Culprit]) -> str:
    """All but the first: `ranks 5 and 7`; how many more, where they are not told apart by their ranks."""
    ranks = {each.rank for each in culprits[1:] if each.rank is not None and not each.is_worker}
    if len(ranks) < len(culprits) - 1 or culprits[0].rank in ranks:
        return f"{len(culprits) - 1} more"
    return listed(ranks, "rank")
