"""`straggler`: a job that makes steps has become slower, and one rank (or those of one node) keeps the others waiting.

Ranks that train together end each step together: when it becomes longer, the straggler spends the added time at
whatever makes it late, the others waiting for it. Agents see which ranks wait: a GPU that waits in a collective is
busy, one of a rank that starts it late is idle; without GPUs, a rank that waits sleeps. Each rank is compared with
itself before, so what it has always done more than others cancels out.

Fires: the job is slower than it was (as for `slow_job`), and of the added time one rank, or the ranks of one node,
wait for nearly nothing while nearly all others wait for nearly all of it; not by chance in 10,000 cases.
Names: the ranks, with how much of the added time they and the others wait; and where dumps found them most often.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erfc, hypot, sqrt

from msgspec.structs import replace

from slurm_watchdog.analysis.lateness import LEAST_BLOCKS, LEAST_RANKS, LEAST_SPREAD, shares
from slurm_watchdog.base.averages import median
from slurm_watchdog.base.memo import by_identity
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.detect.slow_job import Slowdown, SlowJob, slowdown_finding, slowdown_of
from slurm_watchdog.detect.spec import DetectorSpec, each_job
from slurm_watchdog.knowledge.remediation_hints import Hint
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, IncidentKind, StackRequest, Truth
from slurm_watchdog.model.past_runs import RankKey, WaitBlock, WaitDump

DUMPS = 12
"""Dumps that are asked for while a straggler is suspected. At 17 to 28 ms of a process's node each
(controller/evidence/requests.py, whose budget of an hour bounds them, too)."""
APART_S = 20.0  # Between two of them: other steps, and mostly another moment of a step.
SUREST = 0.9999  # More is not claimed: the model is not that exact.
LAG_S = 60.0  # How long a rank has run is read once a minute: so long a block may still be of before.
BEFORE_S = 3600.0  # Before the change so much is compared with: the same program, and mostly the same hour.
LATE, LATE_ERRORS = 0.5, 2.0  # A straggler waits less than this share of the added time, by so many standard errors.
PEERS_WAIT, STRANGE_PEERS = 0.6, 0.1  # The others' median waits for about all of it; a tenth may do something else.
MOST_BY_GPU, MOST_BY_SLEEP = 1.4, 2.0
"""More than the added time others wait where they have become faster themselves, having more of the node (a CPU quota:
1.3, measured); looks at GPUs that keep pace with steps show such values, too."""
CHANCE = 1e-4
"""Probability, for all ranks of the job together, that one that waits as the others do would seem late by chance. It is
asked again with every block of a minute, so it is small; but a job has to be slower to be asked at all."""
MAX_SHARE = 0.5  # More of the ranks than this are no stragglers: the others may be the fast ones.
LEAST_ALIKE, LEAST_DUMPED, PEERS_DUMPED = 3, 5, 0.5
"""Dumps of others that found them asleep, and the share of these that has to be in a call that waits for ranks, or in a
backward pass, which sleeps for nothing else without a GPU: sleep alone may be a data loader's. Fewer suffice if all of
them say so: where others wait for a quarter of a step, a dump of four ranks finds less than one of them asleep."""
LEAST_CALLS = 3  # Dumps that found a straggler in one place, before it is said where it is.


@each_job
def detect(view: ClusterView, job: JobView, settings: SlowJob) -> Finding:
    """One finding for each running job; `settings` are those of slow_job."""
    job_id, shift = job.job.job_id, settings.percent / 100
    finding = SPEC.about_job(job_id)
    slow = slowdown_of(job, shift, settings.lasts) if job.job.state == "RUNNING" else None
    if slow is None:
        steady = slowdown_finding(job, view.now, shift, settings.lasts).truth is Truth.OK
        return finding.ok(f"job {job_id} is not slower than it was") if steady else finding
    if job.silent_nodes or not job.every_rank_known or job.phase is not None:
        return finding
    found = lateness(job.waits, slow.first.at, slow.rise.share, len(job.ranks))
    if found.truth is not Truth.BAD:
        return finding.ok(f"no rank of job {job_id} keeps it waiting") if found.truth is Truth.OK else finding
    return _with_dumps(finding, job, view.now, slow, found)


def _with_dumps(finding: Finding, job: JobView, now: float, slow: Slowdown, found: Lateness) -> Finding:
    """What stacks of the same time have to say of it. Where sleep alone is seen, they have to confirm that it is a wait
    for other ranks; an idle GPU needs no word for it, but may be contradicted."""
    stacks = dumped(job.wait_dumps, slow.first.at, found.late)
    taken = sum(dump.at >= slow.first.at for dump in job.wait_dumps)
    if taken < DUMPS or (stacks.others_wait is Truth.UNKNOWN and not found.by_gpu):
        finding = replace(finding, wanted=(StackRequest(job_id=job.job.job_id, apart_s=APART_S, usual=True),))
    job_id, node, ranks = job.job.job_id, found.late[0].key.node, [str(each.key.rank) for each in found.late]
    who = f"rank {ranks[0]} on {node}" if len(ranks) == 1 else f"{node} (ranks {', '.join(ranks[:8])})"
    if stacks.late_waits or (not found.by_gpu and stacks.others_wait is not Truth.OK):
        return finding
    added, percent = slow.rise.after_s - slow.rise.before_s, 100 * slow.rise.share
    seats = {(rank.node, rank.process.pid): rank for rank in job.ranks}
    culprits = tuple(
        seats[key].culprit(f"does not wait while the others do ({_percent(each.waits)} of the added time)")
        for each in found.late
        if (key := (each.key.node, each.key.pid)) in seats
    )
    return finding.bad(
        f"Job {job_id} is {percent:.1f} % slower since step {slow.first.step}, and {who} keeps the "
        f"others waiting (confidence {min(SUREST, found.confidence):.4f}).",
        culprits=culprits,
        facts=(
            _shares(found, added),
            *([f"stacks found it most often in {stacks.place}"] if stacks.place else []),
        ),
        duration_s=max(0.0, now - slow.first.at),
    )


def _shares(found: Lateness, added_s: float) -> str:
    mine, theirs = sum(each.waits for each in found.late) / len(found.late), found.peers_wait
    does, others = "it waits", ", the other"
    if found.by_gpu:
        mine, theirs, does, others = 1 - mine, 1 - theirs, "its GPU idles", ", those of the other"
    longer = f"of the {added_s:.3g} s by which a step has become longer"
    return f"{longer} {does} {_percent(mine)}{others} {found.peers} ranks {_percent(theirs)}"


def _percent(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.0f} %"


class Waits(Struct, kw_only=False):
    """How much one rank waits, by one signal."""

    key: RankKey
    waits: float  # Share of the added time of a step that it waits for others; below 0: less than before.
    error: float  # Standard error of `waits`.


class Lateness(Struct):
    """What is known of who keeps a job waiting."""

    truth: Truth = Truth.UNKNOWN  # BAD: `late` are the ranks. OK: no one.
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
    keys = blocks[-1].ranks if blocks else ()
    same = [each for each in blocks if each.ranks is keys or each.ranks == keys]
    before = [each for each in same if each.end_at <= since and each.begin_at >= since - BEFORE_S]
    after = [each for each in same if each.begin_at >= since + LAG_S]
    if world < LEAST_RANKS or min(len(before), len(after)) < LEAST_BLOCKS:
        return Lateness()
    if len({key.rank for key in keys}) < world or len(keys) != world:
        return Lateness()
    has_gpus = any(any(each.gpu_looks) for each in (*before, *after))
    rows = _rows(before, after, added, by_gpu=has_gpus)
    if rows is None:
        return Lateness()
    if has_gpus:  # what a GPU idles, its rank does not wait for others
        rows = [replace(each, waits=1.0 - each.waits) for each in rows]
    return _among(rows, has_gpus)


def _among(rows: Sequence[Waits], by_gpu: bool) -> Lateness:
    late = [each for each in rows if each.waits + LATE_ERRORS * each.error <= LATE]
    if not late:
        alike = all(each.waits > LATE for each in rows)
        return Lateness(truth=Truth.OK, by_gpu=by_gpu) if alike else Lateness()
    others = [each for each in rows if each not in late]
    if len(late) >= MAX_SHARE * len(rows) or len({each.key.node for each in late}) > 1:
        return Lateness()
    if [each.key.rank for each in late] == [0]:  # it does extra work in most programs
        return Lateness()
    middle = median(each.waits for each in others)
    most = MOST_BY_GPU if by_gpu else MOST_BY_SLEEP
    slack = [(each.waits, LATE_ERRORS * each.error) for each in others]
    strange = sum(not LATE - off <= waits <= most + off for waits, off in slack)
    if not PEERS_WAIT <= middle <= most or strange > STRANGE_PEERS * len(others):
        return Lateness()
    spread = max(LEAST_SPREAD, 1.4826 * median(abs(each.waits - middle) for each in others))
    errors = min((middle - each.waits) / hypot(each.error, spread) for each in late)
    chance = len(rows) * erfc(errors / sqrt(2)) / 2  # that a normal value is so many standard errors too large
    if chance > CHANCE:
        return Lateness()
    return Lateness(
        truth=Truth.BAD,
        late=tuple(late),
        peers=len(others), peers_wait=middle, confidence=1 - chance, by_gpu=by_gpu,
    )  # fmt: skip


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


SPEC = DetectorSpec(
    detect=detect,
    also=(SlowJob,),
    blames_node=0.25,
    sentence="A rank keeps the others of its job waiting",
    steps_continue=True,
    explained_by=(IncidentKind.SLOW_NODE,),
    why_no_action="it says which rank is late, and not whether its node, its data or its program makes it so",
    alerts=("SlurmWatchdogSlow",),
    hint=Hint(
        usually="Another program on its node, a slow or throttled CPU, a slow data loader, more work than others.",
        try_next="Compare its node with others: slurm-watchdog test-nodes. Look at where its stacks are.",
    ),
)
