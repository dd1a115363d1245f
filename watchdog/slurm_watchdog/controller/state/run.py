"""One run of one job, (job id, restart count), and which of its Slurm steps is the training."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.analysis import rank_motion as motion
from slurm_watchdog.controller.state.counter_clock import Counter, CounterClock
from slurm_watchdog.controller.state.phases import Announcement, Phases
from slurm_watchdog.controller.state.progress_clock import read_progress
from slurm_watchdog.controller.state.training_steps import idle_steps, living_steps, training_steps
from slurm_watchdog.controller.state.wait_tally import Row, WaitTally
from slurm_watchdog.diagnose.logs.root_cause import logged_error
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey
from slurm_watchdog.model.cluster_view import RankGpu
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import OwnWords, ProcessStack
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.observations import Checkpoint, Event, LogFile, Process, Role
from slurm_watchdog.model.past_runs import Motion, PastRun, RankLocation, Steady
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.model.supervisor import BATCH_STEP, SupervisorStatus

KEPT_ERRORS = 60  # Lines: half of them the first ones since the last step, half the last ones.
MAX_PATTERNS = 64
MAX_RANKS = 262_144  # Ranks counted, of all patterns: one that each of a large job logs in several lines has room.


@dataclass
class RunErrors:
    """What was logged, in the order of its coming."""

    lines: list[tuple[str, float, Event]] = field(default_factory=list)  # (node that read it, when, event).
    ranks: dict[str, set[int]] = field(default_factory=dict)  # Pattern -> the ranks that said so since the last step.
    counted: int = 0  # Entries of `ranks`.
    noted: int = 0  # So many lines have come.

    def add(self, node: str, at: float, event: Event, rose_at: float | None) -> None:
        """One line more; `rose_at` is when a step was last seen to rise: older lines make room first."""
        if rose_at is not None and self.lines and self.lines[-1][1] < rose_at <= at:
            self.ranks.clear()
            self.counted = 0
        pattern = event.pattern or ""
        if event.rank is not None and (pattern in self.ranks or len(self.ranks) < MAX_PATTERNS):
            named = self.ranks.setdefault(pattern, set())
            if event.rank not in named and self.counted < MAX_RANKS:
                self.counted += 1
                named.add(event.rank)
        self.noted += 1
        self.lines.append((node, at, event))
        if len(self.lines) > KEPT_ERRORS:
            old = rose_at is not None and self.lines[0][1] < rose_at
            del self.lines[0 if old else KEPT_ERRORS // 2]

    def ranks_by_pattern(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(pattern, ranks in order)."""
        return tuple((pattern, tuple(sorted(named))) for pattern, named in self.ranks.items())


KEPT_PAST = 10
KEPT_CHECKPOINTS = 20
SAME_SAVE_S = 30.0  # The log and the disk tell of the same checkpoint within this time.
SAME_REPORT_S = 2.0  # What each report repeats has a date of about so much the same.
KEPT_SNAPSHOTS = 3
KEPT_LOGS, LOGS_OF_NODE = 256, 64  # Files of a run, and of a node in it: its outputs, and one each of some ranks.
OFFSETS_OF_NODE = 128  # Files of which is known how far they were read; a run that restarted knows those before, too.
LOG_STARTS = 64  # Files in which the run before wrote: an agent takes no more (slurm_watchdog.agent.delivery.channel).
MAX_DIRECTORIES = 256  # With checkpoints. An agent looks at 8 of a job.
START_SLACK_S = 3.0  # Slurm gives start times in whole seconds, by the clock of its own machine.


