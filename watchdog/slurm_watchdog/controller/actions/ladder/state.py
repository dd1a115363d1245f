"""What the ladder works with: the world at one moment, the moves it can answer with, and what a journal says
of the operations. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import duration
from slurm_watchdog.config.schema import Config
from slurm_watchdog.knowledge.rungs import GENTLE
from slurm_watchdog.model.actions import Action, ActionEnd, ActionRun, Decision, Operation, OperationOutcome, Rung
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.observations import Process
from slurm_watchdog.model.protocol import ProcessEnd
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, is_unkillable, why_not_set_down
from slurm_watchdog.model.slurm_states import REQUEUED, STARTED, is_out
from slurm_watchdog.model.supervisor import SupervisorStatus

SHOWN = 3  # Processes of a node that are named one by one.


class StuckNode(Struct):
    """A node on which the old run of a requeued job has not ended."""

    name: str
    processes: str = ""  # What of it is still there, in words; empty if the agent says nothing of any.
    objection: str = ""  # Why the node must not be set DOWN, a sentence; empty if it may.


def stuck_nodes(
    job: SlurmJob,
    listed: Mapping[str, SlurmNode],
    jobs: Sequence[SlurmJob],
    partial: str,
    allowed_out: int,
    processes: Callable[[str], Sequence[Process]],
    unkillable_s: float,
) -> tuple[StuckNode, ...]:
    """The nodes that a requeued job which is COMPLETING still has. `allowed_out`: how many nodes may be out
    of service before we set one DOWN; `processes` are those of the job that the node's agent reports now; one
    that has been in state D for `unkillable_s` cannot be killed."""
    if job.state != "COMPLETING":
        return ()
    out = sum(1 for node in listed.values() if is_out(node.state))
    found = []
    for name in job.nodes:
        node, there = listed.get(name), processes(name)
        why = (
            "Slurm does not list it"
            if node is None
            else why_not_set_down(job, node, jobs, partial, unkillable=is_unkillable(there, unkillable_s))
        )
        if not why and out > allowed_out:
            why = (
                f"{out} nodes are out of service, and {allowed_out} may be (policy.max_drained_nodes, drained_percent)"
            )
        found.append(StuckNode(name=name, processes=words_for(there), objection=why))
    return tuple(found)


def words_for(processes: Sequence[Process]) -> str:
    """`process 4711 (python, rank 1) in state D`, the stuck ones first."""
    ordered = sorted(processes, key=lambda each: (each.state != "D", each.rank is None, each.pid))
    words = []
    for each in ordered[:SHOWN]:
        rank = f", rank {each.rank}" if each.rank is not None else ""
        call = (each.blocked.path or each.blocked.wchan or "") if each.blocked is not None else ""
        words.append(
            f"process {each.pid} ({each.comm}{rank}) in state {each.state}" + (f", waiting for {call}" if call else "")
        )
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(words) + more


def why_it_waits(stuck: Sequence[StuckNode]) -> str:
    """One sentence: what holds the requeued job, and what ends it."""
    where = "; ".join(f"{node.name} ({node.processes or 'its agent reports no process of it'})" for node in stuck)
    commands = " ".join(f"`scontrol update NodeName={node.name} State=DOWN Reason=unkillable`" for node in stuck)
    return (
        f"waiting until its old run has ended on {where}; a process in state D ends when what it waits "
        f"for answers, or with "
        f"the node: {commands} lets the job start elsewhere, and ends every job there"
    )


PROOF = 2  # Steps above the one that was loaded that have to be seen.


UNSEEN = 3  # Lines of a new run that may be missed: until Slurm lists it, what its log says counts for the run before.


class StepsLost(Struct):
    """Steps that were made and have to be made again: what the logs prove, and what they leave open."""

    at_least: int
    at_most: int

    @property
    def words(self) -> str:
        """`9 steps lost`, `1 step lost`, `8 to 17 steps lost`."""
        if self.at_least == self.at_most:
            return f"{self.at_least} step{'' if self.at_least == 1 else 's'} lost"
        return f"{self.at_least} to {self.at_most} steps lost"


def work_words(lost: StepsLost, step_s: float) -> str:
    """The time that these steps took at `step_s` seconds a step, the median of the run that was ended: `3 s`,
    `4 s to 12 min`. An estimate."""
    low, high = (_time(steps * step_s) for steps in (lost.at_least, lost.at_most))
    return high if low == high else f"{low} to {high}"


def _time(seconds: float) -> str:
    if 0 < seconds < 1:
        return "1 s"
    return duration(seconds)


def first_step_if_proven(view: JobView | None, loaded_step: int | None) -> int | None:
    """The first step that a new run made, once two steps above `loaded_step` were seen; 0 where it counts no
    steps but something else that rose twice; None as long as it is not proven to train."""
    progress = view.progress if view is not None else None
    if progress is None:
        return None
    if not progress.step_known:
        return 0 if progress.rises >= PROOF else None
    first = progress.first_step
    if first is None or (loaded_step is not None and progress.step <= loaded_step):
        return None
    above = 1 if loaded_step is not None and first > loaded_step else 0
    return first if progress.rises + above >= PROOF else None


def steps_lost(
    last_step: int,
    stride: int,
    first_step: int,
    next_stride: int,
    loaded_step: int | None,
    *,
    by_epochs: bool = False,
    unseen: int = UNSEEN,
) -> StepsLost:
    """What a restart cost. The old run logged `last_step` last, a line every `stride` steps, the new one `first_step`
    first, a line every `next_stride`; `loaded_step` is the newest complete checkpoint that is known. It continues from
    there if its first line fits, else from somewhere before that line, or from the checkpoint if a few lines before it
    may have been missed; without a known checkpoint these lines make a range. `by_epochs`: it counts by epochs, and may
    have begun one of them again in its log alone (ignite, fastai), so that nothing is known to be lost unless that
    checkpoint fits. `unseen`: lines before its first one that may have been missed."""
    pace = max(1, stride, next_stride)  # the new run has written too few lines to show it
    earliest, latest = max(0, first_step - pace), max(0, first_step - 1)
    confirmed = loaded_step is not None and earliest <= loaded_step <= latest
    if loaded_step is not None and confirmed:
        earliest = latest = loaded_step
    elif loaded_step is None:
        earliest = max(0, earliest - unseen * pace)
    elif 0 < earliest - loaded_step <= unseen * pace:
        earliest = loaded_step
    # Between two lines one step more where it counts from 0: the line of step 50 is then written after 51.
    made_at_most = last_step + (pace if pace > 1 else 0)
    at_least = 0 if by_epochs and not confirmed else max(0, last_step - latest)
    return StepsLost(at_least=at_least, at_most=max(at_least, made_at_most - earliest))


MIN_TRIES = 3  # A limit ends an operation only after so many tries: the time may have passed while Slurm was away.
RETRY_AFTER_S = 3.0  # Between two tries of the same operation: Slurm's rate limit gives a user 2 calls a second.
LAST_LINES_S = 15.0  # For the last lines of a run that is over to be read and reported: three reports, as shipped.
START_SLACK_S = 2.0  # Two start times of one run differ by no more: Slurm counts whole seconds.


class Stage(StrEnum):
    """Where the job stands, seen from the fence of the decision."""

    GONE = "gone"
    SAME_RUN = "same_run"
    ENDING = "ending"  # The run of the decision is coming to its end.
    FINISHED = "finished"  # The run of the decision is over and nothing follows it yet.
    HELD = "held"  # Requeued, and held: our requeue.
    QUEUED = "queued"  # Requeued, and free to start.
    NEXT_RUN = "next_run"  # A later run is going on, or is over.


class LadderLimits(Struct):
    """How long each operation may take, in seconds."""

    kill_switch_s: float = 60.0  # For the kill switch to be written to all nodes of the job.
    checkpoint_s: float
    exit_s: float  # For a job that has saved to end by itself, before the next operation is tried although it runs.
    step_s: float
    mount_s: float = 86400.0  # For a stalled filesystem to answer: the job loses nothing by waiting.
    confirm_s: float
    evidence: bool = False  # Whether an action waits for the evidence of its job.
    signal_s: float = 300.0  # For a job to save or to end after a signal.
    restart_step_s: float = 60.0  # For the supervisor to end the step and to start it again.
    end_s: float = 300.0  # For Slurm to end a job that was cancelled.
    exclusion_s: float = 604800.0  # An exclusion of ours is dropped after this time.
    set_down_after_s: float = 0.0  # A node that holds a requeued job up is set DOWN after this time; 0: never.
    max_drained_nodes: int = 0
    drained_percent: float = 0.0  # No node is set DOWN where more than so many, or this share, are out of service.
    term_s: float = 30.0  # For a process that outlived its job to end after SIGTERM.
    kill_s: float = 60.0  # … and after SIGKILL: one that is still there cannot be killed.


class Observed(ActionRun):
    """An action as its journal has it, and what is known at this moment about its job."""

    limits: LadderLimits
    now: float  # Wall clock: journal entries carry dates, and survive a restart of the controller.
    job_known: bool  # False while Slurm does not answer, or not in a way that can be used: then nothing is done.
    unread: str = ""  # What is wrong with Slurm's answer about the job, where there is one.
    unread_s: float = 0.0  # Since when it has been so.
    refused: str = ""  # Slurm's words, where it refuses to say anything about the job.
    job: SlurmJob | None = None
    step: int | None = None  # Newest step of the run that the decision is about.
    total_steps: int | None = None
    complete_checkpoint_step: int | None = None  # Of the newest complete one that came after the job was asked to save.
    next_first_step: int | None = None  # First step that the new run made, once it is proven to train.
    next_stride: int = 1  # Steps between two lines of its log, the most of the recent ones.
    next_by_epochs: bool = False  # Its log counts steps by epochs.
    stride: int = 1  # The same of the run that the decision is about.
    loaded_step: int | None = None  # Step of the newest complete checkpoint that was known when that run ended.
    stalled_mounts: tuple[str, ...] = ()
    paused: bool = False
    ended_s: float = 0.0  # Since when this controller has seen that the run of the decision is over; 0: it is not.
    taken_up_at: float = 0.0  # When this controller began to drive the action: what agents know comes a moment later.
    submitted: SlurmJob | None = None  # The job that was submitted in place of this one.
    submission_looked_for: bool = False  # Whether `submitted` None means that Slurm has none: someone has looked.
    behind: tuple[SlurmJob, ...] = ()  # Jobs that continue where this one ends: of its array, or that depend on it.
    freed: tuple[SlurmJob, ...] = ()  # Jobs that wait, or have waited, for the end of this one: it lets them start.
    left_alone: str = ""  # Why the job's owner wants it left alone now, a sentence.
    exclude_objection: str | None = None  # Why the nodes of the decision must not be excluded: too few would be left.
    process: ProcessEnd | None = None  # What the node of a process says of it, once anything was tried.
    process_objection: str | None = None  # Why that process must not be touched, by what Slurm and its node say now.
    loop_stuck: bool = False  # An open incident proves that its loop does not turn: it sees no kill switch.
    stuck: tuple[StuckNode, ...] = ()  # Where the old run of the requeued job has not ended.
    supervisor: SupervisorStatus | None = None  # Of the run that the decision is about, if one lives.
    in_place_objection: str | None = None  # Why the step cannot be started again in its allocation.
    unseen_lines: int = UNSEEN  # Lines of the log that may be missed before the first one of a new run or step is read.
    new_step_first_step: int | None = None  # First step of the one that was started for this, once it trains.
    expired_exclusions: tuple[str, ...] = ()  # Nodes that we excluded from it longer ago than that lasts.

    @property
    def stage(self) -> Stage:
        """Where the job of the action stands."""
        return stage_of(self, self.job)

    @property
    def is_saved(self) -> bool:
        """Whether a complete checkpoint is known that came after the job was asked."""
        return self.complete_checkpoint_step is not None or self.tried(Operation.WAIT_CHECKPOINT)

    @property
    def made_last_step(self) -> bool:
        """Whether the run of the decision has come to its end, by its log or by what it has saved."""
        made = max(self.step or 0, self.complete_checkpoint_step or 0)
        return self.total_steps is not None and made >= self.total_steps

    @property
    def may_have_made_last_step(self) -> bool:
        """Whether a run that ended well may have come to its end unseen: its last lines are still on their way."""
        completed = self.job is not None and self.job.state == "COMPLETED"
        return completed and self.total_steps is not None and self.ended_s < LAST_LINES_S

    @property
    def switch_is_out(self) -> bool:
        """Whether a kill switch of ours may still lie somewhere."""
        return self.tried(Operation.WRITE_KILL_SWITCH) and not self.done(Operation.REMOVE_KILL_SWITCH)

    def in_vain(self, operation: Operation) -> bool:
        """Whether an operation was tried for as long as it may take, and often enough."""
        tries, limits = self.tries(operation), self.limits
        limit_s = limits.kill_switch_s if operation is Operation.WRITE_KILL_SWITCH else limits.step_s
        if operation in (Operation.WRITE_ORDER, Operation.RESTART_STEP):
            limit_s = limits.restart_step_s
        return len(tries) >= MIN_TRIES and self.now - tries[0].intent_at > limit_s

    def is_early(self, operation: Operation, most: int) -> bool:
        """Whether an operation was tried a moment ago: each try waits longer, up to `most` times as long."""
        before = self.tries(operation)
        return bool(before) and self.now - (before[-1].outcome_at or before[-1].intent_at) < RETRY_AFTER_S * min(
            most, len(before)
        )

    def retry(self, do: Execute) -> Move:
        """The operation, if it was not tried a moment ago."""
        before = self.tries(do.operation)
        if self.is_early(do.operation, 10):
            return Wait(reason=f"{do.operation} is tried again soon: {before[-1].detail}")
        return replace(do, attempt=len(before) + 1)

    def attempt(self, do: Execute) -> Move | None:
        """The operation until it is refused, or its limit is over: then None."""
        if self.refusal(do.operation) is not None or self.in_vain(do.operation):
            return None
        return self.retry(do)

    def give_up(self, why: str, *, needless: bool = False) -> Move:
        """Ends the action without success, or without need; a kill switch of ours does not stay behind."""
        return self.finish(why, ok=False, needless=needless)

    def finish(self, why: str, *, ok: bool = True, needless: bool = False) -> Move:
        """Ends the action, after its kill switch was removed."""
        if self.switch_is_out:
            if self.is_early(Operation.REMOVE_KILL_SWITCH, 20):
                return Wait(reason=f"{why}; the kill switch has to be removed first")
            tries = len(self.tries(Operation.REMOVE_KILL_SWITCH))
            return Execute(operation=Operation.REMOVE_KILL_SWITCH, attempt=tries + 1)
        if not ok and self.stage is Stage.HELD and not self.done(Operation.RELEASE):
            why = f"{why}; the job stays held: `scontrol release` lets it run"
        if not ok and self.submitted is not None and self.submitted.held:
            why = f"{why}; job {self.submitted.job_id}, submitted in its place, stays held"
        return self.ends(why, ok=ok, needless=needless)

    def ends(self, why: str, *, ok: bool = True, needless: bool = False) -> Finish:
        """Ends the action now."""
        return Finish(end=ActionEnd(ok=ok, ended_at=self.now, detail=why, needless=needless))

    def wait_for_mounts(self) -> Move:
        """Until the filesystem answers that the restart would hang on."""
        mounts, until = ", ".join(self.stalled_mounts), self.decision.decided_at + self.limits.mount_s
        if self.now > until:
            return self.give_up(f"{mounts} did not answer for {self.limits.mount_s:.0f} s")
        return Wait(reason=f"{mounts} does not answer: the restart waits for it", until=until)


class Execute(Struct):
    """Carry this operation out now."""

    operation: Operation
    attempt: int = 0  # 0: `retry` counts it.
    nodes: tuple[str, ...] = ()
    """For EXCLUDE: the whole new list, the existing exclusions included. For DRAIN, SET_DOWN: those to drain,
    or to set DOWN. For REMOVE_KILL_SWITCH: those that may not be passed over, however silent."""
    only_unfinished: bool = True  # For REQUEUE_HOLD: leave a job alone that has ended by itself.
    instead: bool = False  # For RELEASE: of the job that was submitted in place of this one.
    skip: str = ""  # Why nothing is done for this operation: its outcome is `skipped`, with these words.


class Reconcile(Struct):
    """Write down the outcome of an operation whose answer was lost: the world shows it."""

    operation: Operation
    attempt: int
    outcome: OperationOutcome
    detail: str


class Wait(Struct):
    reason: str
    until: float | None = None  # Wall clock: when the ladder gives this up; None: not bounded by a time of its own.


class Finish(Struct):
    end: ActionEnd


Move = Execute | Reconcile | Wait | Finish


def stage_of(at: ActionRun, job: SlurmJob | None) -> Stage:
    """Where the job stands now, compared with the fence of the decision."""
    fence = at.decision.fence
    if job is None or fence is None:
        return Stage.GONE
    if job.restarts == fence.restarts:
        if job.state in STARTED:
            same = job.start_at is None or fence.start_at is None or abs(job.start_at - fence.start_at) < START_SLACK_S
            # Slurm may reuse its job numbers: another job of the same one is none of ours.
            return Stage.SAME_RUN if same else Stage.GONE
        return Stage.ENDING if job.state == "COMPLETING" else Stage.FINISHED
    if job.restarts == fence.restarts + 1 and job.state in REQUEUED:
        return Stage.HELD if job.held else Stage.QUEUED
    return Stage.NEXT_RUN if job.restarts > fence.restarts else Stage.GONE


def ladder_of(decision: Decision) -> tuple[Rung, ...]:
    """The steps of a decision; those of older releases say only the action."""
    if decision.ladder:
        return decision.ladder
    if decision.action is Action.GRACEFUL_RESTART:
        return (Rung.KILL_SWITCH, Rung.REQUEUE)
    return (Rung.EVIDENCE, Rung.REQUEUE) if decision.asked_by is None else (Rung.REQUEUE,)


def ladder_limits_of(config: Config) -> LadderLimits:
    """The limits of the operations by the configuration."""
    policy, ladder = config.policy, config.ladder
    return LadderLimits(
        checkpoint_s=policy.checkpoint_limit,
        signal_s=policy.signal_limit,
        exit_s=ladder.exit_limit,
        step_s=ladder.step_limit,
        confirm_s=ladder.confirm_limit,
        set_down_after_s=ladder.set_down_after,
        evidence=True,
        exclusion_s=policy.exclusion_lifetime,
        max_drained_nodes=policy.max_drained_nodes,
        drained_percent=policy.drained_percent,
    )


def limits_for(decision: Decision, limits: LadderLimits) -> LadderLimits:
    """The limits, with those that the decision's own rule has in their place."""
    return replace(limits, **dict(decision.rung_limits)) if decision.rung_limits else limits


def hung_when_decided(decision: Decision) -> bool:
    """Whether the job's loop did not turn when it was decided: then a new step means that it has recovered."""
    if decision.loop_turns is None:
        return not any(step in GENTLE for step in ladder_of(decision))
    return not decision.loop_turns
