"""A hang that is proven before the limit of its job: part of `collective_hang`. Pure.

What is asked for here is not long, but stuck: from dump after dump, seconds apart, since the step was late by its own
measure, and for longer than ever in the last day. All ranks stand where they stood, all but a few in the same frames of
one collective. Each of the others waits *inside of its own process*, for a lock, a queue or its data loader, and
nothing is at work that could give it what it waits for: no thread of it, compiled code included, fetches anything or is
in a call in which the threads of the waiting ranks are not; its workers have nothing to do, or stand in a lock as well;
all that runs beside it uses no time and moves no data. Or it sleeps for longer than the others wait. Or all stand idle
in collectives, and one alone in another one than all the others. Anything else ends by itself, or may, and proves
nothing; neither does what is not known.

The same, over minutes, proves that a rank never joins the others, who wait in the rendezvous: `who_never_joins`; and
that nothing is at work in a rank that saves or evaluates: `nothing_at_work`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from slurm_watchdog.analysis.job_state import has_ended, is_held, is_on_storage
from slurm_watchdog.analysis.lateness import is_late, is_unheard_of, late_after_s
from slurm_watchdog.analysis.progress_limit import STARTS, saves_now
from slurm_watchdog.analysis.rank_activity import FALLEN_POWER
from slurm_watchdog.analysis.rank_motion import STILL_BYTES_S, STILL_CPU
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, RankPlace, locate, normal_file, place_of
from slurm_watchdog.diagnose.stacks.spinning import is_named_work
from slurm_watchdog.diagnose.stacks.vote import Vote, vote
from slurm_watchdog.diagnose.stacks.waiting import MAYBE_WAITING, ProcessKey, frames_key
from slurm_watchdog.knowledge.limits import most_odd
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import JobView, ProcessView, StackSnapshot, StillRow
from slurm_watchdog.model.evidence import Frame, ProcessStack, ThreadStack
from slurm_watchdog.model.incidents import Culprit, StackRequest
from slurm_watchdog.model.observations import Role

DUMPS, SPAN_S, APART_S = 3, 3.0, 2.0  # They prove it, over so long; so far apart that they can differ (MIN_APART_S).
SECOND_LOOK_DUMPS, SECOND_LOOK_S = 5, 9.0  # So many, over so long, before anything is done: a second look.
LEAST_UNANIMOUS = 3  # So many ranks in one collective, and one alone in another.
OTHERS_CPU = 0.1  # Cores, of all threads of a process that waits: watchdogs and monitors use a few hundredths.
CPU_GRAIN_S = 0.02  # CPU time is counted in hundredths of a second.
ENDLESS_SLEEP_S = 1800.0
"""The others give up before: PyTorch's time-out of a collective with gloo, as it ships (NCCL's is 600 s). What is tried
again, or polled, sleeps for a minute at most."""
LOCK_CALLS = frozenset({"futex", "futex_waitv", "semop", "semtimedop"})
"""Calls in which a thread waits for another one: as `syscalls` has them, but for locks on files."""
ACCEPT_CALLS = frozenset({"accept", "accept4"})
QUEUE_CALLS = LOCK_CALLS | {"poll", "ppoll", "select", "pselect6"}  # … and for a pipe of `multiprocessing`.
ANSWER_CALLS = frozenset(
    {"recvfrom", "recvmsg", "recvmmsg", "sendto", "sendmsg", "sendmmsg", "connect", "pread64", "preadv", "preadv2", "D"}
)
"""Calls in which a thread waits for one answer, of a server or a disk: where its peers' threads are in them too, all of
them fetch. In others (`epoll_wait`, `poll`, `read` of a device) threads of torch, NCCL and CUDA wait at all times."""
MAKES_SAMPLES = frozenset({"fetch", "__getitem__", "__getitems__", "__next__", "__iter__"})  # Below these is work.
TALK = frozenset({"ssl.py", "socket.py", "selectors.py", "subprocess.py", "client.py", "base_events.py"})
"""Files of the interpreter's library in which a thread waits for another program."""
SERVES = frozenset({"accept", "serve_forever"})  # Functions of them that wait for someone to come, and fetch nothing.
INSIDE = frozenset({Place.OTHER, Place.LOCK, Place.QUEUE, Place.DATALOADER})
"""What the frames of such a wait may mean, all the way out: anything else takes its time, or is another matter."""
INSIDE_A_PHASE = INSIDE | {Place.CHECKPOINT}
"""… of a rank that saves or evaluates, where nothing else is at work: who writes, or computes, is a thread, or a
process, that does something."""
IDLE_SPAN_S = 15.0  # From the first dump of what may take its time to the last: a writer that stutters does something.
SERVERS = ("pt_tcpstore", "pt_nccl_", "pt_elastic")  # Names (comm) of torch's threads that listen for others begin so.