@dataclass(slots=True)
class Run:
    """One run of one job."""

    job: SlurmJob
    began_at: float  # Since when this run is known, or the last grace.
    valid_from: float  # Events before this belong to the run before.
    processes: dict[ProcessKey, tuple[Process, float, float | None]] = field(default_factory=dict)
    """(as last seen, seen at, gone since). Those that live are rows of a report, which has a bound; of those that have
    ended ranks and workers are remembered."""
    computes_on: dict[ProcessKey, tuple[str, ...]] = field(default_factory=dict)  # UUIDs of the GPUs, as last seen.
    unlisted: dict[str, int] = field(default_factory=dict)  # Node -> processes there that are not listed.
    on_node: dict[str, dict[ProcessKey, None]] = field(default_factory=dict)
    """Node -> the keys of `processes` that are there. For eight of them a set takes 728 bytes, and this 352."""
    gpus_on: dict[str, tuple[NodeView, tuple[RankGpu, ...]]] = field(default_factory=dict)
    """Node -> a view of it, and the GPUs that the ranks there compute on by it."""
    components: dict[str, set[str]] = field(default_factory=dict)
    """Of a heterogeneous job: node -> the numbers of its components under which its agent knows processes there."""
    order: tuple[ProcessKey, ...] = ()  # The keys of `processes`, sorted; empty: to be sorted again.
    blocked: set[ProcessKey] = field(default_factory=set)  # Those with a thread that waits in one call.
    is_due: bool = True  # Something has come since it was judged last.
    has_numbers: bool = False  # Likewise, but only steps and numbers.
    numbers_wait_s: float = 0.0  # So long they may wait, as the run was judged last.
    left_over: frozenset[ProcessKey] = frozenset()  # Processes of the run before that are still ending.
    step_id: str | None = None  # The Slurm step that the clocks are about, as far as is known.
    steps: frozenset[str | None] = frozenset()  # It, and those whose ranks are of the same world: see `training_steps`.
    steps_from: float = float("-inf")  # Counts that were read before this belong to the Slurm step, or start, before.
    starts: int | None = None  # How often its supervisor has started the command; None: as far as is known it has none.
    begun_ticks: int = 0  # Ranks in the batch step that are older are of an earlier start: see SupervisorStatus.
    clocks: dict[Counter, CounterClock] = field(default_factory=dict)
    clocks_before: dict[Counter, CounterClock] = field(default_factory=dict)
    """Those of the run before, until this one counts: a run that is being ended may make steps for as long as
    it is left."""
    grace_from: float = float("-inf")
    troubled_at: float = float("-inf")  # When an incident of it was open last: such a step teaches nothing.
    troubled_from: float = float("-inf")  # Since when: steps before it are reported again to a new controller.
    started: bool = False  # Whether it has begun: until then every line is of the run before, which is completing.
    unseen: bool = False  # It was never seen running, and has run.
    inactive_since: float | None = None
    touched_at: float | None = None  # When an action of ours first touched it: what it says after that is our doing.
    log_starts: dict[str, int] = field(default_factory=dict)  # Where its lines begin in files of the run before.
    log_offsets: dict[str, dict[str, int]] = field(default_factory=dict)
    """How far each node has read each file, by node and path: less than before where a file was cut off."""
    logs: dict[tuple[str, str], tuple[LogFile, float]] = field(default_factory=dict)
    """(node, path) -> the file as it was seen last, and when."""
    unread: dict[str, float] = field(default_factory=dict)  # Node -> when it returned, until it reads its logs.
    logs_missed: bool = False  # There are more files than were taken.
    phases: Phases = field(default_factory=Phases)  # What its logs have announced since the last step.
    in_saver: bool = False  # The newest dump since the last step shows a rank that saves.
    checkpoint: tuple[int, float] | None = None
    stepped_at: float | None = None  # When its step, or another count, was first seen to rise.
    saved_at: float = float("-inf")  # When a new checkpoint was complete: the step after it could not begin before.
    save_intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_CHECKPOINTS))
    """Times between these moments."""
    checkpoint_intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_CHECKPOINTS))
    past: tuple[PastRun, ...] = ()  # The runs before this one, oldest first.
    early: list[tuple[str, float, Event]] = field(default_factory=list)
    """Error lines that came before this run was seen to begin."""
    complete_on_disk: dict[str, Checkpoint] = field(default_factory=dict)
    """Path -> complete checkpoint as it was seen, the one seen last at the end."""
    disk_steps: dict[str, tuple[int | None, float]] = field(default_factory=dict)
    """Directory -> step of the newest complete checkpoint that an agent saw there, and when it was seen last."""
    growing_at: float | None = None  # When files of a checkpoint were last seen to grow.
    saving_at: float | None = None  # When its stacks last showed a rank that saves and moves.
    errors: RunErrors = field(default_factory=RunErrors)
    snapshots: deque[tuple[float, tuple[ProcessStack, ...], tuple[str, ...]]] = field(
        default_factory=lambda: deque(maxlen=KEPT_SNAPSHOTS)
    )
    collectives: tuple[RecordSet, ...] = ()  # What its ranks recorded of their collectives since the last step.
    own_words: tuple[float, tuple[OwnWords, ...]] = (0.0, ())
    """When they were as old as they say, and what its ranks wrote of their own ends."""
    row: Row | None = None  # Of the dumps since the last step, from those that were taken because it was late.
    steady: dict[ProcessKey, Steady] = field(default_factory=dict)
    """What the dumps since the last step say of ranks that may spin in Python; nothing without them."""
    motion: Motion | None = None  # What the dumps of the whole run say of a loop whose steps cannot be read.
    waits: WaitTally = field(default_factory=WaitTally)  # How often its ranks were found waiting.

    @property
    def rose_at(self) -> float:
        """When a count last rose, as far as is known."""
        return max((clock.rose_at for clock in self.clocks.values()), default=float("-inf"))

    @property
    def moved_at(self) -> tuple[float, float, float]:
        """From when the ages count that plain news move: of its steps, of what its logs grew, and of their reading."""
        logs = self.logs.values()
        grew_at = max((at - log.growth_age_s for log, at in logs if log.growth_age_s is not None), default=0.0)
        return (
            max(self.rose_at, self.saved_at, self.grace_from),
            grew_at,
            max((at for _, at in logs), default=0.0),
        )

    def note(self, is_number: bool) -> None:
        """Something of it has come: steps and numbers of a run may wait for others."""
        if is_number and self.numbers_wait_s:
            self.has_numbers = True
        else:
            self.is_due = True

    def phase(self, now: float) -> Announcement | None:
        """What it is in at `now`, as its logs say; None: it trains, or nothing is known."""
        return self.phases.current(now, self.growing_at, in_saver=self.in_saver)

    def note_save(self, at: float) -> None:
        """A new checkpoint was complete at that moment, as its log or the disk says; what both say counts once. Where
        steps were made since, it says nothing of the present one."""
        if at <= self.saved_at + SAME_REPORT_S:
            return
        if at - self.saved_at >= SAME_SAVE_S and self.saved_at > float("-inf"):
            self.save_intervals_s.append(at - self.saved_at)
        if at > self.rose_at:
            self.forget_dumps(at)
        self.saved_at = at

    def forget_dumps(self, before: float = float("inf")) -> None:
        """A new step, a new checkpoint, a grace: what dumps before it showed does not count against it."""
        kept = [each for each in self.snapshots if each[0] > before]
        if self.row is not None and self.row.kept[0][0] <= before:
            self.row = None
        self.snapshots.clear()
        if kept:
            self.snapshots.extend(kept)
            return
        self.in_saver = False
        self.collectives, self.own_words = (), (0.0, ())
        self.motion = None if self.motion is None else motion.interrupted(self.motion)

    def amend_last(self, **changes: Any) -> None:
        """What is known now of the run before, which there has to be."""
        self.past = (*self.past[:-1], replace(self.past[-1], **changes))

    def forget(self, key: ProcessKey) -> None:
        """A process that is not remembered any more."""
        self.processes.pop(key, None)
        self.blocked.discard(key)
        self.computes_on.pop(key, None)
        self.gpus_on.pop(key[0], None)
        mine = self.on_node.get(key[0])
        if mine is not None:
            mine.pop(key, None)
        self.order = ()


