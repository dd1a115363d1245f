"""What reports say of one run, taken into it: its processes, its logs, its checkpoints, its stacks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from slurm_watchdog.analysis import rank_motion
from slurm_watchdog.analysis.progress_limit import STARTS
from slurm_watchdog.base.capped import put_newest
from slurm_watchdog.controller.state import wait_tally
from slurm_watchdog.controller.state.progress_clock import (
    Stretch,
    apply_loss,
    apply_step,
    counter_of,
    lines_of,
    main_clock,
    main_counter,
)
from slurm_watchdog.controller.state.run import (
    KEPT_ERRORS,
    KEPT_LOGS,
    LOGS_OF_NODE,
    MAX_DIRECTORIES,
    OFFSETS_OF_NODE,
    Run,
)
from slurm_watchdog.controller.state.run_view import snapshot_views
from slurm_watchdog.controller.state.wait_tally import Idle
from slurm_watchdog.diagnose.logs.root_cause import logged_error
from slurm_watchdog.diagnose.stacks.spinning import follow
from slurm_watchdog.diagnose.stacks.vote import vote
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.observations import Checkpoint, Event, EventKind, LogFile, Process, Role
from slurm_watchdog.model.slurm import SlurmJob

KEPT_GONE_S = 3600.0  # A rank or worker that is gone is remembered this long, so that its death is reported.
GONE_OF_ROLE = 256  # … of one node so many ranks, and so many workers. The oldest are forgotten first.
GONE_OF_RUN, GONE_AT_LEAST = 65_536, 16  # … of a whole run, in equal shares of its nodes, which are at least 16.
MAX_PATH = 4096  # Characters of a file's name that is remembered; linux/limits.h.
MAX_LAST_WORDS = 30


def note_process(run: Run, key: ProcessKey, process: Process, made_at: float) -> None:
    """One process as its node sees it now."""
    before = run.processes.get(key)
    if before is None:
        run.is_due = True
        run.on_node.setdefault(key[0], {})[key] = None
        run.order = ()
    dead_at = None
    if process.state in ("Z", "X"):
        dead_at = made_at if before is None or before[2] is None else before[2]
    run.processes[key] = (process, made_at, dead_at)
    if process.blocked is not None:
        run.blocked.add(key)
    elif run.blocked:
        run.blocked.discard(key)


def note_look(run: Run, key: ProcessKey, process: Process, idle: Idle | None, made_at: float, *, trains: bool) -> None:
    """How a rank waits; `idle`: the share in which its GPU did nothing, in how many looks. `trains`: the training is in
    no phase."""
    if process.rank is None or process.state in ("Z", "X") or (run.steps and process.step_id not in run.steps):
        return
    if not trains:
        run.waits.interrupt(key)
    elif run.waits.note(key, process.rank, made_at, process.runnable_s, process.runnable_age_s or 0.0, idle):
        run.note(is_number=True)


def note_absent(run: Run, node: str, seen: set[ProcessKey], made_at: float, unread: Collection[int] = ()) -> None:
    """The processes of this run on a node that its report does not hold any more. Ranks and workers are gone
    since then, and remembered for an hour; anything else (a shell, a compiler) is forgotten: jobs of
    thousands of short processes are no rarity. Of those with a number in `unread` nothing is known at this moment."""
    mine, gone = run.on_node.setdefault(node, {}), dict[Role, list[tuple[float, ProcessKey]]]()
    for key in () if len(mine) == len(seen) else sorted(each for each in mine.keys() - seen if each[1] not in unread):
        run.is_due = True
        process, seen_at, gone_at = run.processes[key]
        gone_since = made_at if gone_at is None else gone_at
        if process.role is Role.HELPER or made_at - gone_since > KEPT_GONE_S:
            run.forget(key)
            continue
        if process.state == "Z" and process.blocked is not None:  # what kept it from ending has let it
            process = replace(process, blocked=None)
            run.blocked.discard(key)
        run.processes[key] = (process, seen_at, gone_since)
        gone.setdefault(process.role, []).append((gone_since, key))
    most = max(GONE_AT_LEAST, min(GONE_OF_ROLE, GONE_OF_RUN // max(1, len(run.job.nodes))))
    for some in gone.values():
        for _, key in sorted(some)[:-most]:
            run.forget(key)


def only_trains(run: Run, keys: Iterable[ProcessKey]) -> bool:
    """Whether living ranks are among these processes, and all of them of steps that are known to be the training: then
    nothing has changed."""
    living = [process for process, _, gone_at in map(run.processes.__getitem__, keys) if gone_at is None]
    steps = {process.step_id for process in living if process.role is Role.RANK}
    return bool(steps) and steps <= run.steps


def note_event(run: Run, node: str, event: Event, made_at: float) -> bool:
    """One line of a log of this run, as an agent read it. Returns whether it is a plain step: one more of a count that
    rises, in no phase, with nothing that it would refute."""
    at = made_at - max(0.0, event.age_s)
    plain = True
    for each in lines_of(event):
        plain = _is_plain_step(run, each) and plain
        _note_event(run, node, each, at)
    return plain


def _is_plain_step(run: Run, event: Event) -> bool:
    clock = run.clocks.get(counter_of(event)) if event.kind is EventKind.PROGRESS else None
    number = event.count if event.step is None else event.step
    if clock is None or number is None or number <= clock.count or not clock.rose:
        return False
    if event.backlog or event.initial or event.phase or event.loss_is_no_number or clock.lower is not None:
        return False
    return not (run.snapshots or run.row or run.collectives or run.own_words[1]) and not run.phases.is_open


def _note_event(run: Run, node: str, event: Event, at: float) -> None:
    if at < run.valid_from or not run.started:
        if event.kind is EventKind.ERROR and not event.backlog:
            note_last_words(run, node, at, event)
        elif event.kind is EventKind.PROGRESS and event.step is not None and not event.backlog:
            note_last_steps(run, event, at)
        return
    its_own = run.unseen and event.kind is EventKind.ERROR and _is_named_after(event.source, run.job)
    of_run_before = event.kind is EventKind.ERROR or (event.kind is EventKind.PROGRESS and run.job.restarts > 0)
    if event.backlog and not its_own and of_run_before:
        return
    if event.kind is EventKind.PROGRESS and (event.step is not None or event.count is not None):
        if at >= run.steps_from:
            _note_progress(run, node, event, at)
    elif event.kind is EventKind.CHECKPOINT:
        _note_saved(run, node, event, at)
    elif event.kind is EventKind.PHASE and event.phase:
        run.phases.announce(node, event, at, main_counter(run.clocks))
        if event.phase == STARTS and run.motion is not None:
            # What was proven before it is no proof that this start is over.
            run.motion = rank_motion.started(run.motion)
    elif event.kind is EventKind.ERROR:
        clock = main_clock(run.clocks)
        rose_at = clock.rose_at if clock is not None and clock.seen > 1 else None
        run.errors.add(node, at, event, rose_at)


def _note_saved(run: Run, node: str, event: Event, at: float) -> None:
    """A checkpoint is complete, as a log or the disk says. Not every trainer says of which step."""
    by_disk = event.pattern in BY_DISK
    if by_disk:
        run.phases.complete(event.source, event.step, at)
    ended = not by_disk and run.phases.end(node, event, at)
    if event.step is None:
        if ended or by_disk:
            run.note_save(at)
    elif run.checkpoint is None or at >= run.checkpoint[1]:
        if run.checkpoint is not None and event.step > run.checkpoint[0] and at > run.checkpoint[1]:
            run.checkpoint_intervals_s.append(at - run.checkpoint[1])
        if ended or by_disk or run.checkpoint is None or event.step > run.checkpoint[0]:
            run.note_save(at)
        run.checkpoint = (event.step, at)


def _note_progress(run: Run, node: str, event: Event, at: float) -> None:
    troubled_at = run.troubled_at if at >= run.troubled_from else float("-inf")
    run.clocks_before = {}
    lately = run.phases.lately(run.rose_at, at, run.saved_at, run.growing_at)
    stretch = Stretch(troubled_at, run.saved_at, lately)
    if apply_step(run.clocks, event, at, stretch):
        main = main_counter(run.clocks)
        if main is not None and main[0] == counter_of(event):
            run.phases.step(node, event, at, main[1])
        run.forget_dumps(at)
        run.collectives, run.own_words = (), (0.0, ())
        run.motion = None if run.motion is None else rank_motion.stepped(run.motion)
        if run.stepped_at is None and any(clock.rose for clock in run.clocks.values()):
            run.stepped_at = at
        if event.phase:  # a bar inside of the training's: the next step ends it
            run.phases.announce(node, event, at, main)
    apply_loss(run.clocks, event, at)


def _is_named_after(path: str, job: SlurmJob) -> bool:
    """Whether the file has the job's number in its name, as Slurm's default has: then no one else wrote its lines."""
    numbers = {job.process_id, job.job_id.partition("_")[0]}
    return bool(numbers & set(re.findall(r"\d+", path.rpartition("/")[2])))


def note_last_words(run: Run, node: str, at: float, event: Event) -> None:
    """An error line that comes after the listing that showed the next run: it is of the run before, as far as
    is known."""
    if not run.past:
        return
    if len(run.early) < MAX_LAST_WORDS:
        run.early.append((node, at, event))
    last = run.past[-1]
    if last.began_at <= at and len(last.errors) < KEPT_ERRORS + MAX_LAST_WORDS:
        run.amend_last(errors=(*last.errors, logged_error(event, node, at)))


def note_last_steps(run: Run, event: Event, at: float) -> None:
    """A step that comes after the listing that showed the next run: the run before made it while it was being ended."""
    if not run.past or not run.clocks_before:
        return
    apply_step(run.clocks_before, event, at, Stretch(troubled_at=float("inf")))
    last, main = run.past[-1], main_clock(run.clocks_before)
    if main is not None and main.is_step and last.last_step is not None and main.step > last.last_step:
        run.amend_last(last_step=main.step)


def note_log(run: Run, node: str, log: LogFile, at: float) -> bool:
    """A file of the run as an agent sees it now. Returns whether it is as before, but for how far it has grown."""
    key = (node, log.path)
    if len(log.path) > MAX_PATH:
        return True
    is_back = log.error is None and run.unread.pop(node, None) is not None
    if log.offset is not None:
        put_newest(run.log_offsets.setdefault(node, {}), log.path, log.offset, OFFSETS_OF_NODE)
    if key not in run.logs and (len(run.logs) >= KEPT_LOGS or sum(of == node for of, _ in run.logs) >= LOGS_OF_NODE):
        run.logs_missed = True
        return False
    before = run.logs.get(key)
    run.logs[key] = (log, at)
    return not is_back and before is not None and _log_class(before[0]) == _log_class(log)


def _log_class(log: LogFile) -> tuple[object, ...]:
    return log.error, log.growth_age_s is None, bool(log.lag_bytes), log.skipped_bytes, log.framework


BY_DISK = frozenset({"directory", "tracker"})  # Patterns of events about the disk: see agent.collectors.checkpoint.
SEEN_LATE_S = 60.0  # What a look does not show was not complete so long before: clients' directories are old (nfs(5)).
EARLIER_CHECKPOINTS = 32  # Of a run: damaged ones follow until a person restarts a job whose loss went bad.


def note_on_disk(run: Run, node: str, found: Checkpoint, at: float) -> bool:
    """The checkpoints in one directory as an agent sees them now. One more that is complete sets the clock to when it
    was, as a line in the log does that says so: the step after it could not begin before. One that the log has reported
    did that already, and one beyond the run's step is another training's. Returns whether it is as before."""
    if not run.started:
        return True
    looked_at = at - max(0.0, found.looked_age_s)
    if found.writing:
        run.growing_at = looked_at
    if (found.path is None and found.step is None) or len(found.directory) > MAX_PATH:
        return not found.writing
    before, clock = run.disk_steps.get(found.directory), main_clock(run.clocks)
    put_newest(run.disk_steps, found.directory, (found.step, looked_at), MAX_DIRECTORIES)
    if found.path is not None and found.step is not None:
        put_newest(run.complete_on_disk, found.path, found, EARLIER_CHECKPOINTS)
    same = before is not None and before[0] == found.step and not found.writing
    if clock is not None and clock.is_step and found.step is not None and found.step > clock.step + clock.stride:
        return same
    complete_at = at - max(0.0, found.age_s or 0.0)
    if complete_at >= run.valid_from:
        run.phases.complete(found.path or found.directory, found.step, complete_at)
        if found.age_s is not None:
            run.note_save(complete_at)
    logged = run.checkpoint is not None and found.step is not None and run.checkpoint[0] >= found.step
    if before is not None and found.step is not None and not logged and found.step > (before[0] or -1):
        run.note_save(max(complete_at, before[1] - SEEN_LATE_S))  # the server's clock may be slow
    return same


def note_early_dump(
    run: Run, stacks: tuple[ProcessStack, ...], silent: tuple[str, ...], at: float, asked_at: float
) -> None:
    """One dump of all ranks that was asked for because the step was late by its own measure. It belongs to the row
    that may prove a hang, and to nothing else: what is judged by the limit of a job rests on dumps that were taken
    near that limit. If a step has come since it was asked for, it shows what was before that."""
    clock = main_clock(run.clocks)
    if clock is not None and clock.rose_at <= asked_at:
        run.row = wait_tally.follow_row(run.row, (at, stacks, silent))
        run.is_due = True


def note_snapshot(run: Run, stacks: tuple[ProcessStack, ...], silent: tuple[str, ...], at: float) -> None:
    """One dump of all ranks."""
    if run.row is not None:
        run.row = wait_tally.follow_row(run.row, (at, stacks, silent))
    before = run.steady if run.snapshots else {}
    run.snapshots.append((at, stacks, silent))
    run.is_due = True
    dumps = snapshot_views(run, at)
    voted = vote(dumps)
    run.motion = rank_motion.follow(run.motion, dumps[-2] if len(dumps) > 1 else None, dumps[-1], at)
    outside = {(each.node, each.pid) for each in voted.outside}
    run.steady = follow(before, [each for each in stacks if (each.node, each.pid) in outside], at)
    if voted.moving:
        run.collectives = ()  # they may be further by now
    run.in_saver = voted.checkpointing
    if voted.checkpointing and voted.moving is not False:
        run.saving_at = at