class Proof(Struct):
    """Who keeps the others waiting."""

    culprits: tuple[Culprit, ...]
    voted: Vote
    late_s: float  # The step was late so long after the one before.
    dumps: int
    span_s: float  # Between the first and the last of them.

    @property
    def is_confirmed(self) -> bool:
        """Whether a second look has shown the same."""
        return self.dumps >= SECOND_LOOK_DUMPS and self.span_s >= SECOND_LOOK_S


class _Seen(Struct):
    """What the dumps of one row show."""

    job: JobView
    dumps: tuple[Mapping[ProcessKey, ProcessStack], ...]  # Oldest first.
    theirs: tuple[ProcessKey, ...]  # The ranks that wait for the others.
    since_s: float  # Age of the first.
    span_s: float  # From it to the last.
    inside: frozenset[Place] = INSIDE  # What the frames of a wait may mean.


def early_stacks(job: JobView, proven: Proof | None) -> StackRequest | None:
    """The next dump of a job that is late; None: none before the limit comes near. Once someone was seen to move,
    the step is merely slow; what five dumps have not proven has to wait for the limit."""
    row = job.row
    if not is_late(job) or _speaks_against(job) or (row is not None and row.over):
        return None
    may_prove = row is None or row.dumps < SECOND_LOOK_DUMPS or _row_s(row) < SPAN_S
    if not may_prove and (proven is None or proven.is_confirmed):
        return None
    last = row is not None and row.dumps == SECOND_LOOK_DUMPS - 1
    apart_s = max(APART_S, SECOND_LOOK_S - _row_s(row)) if last and row is not None else APART_S
    return StackRequest(job_id=job.job.job_id, apart_s=apart_s, early=True)


def proof_of_hang(job: JobView) -> Proof | None:
    """The proof, None while there is none."""
    row, progress, late_s = job.row, job.progress, late_after_s(job.progress)
    if row is None or row.over or row.dumps < DUMPS or progress is None or late_s is None or not is_late(job):
        return None
    span_s = _row_s(row)
    began_late = progress.age_s - row.snapshots[0].age_s >= late_s - 1.0
    if span_s < SPAN_S or not began_late or not is_unheard_of(progress) or _speaks_against(job):
        return None
    voted = vote(row.snapshots, job.ranks)
    culprits = _culprits(job, row.snapshots, voted, span_s, _wait_together)
    if not culprits:
        return None
    return Proof(culprits=culprits, voted=voted, late_s=late_s, dumps=row.dumps, span_s=span_s)


def who_never_joins(job: JobView, least_s: float) -> tuple[tuple[Culprit, ...], Vote, float] | None:
    """Of a run that has made no step: the few ranks that all others have waited for to join, with the vote and the
    seconds between the first dump and the last, at least `least_s`; None: it is not so, or not known. The proof is the
    same; a start that reads, compiles, downloads or sleeps for a while shows something of it in minutes."""
    dumps = job.snapshots
    if job.progress is not None or job.phase not in (None, STARTS) or len(dumps) < DUMPS or _speaks_against(job):
        return None
    span_s, voted = dumps[0].age_s - dumps[-1].age_s, vote(dumps, job.ranks)
    if span_s < least_s or voted.checkpointing or voted.patient:
        return None
    culprits = _culprits(job, dumps, voted, span_s, _wait_for_others_to_join, frozenset({"startup"}))
    return (culprits, voted, span_s) if culprits else None