def has_ranks(run: Run, node: str) -> bool:
    """Whether the run has, or may have, a rank on this node that lives: one that is known, or was not listed."""
    mine = (run.processes[key] for key in run.on_node.get(node, ()))
    return bool(run.unlisted.get(node)) or any(p.role is Role.RANK and gone_at is None for p, _, gone_at in mine)


def ids_on(run: Run, node: str) -> tuple[str, ...]:
    """Under which job ids the agent of a node knows the processes of this run."""
    return tuple(sorted(run.components.get(node, ()))) or (run.job.process_id,)


def started_at(job: SlurmJob, now: float, wall: float | None) -> float:
    """The moment of the run's start on our monotonic clock; without dates, the beginning of time."""
    if wall is None or job.start_at is None:
        return float("-inf")
    return now - max(0.0, wall - job.start_at) - START_SLACK_S


def past_run(run: Run, now: float) -> PastRun:
    """What is remembered of a run that is over."""
    progress = read_progress(run.clocks, None, run.grace_from, now)
    last_step = progress.step if progress is not None and progress.step_known else None
    last_increase_age_s = None if progress is None else progress.last_increase_age_s
    ranks = [process for process, _, _ in run.processes.values() if process.role is Role.RANK]
    return PastRun(
        restarts=run.job.restarts,
        began_at=run.began_at,
        ended_at=now if run.inactive_since is None else run.inactive_since,
        steps_seen=0 if progress is None else progress.steps_seen - 1,
        first_step=None if progress is None else progress.first_step,
        last_step=last_step,
        start_s=None if run.stepped_at is None else max(0.0, run.stepped_at - run.began_at),
        stride=1 if progress is None else progress.widest_stride,
        total_steps=None if progress is None else progress.total_steps,
        rose_at=None if last_increase_age_s is None else now - last_increase_age_s,
        step_log="" if progress is None else progress.source,
        step_s=None if progress is None else progress.step_s,
        checkpoint_step=_checkpoint_step(run, last_step),
        saved_at=None if run.saved_at == float("-inf") else run.saved_at,
        state=run.job.state,
        started_again=run.job.starts_again,
        log_read=bool(run.log_offsets or run.clocks or run.errors.lines),
        unseen=run.unseen,
        nodes=run.job.nodes,
        touched_at=run.touched_at,
        errors=tuple(logged_error(event, node, at) for node, at, event in run.errors.lines),
        error_ranks=run.errors.ranks_by_pattern(),
        # Those that were seen, or as many as their world size says.
        ranks=max([len({rank.rank for rank in ranks}), *(rank.world_size or 0 for rank in ranks)]),
        seats=_seats(run),
        batch_host=run.job.batch_host,
    )


