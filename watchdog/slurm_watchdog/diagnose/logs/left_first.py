"""The rank that left with exit code 0 while its peers trained: they end with errors about the connection to it, and
nobody logs that it left. Pure.

srun reports every task of a step that ended otherwise, and torchrun's tables every rank of their nodes. Where they
report all ranks but one, and that one was gone before them and said nothing, it is known. A rank of which nothing is
reported may be one whose line is missing: one is named only if all others have theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from msgspec.structs import replace

from slurm_watchdog.diagnose.logs.ranks import closed_by_torchrun, rank_in_table, tasks_that_failed
from slurm_watchdog.diagnose.logs.reported_run import (
    MAX_RUNS_REMEMBERED,
    READ_APART_S,
    ReportedRun,
    attributed_errors,
    case_of,
    reported,
)
from slurm_watchdog.model.past_runs import LoggedError, PastRun, RankLocation

HOW = "exited with code 0 before its peers"
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
    if any(said.rank == left.rank for said in attributed_errors(replace(run, errors=tuple(lines)))):
        return None  # a victim that has handled its error
    # One that was gone while the others made steps is of an earlier start, or was not needed.
    return left if run.rose_at is None or left.gone_at >= run.rose_at - READ_APART_S else None


@lru_cache(maxsize=MAX_RUNS_REMEMBERED)
def _failed_ranks(run: ReportedRun) -> frozenset[int]:
    """The ranks that are reported to have ended otherwise than with exit code 0; none where the one who reports them
    may keep others to itself."""
    texts = [line.text for line in run.lines]
    in_tables = frozenset(rank for text in texts if (rank := rank_in_table(text)) is not None)
    if in_tables:
        return _failed_below_torchrun(run, in_tables, texts)
    ranks = case_of(run).ranks
    if ranks.launcher or not ranks.tasks_are_ranks or not ranks.several_a_host:
        return frozenset()  # Slurm's tasks are, or may be, launchers of several ranks
    return frozenset(task for text in texts for task in tasks_that_failed(text))


def _failed_below_torchrun(run: ReportedRun, in_tables: frozenset[int], texts: Iterable[str]) -> frozenset[int]:
    """Those in the tables, and those that torchrun itself ended, which not every release has in its table. None where
    a node has no table: its torchrun was ended from outside, and a rank of it may have left in order for that."""
    closed = {pid for text in texts if (pid := closed_by_torchrun(text)) is not None}
    pids = [seat.pid for seat in run.seats]
    ended = {seat.rank for seat in run.seats if seat.pid in closed and pids.count(seat.pid) == 1}
    judged = {seat.node for seat in run.seats if seat.rank in in_tables}
    return in_tables | ended if all(seat.node in judged for seat in run.seats) else frozenset()
