"""What a run died of, from the error lines that agents reported of it, and who is named. Pure.

The engine is that of `scan-log` (slurm_watchdog.diagnose.logs.verdict): cause before cascade, and no one
named where nothing names him.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import dead_for_s
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import EXCERPT_CHARS, duration, shortened
from slurm_watchdog.diagnose.logs import reported_run as agents
from slurm_watchdog.diagnose.logs.ranks import Ranks
from slurm_watchdog.diagnose.logs.reported_run import READ_APART_S, ReportedRun, reported
from slurm_watchdog.diagnose.logs.verdict import judge_errors
from slurm_watchdog.knowledge.launcher_exits import Ending
from slurm_watchdog.knowledge.log_signatures import LogTable, log_table
from slurm_watchdog.model.cluster_view import JobView, ProcessView
from slurm_watchdog.model.evidence import OwnWords
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.observations import Event
from slurm_watchdog.model.past_runs import LoggedError, PastRun, RankLocation
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.text import split_prefix

# The rank that left with exit code 0 while its peers trained: they end with errors about the connection to it, and
# no one logs that it left. srun reports every task of a step that ended otherwise, and torchrun's tables every rank of
# their nodes. Where they report all ranks but one, and that one was gone before them and said nothing, it is known. A
# rank of which nothing is reported may be one whose line is missing: one is named only if all others have theirs.
LEFT_FIRST = "exited with code 0 before its peers"
ORDER_SLACK_S = 1.0  # A rank may have ended so long before the report that says so (agent.service.OUT_OF_TURN_S).


def left_first(run: PastRun, lines: Sequence[LoggedError]) -> RankLocation | None:
    """The rank of `run` that ended so; None: there is none, or it is not known. `lines`: errors since the last step."""
    if run.total_steps is not None and run.last_step is not None and run.last_step >= run.total_steps:
        return None
    failed = _failed_ranks(reported(run, lines))
    absent = [seat for seat in run.seats if seat.rank not in failed]
    if len(absent) != 1 or len(failed) + 1 != run.ranks or len(run.seats) != run.ranks or run.ranks < 2:
        return None
    (left,) = absent
    others = [seat.gone_at for seat in run.seats if seat is not left and seat.gone_at is not None]
    if left.gone_at is None or any(at < left.gone_at - ORDER_SLACK_S for at in others):
        return None
    if any(said.rank == left.rank for said in agents.attributed_errors(replace(run, errors=tuple(lines)))):
        return None  # a victim that has handled its error
    # One that was gone while the others made steps is of an earlier start, or was not needed.
    return left if run.rose_at is None or left.gone_at >= run.rose_at - READ_APART_S else None


@lru_cache(maxsize=agents.MAX_RUNS_REMEMBERED)
def _failed_ranks(run: ReportedRun) -> frozenset[int]:
    """The ranks that are reported to have ended with another code than 0; none where reports may be partial."""
    ranks = agents.case_of(run).ranks
    if ranks.in_tables:
        return _failed_below_torchrun(run, ranks)
    if ranks.launcher or not ranks.tasks_are_ranks or not ranks.several_a_host:
        return frozenset()  # Slurm's tasks are, or may be, launchers of several ranks
    return frozenset(ranks.failed)


def _failed_below_torchrun(run: ReportedRun, ranks: Ranks) -> frozenset[int]:
    """Those in the tables, and those that torchrun itself ended, which not every release has in its table. None where
    a node has no table: its torchrun was ended from outside, and a rank of it may have left in order for that."""
    pids = [seat.pid for seat in run.seats]
    ended = {seat.rank for seat in run.seats if seat.pid in ranks.closed and pids.count(seat.pid) == 1}
    judged = {seat.node for seat in run.seats if seat.rank in ranks.in_tables}
    return frozenset(ranks.in_tables | ended) if all(seat.node in judged for seat in run.seats) else frozenset()


ABOUT_S = 60.0
"""A rank that raised an exception may take so long to end; what it wrote longer before is of another start."""
FIRST_S = 2.0  # Two reports of one moment differ by less: who wrote so much before all others was first.
SAID = 8


def words_of(job: JobView, rank: ProcessView) -> OwnWords | None:
    """What this rank, which is gone, wrote of its end; None where nothing is known."""
    for each in job.own_words:
        if (each.node, each.rank) == (rank.node, rank.process.rank):
            return each if abs(each.age_s - dead_for_s(rank)) <= ABOUT_S else None
    return None


def who_failed_first(job: JobView, dead: Sequence[ProcessView]) -> ProcessView | None:
    """Of those that are gone the one that wrote why before all others. None where none did, several at once, where it
    only says that it lost another one, or where a rank of another node was gone as early and said nothing."""
    wrote = [(words.age_s, rank) for rank in dead if (words := words_of(job, rank)) is not None]
    wrote.sort(key=lambda each: -each[0])
    if not wrote or (len(wrote) > 1 and wrote[0][0] - wrote[1][0] < FIRST_S):
        return None
    first = wrote[0][1]
    mute = [rank for rank in dead if rank.node != first.node and words_of(job, rank) is None]
    if any(dead_for_s(rank) >= dead_for_s(first) - FIRST_S for rank in mute):
        return None
    words = words_of(job, first)
    return None if words is None or _is_consequence(words.text) else first


def _is_consequence(text: str) -> bool:
    fact = parse_line(text)
    return fact is not None and fact.pattern in log_table().consequences


def facts_of_ends(job: JobView, dead: Sequence[ProcessView]) -> tuple[str, ...]:
    """A sentence for each of the first that wrote something."""
    wrote = [words for rank in dead if (words := words_of(job, rank)) is not None]
    wrote.sort(key=lambda each: -each.age_s)
    return tuple(f"rank {each.rank} on {each.node} wrote {each.age_s:.0f} s ago: {each.text}" for each in wrote[:SAID])


LEAST_SIGNAL = 128
"""Of codes from here on a shell says which signal it was: that is the launcher's to say, and may be its own deed."""