def _seats(run: Run) -> tuple[RankLocation, ...]:
    """Of each rank the process that was seen last: a command that was started again has had others."""
    newest: dict[int, tuple[float, ProcessKey, float | None]] = {}
    for key, (process, seen_at, gone_at) in run.processes.items():
        if process.role is Role.RANK and process.rank is not None:
            before = newest.get(process.rank)
            if before is None or (seen_at, key) > before[:2]:
                newest[process.rank] = seen_at, key, gone_at
    ordered = sorted(newest.items(), key=lambda each: each[1][1])
    return tuple(RankLocation(rank, key[0], key[1], gone_at) for rank, (_, key, gone_at) in ordered)


def mark_unseen(run: Run) -> None:
    """This run began and ended between two listings: what was said a while after it was queued are its own words."""
    since = run.began_at + START_SLACK_S
    own = [each for each in run.early if each[1] > since]
    for node, at, event in own:
        run.errors.add(node, at, event, None)
    if own and run.past:
        run.amend_last(errors=tuple(error for error in run.past[-1].errors if error.at <= since))
    run.started = run.unseen = True


def _checkpoint_step(run: Run, last_step: int | None) -> int | None:
    """The newest complete checkpoint of what the log and the disk say; one above the last step is another
    training's."""
    steps = [*(step for step, _ in run.disk_steps.values()), *((run.checkpoint[0],) if run.checkpoint else ())]
    return max((each for each in steps if each is not None and (last_step is None or each <= last_step)), default=None)


