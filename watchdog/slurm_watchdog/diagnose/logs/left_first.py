"""The rank that left with exit code 0 while its peers trained: they end with errors about the connection to it, and
nobody logs that it left. Pure.

srun reports every task of a step that ended otherwise. Where it reports all ranks but one, and that one was gone before
them, it is known. A rank of which nothing is reported may be one whose line is missing: one is named only if all others
have theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from slurm_watchdog.diagnose.logs.ranks import tasks_that_failed
from slurm_watchdog.diagnose.logs.reported_run import READ_APART_S
from slurm_watchdog.model.past_runs import LoggedError, PastRun, RankLocation

HOW: Final = "exited with code 0 before its peers"
ORDER_SLACK_S: Final = 1.0
"""A rank may have ended so long before the report that says so (agent.service.OUT_OF_TURN_S)."""


def left_first(run: PastRun, lines: Iterable[LoggedError]) -> RankLocation | None:
    """The rank of `run` that ended so; None: there is none, or it is not known. `lines`: errors since the last step."""
    if run.total_steps is not None and run.last_step is not None and run.last_step >= run.total_steps:
        return None
    failed = frozenset(task for line in lines for task in tasks_that_failed(line.line))
    absent = [seat for seat in run.seats if seat.rank not in failed]
    if len(absent) != 1 or len(failed) + 1 != run.ranks or len(run.seats) != run.ranks or run.ranks < 2:
        return None
    (left,) = absent
    others = [seat.gone_at for seat in run.seats if seat is not left and seat.gone_at is not None]
    if left.gone_at is None or any(at < left.gone_at - ORDER_SLACK_S for at in others):
        return None
    # One that was gone while the others made steps is of an earlier start, or was not needed.
    return left if run.rose_at is None or left.gone_at >= run.rose_at - READ_APART_S else None