def nothing_at_work(job: JobView, voted: Vote) -> bool:
    """Whether who keeps the others waiting in an evaluation, or below a function that saves, stands in a lock of its
    own process or in a sleep that outlasts the others, and nothing is at work there, for a quarter of a minute."""
    dumps = job.snapshots
    if len(dumps) < DUMPS or _is_unknown(job):
        return False
    span_s = dumps[0].age_s - dumps[-1].age_s
    if span_s < IDLE_SPAN_S:
        return False
    return bool(_culprits(job, dumps, voted, span_s, _wait_together, frozenset({"evaluation"}), INSIDE_A_PHASE))


def _row_s(row: StillRow) -> float:
    return row.snapshots[0].age_s - row.snapshots[-1].age_s


def _speaks_against(job: JobView) -> bool:
    """Whether something is not known of this job, or shows that it does something else than to train."""
    return _is_unknown(job) or saves_now(job)


def _is_unknown(job: JobView) -> bool:
    """Whether something is not known of this job, stands on storage, or is over."""
    ranks = job.ranks
    unknown = job.silent_nodes or job.unlisted or not ranks or not all(rank.alive for rank in ranks)
    if unknown or not job.every_rank_known or {rank.node for rank in ranks} < set(job.job.nodes):
        return True
    held = any(each.alive and (is_on_storage(each) or is_held(each)) for each in job.processes)
    return held or has_ended(job) or job.renewed


def _culprits(
    job: JobView,
    snapshots: Sequence[StackSnapshot],
    voted: Vote,
    span_s: float,
    wait_together: Callable[[Sequence[RankPlace]], bool],
    usual: frozenset[str] = frozenset(),
    inside: frozenset[Place] = INSIDE,
) -> tuple[Culprit, ...]:
    outside = {(each.node, each.rank, each.pid) for each in voted.outside}
    few = len(outside) <= most_odd(len(job.ranks)) and len(outside) == len(voted.outside)
    if not outside or not few or voted.moving is not False or not voted.waiting or voted.undumped or voted.missing:
        return ()
    dumps = tuple({(s.node, s.pid, s.start_ticks): s for s in dump.stacks} for dump in snapshots)
    ranks = [rank.key for rank in job.ranks]
    if any(key not in dump for dump in dumps for key in ranks):
        return ()
    places = {key: locate(dumps[-1][key]) for key in ranks}
    theirs = tuple(key for key in ranks if (key[0], places[key].rank, key[1]) not in outside)
    if not wait_together([places[key] for key in theirs]) or any(places[key].contexts - usual for key in ranks):
        return ()
    if not all(_moves_nothing(dumps[0][key], dumps[-1][key], span_s) for key in ranks) or _a_gpu_computes(job):
        return ()
    mine = [key for key in ranks if key not in theirs]
    if all(places[key].place in WAITS_FOR_PEERS for key in mine):
        idle = all(_uses_no_time(dumps[0][key], dumps[-1][key], span_s) for key in ranks)
        return voted.outside if idle and len(theirs) >= LEAST_UNANIMOUS else ()
    seen = _Seen(job=job, dumps=dumps, theirs=theirs, since_s=snapshots[0].age_s, span_s=span_s, inside=inside)
    return voted.outside if all(_is_stuck(seen, key) for key in mine) else ()


