"""The ladder up to the end of the run: the job is asked to save and to end, as gently as the rule says. Pure."""

from __future__ import annotations

from slurm_watchdog.controller.actions.ladder.end_run import end_run
from slurm_watchdog.controller.actions.ladder.state import (
    MIN_TRIES,
    RETRY_AFTER_S,
    Execute,
    Move,
    Observed,
    Stage,
    Wait,
    hung_when_decided,
    ladder_of,
)
from slurm_watchdog.knowledge.rungs import ENDINGS, GENTLE, RUN_AGAIN
from slurm_watchdog.model.actions import ASKING, Operation, OperationOutcome, Rung
from slurm_watchdog.model.slurm_states import ENDED_BY_PERSON, ENDED_FROM_OUTSIDE, FAILED, RESTARTABLE
from slurm_watchdog.model.supervisor import SupervisorState


def before_end(at: Observed) -> Move:
    """The run of the decision continues, or has ended before we put it back."""
    if not at.save_requests():
        if at.stage is Stage.ENDING:
            return Wait(reason="the job is already ending")
        if at.stage is Stage.FINISHED:
            if at.job is not None and at.job.starts_again:
                return Wait(reason="the job has ended on its own, and is being started again")
            state = "" if at.job is None else at.job.state
            outside = f"was ended outside the watchdog ({state})" if state in ENDED_FROM_OUTSIDE else "ended on its own"
            return at.give_up(f"the job {outside} before anything was done; it is not run again")
        if _makes_steps_again(at):
            return at.give_up("the job makes steps again: it is left alone", needless=True)
        if (kept := _kept(at)) is not None:
            return kept
        if at.stalled_mounts and not at.tried(Operation.REQUEUE_HOLD):
            return at.wait_for_mounts()
        if at.paused:
            return Wait(reason="paused: the job is not touched until `slurm-watchdog resume`")
        return _next_rung(at)
    if at.stage is Stage.SAME_RUN:
        return _after_request(at)
    return _ended_after_asking(at)


def _makes_steps_again(at: Observed) -> bool:
    """Whether a job that hung has made a step since the decision: waiting for a filesystem or `resume`
    can take hours."""
    decided = at.decision.step_at_decision
    return hung_when_decided(at.decision) and decided is not None and at.step is not None and at.step > decided


def _after_request(at: Observed) -> Move:
    """Asked, and it runs: has it saved, does it end?"""
    if at.is_saved:
        if not at.done(Operation.WAIT_CHECKPOINT):
            return Execute(operation=Operation.WAIT_CHECKPOINT, attempt=len(at.tries(Operation.WAIT_CHECKPOINT)) + 1)
        saved_at = next(r.intent_at for r in at.records if r.operation is Operation.WAIT_CHECKPOINT)
        asked_at = max(record.intent_at for record in at.save_requests())
        waits = at.supervisor is not None and at.supervisor.state is SupervisorState.WAITING
        if not waits and at.now - max(saved_at, asked_at) < at.limits.exit_s:
            return Wait(
                reason="the job has saved; waiting briefly for it to end",
                until=max(saved_at, asked_at) + at.limits.exit_s,
            )
    elif _makes_steps_again(at):
        return at.give_up("the job makes steps again: it is left alone", needless=True)
    return _kept(at) or _next_rung(at)


def _kept(at: Observed) -> Move | None:
    """A job that runs, and that its owner or an administrator has meanwhile taken into his own hands."""
    assert at.job is not None
    if at.left_alone and at.decision.asked_by is None:
        return at.give_up(f"{at.left_alone}: it is not touched any more")
    if at.job.state not in RESTARTABLE:
        return Wait(reason=f"the job is {at.job.state}: it is not touched until it runs again")
    ways = [rung for rung in ladder_of(at.decision) if rung in ENDINGS]
    if at.job.kept_from_queue and ways and not set(ways) - RUN_AGAIN:
        return at.give_up(f"{at.job.kept_from_queue}: it is left as it is")
    return None


def _next_rung(at: Observed) -> Move:
    """The first step that is not over, of a run that continues."""
    saved = at.is_saved
    for rung in ladder_of(at.decision):
        move: Move | None = None
        if rung is Rung.KILL_SWITCH and not saved:
            move = _kill_switch(at)
        elif rung is Rung.SIGUSR1 and not saved:
            move = _signal(at, Operation.SIGNAL_USR1)
        elif rung is Rung.SIGTERM and not (saved and at.tried(Operation.SIGNAL_TERM)):
            move = _signal(at, Operation.SIGNAL_TERM)
        if move is not None:
            return move
    asked = any(rung in GENTLE for rung in ladder_of(at.decision))
    hangs = at.loop_stuck and at.decision.asked_by is not None
    if asked and not (saved or hangs) and at.decision.loop_turns is not False and not at.decision.lose_work:
        return at.give_up(_why_not_saved(at))
    if at.paused:
        return Wait(reason="paused: the job is not requeued until `slurm-watchdog resume`")
    return end_run(at)


def _kill_switch(at: Observed) -> Move | None:
    if at.decision.hold_first and not at.done(Operation.HOLD_OTHERS):
        return at.attempt(Execute(operation=Operation.HOLD_OTHERS))
    if not at.done(Operation.WRITE_KILL_SWITCH):
        return at.attempt(Execute(operation=Operation.WRITE_KILL_SWITCH))
    switched_at = at.tries(Operation.WRITE_KILL_SWITCH)[0].intent_at
    if at.loop_stuck or (at.now - switched_at > at.limits.checkpoint_s and _has_waited(at)):
        return None
    return Wait(reason="waiting for a complete checkpoint", until=switched_at + at.limits.checkpoint_s)


