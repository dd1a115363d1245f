"""Activity of a job's ranks, as far as their processes and GPUs show it: the evidence where stacks are unavailable.

A GPU that spins in a collective is 100 % busy and draws a fraction of what it draws while it computes, and it uses a
fraction of its tensor cores and memory, where the card counts that (GPM); where the two differ, it works. The rank that
the others wait for has an idle GPU or a process that uses no time. A rank that computes or moves data speaks against a
hang: a checkpoint that rank 0 writes, an evaluation, the building of an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import STORAGE_S, held_by, is_held, moves_data
from slurm_watchdog.analysis.rank_motion import moves_bytes, moves_on_connection
from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.limits import most_odd
from slurm_watchdog.model.cluster_view import JobView, ProcessView, RankGpu
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.node_view import GpuView, work_ratio
from slurm_watchdog.model.observations import Role

QUIET_CPU = 0.2  # Cores. A rank that waits uses next to none; one that spins, loads or saves about one or more.
SPINNING_CPU = 0.5  # Cores. A main thread that polls its GPU uses one.
FELL_QUIET_S = 240.0  # Without a GPU that tells more: no one waits for a lock or for the network for so long.
LOW_POWER = 0.5  # Of what is usual on this GPU. Spinning: 68 to 110 W of 330 W; an evaluation is a forward pass.
FALLEN_POWER = 0.7  # The average over a minute, which lags, has to be below: one look may catch a gap between steps.
LEAST_WORK = 0.05
"""Share of tensor cores or memory: a kernel that waits for its peers uses next to nothing of either, and so do programs
of small kernels at work."""
MOVED_WITHIN_S = 300.0  # No one who hangs has waited for a disk since: half of a limit is looked back upon, up to this.
LEAST_RANKS = 3  # With fewer, no rank differs.


Dumps = dict[tuple[str, int, int], list[tuple[float, ProcessStack]]]  # Process key: (age in s, stack), oldest first.


class RankState(StrEnum):
    WORKS = "works"
    SPINS = "spins"  # Its GPU is busy and draws far less than usual.
    BUSY = "busy"  # Its GPU has been busy all the time; whether it computes or spins is not known.
    IDLE = "idle"  # Neither its GPU nor its process does anything.
    UNKNOWN = "unknown"


class RankActivity(Struct):
    """What one rank is doing."""

    rank: ProcessView
    doing: RankState
    why: str  # Half a sentence.
    quiet: bool | None = None  # Whether its process uses next to no time; None: not known.
    gpu: RankGpu | None = None


class LoopState(Struct):
    """Whether a loop stands, as far as this evidence goes."""

    stands: bool | None = None  # True: no one works, and that is known of all. False: someone does. None: not known.
    in_collective: bool = False  # Most of the ranks wait for others on their GPUs.
    spinning: int = 0  # Ranks whose GPUs are busy at a fraction of their usual power, where the loop stands.
    why: str = ""  # Half a sentence: what it is seen by.
    culprits: tuple[Culprit, ...] = ()


def loop_state(job: JobView, now: float, limit_s: float) -> LoopState:
    """What the living ranks do, taken together. A GPU counts as idle or busy after half of `limit_s`."""
    ranks = job.living_ranks
    if job.is_writing:
        return LoopState(stands=False, why="a checkpoint is being written")
    if not _all_known(job):
        return LoopState(why="not all ranks are known")
    seen = activities(job, ranks, now, limit_s / 2)
    by: dict[RankState, list[RankActivity]] = {doing: [a for a in seen if a.doing is doing] for doing in RankState}
    idle, spinning = by[RankState.IDLE], by[RankState.SPINS]
    if _odd_among_busy(seen):
        where = f"the GPUs of the other {len(seen) - len(idle)} ranks are busy"
        return LoopState(stands=True, in_collective=True, why=where, culprits=_culprits(idle))
    fallen = _fell_quiet_among_polling(seen)
    if fallen:
        where = f"the processes of the other {len(seen) - len(fallen)} ranks poll, and no GPU shows more"
        return LoopState(stands=True, in_collective=True, why=where, culprits=_culprits(fallen))
    if by[RankState.WORKS]:
        first = by[RankState.WORKS][0]
        return LoopState(stands=False, why=f"rank {first.rank.process.rank} {first.why}")
    if not seen or by[RankState.UNKNOWN] or by[RankState.BUSY]:
        return LoopState(why="what the ranks do is not known")
    if not spinning:
        why = "neither the processes nor the GPUs of the ranks do anything"
        return LoopState(stands=True, why=why, culprits=_culprits(a for a in idle if is_held(a.rank)))
    in_collective = 2 * len(spinning) >= len(seen) and len(seen) > 1
    of_what = "power" if all(a.gpu and a.gpu.view.gpu.usual_power_w for a in spinning) else "power or activity"
    why = f"the GPUs of {len(spinning)} of {len(seen)} ranks spin: busy, at less than half of their usual {of_what}"
    odd = idle if idle else _quiet_among_spinning(spinning)
    culprits = _culprits(_odd_if_few(odd, seen))
    return LoopState(stands=True, in_collective=in_collective, spinning=len(spinning), why=why, culprits=culprits)


def all_compute(job: JobView, now: float, limit_s: float) -> bool:
    """Whether the GPUs of all ranks of a job are known to compute, at the power that is usual for it."""
    if not _all_known(job):
        return False
    seen = activities(job, job.ranks, now, limit_s / 2)
    views = [a.gpu.view for a in seen if a.doing is RankState.WORKS and a.gpu is not None]
    return 0 < len(views) == len(seen) and all(v.idle_since is None and _draws_little(v) is False for v in views)


def _all_known(job: JobView) -> bool:
    """Whether no rank is missing from what is known, as far as anything tells how many there are."""
    return job.every_rank_known and {rank.node for rank in job.ranks} >= set(job.job.nodes)


def activities(job: JobView, ranks: Iterable[ProcessView], now: float, idle_for_s: float) -> tuple[RankActivity, ...]:
    """What each of `ranks` is doing, in their order."""
    gpus: dict[tuple[int, int], list[RankGpu]] = {}
    for each in job.gpus:
        gpus.setdefault((each.rank, each.pid), []).append(each)
    workers: dict[int | None, list[ProcessView]] = {}
    for process in job.processes:
        if process.process.role is Role.WORKER and process.alive:
            workers.setdefault(process.process.rank, []).append(process)
    counted = any(p.process.io_bytes_s is not None for p in job.processes)
    dumped = _dumps_of(job)
    found = []
    for rank in ranks:
        its = gpus.get((rank.process.rank or 0, rank.process.pid), [])
        by_gpus = _by_gpus(its, now, idle_for_s) if job.gpus else (RankState.IDLE, "does nothing")
        seen = dumped.get(rank.key, [])
        found.append(_activity(rank, its, by_gpus, workers.get(rank.process.rank, []), seen, idle_for_s, counted))
    return tuple(found)


def _uses_cpu(process: ProcessView) -> bool:
    return (process.process.cpu_ratio or 0.0) >= QUIET_CPU


def is_quiet(process: ProcessView | None, *, counted: bool = False) -> bool | None:
    """Whether the process neither computes nor moves data; None: not known. `counted`: the bytes that it
    moves can be counted, so that not to know them is not to know."""
    if process is None or process.process.cpu_ratio is None or (counted and process.process.io_bytes_s is None):
        return None
    ready = process.process.state == "R"  # it computes, on a node with too few cores
    return process.process.cpu_ratio < QUIET_CPU and not ready and not moves_data(process)


def _activity(
    rank: ProcessView,
    gpus: list[RankGpu],
    by_gpus: tuple[RankState, str],
    workers: list[ProcessView],
    dumps: Sequence[tuple[float, ProcessStack]],
    idle_for_s: float,
    counted: bool,
) -> RankActivity:
    first = gpus[0] if gpus else None
    if is_held(rank):
        return RankActivity(rank=rank, doing=RankState.IDLE, why=held_by(rank), quiet=True, gpu=first)
    quiet = is_quiet(rank, counted=counted)
    doing, why = by_gpus
    within_s = max(STORAGE_S, min(idle_for_s, MOVED_WITHIN_S))
    if _transfers(dumps) or any(moves_data(each, within_s) for each in (rank, *workers)):
        doing, why = RankState.WORKS, "moves data"
    elif any(map(_uses_cpu, workers)):
        doing, why = RankState.WORKS, "has workers that compute"
    elif doing is RankState.IDLE and (quiet is None or any(is_quiet(w, counted=counted) is None for w in workers)):
        doing, why = RankState.UNKNOWN, "is not known well enough"
    elif doing in (RankState.SPINS, RankState.BUSY) and counted and rank.process.io_bytes_s is None:
        doing, why = RankState.UNKNOWN, "waits, or saves or loads: what it moves is not known"
    elif doing is RankState.IDLE and (_computed([stack for _, stack in dumps]) or not quiet):
        doing, why = RankState.WORKS, "computes"
    return RankActivity(rank=rank, doing=doing, why=why, quiet=quiet, gpu=first)


def _computed(seen: Sequence[ProcessStack]) -> bool:
    """Whether each of a rank's dumps, oldest first, found it running, or waiting for a core, and using time in
    between: however little it got."""
    if len(seen) < 2 or any(each.state != "R" for each in seen):
        return False
    return seen[-1].cpu_s > seen[0].cpu_s or (seen[-1].main_cpu_s or 0.0) > (seen[0].main_cpu_s or 0.0)


def _by_gpus(gpus: list[RankGpu], now: float, idle_for_s: float) -> tuple[RankState, str]:
    """What the GPUs of a rank say, its process left aside."""
    found: set[RankState] = {_by_gpu(each, now, idle_for_s) for each in gpus}
    for doing, why in (
        (RankState.WORKS, "computes on its GPU"),
        (RankState.UNKNOWN, "is not known well enough"),
        (RankState.BUSY, "keeps its GPU busy"),
        (RankState.SPINS, "spins on its GPU"),
        (RankState.IDLE, "has had an idle GPU"),
    ):
        if doing in found:
            return doing, why
    return RankState.UNKNOWN, "has no GPU that is known"


def _by_gpu(each: RankGpu, now: float, idle_for_s: float) -> RankState:
    view, ratio = each.view, each.view.gpu.utilization_ratio
    if ratio is None:
        return RankState.UNKNOWN
    if view.idle_since is not None:
        return RankState.IDLE if now - view.idle_since >= idle_for_s else RankState.UNKNOWN
    if view.busy_since is None:
        return RankState.WORKS  # busy now and then: it computes
    known = [low for low in (_draws_little(view), _works_little(view)) if low is not None]
    if known:
        return RankState.SPINS if all(known) else RankState.WORKS
    return RankState.BUSY if now - view.busy_since >= idle_for_s else RankState.UNKNOWN


def _draws_little(view: GpuView) -> bool | None:
    """Whether it draws far less than usual; None: not known."""
    now_w, recent_w, usual_w = view.gpu.power_w, view.gpu.recent_power_w, view.gpu.usual_power_w
    if now_w is None or recent_w is None or usual_w is None:
        return None
    return now_w < LOW_POWER * usual_w and recent_w < FALLEN_POWER * usual_w


def _works_little(view: GpuView) -> bool | None:
    """The same of its tensor cores and its memory, by GPM; None also of a program that uses neither much."""
    ratio, usual = work_ratio(view.gpu), view.gpu.usual_work_ratio
    return None if ratio is None or usual is None or usual < LEAST_WORK else ratio < LOW_POWER * usual


def _odd_among_busy(seen: tuple[RankActivity, ...]) -> bool:
    """Few idle ranks, while the GPUs of all others are busy and none is known to compute: those wait for these."""
    idle = [a for a in seen if a.doing is RankState.IDLE]
    busy = [a for a in seen if a.doing in (RankState.SPINS, RankState.BUSY)]
    spins_known = any(a.doing is RankState.SPINS for a in seen)
    return (
        bool(_odd_if_few(idle, seen))
        and len(idle) + len(busy) == len(seen)
        and all(a.gpu is not None for a in idle)
        and not (spins_known and any(a.doing is RankState.BUSY for a in busy))
    )


def _fell_quiet_among_polling(seen: tuple[RankActivity, ...]) -> list[RankActivity]:
    """Where no GPU is known, or of none its power: the few ranks that have used no time for long and used a core
    before, as all others still do. A rank that never does (it hands on what others computed) is not among them."""
    if any(a.gpu is not None and a.doing is not RankState.BUSY for a in seen):
        return []
    quiet = [a for a in seen if (a.rank.quiet_s or 0.0) >= FELL_QUIET_S and a.quiet]
    polling = [a for a in seen if (a.rank.process.cpu_ratio or 0.0) >= SPINNING_CPU and not moves_data(a.rank)]
    return _odd_if_few(quiet, seen) if quiet and len(quiet) + len(polling) == len(seen) else []


def few_idle_among_busy(job: JobView, now: float, limit_s: float) -> LoopState:
    """Of a job that never trained no one knows what power its GPUs draw when they compute: few ranks that
    idle while the GPUs of all others have been busy in every look for half of `limit_s`."""
    ranks = job.living_ranks
    seen = activities(job, ranks, now, limit_s / 2)
    idle = [a for a in seen if a.doing is RankState.IDLE and a.gpu is not None]
    busy = {
        each.rank for each in job.gpus if each.view.busy_since is not None and now - each.view.busy_since >= limit_s / 2
    }
    others = [a for a in seen if a not in idle]
    if not _all_known(job) or not _odd_if_few(idle, seen) or any(a.rank.process.rank not in busy for a in others):
        return LoopState(why="what the ranks do is not known")
    why = f"the GPUs of the other {len(others)} ranks are busy all the time"
    return LoopState(stands=True, in_collective=True, why=why, culprits=_culprits(idle))


def _quiet_among_spinning(spinning: list[RankActivity]) -> list[RankActivity]:
    """The ranks whose process uses no time, if those of all others poll."""
    quiet = [a for a in spinning if a.quiet]
    polling = [a for a in spinning if (a.rank.process.cpu_ratio or 0.0) >= SPINNING_CPU]
    return quiet if len(quiet) + len(polling) == len(spinning) else []


def _odd_if_few(odd: list[RankActivity], seen: tuple[RankActivity, ...]) -> list[RankActivity]:
    """The odd ones if they are few enough to be that; else no one."""
    return odd if len(seen) >= LEAST_RANKS and len(odd) <= most_odd(len(seen)) else []


def are_at_work(job: JobView, named: Iterable[Culprit]) -> bool:
    """Whether a process of those that are `named` is seen to work: a rank that moves data, or a child of one (a data
    loader's worker that fills its buffer, a program that it started) that computes or does. What the rank's own
    threads compute does not count: some poll as long as a collective has not ended. On a node with too few cores a
    child that computes gets little time, but it is ready to run whenever it is looked at."""
    those = {(each.node, each.rank) for each in named if each.rank is not None}
    dumped = _dumps_of(job)
    return any(
        moves_data(each)
        or _transfers(dumped.get(each.key, []))
        or (each.process.role is Role.WORKER and (_uses_cpu(each) or each.process.state == "R"))
        for each in job.processes
        if each.alive and (each.node, each.process.rank) in those
    )


def _dumps_of(job: JobView) -> Dumps:
    found: Dumps = {}
    for snapshot in job.snapshots:
        for stack in snapshot.stacks:
            found.setdefault((stack.node, stack.pid, stack.start_ticks), []).append((snapshot.age_s, stack))
    return found


def _transfers(dumps: Sequence[tuple[float, ProcessStack]]) -> bool:
    """Whether a process has read or written between its last two dumps, or data moved on a connection that it waits
    for, between two of its last dumps that found it waiting. To wait is no work."""
    waits = [each for each in dumps[-3:] if each[1].waits_for]
    pairs = ((moves_bytes, dumps[-2:]), (moves_on_connection, waits[-2:]))
    return any(len(two) == 2 and moves(two[0][1], two[1][1], two[0][0] - two[1][0]) for moves, two in pairs)


def _culprits(odd: Iterable[RankActivity]) -> tuple[Culprit, ...]:
    found = []
    for each in odd:
        named = each.rank.culprit(each.why if is_held(each.rank) else "does nothing while the others wait")
        found.append(replace(named, gpu_uuid=each.gpu.view.gpu.uuid or None if each.gpu is not None else None))
    return tuple(found)