def _wait_together(places: Sequence[RankPlace]) -> bool:
    """Whether all of these stand in the same frames of one collective, or where one shows in DDP and NCCL."""
    return len({frames_key(each) for each in places}) == 1 and places[0].place in (
        (WAITS_FOR_PEERS - {Place.RENDEZVOUS}) | MAYBE_WAITING
    )


def _wait_for_others_to_join(places: Sequence[RankPlace]) -> bool:
    """Whether all of these do. The one that keeps the store stands in other frames than those who ask it."""
    return bool(places) and all(each.place is Place.RENDEZVOUS for each in places)


def _a_gpu_computes(job: JobView) -> bool:
    """Whether a GPU of it draws nearly what it draws in training."""
    known = [(each.view.gpu.power_w, each.view.gpu.usual_power_w) for each in job.gpus]
    return any(power is not None and usual is not None and power >= FALLEN_POWER * usual for power, usual in known)


def _moves_nothing(first: ProcessStack, last: ProcessStack, span_s: float) -> bool:
    if first.io_bytes is None or last.io_bytes is None or last.state in (None, "D", "T", "t"):
        return False
    return last.io_bytes - first.io_bytes <= STILL_BYTES_S * span_s


def _uses_no_time(first: ProcessStack, last: ProcessStack, span_s: float) -> bool:
    if first.main_cpu_s is None or last.main_cpu_s is None or last.state == "R":
        return False
    own_s, all_s = last.main_cpu_s - first.main_cpu_s, last.cpu_s - first.cpu_s
    return own_s <= STILL_CPU * span_s + CPU_GRAIN_S and all_s <= OTHERS_CPU * span_s + CPU_GRAIN_S


def _is_stuck(seen: _Seen, key: ProcessKey) -> bool:
    """Whether the rank of `key` waits inside of its own process for what no one is about to give it."""
    first, last = seen.dumps[0][key], seen.dumps[-1][key]
    place = locate(last)
    by_queue = place.place in (Place.QUEUE, Place.DATALOADER)
    calls = {dump[key].syscall for dump in seen.dumps}
    waits = calls <= (QUEUE_CALLS if by_queue else LOCK_CALLS) and _is_inside(place.raw, seen.inside)
    still = (waits or all(_sleeps(dump[key]) for dump in seen.dumps)) and _uses_no_time(first, last, seen.span_s)
    if not still or not _threads_rest(first, last, [seen.dumps[-1][each] for each in seen.theirs]):
        return False
    beside = [
        each for each in seen.job.processes if each.alive and each.node == key[0] and each.process.role is not Role.RANK
    ]
    mine = [each for each in beside if each.process.rank in (None, place.rank)]
    if not all(_rests(each, seen.since_s) for each in mine):
        return False
    return place.place is not Place.DATALOADER or _workers_rest(seen, place.rank, mine)


def _workers_rest(seen: _Seen, rank: int, mine: Iterable[ProcessView]) -> bool:
    """Whether every worker of this rank's data loader, of which there is one at least, waits for work or in a lock."""
    last = seen.dumps[-1].values()
    theirs = [s for s in last if s.role is Role.WORKER and s.rank != rank and s.error is None]
    workers = [each for each in mine if each.process.role is Role.WORKER]
    dumps = (seen.dumps[0], seen.dumps[-1])
    return bool(workers) and all(
        _worker_rests([dump.get(each.key) for dump in dumps], theirs, seen.span_s) for each in workers
    )


def _is_inside(frames: Iterable[Frame], places: frozenset[Place] = INSIDE) -> bool:
    """Whether these frames, outermost included, tell of nothing but a wait inside of the process; names of functions
    that tell of work are an objection outside of a phase that has a name."""
    frames = tuple(frames)
    if any(place_of(each.function, each.file) not in places for each in frames):
        return False
    return Place.CHECKPOINT in places or not is_named_work(frames)