def new_run(job: SlurmJob, now: float, before: Run | None, wall: float | None) -> Run:
    """The run that begins, with what is remembered of the one before."""
    started = job.state in RUNNING
    if before is not None and not before.started and job.restarts > before.job.restarts:
        mark_unseen(before)
    valid_from = now
    if started and (before is None or (wall is not None and job.start_at is not None)):
        valid_from = started_at(job, now, wall)
    run = Run(
        job=job,
        began_at=now,
        started=started,
        valid_from=valid_from,
        past=(*before.past, past_run(before, now))[-KEPT_PAST:] if before is not None and before.started else (),
        left_over=frozenset(before.processes) if before is not None else frozenset(),
        clocks_before=before.clocks if before is not None and before.started else {},
    )
    if before is not None:
        run.log_offsets = {node: dict(mine) for node, mine in before.log_offsets.items()}
        run.log_starts = _log_starts(before)
    return run


def _log_starts(before: Run) -> dict[str, int]:
    """How far each file has been read by whichever node has read most of it: the files that Slurm names
    first, then each node's in turn."""
    named, found = {before.job.stdout, before.job.stderr}, dict[str, int]()
    turns = (enumerate(mine.items()) for mine in before.log_offsets.values())
    for _, _, path, offset in sorted(
        (path not in named, turn, path, at) for mine in turns for turn, (path, at) in mine
    ):
        if path in found or len(found) < LOG_STARTS:
            found[path] = max(offset, found.get(path, 0))
    return found


def follow_training(run: Run, now: float, interval_s: float) -> None:
    """Where the batch script continues from one step to the next (its data, then the training), everything starts
    again. What was learnt of the steps before says nothing about how long the next program takes to start. The last
    lines of the one before may come with the next report only, and from another node. A rank that cannot be killed may
    stay of a step that was started again elsewhere; a step beside one that has all its ranks is a side step, unless
    that one does nothing beside it, or has half as many ranks."""
    living, (newest, steps) = living_steps(run.processes), training_steps(run.processes, run.steps)
    continues = run.step_id is None or run.step_id in steps
    if not living or (not continues and run.step_id in living and not _gives_way(run, steps)):
        return
    run.step_id, run.steps = newest, steps
    if not continues:
        _begin_again(run, now, interval_s)


def follow_start(run: Run, status: SupervisorStatus, now: float, interval_s: float) -> None:
    """The same where the supervisor has started a command again whose ranks are in the batch step: that keeps its id.
    Their processes on the batch host are known by their age."""
    before, run.starts = run.starts, status.starts
    if status.begun_ticks > run.begun_ticks:  # known a moment after the start is counted
        run.begun_ticks = status.begun_ticks
        for key in [key for key, (process, _, _) in run.processes.items() if is_of_earlier_start(run, key, process)]:
            run.forget(key)
    if before is None or status.starts <= before:
        return
    run.steps = frozenset()
    if run.step_id == BATCH_STEP:
        _begin_again(run, now, interval_s)


def is_of_earlier_start(run: Run, key: ProcessKey, process: Process) -> bool:
    """Whether this process was a rank, or its worker, before the supervisor started the command again."""
    in_batch = process.step_id == BATCH_STEP and process.role is not Role.HELPER and key[0] == run.job.batch_host
    return in_batch and key[2] < run.begun_ticks


def _begin_again(run: Run, now: float, interval_s: float) -> None:
    run.clocks.clear()
    run.forget_dumps()
    run.motion = None
    run.waits = WaitTally()
    run.phases, run.grace_from, run.steps_from = Phases(), now, now + interval_s
    run.logs.clear()
    run.logs_missed = False


def _gives_way(run: Run, steps: frozenset[str | None]) -> bool:
    """Whether what was the training so far has lost a rank, or is none beside `steps`."""
    ranks = [each for each in run.processes.values() if each[0].role is Role.RANK]
    mine = [gone_at for process, _, gone_at in ranks if process.step_id in run.steps]
    theirs = sum(1 for process, _, gone_at in ranks if process.step_id in steps and gone_at is None)
    lost = any(gone_at is not None for gone_at in mine)
    return lost or theirs >= 2 * len(mine) or run.steps <= idle_steps(run.processes)
