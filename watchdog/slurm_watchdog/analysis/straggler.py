"""Which rank keeps the others waiting, while the job makes steps: the one that does not spend on waiting the time by
which a step has become longer. Pure.

Ranks that train together end each step together. When it becomes longer, every rank spends the added time somewhere:
the straggler at whatever makes it late, the others waiting for it. Agents see in every report which ranks wait: where
the job has GPUs, a GPU that waits in a collective is busy and that of a rank that starts it late is idle; where it has
none, a rank that waits sleeps and one that is late does not. The shares before and since give how much of the added
time a rank waited: about all of it, or for a straggler about nothing.

Each rank is compared with itself before: what it has always done more than others (a stage of a pipeline with more
layers, logging by rank 0) is in both shares and cancels out. If the added time is everybody's (storage, longer
samples), or another rank's in each step, all ranks show the same, and no rank is identified.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc, hypot, sqrt

from msgspec.structs import replace

from slurm_watchdog.analysis.memo import by_identity
from slurm_watchdog.base.averages import fmean, median
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.past_runs import WHOLE, RankKey, WaitBlock, WaitDump

LEAST_RANKS = 4  # With fewer, there is no one to compare with.
LEAST_S, LEAST_LOOKS, LEAST_BLOCKS = 230.0, 60, 4
"""Of each rank before the change, and since: so long its sleep is known (four readings, a minute apart), or so many
looks at its GPU, which are five minutes at the shipped interval."""
LAG_S = 60.0
"""How long a rank has run is read once in a minute: so much after the change a block may still be of before."""
ROUNDED = 0.5 / WHOLE
BEFORE_S = 3600.0  # Before the change so much is compared with: the same program, and mostly the same hour.
LATE, LATE_ERRORS = 0.5, 2.0  # A straggler waits less than this share of the added time, by so many standard errors.
PEERS_WAIT, STRANGE_PEERS = 0.6, 0.1
"""The median of the others waits at least for about all of it, and at most a tenth of them do something else."""
MOST_BY_GPU, MOST_BY_SLEEP = 1.4, 2.0
"""More than the added time others wait where they have become faster themselves, having more of the node (a CPU quota:
1.3, measured); looks at GPUs that keep pace with steps show such values, too."""
CHANCE = 1e-4
"""Probability, for all ranks of the job together, that one that waits as the others do would seem late by chance. It is
asked again with every block of a minute, so it is small; but a job has to be slower to be asked at all."""
LEAST_SPREAD = 0.05  # Of the others' shares: what no look can tell apart.
MAX_SHARE = 0.5  # More of the ranks than this are no stragglers: the others may be the fast ones.
LEAST_ALIKE, LEAST_DUMPED, PEERS_DUMPED = 3, 5, 0.5
"""Dumps of others that found them asleep, and the share of these that has to be in a call that waits for ranks, or in a
backward pass, which sleeps for nothing else without a GPU: sleep alone may be a data loader's. Fewer suffice if all of
them say so: where others wait for a quarter of a step, a dump of four ranks finds less than one of them asleep."""
LEAST_CALLS = 3  # Dumps that found a straggler in one place, before it is said where it is.


class Waits(Struct, kw_only=False):
    """How much one rank waits, by one signal."""

    key: RankKey
    waits: float
    """Of the time by which a step has become longer it waits for others this share; below 0: it waits less than before
    even so."""
    error: float  # Standard error of `waits`.


class Lateness(Struct):
    """What is known of who keeps a job waiting."""

    truth: Truth  # BAD: `late` are the ranks. OK: no one. UNKNOWN: `why`.
    why: str = ""  # Half a sentence, unless BAD.
    late: tuple[Waits, ...] = ()
    peers: int = 0
    peers_wait: float = 0.0  # The median of what they wait, as of Waits.waits.
    confidence: float = 0.0
    by_gpu: bool = False  # By idle GPUs; otherwise by main threads that sleep.


def lateness(blocks: tuple[WaitBlock, ...], since: float, added: float, world: int) -> Lateness:
    """Who has kept the others waiting since `since`, when a step became longer by the share `added` (0.1: a tenth).
    `blocks`: oldest first; `world`: how many ranks the job has."""
    # To a tenth of a per cent: not for each step all of it again, but once in a minute.
    return _lateness(blocks, since, round(added, 3), world)


@by_identity
def _lateness(blocks: tuple[WaitBlock, ...], since: float, added: float, world: int) -> Lateness:
    if world < LEAST_RANKS:
        return _unknown(f"{world} ranks are too few to compare")
    keys = blocks[-1].ranks if blocks else ()
    same = [each for each in blocks if each.ranks is keys or each.ranks == keys]
    before = [each for each in same if each.end_at <= since and each.begin_at >= since - BEFORE_S]
    after = [each for each in same if each.begin_at >= since + LAG_S]
    if min(len(before), len(after)) < LEAST_BLOCKS:
        return _unknown("its ranks have not been looked at for long enough before and since")
    if len({key.rank for key in keys}) < world or len(keys) != world:
        return _unknown("not all of its ranks are known")
    has_gpus = any(any(each.gpu_looks) for each in (*before, *after))
    rows = _rows(before, after, added, by_gpu=has_gpus)
    if rows is None:
        return _unknown("it is not known of all ranks how often they wait")
    if has_gpus:  # what a GPU idles, its rank does not wait for others
        rows = [replace(each, waits=1.0 - each.waits) for each in rows]
    return _judge(rows, has_gpus)


def _judge(rows: Sequence[Waits], by_gpu: bool) -> Lateness:
    late = [each for each in rows if each.waits + LATE_ERRORS * each.error <= LATE]
    if not late and all(each.waits > LATE for each in rows):
        return Lateness(truth=Truth.OK, why="no rank differs from the others", by_gpu=by_gpu)
    if not late:
        return _unknown("no rank differs clearly from the others")
    others = [each for each in rows if each not in late]
    if len(late) >= MAX_SHARE * len(rows) or len({each.key.node for each in late}) > 1:
        return _unknown("the ranks that do not wait are many, or on several nodes")
    if [each.key.rank for each in late] == [0]:
        return _unknown("only rank 0 does not wait, which does extra work in most programs")
    middle = median(each.waits for each in others)
    most = MOST_BY_GPU if by_gpu else MOST_BY_SLEEP
    slack = [(each.waits, LATE_ERRORS * each.error) for each in others]
    strange = sum(not LATE - off <= waits <= most + off for waits, off in slack)
    if not PEERS_WAIT <= middle <= most or strange > STRANGE_PEERS * len(others):
        return _unknown("the other ranks do not wait for the added time, either")
    spread = max(LEAST_SPREAD, 1.4826 * median(abs(each.waits - middle) for each in others))
    chance = len(rows) * max(_tail((middle - each.waits) / hypot(each.error, spread)) for each in late)
    if chance > CHANCE:
        return _unknown("it may be chance so far")
    return Lateness(
        truth=Truth.BAD,
        late=tuple(late),
        peers=len(others), peers_wait=middle, confidence=1 - chance, by_gpu=by_gpu,
    )  # fmt: skip


def _unknown(why: str) -> Lateness:
    return Lateness(truth=Truth.UNKNOWN, why=why)


def _tail(errors: float) -> float:
    """Probability that a normal value is at least so many standard errors too large."""
    return erfc(errors / sqrt(2)) / 2


def _rows(before: Sequence[WaitBlock], after: Sequence[WaitBlock], added: float, *, by_gpu: bool) -> list[Waits] | None:
    """Of each rank which share of the added time it spent so; None: too little is known of one of them.

    A step took T and takes T (1 + a). Of T it spent the share p so, of T (1 + a) the share q: of the added a T that
    is (q (1 + a) - p) / a.
    """
    old, new = shares(before, by_gpu), shares(after, by_gpu)
    if old is None or new is None:
        return None
    found = []
    for key, (p, p_error), (q, q_error) in zip(after[-1].ranks, old, new, strict=True):
        error = hypot((1 + added) * q_error, p_error) / added
        found.append(Waits(key, ((1 + added) * q - p) / added, error))
    return found


def shares(blocks: Sequence[WaitBlock], by_gpu: bool) -> list[tuple[float, float]] | None:
    """(share, standard error) of each rank. The error is by how much blocks differ, of this rank or of all,
    whichever is more; of looks at a GPU it is no less than chance gives for so many.

    Sums over all ranks, one block after the other: 0.25 s for 4,096 ranks and three hours, half of what a rank after
    the other takes.
    """
    count = len(blocks[-1].ranks)
    seen, weights, sums, squares = [0] * count, [0] * count, [0] * count, [0] * count
    for block in blocks:
        of, share = (block.gpu_looks, block.gpu_idle) if by_gpu else (block.seconds, block.asleep)
        seen = [n + (w > 0) for n, w in zip(seen, of, strict=True)]
        weights = [n + w for n, w in zip(weights, of, strict=True)]
        sums = [n + w * v for n, w, v in zip(sums, of, share, strict=True)]
        squares = [n + w * v * v for n, w, v in zip(squares, of, share, strict=True)]
    if min(seen) < LEAST_BLOCKS or min(weights) < (LEAST_LOOKS if by_gpu else LEAST_S):
        return None
    found = []
    for n, weight, total, square in zip(seen, weights, sums, squares, strict=True):
        mean = total / weight
        spread = max(0.0, square / weight - mean * mean) / (n - 1) / WHOLE**2
        careful = (total / WHOLE + 0.5) / (weight + 1)  # never 0: of 60 looks none proves little
        found.append((mean / WHOLE, spread, careful * (1 - careful) / weight if by_gpu else ROUNDED**2))
    usual = fmean(spread for _, spread, _ in found)
    return [(share, sqrt(max(spread, usual, chance))) for share, spread, chance in found]


# ------------------------------------------------------------------------------------ what dumps of stacks add


class Dumped(Struct):
    """What the dumps since the change say of stragglers."""

    others_wait: Truth  # Whether the others, asleep, are in calls that wait for ranks. UNKNOWN: too few dumps.
    late_waits: bool  # A straggler was found waiting for others in most of its dumps: then it is none.
    place: str = ""  # Where they were most often, and how often; empty: in no place often.


def dumped(dumps: Sequence[WaitDump], since: float, late: Sequence[Waits]) -> Dumped:
    """What stacks say of the stragglers and of those that wait for them."""
    keys = {each.key for each in late}
    seen = [each for dump in dumps if dump.at >= since for each in dump.ranks]
    asleep = [each for each in seen if each.key not in keys and each.asleep]
    mine = [each for each in seen if each.key in keys]
    waits = sum(each.with_peers or each.in_backward for each in asleep)
    wait = Truth.UNKNOWN
    if waits == len(asleep) >= LEAST_ALIKE:
        wait = Truth.OK
    elif len(asleep) >= LEAST_DUMPED:
        wait = Truth.OK if waits >= PEERS_DUMPED * len(asleep) else Truth.BAD
    calls: dict[str, int] = {}
    for each in mine:
        if each.call and not each.with_peers:
            calls[each.call] = calls.get(each.call, 0) + 1
    call, times = max(calls.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    return Dumped(
        others_wait=wait,
        late_waits=len(mine) >= LEAST_CALLS and 2 * sum(each.with_peers for each in mine) > len(mine),
        place=f"{call}: {times} of {len(mine)} dumps" if times >= LEAST_CALLS else "",
    )
