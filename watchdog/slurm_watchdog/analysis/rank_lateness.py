"""How late each rank of a training is: how much less of the time than the others it waits for them. Shown, and no
judgement. Pure.

Ranks that train together end each step together, so that the one that comes last waits least. From the last minutes
in which the job made steps: where it has GPUs, the share in which a rank's GPU idles beyond the others' (one that waits
in a collective is busy), else the share in which its main thread sleeps less than theirs.

`straggler` compares with the time before the job became slower, and so accuses nobody who has always done more: rank 0
that writes the log, a stage of a pipeline with more layers. Here they are late, as the others do wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot
from statistics import median
from typing import Final

from slurm_watchdog.analysis.memo import by_identity
from slurm_watchdog.analysis.straggler import LEAST_BLOCKS, LEAST_RANKS, LEAST_SPREAD, shares
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.rank_waits import RankKey, WaitBlock

RECENT_BLOCKS: Final = 10
"""Of a minute each: twice as many looks as `straggler` asks for at least."""
LEAST_LATE: Final = 0.1
"""Of the time: what is less is no lateness that a person would look into."""
ERRORS: Final = 3.0
"""Standard errors: of 1,024 ranks that are alike one or two would be beyond by chance alone, were it not for
LEAST_LATE."""


class RankLateness(Struct, frozen=True, kw_only=True):
    """Of one rank."""

    ratio: float
    """The share of the time in which the others wait and it does not; 0: as the median of all, or it waits more."""
    is_late: bool
    """Whether it differs clearly."""


@by_identity
def rank_lateness(blocks: tuple[WaitBlock, ...]) -> Mapping[RankKey, RankLateness]:
    """Of every rank; nothing where too little is known of one of them. `blocks`: oldest first."""
    keys = blocks[-1].ranks if blocks else ()
    recent = [each for each in blocks[-RECENT_BLOCKS:] if each.ranks is keys or each.ranks == keys]
    if len(keys) < LEAST_RANKS or len(recent) < LEAST_BLOCKS:
        return {}
    by_gpu = any(any(each.gpu_looks) for each in recent)
    found = shares(recent, by_gpu)
    if found is None:
        return {}
    waits = [1.0 - share if by_gpu else share for share, _ in found]
    middle = median(waits)
    spread = max(LEAST_SPREAD, 1.4826 * median(abs(each - middle) for each in waits))
    return {
        key: RankLateness(
            ratio=min(1.0, max(0.0, middle - wait)),
            is_late=middle - wait >= max(LEAST_LATE, ERRORS * hypot(error, spread)),
        )
        for key, wait, (_, error) in zip(keys, waits, found, strict=True)
    }
