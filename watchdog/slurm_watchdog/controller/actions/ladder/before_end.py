"""The ladder up to the end of the run: the job is asked to save and to end, as gently as the rule says. Pure."""

from __future__ import annotations

from slurm_watchdog.controller.actions.ladder.end_run import end_run
from slurm_watchdog.controller.actions.ladder.state import (
    ASKING,
    MIN_TRIES,
    RETRY_AFTER_S,
    Execute,
    LadderLimits,
    Move,
    Observed,
    Stage,
    Wait,
    attempt,
    done,
    give_up,
    hung_when_decided,
    is_saved,
    ladder_of,
    made_last_step,
    may_have_made_last_step,
    refused,
    save_requests,
    tried,
    tries,
    wait_for_mounts,
    why_failed,
)
from slurm_watchdog.knowledge.rungs import ENDINGS, GENTLE, RUN_AGAIN
from slurm_watchdog.model.actions import ActionRun, Operation, OperationOutcome, Rung
from slurm_watchdog.model.slurm_states import ENDED_BY_PERSON, ENDED_FROM_OUTSIDE, FAILED, RESTARTABLE
from slurm_watchdog.model.supervisor import SupervisorState


def before_end(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Move:
    """The run of the decision continues, or has ended before we put it back."""
    if not save_requests(run):
        if stage is Stage.ENDING:
            return Wait(reason="the job is already ending")
        if stage is Stage.FINISHED:
            if world.job is not None and world.job.starts_again:
                return Wait(reason="the job has ended on its own, and is being started again")
            return give_up(run, world, f"{_how_it_ended(world)} before anything was done; it is not run again")
        if _makes_steps_again(run, world):
            return give_up(run, world, "the job makes steps again: it is left alone", needless=True)
        if (kept := _kept(run, world)) is not None:
            return kept
        if world.stalled_mounts and not tried(run, Operation.REQUEUE_HOLD):
            return wait_for_mounts(run, world, limits)
        if world.paused:
            return Wait(reason="paused: the job is not touched until `slurm-watchdog resume`")
        return _next_rung(run, world, limits)
    if stage is Stage.SAME_RUN:
        return _after_request(run, world, limits)
    return _ended_after_asking(run, stage, world, limits)


def _makes_steps_again(run: ActionRun, world: Observed) -> bool:
    """Whether a job that hung has made a step since the decision: waiting for a filesystem or `resume`
    can take hours."""
    decided = run.decision.step_at_decision
    return hung_when_decided(run.decision) and decided is not None and world.step is not None and world.step > decided


def _after_request(run: ActionRun, world: Observed, limits: LadderLimits) -> Move:
    """Asked, and it runs: has it saved, does it end?"""
    if is_saved(run, world):
        if not done(run, Operation.WAIT_CHECKPOINT):
            return Execute(operation=Operation.WAIT_CHECKPOINT, attempt=len(tries(run, Operation.WAIT_CHECKPOINT)) + 1)
        saved_at = next(r.intent_at for r in run.records if r.operation is Operation.WAIT_CHECKPOINT)
        asked_at = max(record.intent_at for record in save_requests(run))
        waits = world.supervisor is not None and world.supervisor.state is SupervisorState.WAITING
        if not waits and world.now - max(saved_at, asked_at) < limits.exit_s:
            return Wait(
                reason="the job has saved; waiting briefly for it to end",
                until=max(saved_at, asked_at) + limits.exit_s,
            )
    elif _makes_steps_again(run, world):
        return give_up(run, world, "the job makes steps again: it is left alone", needless=True)
    return _kept(run, world) or _next_rung(run, world, limits)


def _kept(run: ActionRun, world: Observed) -> Move | None:
    """A job that runs, and that its owner or an administrator has meanwhile taken into his own hands."""
    assert world.job is not None
    if world.left_alone and run.decision.asked_by is None:
        return give_up(run, world, f"{world.left_alone}: it is not touched any more")
    if world.job.state not in RESTARTABLE:
        return Wait(reason=f"the job is {world.job.state}: it is not touched until it runs again")
    ways = [rung for rung in ladder_of(run.decision) if rung in ENDINGS]
    if world.job.kept_from_queue and ways and not set(ways) - RUN_AGAIN:
        return give_up(run, world, f"{world.job.kept_from_queue}: it is left as it is")
    return None


def _how_it_ended(world: Observed) -> str:
    """`the job ended on its own`, unless Slurm's word says who ended it."""
    state = "" if world.job is None else world.job.state
    return (
        f"the job was ended outside the watchdog ({state})"
        if state in ENDED_FROM_OUTSIDE
        else "the job ended on its own"
    )


def _next_rung(run: ActionRun, world: Observed, limits: LadderLimits) -> Move:
    """The first step that is not over, of a run that continues."""
    saved = is_saved(run, world)
    for rung in ladder_of(run.decision):
        move: Move | None = None
        if rung is Rung.KILL_SWITCH and not saved:
            move = _kill_switch(run, world, limits)
        elif rung is Rung.SIGUSR1 and not saved:
            move = _signal(run, world, limits, Operation.SIGNAL_USR1)
        elif rung is Rung.SIGTERM and not (saved and tried(run, Operation.SIGNAL_TERM)):
            move = _signal(run, world, limits, Operation.SIGNAL_TERM)
        if move is not None:
            return move
    asked = any(rung in GENTLE for rung in ladder_of(run.decision))
    hangs = world.loop_stuck and run.decision.asked_by is not None
    if asked and not (saved or hangs) and run.decision.loop_turns is not False and not run.decision.lose_work:
        return give_up(run, world, _why_not_saved(run, world))
    if world.paused:
        return Wait(reason="paused: the job is not requeued until `slurm-watchdog resume`")
    return end_run(run, Stage.SAME_RUN, world, limits)


def _kill_switch(run: ActionRun, world: Observed, limits: LadderLimits) -> Move | None:
    if run.decision.hold_first and not done(run, Operation.HOLD_OTHERS):
        return attempt(run, world, limits, Execute(operation=Operation.HOLD_OTHERS))
    if not done(run, Operation.WRITE_KILL_SWITCH):
        return attempt(run, world, limits, Execute(operation=Operation.WRITE_KILL_SWITCH))
    switched_at = tries(run, Operation.WRITE_KILL_SWITCH)[0].intent_at
    if world.loop_stuck or (world.now - switched_at > limits.checkpoint_s and _has_waited(run, world, limits)):
        return None
    return Wait(reason="waiting for a complete checkpoint", until=switched_at + limits.checkpoint_s)


def _signal(run: ActionRun, world: Observed, limits: LadderLimits, operation: Operation) -> Move | None:
    """Sent once. Only if it is known that nothing was sent (skipped) it is tried again."""
    before = tries(run, operation)
    if before and before[-1].outcome is not OperationOutcome.SKIPPED:
        last = before[-1]
        if last.outcome is OperationOutcome.FAILED or world.now - last.intent_at > limits.signal_s:
            return None
        return Wait(
            reason=f"{operation} was sent; waiting for a complete checkpoint or the end of the job",
            until=last.intent_at + limits.signal_s,
        )
    if len(before) >= MIN_TRIES and world.now - before[0].intent_at > limits.step_s:
        return None
    if world.paused:
        return Wait(reason="paused: the job gets no signal until `slurm-watchdog resume`")
    if before and world.now - (before[-1].outcome_at or before[-1].intent_at) < RETRY_AFTER_S * len(before):
        return Wait(reason=f"{operation} is tried again soon: {before[-1].detail}")
    return Execute(operation=operation, attempt=len(before) + 1)


def _why_not_saved(run: ActionRun, world: Observed) -> str:
    """Why a job is not ended: nothing made it save."""
    if world.loop_stuck:
        return (
            "the job hangs now: its loop cannot see the kill switch. What is done about the hang is "
            "decided with its own incident"
        )
    said = []
    if tried(run, Operation.HOLD_OTHERS) and not done(run, Operation.HOLD_OTHERS):
        said.append(why_failed(run, Operation.HOLD_OTHERS))
    for rung in ladder_of(run.decision):
        operation = ASKING.get(rung)
        if operation is None or not tried(run, operation):
            continue
        if operation is Operation.WRITE_KILL_SWITCH and not done(run, operation):
            said.append(why_failed(run, operation))
        elif operation is Operation.WRITE_KILL_SWITCH:
            said.append("no complete checkpoint in time, so look whether the trainer looks for the kill switch")
        elif refused(run, operation) is not None:
            said.append(why_failed(run, operation))
        else:
            said.append(f"no complete checkpoint after {operation}")
    return "; ".join(said) + ". It runs and is left alone: ending it would lose its work"


def _ended_after_asking(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Move:
    """The run is over, or ending, after it was asked: did it save, and may it continue?"""
    assert world.job is not None
    if not is_saved(run, world):
        return _ended_without_saving(run, stage, world, limits)
    if stage is Stage.FINISHED and world.job.state in ENDED_BY_PERSON:
        return give_up(run, world, f"the job was ended outside the watchdog ({world.job.state}); it is not run again")
    if made_last_step(world):
        why = "the job has made its last step and ended: it is finished"
        return give_up(run, world, why, needless=True)
    if not done(run, Operation.WAIT_CHECKPOINT):
        return Execute(operation=Operation.WAIT_CHECKPOINT, attempt=len(tries(run, Operation.WAIT_CHECKPOINT)) + 1)
    if stage is Stage.ENDING:
        return Wait(reason="the job has saved and is ending")
    if may_have_made_last_step(world):
        return Wait(reason="the job has saved and ended; waiting for the last lines of its log: it may be finished")
    if world.paused:
        return Wait(reason="paused: the job is not requeued until `slurm-watchdog resume`")
    return end_run(run, stage, world, limits)


def _ended_without_saving(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Move:
    assert world.job is not None
    if stage is Stage.FINISHED and world.job.state in ENDED_BY_PERSON:
        return give_up(run, world, f"the job was ended outside the watchdog ({world.job.state}); it is not run again")
    if not _has_waited(run, world, limits):
        return Wait(reason="the job has ended; waiting to hear whether it saved")
    if stage is Stage.ENDING:
        return Wait(reason="the job is ending")
    if _ended_by_our_signal(run, world):
        if world.paused:
            return Wait(reason="paused: the job is not requeued until `slurm-watchdog resume`")
        return end_run(run, stage, world, limits)
    if tried(run, Operation.WRITE_KILL_SWITCH) and not done(run, Operation.WRITE_KILL_SWITCH):
        return give_up(
            run,
            world,
            "the job ended while its kill switch was not on all nodes yet: if it saw it, restart it manually",
        )
    if world.ended_s <= limits.step_s:  # a save that took long may have been complete a moment before the end
        return Wait(reason="the job has ended; waiting to hear whether it saved")
    return give_up(
        run,
        world,
        f"the job ended ({world.job.state}) without showing a complete checkpoint; restart it manually",
    )


def _ended_by_our_signal(run: ActionRun, world: Observed) -> bool:
    """Whether the run was ended by a signal that is known to be sent, in a loop that hung: it lost
    nothing by that."""
    assert world.job is not None
    signalled = any(
        r.operation is not Operation.WRITE_KILL_SWITCH and r.outcome is OperationOutcome.DONE
        for r in save_requests(run)
    )
    # A job that hung ends so after a signal: it continues from its last complete checkpoint, as if it had
    # been requeued.
    hung = run.decision.loop_turns is False and not _makes_steps_again(run, world)
    return signalled and hung and world.job.state in FAILED and not made_last_step(world)


def _has_waited(run: ActionRun, world: Observed, limits: LadderLimits) -> bool:
    """Whether agents had their time to tell of a checkpoint: since the job was asked, and since we listen."""
    asked_at = min(record.intent_at for record in save_requests(run))
    return world.now - max(asked_at, world.taken_up_at) > limits.step_s
