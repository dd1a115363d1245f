"""The ladder: what to do next for one action, from its journal and from the at. Pure.

The world is asked first: whether an operation is done is read off Slurm, not off what we remember to have sent.
`Restarts` rises at the moment of a requeue (measured on Slurm 22.05 and 25.11), so the fence
(job id, restart count, start time) tells the run that the decision is about from every other one.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.controller.actions.ladder import process
from slurm_watchdog.controller.actions.ladder.after_requeue import after_requeue
from slurm_watchdog.controller.actions.ladder.before_end import before_end
from slurm_watchdog.controller.actions.ladder.end_run import after_cancel, end_run, go_on_elsewhere, is_under_way
from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    Finish,
    Move,
    Observed,
    Reconcile,
    Stage,
    Wait,
    ladder_of,
    limits_for,
)
from slurm_watchdog.model.actions import Operation, OperationOutcome, OperationRecord, Rung, answer_shown
from slurm_watchdog.model.slurm_states import OVER, WAITING

_WITHOUT_US = {
    Stage.HELD: "the job was requeued and held without this action: nothing is left to do",
    Stage.QUEUED: "the job was requeued without this action: nothing is left to do",
    Stage.NEXT_RUN: "the job was started again without this action: nothing is left to do",
}


def next_move(at: Observed) -> Move:
    """What is to be done next. Given any prefix of the journal and any world, never does a thing twice."""
    if at.end is not None:
        return Finish(end=at.end)
    at = replace(at, limits=limits_for(at.decision, at.limits))
    move, held = _next_move(at), at.tried(Operation.HOLD_OTHERS) and not at.done(Operation.RELEASE_OTHERS)
    return _with_others_released(at, move) if held else move


def _with_others_released(at: Observed, move: Move) -> Move:
    """The elements of the array that were held wait until the kill switch is gone and the job has started again, so
    that it comes first; at the end of the action they are released in any case."""
    ended = isinstance(move, Finish)
    again = at.stage not in (Stage.HELD, Stage.QUEUED) and at.done(Operation.REMOVE_KILL_SWITCH)
    if not ended and not (again and isinstance(move, Wait) and at.job_known):
        return move
    release = at.attempt(Execute(operation=Operation.RELEASE_OTHERS))
    if release is not None or not isinstance(move, Finish):
        return release or move
    release_them = ", ".join(f"`scontrol release {name}`" for name in at.decision.hold_first)
    why = at.why_failed(Operation.RELEASE_OTHERS)
    detail = f"{move.end.detail}; elements of its array stay held ({why}): {release_them} lets them run"
    return Finish(end=replace(move.end, detail=detail))


def _next_move(at: Observed) -> Move:
    if not at.job_known:
        return _unknown(at)
    if at.decision.process is not None:
        return process.next_move(at, at.decision.process)
    lost = next((r for r in at.records if r.outcome is None), None)
    if lost is not None:
        return _reconcile(at, lost)
    if at.tried(Operation.ABANDON) and at.can_be_abandoned():
        return at.give_up(at.tries(Operation.ABANDON)[-1].detail or "an operator ended the action")
    if Rung.HOLD in ladder_of(at.decision):
        return _hold(at)
    if at.tried(Operation.RESUBMIT) and at.refusal(Operation.RESUBMIT) is None:
        return go_on_elsewhere(at)
    if at.tried(Operation.CANCEL) and at.stage in (Stage.SAME_RUN, Stage.ENDING, Stage.FINISHED, Stage.GONE):
        return after_cancel(at)
    if at.stage is Stage.GONE:
        return at.give_up("Slurm does not know the job any more")
    if is_under_way(at) and at.stage in (Stage.SAME_RUN, Stage.ENDING, Stage.FINISHED):
        return Wait(reason="the job is ending") if at.stage is Stage.ENDING else end_run(at)
    if at.stage is Stage.SAME_RUN and _wants_evidence(at):
        return Execute(operation=Operation.EVIDENCE, attempt=len(at.tries(Operation.EVIDENCE)) + 1)
    if at.stage in (Stage.SAME_RUN, Stage.ENDING, Stage.FINISHED):
        return before_end(at)
    if not at.sent(Operation.REQUEUE_HOLD):
        return at.give_up(_WITHOUT_US[at.stage], needless=True)
    return after_requeue(at)


def _unknown(at: Observed) -> Move:
    """Nothing is done to a job that is not known. Slurm may come back at any time; what it refuses, or
    answers badly, does not mend itself."""
    if at.refused:
        return at.give_up(f"Slurm says nothing about the job: {at.refused}")
    if not at.unread:
        return Wait(reason="Slurm does not answer")
    if at.unread_s > at.limits.confirm_s:
        why = f"for {at.limits.confirm_s:.0f} s Slurm's answer about the job could not be used: {at.unread}"
        job_id = at.decision.fence.job_id if at.decision.fence is not None else ""
        return at.give_up(f"{why}; look with `scontrol show job {job_id}`")
    return Wait(reason=f"Slurm answers, and its answer cannot be used: {at.unread}")


def _reconcile(at: Observed, lost: OperationRecord) -> Move:
    """The controller died, or Slurm did not answer, between intent and outcome: what does the world show?"""
    requeued = at.stage in (Stage.HELD, Stage.QUEUED, Stage.NEXT_RUN)
    new = at.submitted
    if lost.operation is Operation.RESUBMIT and new is None and not at.submission_looked_for:
        return Wait(reason="looking for the job that was submitted")
    ordered = lost.operation in (Operation.WRITE_ORDER, Operation.RESTART_STEP)
    answer = answer_shown(at.decision, at.supervisor) if ordered else None
    if answer is not None:
        return Reconcile(operation=lost.operation, attempt=lost.attempt, outcome=answer[0], detail=answer[1])
    shown = {
        Operation.WAIT_CHECKPOINT: True,
        Operation.REQUEUE_HOLD: requeued,
        Operation.RELEASE: at.stage in (Stage.QUEUED, Stage.NEXT_RUN) if new is None else not new.held,
        Operation.CANCEL: at.stage in (Stage.ENDING, Stage.FINISHED, Stage.GONE),
        Operation.RESUBMIT: new is not None,
        Operation.HOLD: at.job is not None and at.job.held,
        Operation.SET_DOWN: at.stage is Stage.NEXT_RUN or (at.stage is Stage.QUEUED and not at.stuck),
    }.get(lost.operation)
    detail = "the answer was lost; it is done again, which is harmless"
    outcome = OperationOutcome.UNKNOWN
    if lost.operation is Operation.ABANDON:
        outcome, detail = OperationOutcome.DONE, "an operator cancelled the restart; the job was left as it is"
    elif lost.operation in (Operation.SIGNAL_USR1, Operation.SIGNAL_TERM):
        detail = "the answer was lost; a signal is not sent twice, its effect is waited for"
    elif shown:
        outcome, detail = OperationOutcome.DONE, "the answer was lost; the world shows that it was done"
        if lost.operation is Operation.RESUBMIT and new is not None:
            detail = f"the answer was lost; job {new.job_id} is there"
    elif shown is not None:
        detail = "the answer was lost; Slurm shows that it was not done"
    return Reconcile(operation=lost.operation, attempt=lost.attempt, outcome=outcome, detail=detail)


def _wants_evidence(at: Observed) -> bool:
    """Before anything is done to the job, once; a second time only if the controller died over the first. An
    action that has begun is past it."""
    before = at.tries(Operation.EVIDENCE)
    if not at.limits.evidence or Rung.EVIDENCE not in ladder_of(at.decision) or len(before) < len(at.records):
        return False
    return not before or (len(before) == 1 and before[0].outcome is OperationOutcome.UNKNOWN)


def _hold(at: Observed) -> Move:
    """Keeps a job that restarts and dies from starting again, as soon as it waits in the queue. It is reported,
    never ended."""
    job, decision = at.job, at.decision
    if job is None:
        return at.give_up("Slurm does not know the job any more")
    if job.held and job.state != "COMPLETING":
        what = f"`scontrol release {job.job_id}` lets it run, once the cause is mended"
        ours = at.tried(Operation.HOLD)
        by = "slurm-watchdog keeps it in the queue, for" if ours else "a user or an administrator holds it already;"
        return at.ends(f"{by} it restarted and died again and again; {what}")
    if job.state == "RUNNING":
        before = decision.step_at_decision
        if at.next_first_step is not None and (before is None or at.next_first_step > before):
            return at.give_up("the job makes new steps: it is not held", needless=True)
        if at.now - decision.decided_at > at.limits.confirm_s:
            return at.give_up("the job has not died again: it is not held", needless=True)
        return Wait(reason="the job runs: it is held when it is in the queue again")
    if job.state == "COMPLETING":
        return Wait(reason="the job is ending")
    if job.state not in WAITING:
        return at.give_up(f"the job is {job.state}: there is nothing to hold", needless=job.state in OVER)
    if at.paused:
        return Wait(reason="paused: the job is not held until `slurm-watchdog resume`")
    refusal = at.refusal(Operation.HOLD)
    if refusal is not None:
        return at.give_up(f"hold was refused: {refusal.detail}")
    return Execute(operation=Operation.HOLD, attempt=len(at.tries(Operation.HOLD)) + 1)
