"""Answers to reports that wait for a question: an agent that is asked for stacks hears of it at once, and not with its
next report.

Only of a node with a job whose step is due, that has just lost a rank, or that something is being done about, or of one
that was asked a moment ago: reports come on their own grid, and whether the step is late is known between two of them.
Whatever is asked, or ordered, is then on its way within the same exchange.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from slurm_watchdog.analysis.lateness import due_after_s
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.progress_clock import main_clock
from slurm_watchdog.controller.state.run import Run
from slurm_watchdog.model.protocol import Command

BEFORE_NEXT_S = 1.0
"""An answer is given so long before the next report of that node is made: none waits for another one."""
DUE_SHARE = 0.9  # Reports come a little unevenly.
AGAIN_S = 10.0
"""Who was asked so lately is asked again soon: one dump says nothing, and after it come evidence and orders."""
LOST_S = 15.0
"""For so long after the end of a rank its job is asked about it: for evidence, for stacks of those that are left."""
LONG_DUE_S = 120.0  # After so long without a step there is no hurry: the limit of the job judges it.


class HeldAnswers:
    """One event loop owns it."""

    def __init__(
        self,
        state: ClusterState,
        commands: CommandQueue,
        interval_s: Callable[[str], float],
        is_acted_on: Callable[[str], bool],
    ):
        """`interval_s`: how often a node, by its name, reports; `is_acted_on`: whether an action about a job is
        under way, by its id."""
        self._state, self._commands = state, commands
        self._interval_s, self._is_acted_on = interval_s, is_acted_on

    def coming(self, node: str, now: float) -> Awaitable[tuple[Command, ...]] | None:
        """What will be asked of this node within moments; None if its answer need not wait for it. Nor does one to a
        node that has been asked: its agent sends one report after the other, and the next one has the stacks."""
        interval_s = self._interval_s(node)
        hold_s = min(interval_s - BEFORE_NEXT_S, self._commands.silent_s(node))
        if hold_s <= 0.0:
            return None
        jobs = (job.job_id for job, _ in self._state.jobs_on(node, now))
        if self._commands.asked_age_s(node) <= AGAIN_S or any(
            self._is_urgent(job_id, now, interval_s) or self._is_acted_on(job_id) for job_id in jobs
        ):
            return self._commands.arrival(node, hold_s)
        return None

    def _is_urgent(self, job_id: str, now: float, interval_s: float) -> bool:
        run = self._state.runs.get(job_id)
        return run is not None and (now - run.lost_at <= LOST_S or is_due(run, now, interval_s))


def is_due(run: Run, now: float, interval_s: float) -> bool:
    """Whether most steps of this run have come after the time that has passed since its last one, and a report that
    could say so is due, too: its paces are of more frequent ones where its agents report less often by now."""
    clock = main_clock(run.clocks) if run.phase(now) is None else None
    usual_s = None if clock is None else due_after_s(clock.paces.recent_s())
    if clock is None or usual_s is None:
        return False
    since_s = now - max(clock.rose_at, run.saved_at, run.grace_from)
    return DUE_SHARE * max(usual_s, interval_s) <= since_s <= LONG_DUE_S