class Cause(Struct):
    """What the lines come to."""

    error: LoggedError  # The line that says most of the first failure.
    pattern: str
    node: str | None = None  # Where the rank that failed ran.
    rank: int | None = None
    pid: int | None = None
    only_consequence: bool = False  # No line says why; this is the first that says that something is wrong.
    alike: int = 0
    """Ranks that said or did the same, the first included, named or not; 0: no line names its rank."""
    followed: int = 0  # Further lines, of consequences or of later failures.
    suspects: tuple[Culprit, ...] = ()  # In a cascade of which no line says why: the few ranks that it points at.
    from_outside: bool = False  # Someone ended the run, and nothing had gone wrong before.
    how: str = ""
    """`was killed (SIGKILL)`, `exited with code 1`, by a launcher or Slurm, where the process itself said nothing."""

    @property
    def words(self) -> str:
        return log_table().means.get(self.pattern, self.pattern)


def find_cause(run: PastRun) -> Cause | None:
    """What went wrong since the last step of `run`; None if no error was logged since, or none that ended it.

    Where only consequences came after that step, their cause may have been read in another log shortly before: each
    agent reads when its time has come.
    """
    found = _cause_in(run, agents.lines_since_last_step(run))
    if found is None or not found.only_consequence or found.from_outside:
        return found
    wider = _cause_in(run, agents.lines_since_last_step(run, READ_APART_S))
    if wider is not None and not wider.only_consequence:
        return wider
    left = None if found.rank is not None or found.suspects else left_first(run, agents.lines_since_last_step(run))
    return found if left is None else replace(found, rank=left.rank, node=left.node, pid=left.pid, how=LEFT_FIRST)


def _cause_in(run: PastRun, lines: Sequence[LoggedError]) -> Cause | None:
    judged = _find_cause(reported(run, lines), log_table()) if lines else None
    return None if judged is None else replace(judged[1], error=lines[judged[0]])


@lru_cache(maxsize=agents.MAX_RUNS_REMEMBERED)
def _find_cause(run: ReportedRun, table: LogTable) -> tuple[int, Cause] | None:
    """(the place of the line that says most, the cause with its text alone). `table`: the rows in force."""
    verdict = judge_errors(agents.case_of(run))
    followed = len(run.lines) - 1
    if verdict is None:
        place = next((at for at, line in enumerate(run.lines) if line.pattern in table.from_outside), None)
        if place is None:
            return None
        line = run.lines[place]
        error = LoggedError(at=0.0, line=line.line)
        return place, Cause(
            error=error, pattern=line.pattern, only_consequence=True, followed=followed, from_outside=True
        )
    numbers = list(run.numbered())
    place = numbers.index(verdict.line) if verdict.line in numbers else 0
    line = run.lines[place]
    cause = Cause(
        error=LoggedError(at=0.0, line=line.line), pattern=verdict.name, only_consequence=True, followed=followed
    )
    if verdict.suspected:
        suspects = tuple(
            Culprit(rank=rank, node=agents.node_of(None, rank, line, run), reason=verdict.suspected)
            for rank in verdict.missing
        )
        return place, replace(cause, suspects=suspects)
    named = verdict.rank is not None or verdict.host is not None
    node = agents.node_of(verdict.host, verdict.rank, line, run) if named or verdict.explained else None
    return place, replace(
        cause,
        node=node,
        rank=verdict.rank,
        pid=agents.pid_of(verdict.rank, node, run),
        only_consequence=not verdict.explained,
        alike=max(len(verdict.first_ranks), verdict.alike),
        how=verdict.how,
    )