def _signal(at: Observed, operation: Operation) -> Move | None:
    """Sent once. Only if it is known that nothing was sent (skipped) it is tried again."""
    before = at.tries(operation)
    if before and before[-1].outcome is not OperationOutcome.SKIPPED:
        last = before[-1]
        if last.outcome is OperationOutcome.FAILED or at.now - last.intent_at > at.limits.signal_s:
            return None
        return Wait(
            reason=f"{operation} was sent; waiting for a complete checkpoint or the end of the job",
            until=last.intent_at + at.limits.signal_s,
        )
    if len(before) >= MIN_TRIES and at.now - before[0].intent_at > at.limits.step_s:
        return None
    if at.paused:
        return Wait(reason="paused: the job gets no signal until `slurm-watchdog resume`")
    if before and at.now - (before[-1].outcome_at or before[-1].intent_at) < RETRY_AFTER_S * len(before):
        return Wait(reason=f"{operation} is tried again soon: {before[-1].detail}")
    return Execute(operation=operation, attempt=len(before) + 1)


def _why_not_saved(at: Observed) -> str:
    """Why a job is not ended: nothing made it save."""
    if at.loop_stuck:
        return (
            "the job hangs now: its loop cannot see the kill switch. What is done about the hang is "
            "decided with its own incident"
        )
    said = []
    if at.tried(Operation.HOLD_OTHERS) and not at.done(Operation.HOLD_OTHERS):
        said.append(at.why_failed(Operation.HOLD_OTHERS))
    for rung in ladder_of(at.decision):
        operation = ASKING.get(rung)
        if operation is None or not at.tried(operation):
            continue
        if operation is Operation.WRITE_KILL_SWITCH and not at.done(operation):
            said.append(at.why_failed(operation))
        elif operation is Operation.WRITE_KILL_SWITCH:
            said.append("no complete checkpoint in time, so look whether the trainer looks for the kill switch")
        elif at.refusal(operation) is not None:
            said.append(at.why_failed(operation))
        else:
            said.append(f"no complete checkpoint after {operation}")
    return "; ".join(said) + ". It runs and is left alone: ending it would lose its work"


def _ended_after_asking(at: Observed) -> Move:
    """The run is over, or ending, after it was asked: did it save, and may it continue?"""
    assert at.job is not None
    if not at.is_saved:
        return _ended_without_saving(at)
    if at.stage is Stage.FINISHED and at.job.state in ENDED_BY_PERSON:
        return at.give_up(f"the job was ended outside the watchdog ({at.job.state}); it is not run again")
    if at.made_last_step:
        why = "the job has made its last step and ended: it is finished"
        return at.give_up(why, needless=True)
    if not at.done(Operation.WAIT_CHECKPOINT):
        return Execute(operation=Operation.WAIT_CHECKPOINT, attempt=len(at.tries(Operation.WAIT_CHECKPOINT)) + 1)
    if at.stage is Stage.ENDING:
        return Wait(reason="the job has saved and is ending")
    if at.may_have_made_last_step:
        return Wait(reason="the job has saved and ended; waiting for the last lines of its log: it may be finished")
    if at.paused:
        return Wait(reason="paused: the job is not requeued until `slurm-watchdog resume`")
    return end_run(at)


def _ended_without_saving(at: Observed) -> Move:
    assert at.job is not None
    if at.stage is Stage.FINISHED and at.job.state in ENDED_BY_PERSON:
        return at.give_up(f"the job was ended outside the watchdog ({at.job.state}); it is not run again")
    if not _has_waited(at):
        return Wait(reason="the job has ended; waiting to hear whether it saved")
    if at.stage is Stage.ENDING:
        return Wait(reason="the job is ending")
    if _ended_by_our_signal(at):
        if at.paused:
            return Wait(reason="paused: the job is not requeued until `slurm-watchdog resume`")
        return end_run(at)
    if at.tried(Operation.WRITE_KILL_SWITCH) and not at.done(Operation.WRITE_KILL_SWITCH):
        return at.give_up(
            "the job ended while its kill switch was not on all nodes yet: if it saw it, restart it manually"
        )
    if at.ended_s <= at.limits.step_s:  # a save that took long may have been complete a moment before the end
        return Wait(reason="the job has ended; waiting to hear whether it saved")
    return at.give_up(f"the job ended ({at.job.state}) without showing a complete checkpoint; restart it manually")


def _ended_by_our_signal(at: Observed) -> bool:
    """Whether the run was ended by a signal that is known to be sent, in a loop that hung: it lost nothing by that."""
    assert at.job is not None
    signalled = any(
        r.operation is not Operation.WRITE_KILL_SWITCH and r.outcome is OperationOutcome.DONE
        for r in at.save_requests()
    )
    # A job that hung ends so after a signal: it continues from its last complete checkpoint, as if it had
    # been requeued.
    hung = at.decision.loop_turns is False and not _makes_steps_again(at)
    return signalled and hung and at.job.state in FAILED and not at.made_last_step


def _has_waited(at: Observed) -> bool:
    """Whether agents had their time to tell of a checkpoint: since the job was asked, and since we listen."""
    asked_at = min(record.intent_at for record in at.save_requests())
    return at.now - max(asked_at, at.taken_up_at) > at.limits.step_s
