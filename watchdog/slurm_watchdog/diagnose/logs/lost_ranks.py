"""The rank that the others say they lost, in words of a program's own. Pure.

A suspect and no more: who says so lost a connection, and it may be his own end of it that broke. So it is
named only if all that name one name the same, if several do (or the first rank, or nobody in particular), and
if it says nothing of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.diagnose.logs.collective_timeouts import Suspects
from slurm_watchdog.diagnose.logs.ranks import Ranks
from slurm_watchdog.diagnose.logs.tracebacks import FoundError
from slurm_watchdog.knowledge.log_signatures import LOST_A_RANK

SPEAKERS = 2
"""So many different ranks have to say so, where any of them is named; rank 0 may be the only one that logs."""


def lost_rank(errors: Sequence[FoundError], ranks: Ranks) -> Suspects | None:
    """Whom all of `errors` that name a lost rank name; None if they differ, are too few, or if that rank
    speaks itself."""
    lines_with_peer = [
        (error, int(next(n for n in match.groups() if n)))
        for error in errors
        if (match := LOST_A_RANK.search(error.text))
    ]
    peers = {peer for _, peer in lines_with_peer}
    if len(peers) != 1:
        return None
    peer = peers.pop()
    spoke = {ranks.rank_of(error.who) for error in errors}
    speakers = {rank for error, _ in lines_with_peer if (rank := ranks.rank_of(error.who)) is not None}
    enough = not speakers or len(speakers) >= SPEAKERS or speakers == {0}
    unknown = ranks.excerpt and ranks.world is None
    if not enough or unknown or peer in spoke or (ranks.world is not None and peer >= ranks.world):
        return None
    return Suspects(
        (peer,),
        "is suspect, for it is the one that they say they lost, and it says nothing itself",
        lines_with_peer[0][0].line,
    )