def running(job: JobView, now: float) -> PastRun:
    """The present run of a job in the shape of one that is over."""
    progress = job.progress
    steps = [c.step for c in job.checkpoints_on_disk if c.step is not None]
    steps += [job.checkpoint.step] if job.checkpoint is not None else []
    last_step = progress.step if progress is not None and progress.step_known else None
    return PastRun(
        restarts=job.job.restarts,
        began_at=now - job.run_age_s,
        ended_at=now,
        steps_seen=0 if progress is None else progress.steps_seen - 1,
        first_step=None if progress is None else progress.first_step,
        last_step=last_step,
        total_steps=None if progress is None else progress.total_steps,
        rose_at=None
        if progress is None or progress.last_increase_age_s is None
        else now - progress.last_increase_age_s,
        step_log="" if progress is None else progress.source,
        step_s=None if progress is None else progress.step_s,
        checkpoint_step=max((s for s in steps if last_step is None or s <= last_step), default=None),
        saved_at=None if job.saved_age_s is None else now - job.saved_age_s,
        state=job.job.state,
        log_read=progress is not None or bool(job.errors),
        touched_at=None if job.touched_age_s is None else now - job.touched_age_s,
        nodes=job.job.nodes,
        batch_host=job.job.batch_host,
        errors=tuple(logged_error(e.event, e.node, now - e.age_s) for e in job.errors),
        error_ranks=job.error_ranks,
        ranks=max([len(job.ranks), *(r.process.world_size or 0 for r in job.ranks)]),
        seats=tuple(
            RankLocation(r.process.rank, r.node, r.process.pid, None if r.gone_s is None else now - r.gone_s)
            for r in job.ranks
            if r.process.rank is not None
        ),
    )


def failed_first(job: JobView, dead: Sequence[ProcessView], now: float) -> ProcessView | None:
    """Of those gone the one that failed first: by what ranks wrote of it, else by the log. None: neither shows."""
    known = who_failed_first(job, dead)
    cause = find_cause(running(job, now)) if known is None and job.errors else None
    if cause is None or cause.rank is None or cause.from_outside:
        return known
    return next((rank for rank in dead if rank.process.rank == cause.rank), None)


def how_they_ended(job: JobView, ranks: Sequence[int | None], now: float) -> str:
    """`was killed (SIGKILL)`, `exited with code 1`, as a launcher or Slurm says of the one rank; else `ended`."""
    if not job.errors or len(ranks) != 1 or ranks[0] is None:
        return "ended"
    run = running(job, now)
    cause = find_cause(run)
    if cause is not None and cause.how and cause.rank == ranks[0]:
        return cause.how
    code = _exit_codes(reported(run, agents.lines_since_last_step(run))).get(ranks[0])
    return "ended" if code is None else Ending(code=code).words


@lru_cache(maxsize=agents.MAX_RUNS_REMEMBERED)
def _exit_codes(run: ReportedRun) -> dict[int, int]:
    """Rank -> the code with which it left by itself, as a launcher or Slurm has told it, whatever it said before."""
    ranks = agents.case_of(run).ranks
    codes = {row.rank: row.code for row in ranks.failures if row.rank is not None and row.code}
    if ranks.tasks_are_ranks:
        codes |= {each.task: each.code for each in ranks.tasks if each.task is not None and each.code}
    return {rank: code for rank, code in codes.items() if 0 < code < LEAST_SIGNAL}


def last_error_before_end(job: JobView, gone: ProcessView, now: float) -> str:
    """The line by which this rank itself said why it ends, in its log or in a file of its own, in a form for a
    sentence; empty where none of its own is known to be the cause."""
    rank, words = gone.process.rank, words_of(job, gone)
    if words is not None:
        return shortened(words.text, EXCERPT_CHARS).rstrip(".:")
    cause = find_cause(running(job, now)) if job.errors and rank is not None else None
    if (
        cause is None
        or cause.how
        or cause.only_consequence
        or cause.rank != rank
        or cause.pattern in log_table().headers
    ):
        return ""
    return shortened(split_prefix(cause.error.line)[0], EXCERPT_CHARS).rstrip(".:")


def logged_error(event: Event, node: str, at: float) -> LoggedError:
    """The line as an agent reported it; `node` is where it was read."""
    return LoggedError(
        at=at, line=event.line, pattern=event.pattern or "", source=event.source, read_on=node
    )  # fmt: skip


def culprit_of(cause: Cause) -> Culprit | None:
    """Who is named: the first to fail. None where the line does not tell whose it is."""
    if cause.node is None and cause.rank is None:
        return None
    said = f"{cause.words}: {shortened(cause.error.line, 200)}"
    reason = f"{LEFT_FIRST}, which then logged: {said}" if cause.how == LEFT_FIRST else said
    return Culprit(node=cause.node, rank=cause.rank, pid=cause.pid, reason=reason)


def work_lost(run: PastRun) -> tuple[str, ...]:
    """What it cost, a sentence: steps since the newest complete checkpoint, and their time; none without a step."""
    if run.last_step is None:
        return ()
    if run.checkpoint_step is None and run.saved_at is not None:
        saved = f"a checkpoint was saved {duration(max(0.0, run.ended_at - run.saved_at))} before, step unknown"
        return (f"last step {run.last_step}; {saved}",)
    if run.checkpoint_step is None:
        began = "" if run.first_step is None else f", which began at step {run.first_step}"
        return (f"last step {run.last_step}; no complete checkpoint of this run was seen{began}",)
    steps = run.last_step - run.checkpoint_step
    took = "" if run.step_s is None else f", about {duration(steps * run.step_s)} of work"
    return (
        f"last step {run.last_step}, last complete checkpoint at step {run.checkpoint_step}: {steps} steps lost{took}",
    )
