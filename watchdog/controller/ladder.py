"""The ladder: what to do next for one action, from its journal and from the world. Pure.

The world is asked first: whether a rung is done is read off Slurm, not off what we remember to have sent.
`Restarts` rises at the moment of a requeue (measured on Slurm 22.05 and 25.11), so the fence
(job id, restart count, start time) tells the run that the decision is about from every other one.
"""

from __future__ import annotations

from enum import StrEnum

from watchdog.model import (
    Action,
    ActionEnd,
    ActionRun,
    Rung,
    RungOutcome,
    RungRecord,
    SlurmJob,
    Value,
)

RUNNING_STATES = frozenset(
    {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "CONFIGURING"}
)
WAITING_STATES = frozenset(
    {"PENDING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
MIN_TRIES = 3
"""A limit ends a rung only after so many tries: the time may have passed while Slurm was away."""
RETRY_AFTER_S = 3.0
"""Between two tries of the same rung: Slurm's rate limit gives a user 2 calls a second."""
LATE_S = 60.0
"""slurmctld may carry a request out so long after whoever sent it gave up waiting: it lies in a queue there, and is not taken back."""


CANCELLED_STATES = frozenset({"CANCELLED", "REVOKED", "DEADLINE"})
"""Ended by a person, or by a date that a person set."""


class Stage(StrEnum):
    """Where the job stands, seen from the fence of the decision."""

    GONE = "gone"
    SAME_RUN = "same_run"
    ENDING = "ending"
    """The run of the decision is coming to its end, by itself."""
    FINISHED = "finished"
    """The run of the decision is over and nothing follows it yet."""
    HELD = "held"
    """Requeued, and held: our requeue."""
    QUEUED = "queued"
    """Requeued, and free to start."""
    NEXT_RUN = "next_run"
    """A later run is going on, or is over."""


class LadderLimits(Value, frozen=True, kw_only=True):
    """How long each rung may take, in seconds."""

    kill_switch_s: float
    checkpoint_s: float
    exit_s: float
    """For a job that has saved to end by itself, before it is requeued although it runs."""
    step_s: float
    mount_s: float
    confirm_s: float
    evidence_s: float = 0.0
    """0: an action does not ask for evidence."""


class World(Value, frozen=True, kw_only=True):
    """What is known at this moment about the job of an action."""

    now: float
    """Wall clock: journal entries carry dates, and survive a restart of the controller."""
    job_known: bool
    """False while Slurm does not answer: then nothing is done."""
    job: SlurmJob | None = None
    step: int | None = None
    """Newest step of the run that the decision is about."""
    total_steps: int | None = None
    complete_checkpoint_step: int | None = None
    """Step of the newest complete checkpoint that came after the kill switch."""
    next_first_step: int | None = None
    """First step that the new run logged."""
    next_stride: int = 1
    stalled_mounts: tuple[str, ...] = ()
    paused: bool = False
    taken_up_at: float = 0.0
    """When this controller began to drive the action: what agents know takes a moment to arrive after that."""


class Do(Value, frozen=True, kw_only=True):
    """Carry this rung out now."""

    rung: Rung
    attempt: int
    nodes: tuple[str, ...] = ()
    """For EXCLUDE: the whole new list, the existing exclusions included."""
    only_unfinished: bool = True
    """For REQUEUE_HOLD: leave a job alone that has ended by itself."""


class Settle(Value, frozen=True, kw_only=True):
    """Write down the outcome of a rung whose answer was lost: the world shows it."""

    rung: Rung
    attempt: int
    outcome: RungOutcome
    detail: str


class Wait(Value, frozen=True, kw_only=True):
    reason: str


class End(Value, frozen=True, kw_only=True):
    end: ActionEnd


Move = Do | Settle | Wait | End


def stage_of(run: ActionRun, job: SlurmJob | None) -> Stage:
    """Where the job stands now, compared with the fence of the decision."""
    fence = run.decision.fence
    if job is None or fence is None:
        return Stage.GONE
    if job.restarts == fence.restarts:
        if job.state in RUNNING_STATES:
            return Stage.SAME_RUN
        return Stage.ENDING if job.state == "COMPLETING" else Stage.FINISHED
    if job.restarts == fence.restarts + 1 and job.state in WAITING_STATES:
        return Stage.HELD if job.held else Stage.QUEUED
    return Stage.NEXT_RUN if job.restarts > fence.restarts else Stage.GONE


def next_move(run: ActionRun, world: World, limits: LadderLimits) -> Move:
    """What is to be done next. Given any prefix of the journal and any world, never does a thing twice."""
    if run.end is not None:
        return End(end=run.end)
    if not world.job_known:
        return Wait(reason="Slurm does not answer")
    stage = stage_of(run, world.job)
    lost = next((r for r in run.records if r.outcome is None), None)
    if lost is not None:
        return _settle(lost, stage, run)
    if stage is Stage.GONE:
        return _leave(run, world, "Slurm does not know the job any more")
    if stage is Stage.SAME_RUN and _wants_evidence(run, limits):
        return Do(rung=Rung.EVIDENCE, attempt=_attempts(run, Rung.EVIDENCE) + 1)
    if stage in (Stage.SAME_RUN, Stage.ENDING, Stage.FINISHED):
        if run.decision.action is Action.GRACEFUL_RESTART:
            return _before_requeue_gracefully(run, stage, world, limits)
        return _before_requeue(run, stage, world, limits)
    if not _tried(run, Rung.REQUEUE_HOLD):
        return _leave(run, world, "the job was requeued by somebody else: nothing left to do")
    if stage is Stage.HELD:
        return _while_held(run, world, limits)
    return _confirm(run, stage, world, limits)


def _settle(lost: RungRecord, stage: Stage, run: ActionRun) -> Settle:
    """The controller died, or Slurm did not answer, between intent and outcome: what does the world show?"""
    requeued = stage in (Stage.HELD, Stage.QUEUED, Stage.NEXT_RUN)
    shown = {
        Rung.WAIT_CHECKPOINT: True,
        Rung.REQUEUE_HOLD: requeued,
        Rung.RELEASE: stage in (Stage.QUEUED, Stage.NEXT_RUN),
    }.get(lost.rung)
    if shown is None:
        outcome, detail = RungOutcome.UNKNOWN, "the answer was lost; it is done again, which is harmless"
    elif shown:
        outcome, detail = RungOutcome.DONE, "the answer was lost; the world shows that it was done"
    else:
        outcome, detail = RungOutcome.UNKNOWN, "the answer was lost; Slurm shows that it was not done"
    return Settle(rung=lost.rung, attempt=lost.attempt, outcome=outcome, detail=detail)


def _wants_evidence(run: ActionRun, limits: LadderLimits) -> bool:
    """Before anything is done to the job, once; a second time only if the controller died over the first. An operator's restart
    is of a job that nobody suspects, and an action that has begun is past it."""
    tries = [record for record in run.records if record.rung is Rung.EVIDENCE]
    if limits.evidence_s <= 0 or run.decision.asked_by is not None or len(tries) < len(run.records):
        return False
    return not tries or (len(tries) == 1 and tries[0].outcome is RungOutcome.UNKNOWN)


def _before_requeue(run: ActionRun, stage: Stage, world: World, limits: LadderLimits) -> Move:
    """The loop does not turn: there is no checkpoint to wait for."""
    if stage is Stage.ENDING:
        return Wait(reason="the job is ending by itself")
    if stage is Stage.FINISHED:
        return _leave(run, world, "the job ended by itself before it was requeued; it is not run again")
    if _goes_on(run, world):
        return _leave(run, world, "the job makes steps again: it is left alone")
    if world.stalled_mounts and not _tried(run, Rung.REQUEUE_HOLD):
        return _wait_for_mounts(run, world, limits)
    if world.paused:
        return Wait(reason="paused: the job is not touched until `slurm-watchdog resume`")
    return _once(run, world, limits, Do(rung=Rung.REQUEUE_HOLD, attempt=0))


def _goes_on(run: ActionRun, world: World) -> bool:
    """Whether the job has made a step since the decision: waiting for a filesystem or for `resume` can take hours."""
    decided = run.decision.step_at_decision
    return decided is not None and world.step is not None and world.step > decided


def _before_requeue_gracefully(run: ActionRun, stage: Stage, world: World, limits: LadderLimits) -> Move:
    """Kill switch, then a complete checkpoint, then the end of the run, whichever way it comes."""
    if not _done(run, Rung.WRITE_KILL_SWITCH) and not _has_heard(run, stage, world):
        if stage is not Stage.SAME_RUN:
            partly = _tried(run, Rung.WRITE_KILL_SWITCH)
            if partly and not _has_waited(run, world, limits):
                return Wait(reason="the job has ended; waiting to hear whether it saved for the kill switch")
            return _leave(
                run,
                world,
                "the job ended while its kill switch was not on all nodes yet: if it heard it, restart it by hand"
                if partly
                else "the job ended by itself before the kill switch was written; it is not run again",
            )
        if world.paused and not _tried(run, Rung.WRITE_KILL_SWITCH):
            return Wait(reason="paused: the job is not touched until `slurm-watchdog resume`")
        return _once(run, world, limits, Do(rung=Rung.WRITE_KILL_SWITCH, attempt=0))
    if stage is Stage.FINISHED and world.job is not None and world.job.state in CANCELLED_STATES:
        return _leave(run, world, f"the job was ended by somebody ({world.job.state}); it is not run again")
    switched_at = min(r.intent_at for r in run.records if r.rung is Rung.WRITE_KILL_SWITCH)
    saved = world.complete_checkpoint_step is not None or _tried(run, Rung.WAIT_CHECKPOINT)
    if not saved:
        if stage is Stage.FINISHED and _has_waited(run, world, limits):
            return _leave(
                run, world, "the job ended without showing a complete checkpoint; restart it by hand"
            )
        if world.now - switched_at > limits.checkpoint_s and _has_waited(run, world, limits):
            return _leave(
                run, world, "no complete checkpoint in time: does the trainer look for the kill switch?"
            )
        return Wait(reason="waiting for a complete checkpoint")
    if stage is not Stage.SAME_RUN and _made_last_step(world):
        return _leave(run, world, "the job has made its last step and ended: it is finished")
    if not _done(run, Rung.WAIT_CHECKPOINT):
        return Do(rung=Rung.WAIT_CHECKPOINT, attempt=_attempts(run, Rung.WAIT_CHECKPOINT) + 1)
    if stage is Stage.ENDING:
        return Wait(reason="the job has saved and is ending")
    saved_at = next(r.intent_at for r in run.records if r.rung is Rung.WAIT_CHECKPOINT)
    if stage is Stage.SAME_RUN and world.now - saved_at < limits.exit_s:
        return Wait(reason="the job has saved; it has a moment to end by itself")
    if world.paused:
        return Wait(reason="paused: the job is not requeued until `slurm-watchdog resume`")
    return _once(
        run, world, limits, Do(rung=Rung.REQUEUE_HOLD, attempt=0, only_unfinished=stage is Stage.SAME_RUN)
    )


def _has_waited(run: ActionRun, world: World, limits: LadderLimits) -> bool:
    """Whether agents had their time to tell of a checkpoint: since the kill switch, and since we listen."""
    switched_at = min(r.intent_at for r in run.records if r.rung is Rung.WRITE_KILL_SWITCH)
    return world.now - max(switched_at, world.taken_up_at) > limits.step_s


def _has_heard(run: ActionRun, stage: Stage, world: World) -> bool:
    """A job that saved after we began to write its kill switch, and then ended, has read it: whatever became of the answer."""
    tried = _tried(run, Rung.WRITE_KILL_SWITCH)
    return tried and stage is not Stage.SAME_RUN and world.complete_checkpoint_step is not None


def _made_last_step(world: World) -> bool:
    return world.total_steps is not None and world.step is not None and world.step >= world.total_steps


def _while_held(run: ActionRun, world: World, limits: LadderLimits) -> Move:
    """Requeued and held by us: add exclusions, take the kill switch away, release."""
    assert world.job is not None
    if _done(run, Rung.RELEASE):
        return _leave(run, world, "the job was released and then held again by somebody else")
    missing = [node for node in run.decision.exclude if node not in world.job.excluded_nodes]
    if missing and not _failed(run, Rung.EXCLUDE) and not _in_vain(run, world, limits, Rung.EXCLUDE):
        nodes = tuple(dict.fromkeys((*world.job.excluded_nodes, *missing)))
        return _once(run, world, limits, Do(rung=Rung.EXCLUDE, attempt=0, nodes=nodes), for_ever=True)
    if _switch_is_out(run):
        return _once(run, world, limits, Do(rung=Rung.REMOVE_KILL_SWITCH, attempt=0), for_ever=True)
    if world.stalled_mounts:
        return _wait_for_mounts(run, world, limits)
    if world.paused:
        return Wait(reason="paused: the job stays held until `slurm-watchdog resume`")
    if _may_be_requeued_again(run, world):
        return Wait(
            reason="a request to requeue it got no answer: it stays held until that can't be carried out any more"
        )
    return _once(run, world, limits, Do(rung=Rung.RELEASE, attempt=0), for_ever=True)


def _may_be_requeued_again(run: ActionRun, world: World) -> bool:
    """Whether a request that was repeated because nobody answered may still be under way to Slurm: it would hit the next run. A job
    that is held takes no harm from it."""
    tries = [r for r in run.records if r.rung is Rung.REQUEUE_HOLD]
    doubtful = [r.outcome_at or r.intent_at for r in tries if r.outcome is RungOutcome.UNKNOWN]
    return len(tries) > 1 and any(world.now < at + LATE_S for at in doubtful)


def _confirm(run: ActionRun, stage: Stage, world: World, limits: LadderLimits) -> Move:
    """Released: the restart has worked when the new run has made its first new step."""
    requeued_at = next(r.intent_at for r in run.records if r.rung is Rung.REQUEUE_HOLD)
    last_at = max(r.outcome_at or r.intent_at for r in run.records)
    if _switch_is_out(run):
        return _once(run, world, limits, Do(rung=Rung.REMOVE_KILL_SWITCH, attempt=0), for_ever=True)
    if world.next_first_step is not None:
        lost = None
        if run.decision.step_at_decision is not None:
            last = max(run.decision.step_at_decision, world.step or 0)
            lost = max(0, last + world.next_stride - world.next_first_step)
        avoided = [n for n in run.decision.exclude if world.job is not None and n in world.job.excluded_nodes]
        excluded = f" without {', '.join(avoided)}" if avoided else ""
        return End(
            end=ActionEnd(
                ok=True,
                ended_at=world.now,
                detail=f"the job runs again{excluded}; first new step {world.next_first_step}"
                + ("" if lost is None else f", {lost} step{'' if lost == 1 else 's'} lost"),
                resumed_at_step=world.next_first_step,
                steps_lost=lost,
                downtime_s=world.now - requeued_at,
            )
        )
    if (
        world.job is not None
        and stage is Stage.NEXT_RUN
        and world.job.state not in RUNNING_STATES | WAITING_STATES
    ):
        return _leave(run, world, f"the job was restarted and is {world.job.state} without a new step")
    queued = _why_queued(world.job) if stage is Stage.QUEUED and world.job is not None else None
    if world.now - last_at > limits.confirm_s:
        return _leave(
            run,
            world,
            f"released, and still {queued} {limits.confirm_s:.0f} s later: Slurm starts it when it can"
            if queued
            else f"no new step within {limits.confirm_s:.0f} s of the restart",
        )
    return Wait(reason=f"the job is {queued}" if queued else "waiting for the first new step")


QUEUE_REASONS: dict[str, str] = {
    "JobArrayTaskLimit": "another element of its array runs, and the array allows no more at once (%)",
    "Resources": "there are not enough free nodes",
    "Priority": "jobs of higher priority come first",
    "Dependency": "another job has to end first",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "BeginTime": "its start was put off",
    "JobHeldUser": "somebody holds it",
    "JobHeldAdmin": "an administrator holds it",
}
"""Slurm's reasons for a job that waits, in words (squeue(1), JOB REASON CODES)."""


def _why_queued(job: SlurmJob) -> str:
    """`waiting in the queue (…)`, with Slurm's reason. Slurm may append node names to it: `ReqNodeNotAvail, …`."""
    name = job.reason.strip("()").partition(",")[0]
    if not name or name == "None":
        return "waiting in the queue"
    words = QUEUE_REASONS.get(name)
    return f"waiting in the queue ({name}{': ' + words if words else ''})"


def _once(run: ActionRun, world: World, limits: LadderLimits, do: Do, *, for_ever: bool = False) -> Move:
    """The rung, if it was not refused, not done, and not tried a moment ago; gives up at its limit."""
    tries = [r for r in run.records if r.rung is do.rung]
    if tries:
        last = tries[-1]
        if last.outcome is RungOutcome.FAILED and not for_ever:
            return _leave(run, world, f"{do.rung} was refused: {last.detail}")
        if _in_vain(run, world, limits, do.rung) and not for_ever:
            return _leave(run, world, f"{do.rung} did not succeed in time: {last.detail}")
        if world.now - (last.outcome_at or last.intent_at) < RETRY_AFTER_S * min(10, len(tries)):
            return Wait(reason=f"{do.rung} is tried again soon: {last.detail}")
    return Do(rung=do.rung, attempt=len(tries) + 1, nodes=do.nodes, only_unfinished=do.only_unfinished)


def _in_vain(run: ActionRun, world: World, limits: LadderLimits, rung: Rung) -> bool:
    """Whether a rung was tried for as long as it may take, and often enough."""
    tries = [r for r in run.records if r.rung is rung]
    return len(tries) >= MIN_TRIES and world.now - tries[0].intent_at > _limit_s(rung, limits)


def _limit_s(rung: Rung, limits: LadderLimits) -> float:
    return limits.kill_switch_s if rung is Rung.WRITE_KILL_SWITCH else limits.step_s


def _wait_for_mounts(run: ActionRun, world: World, limits: LadderLimits) -> Move:
    if world.now - run.decision.decided_at > limits.mount_s:
        return _leave(
            run, world, f"{', '.join(world.stalled_mounts)} did not answer for {limits.mount_s:.0f} s"
        )
    return Wait(reason=f"{', '.join(world.stalled_mounts)} does not answer: the restart waits for it")


def _leave(run: ActionRun, world: World, why: str) -> Move:
    """Ends the action without success; a kill switch of ours does not stay behind."""
    if _switch_is_out(run):
        tries = [r for r in run.records if r.rung is Rung.REMOVE_KILL_SWITCH]
        if not tries or world.now - (tries[-1].outcome_at or tries[-1].intent_at) >= RETRY_AFTER_S * min(
            20, len(tries)
        ):
            return Do(rung=Rung.REMOVE_KILL_SWITCH, attempt=len(tries) + 1)
        return Wait(reason=f"{why}; the kill switch has to be removed first")
    if stage_of(run, world.job) is Stage.HELD and not _done(run, Rung.RELEASE):
        why = f"{why}; the job stays held: `scontrol release` lets it run"
    return End(end=ActionEnd(ok=False, ended_at=world.now, detail=why))


def _switch_is_out(run: ActionRun) -> bool:
    """Whether a kill switch of ours may still lie somewhere."""
    return _tried(run, Rung.WRITE_KILL_SWITCH) and not _done(run, Rung.REMOVE_KILL_SWITCH)


def _tried(run: ActionRun, rung: Rung) -> bool:
    return any(r.rung is rung for r in run.records)


def _attempts(run: ActionRun, rung: Rung) -> int:
    return sum(1 for r in run.records if r.rung is rung)


def _done(run: ActionRun, rung: Rung) -> bool:
    return any(r.rung is rung and r.outcome in (RungOutcome.DONE, RungOutcome.SKIPPED) for r in run.records)


def _failed(run: ActionRun, rung: Rung) -> bool:
    return any(r.rung is rung and r.outcome is RungOutcome.FAILED for r in run.records)