def _talks(frames: Iterable[Frame]) -> bool:
    """Whether these frames are about someone outside of the process, who is asked for something."""
    frames = tuple(frames)
    files = [normal_file(frame.file).rpartition("/")[2] in TALK for frame in frames]
    serves = next((n for n, each in enumerate(frames) if each.function.rpartition(".")[2] in SERVES), None)
    return any(files) and (serves is None or not all(files[:serves]))


def _threads_rest(first: ProcessStack, last: ProcessStack, peers: Sequence[ProcessStack]) -> bool:
    """Whether no thread of this process, beside its main one, fetches anything or does what no peer's thread does."""
    usual = {_frames(thread) for peer in peers for thread in peer.threads}
    before = {_frames(thread) for thread in first.threads}
    for thread in last.threads:
        if not thread.frames or thread.thread_id == last.pid or thread.name == "MainThread":
            continue
        rests = _frames(thread) in before and _is_inside(thread.frames)
        if _talks(thread.frames) or not (rests or _frames(thread) in usual):
            return False
    mine, theirs = _calls(last), [calls for peer in peers if (calls := _calls(peer)) is not None]
    if mine is None or not theirs or not mine.keys().isdisjoint(ANSWER_CALLS):
        return False
    return all(count <= max(each[call] for each in theirs) for call, count in mine.items() if call not in LOCK_CALLS)


def _frames(thread: ThreadStack) -> tuple[tuple[str, str], ...]:
    return tuple((frame.function, frame.file) for frame in thread.frames)


def _calls(stack: ProcessStack) -> Counter[str] | None:
    """System calls of its threads, and in `D` those that wait for a disk; None: not known."""
    if stack.others is None:
        return None
    found: Counter[str] = Counter()
    for row in stack.others:
        if not row.name.startswith(SERVERS):
            found["D" if row.state == "D" else row.call] += row.threads
    return found


def _sleeps(stack: ProcessStack) -> bool:
    """Whether no one will live to see its main thread wake by itself."""
    return stack.sleep_s is not None and stack.sleep_s >= ENDLESS_SLEEP_S


def _rests(process: ProcessView, since_s: float) -> bool:
    """Whether this process is known to have done nothing for so long."""
    sleeps = process.process.state in ("S", "I") and process.process.blocked is None
    return sleeps and process.worked_age_s is not None and process.worked_age_s >= since_s


def _worker_rests(dumps: Sequence[ProcessStack | None], theirs: Sequence[ProcessStack], span_s: float) -> bool:
    """Whether a worker of a data loader waits for work, as those of the waiting ranks do, or in a lock; and no thread
    of it does what none of theirs does."""
    first, last = dumps[0], dumps[-1]
    if first is None or last is None or last.error is not None or first.error is not None:
        return False
    if not _moves_nothing(first, last, span_s) or not _uses_no_time(first, last, span_s):
        return False
    place = locate(last)
    if frames_key(locate(first)) != frames_key(place):
        return False
    sleeps = _sleeps(first) and _sleeps(last)
    if {first.state, last.state} != {"S"} or not (sleeps or _is_inside(place.raw)):
        return False
    makes = any(frame.function.rpartition(".")[2] in MAKES_SAMPLES for frame in place.raw)
    in_locks = last.others is not None and all(each.call in LOCK_CALLS and each.state != "D" for each in last.others)
    inside = all(_is_inside(each.frames) for each in last.threads if each.thread_id != last.pid)
    if not (in_locks and inside) and not _threads_rest(first, last, theirs):
        return False
    if makes and not all(each.call in LOCK_CALLS | ACCEPT_CALLS for each in last.others or ()):
        return False  # a thread of it may be what fetches the sample, in whatever call
    idle_in = {frames_key(locate(each)) for each in theirs}
    locked = sleeps or (first.syscall in LOCK_CALLS and last.syscall in LOCK_CALLS)
    by_pipe = last.syscall in QUEUE_CALLS or (last.syscall == "read" and "pipe" in (last.wchan or ""))
    return locked or (frames_key(place) in idle_in and by_pipe and not makes)
