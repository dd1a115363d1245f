"""The clock of a run that writes no step that can be read: whether its ranks move, dump after dump. Pure.

A step that rises proves that the loop turns. Where none is written, two dumps of all ranks, minutes apart, tell nearly
as much: a rank that trains has used time in between, even where both found it in the same function. Only one that has
used next to none (STILL_CPU), has moved no data and is where it was, did nothing. Ranks that wait for their peers, or
for their GPU, may spin: they neither prove that the loop turns nor that it does not.

The clock counts once a run was seen to move in the code of a training in TRAINED_LOOKS looks: of everything that trains
nothing (a server, a notebook) nothing is said.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, locate, main_thread
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey, frames_key
from slurm_watchdog.knowledge import program_kinds
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import JobView, StackSnapshot
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.past_runs import Motion

STILL_CPU = 0.005
"""Cores, of the main thread, from one dump to the next. A wait with a time-out (a data loader polls every 5
s) uses a tenth of it; a step of a minute whose kernels are started by Python uses several times as much."""
STILL_BYTES_S = 100_000.0  # Through system calls of a process. Heartbeats and metrics stay below a hundredth of it.
QUIET_CONNECTION_BYTES_S = 10_000.0  # What keeps a connection alive, and metrics every few seconds, are less.
TRAINED_LOOKS = 3  # That saw it moving in the code of a training: a quarter of an hour as shipped.
STILL_LOOKS = 3  # Dumps in a row, at least, that found it motionless.
KEPT_PAUSES = 20
MAY_SPIN = WAITS_FOR_PEERS | {Place.DEVICE}  # Where time is used by waiting, too.
ELSEWHERE = frozenset({Place.SUBPROCESS, Place.REMOTE, Place.NETWORK})


def is_proven(motion: Motion | None) -> bool:
    """Whether a run has moved as a training does: then, that it does not is worth a word."""
    return motion is not None and motion.trained >= TRAINED_LOOKS


def still_s(motion: Motion, now: float) -> float:
    """For how long no one has been seen to move; 0 where someone was, or where that is not known well enough."""
    if motion.still_from_at is None or motion.still_looks < STILL_LOOKS:
        return 0.0
    return now - motion.still_from_at


def follow(before: Motion | None, earlier: StackSnapshot | None, newest: StackSnapshot, now: float) -> Motion:
    """`before` and one more dump of all ranks, `newest`; `earlier` is the dump before it, None where there is
    none to compare with."""
    at = now - newest.age_s
    known = before or Motion(last_at=at)
    moved = Truth.UNKNOWN if earlier is None else _has_moved(earlier, newest)
    if moved is Truth.OK:
        pauses = known.pauses_s
        if (
            known.still_from_at is not None and known.trained
        ):  # what takes long before it trains (a build) is no pace of it
            pauses = (*pauses, at - known.still_from_at)[-KEPT_PAUSES:]
        trained = known.trained + any(_trains(stack) for stack in _ranks_of(newest).values())
        return replace(known, last_at=at, trained=trained, still_from_at=None, still_looks=0, pauses_s=pauses)
    if moved is Truth.UNKNOWN or earlier is None:
        return replace(known, last_at=at, still_from_at=None, still_looks=0)
    if known.still_from_at is None:
        return replace(known, last_at=at, still_from_at=now - earlier.age_s, still_looks=2)
    return replace(known, last_at=at, still_looks=known.still_looks + 1)


def interrupted(before: Motion) -> Motion:
    """What came before a sign of life, or a grace, is no part of a row of dumps that begins after it."""
    return replace(before, still_from_at=None, still_looks=0)


def started(before: Motion) -> Motion:
    """After the log announced a start: that it trains has to be seen again."""
    return replace(before, trained=0, still_from_at=None, still_looks=0)


def stepped(before: Motion) -> Motion:
    """After a step that could be read: it moves, and has trained."""
    return replace(before, trained=before.trained + 1, still_from_at=None, still_looks=0)


def is_training(job: JobView) -> bool:
    """Whether anything shows that the job trains, apart from steps: that it saves, its log's phase, an
    earlier run, its stacks."""
    log_shows_training = job.phase is not None or any(run.steps_seen for run in job.past)
    saves = job.saved_age_s is not None or job.growing_age_s is not None or job.saving_age_s is not None
    return log_shows_training or saves or is_proven(job.motion) or is_in_training_code(job)


def is_in_training_code(job: JobView) -> bool:
    """Whether the newest dump shows a rank in the loop of a training."""
    return any(_trains(stack) for dump in job.snapshots[-1:] for stack in _ranks_of(dump).values())


def is_serving(job: JobView) -> bool:
    """Whether a rank was seen in a loop that waits for requests: then others may wait for it indefinitely, and
    nothing is wrong."""
    return any(_serves(stack) for dump in job.snapshots for stack in _ranks_of(dump).values())


def waits_for_others_work(job: JobView) -> bool:
    """Whether the newest dump shows a rank that waits for a program or a task of Ray that it has started, or
    for a server: these may do the work."""
    return any(locate(stack).place in ELSEWHERE for dump in job.snapshots[-1:] for stack in _ranks_of(dump).values())


def did_nothing(job: JobView, node: str | None, pid: int | None) -> bool:
    """Whether this process is known to have used next to no time, and to have moved no data, from the first
    of the dumps to the last."""
    seen = [
        (dump.age_s, stack)
        for dump in job.snapshots
        for key, stack in _ranks_of(dump).items()
        if key[:2] == (node, pid)
    ]
    if len(seen) < STILL_LOOKS:
        return False
    (first_age_s, first), (last_age_s, last) = seen[0], seen[-1]
    return used_nothing(first, last, first_age_s - last_age_s) is True


def moves_bytes(before: ProcessStack, after: ProcessStack, apart_s: float) -> bool:
    """Whether a process has read or written between two dumps, more than heartbeats do."""
    moved = 0 if None in (before.io_bytes, after.io_bytes) else (after.io_bytes or 0) - (before.io_bytes or 0)
    return moved > STILL_BYTES_S * apart_s


def moves_on_connection(before: ProcessStack, after: ProcessStack, apart_s: float) -> bool:
    """Whether data came or went on a connection that a thread of a process waits for, the same one in two dumps."""
    first = {each.socket: each.moved for each in before.waits_for}
    moved = [each.moved - first[each.socket] for each in after.waits_for if each.socket in first]
    return max(moved, default=0) > QUIET_CONNECTION_BYTES_S * apart_s


def _has_moved(earlier: StackSnapshot, newest: StackSnapshot) -> Truth:
    """OK: someone has. BAD: no one has, as far as ranks can be told apart from those who only wait. UNKNOWN:
    not all were dumped."""
    before, after = _ranks_of(earlier), _ranks_of(newest)
    if not after or before.keys() != after.keys() or earlier.silent_nodes or newest.silent_nodes:
        return Truth.UNKNOWN
    apart_s = earlier.age_s - newest.age_s
    seen = [_rank_moved(before[key], after[key], apart_s) for key in after]
    if Truth.OK in seen:
        return Truth.OK
    return Truth.UNKNOWN if Truth.UNKNOWN in seen else Truth.BAD


def _rank_moved(before: ProcessStack, after: ProcessStack, apart_s: float) -> Truth:
    one, other = locate(before), locate(after)
    if one.error is not None or other.error is not None or apart_s <= 0:
        return Truth.UNKNOWN
    if frames_key(one) != frames_key(other):
        return Truth.OK
    if other.place in MAY_SPIN:
        return Truth.BAD
    idle = used_nothing(before, after, apart_s)
    return Truth.UNKNOWN if idle is None else Truth.BAD if idle else Truth.OK


def used_nothing(before: ProcessStack, after: ProcessStack, apart_s: float) -> bool | None:
    """None: its own time is not known. Bytes count where they could be read."""
    if before.main_cpu_s is None or after.main_cpu_s is None or apart_s <= 0:
        return None
    used_s = after.main_cpu_s - before.main_cpu_s
    works = moves_bytes(before, after, apart_s) or moves_on_connection(before, after, apart_s)
    return used_s <= STILL_CPU * apart_s + 0.02 and not works


def _ranks_of(dump: StackSnapshot) -> dict[ProcessKey, ProcessStack]:
    return {
        (stack.node, stack.pid, stack.start_ticks): stack
        for stack in dump.stacks
        if stack.role is Role.RANK and stack.rank is not None
    }


def _trains(stack: ProcessStack) -> bool:
    thread = main_thread(stack)
    return thread is not None and program_kinds.trains(thread.frames)


def _serves(stack: ProcessStack) -> bool:
    """The main thread alone counts: a training may have one that hands out its metrics."""
    main = next((t for t in stack.threads if t.name == "MainThread" or t.thread_id == stack.pid), None)
    thread = main or main_thread(stack)
    return thread is not None and program_kinds.serves(thread.frames)
