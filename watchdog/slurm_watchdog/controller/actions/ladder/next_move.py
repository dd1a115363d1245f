"""The ladder: what to do next for one action, from its journal and from the world. Pure.

The world is asked first: whether an operation is done is read off Slurm, not off what we remember to have sent.
`Restarts` rises at the moment of a requeue (measured on Slurm 22.05 and 25.11), so the fence
(job id, restart count, start time) tells the run that the decision is about from every other one.
"""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.controller.actions.ladder import process
from slurm_watchdog.controller.actions.ladder.after_requeue import after_requeue
from slurm_watchdog.controller.actions.ladder.before_end import before_end
from slurm_watchdog.controller.actions.ladder.end_run import after_cancel, end_run, go_on_elsewhere
from slurm_watchdog.controller.actions.ladder.in_place import is_under_way
from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    Finish,
    LadderLimits,
    Move,
    Observed,
    Reconcile,
    Stage,
    Wait,
    attempt,
    can_be_abandoned,
    done,
    give_up,
    ladder_of,
    limits_for,
    others_are_held,
    refused,
    sent,
    stage_of,
    tried,
    tries,
    why_failed,
)
from slurm_watchdog.model.actions import (
    ActionEnd,
    ActionRun,
    Operation,
    OperationOutcome,
    OperationRecord,
    Rung,
    answer_shown,
)
from slurm_watchdog.model.slurm_states import OVER, WAITING

_WITHOUT_US = {
    Stage.HELD: "the job was requeued and held without this action: nothing is left to do",
    Stage.QUEUED: "the job was requeued without this action: nothing is left to do",
    Stage.NEXT_RUN: "the job was started again without this action: nothing is left to do",
}


def next_move(run: ActionRun, world: Observed, limits: LadderLimits) -> Move:
    """What is to be done next. Given any prefix of the journal and any world, never does a thing twice."""
    if run.end is not None:
        return Finish(end=run.end)
    limits = limits_for(run.decision, limits)
    move = _next_move(run, world, limits)
    return _with_others_released(run, world, limits, move) if others_are_held(run) else move


def _with_others_released(run: ActionRun, world: Observed, limits: LadderLimits, move: Move) -> Move:
    """The elements of the array that were held wait until the kill switch is gone and the job has started again, so
    that it comes first; at the end of the action they are released in any case."""
    ended = isinstance(move, Finish)
    again = stage_of(run, world.job) not in (Stage.HELD, Stage.QUEUED) and done(run, Operation.REMOVE_KILL_SWITCH)
    if not ended and not (again and isinstance(move, Wait) and world.job_known):
        return move
    release = attempt(run, world, limits, Execute(operation=Operation.RELEASE_OTHERS))
    if release is not None or not isinstance(move, Finish):
        return release or move
    release_them = ", ".join(f"`scontrol release {name}`" for name in run.decision.hold_first)
    why = why_failed(run, Operation.RELEASE_OTHERS)
    detail = f"{move.end.detail}; elements of its array stay held ({why}): {release_them} lets them run"
    return Finish(end=replace(move.end, detail=detail))


def _next_move(run: ActionRun, world: Observed, limits: LadderLimits) -> Move:
    if not world.job_known:
        return _unknown(run, world, limits)
    if run.decision.process is not None:
        return process.next_move(run, run.decision.process, world, limits)
    stage = stage_of(run, world.job)
    lost = next((r for r in run.records if r.outcome is None), None)
    if lost is not None:
        return _reconcile(run, lost, stage, world)
    if tried(run, Operation.ABANDON) and can_be_abandoned(run):
        return give_up(run, world, tries(run, Operation.ABANDON)[-1].detail or "an operator ended the action")
    if Rung.HOLD in ladder_of(run.decision):
        return _hold(run, world, limits)
    if tried(run, Operation.RESUBMIT) and refused(run, Operation.RESUBMIT) is None:
        return go_on_elsewhere(run, stage, world, limits)
    if tried(run, Operation.CANCEL) and stage in (Stage.SAME_RUN, Stage.ENDING, Stage.FINISHED, Stage.GONE):
        return after_cancel(run, stage, world, limits)
    if stage is Stage.GONE:
        return give_up(run, world, "Slurm does not know the job any more")
    if is_under_way(run) and stage in (Stage.SAME_RUN, Stage.ENDING, Stage.FINISHED):
        return Wait(reason="the job is ending") if stage is Stage.ENDING else end_run(run, stage, world, limits)
    if stage is Stage.SAME_RUN and _wants_evidence(run, limits):
        return Execute(operation=Operation.EVIDENCE, attempt=len(tries(run, Operation.EVIDENCE)) + 1)
    if stage in (Stage.SAME_RUN, Stage.ENDING, Stage.FINISHED):
        return before_end(run, stage, world, limits)
    if not sent(run, Operation.REQUEUE_HOLD):
        return give_up(run, world, _WITHOUT_US[stage], needless=True)
    return after_requeue(run, stage, world, limits)


def _unknown(run: ActionRun, world: Observed, limits: LadderLimits) -> Move:
    """Nothing is done to a job that is not known. Slurm may come back at any time; what it refuses, or
    answers badly, does not mend itself."""
    if world.refused:
        return give_up(run, world, f"Slurm says nothing about the job: {world.refused}")
    if not world.unread:
        return Wait(reason="Slurm does not answer")
    if world.unread_s > limits.confirm_s:
        why = f"for {limits.confirm_s:.0f} s Slurm's answer about the job could not be used: {world.unread}"
        return give_up(run, world, f"{why}; look with `scontrol show job {_job_id(run)}`")
    return Wait(reason=f"Slurm answers, and its answer cannot be used: {world.unread}")


def _job_id(run: ActionRun) -> str:
    return run.decision.fence.job_id if run.decision.fence is not None else ""


def _reconcile(run: ActionRun, lost: OperationRecord, stage: Stage, world: Observed) -> Move:
    """The controller died, or Slurm did not answer, between intent and outcome: what does the world show?"""
    requeued = stage in (Stage.HELD, Stage.QUEUED, Stage.NEXT_RUN)
    new = world.submitted
    if lost.operation is Operation.RESUBMIT and new is None and not world.submission_looked_for:
        return Wait(reason="looking for the job that was submitted")
    answer = (
        answer_shown(run.decision, world.supervisor)
        if lost.operation in (Operation.WRITE_ORDER, Operation.RESTART_STEP)
        else None
    )
    if answer is not None:
        return Reconcile(operation=lost.operation, attempt=lost.attempt, outcome=answer[0], detail=answer[1])
    shown = {
        Operation.WAIT_CHECKPOINT: True,
        Operation.REQUEUE_HOLD: requeued,
        Operation.RELEASE: stage in (Stage.QUEUED, Stage.NEXT_RUN) if new is None else not new.held,
        Operation.CANCEL: stage in (Stage.ENDING, Stage.FINISHED, Stage.GONE),
        Operation.RESUBMIT: new is not None,
        Operation.HOLD: world.job is not None and world.job.held,
        Operation.SET_DOWN: stage is Stage.NEXT_RUN or (stage is Stage.QUEUED and not world.stuck),
    }.get(lost.operation)
    detail = "the answer was lost; it is done again, which is harmless"
    outcome = OperationOutcome.UNKNOWN
    if lost.operation is Operation.ABANDON:
        outcome, detail = (
            OperationOutcome.DONE,
            "an operator cancelled the restart; the job was left as it is",
        )
    elif lost.operation in (Operation.SIGNAL_USR1, Operation.SIGNAL_TERM):
        detail = "the answer was lost; a signal is not sent twice, its effect is waited for"
    elif shown:
        outcome, detail = OperationOutcome.DONE, "the answer was lost; the world shows that it was done"
        if lost.operation is Operation.RESUBMIT and new is not None:
            detail = f"the answer was lost; job {new.job_id} is there"
    elif shown is not None:
        detail = "the answer was lost; Slurm shows that it was not done"
    return Reconcile(operation=lost.operation, attempt=lost.attempt, outcome=outcome, detail=detail)


def _wants_evidence(run: ActionRun, limits: LadderLimits) -> bool:
    """Before anything is done to the job, once; a second time only if the controller died over the first. An
    action that has begun is past it."""
    before = tries(run, Operation.EVIDENCE)
    if not limits.evidence or Rung.EVIDENCE not in ladder_of(run.decision) or len(before) < len(run.records):
        return False
    return not before or (len(before) == 1 and before[0].outcome is OperationOutcome.UNKNOWN)


def _hold(run: ActionRun, world: Observed, limits: LadderLimits) -> Move:
    """Keeps a job that restarts and dies from starting again, as soon as it waits in the queue. It is reported,
    never ended."""
    job, decision = world.job, run.decision
    if job is None:
        return give_up(run, world, "Slurm does not know the job any more")
    if job.held and job.state != "COMPLETING":
        ours = tried(run, Operation.HOLD)
        what = f"`scontrol release {job.job_id}` lets it run, once the cause is mended"
        by = (
            "slurm-watchdog keeps it in the queue, for it"
            if ours
            else "a user or an administrator holds it already; it"
        )
        detail = f"{by} restarted and died again and again; {what}"
        return Finish(end=ActionEnd(ok=True, ended_at=world.now, detail=detail))
    if job.state == "RUNNING":
        before = decision.step_at_decision
        if world.next_first_step is not None and (before is None or world.next_first_step > before):
            return give_up(run, world, "the job makes new steps: it is not held", needless=True)
        if world.now - decision.decided_at > limits.confirm_s:
            return give_up(run, world, "the job has not died again: it is not held", needless=True)
        return Wait(reason="the job runs: it is held when it is in the queue again")
    if job.state == "COMPLETING":
        return Wait(reason="the job is ending")
    if job.state not in WAITING:
        return give_up(run, world, f"the job is {job.state}: there is nothing to hold", needless=job.state in OVER)
    if world.paused:
        return Wait(reason="paused: the job is not held until `slurm-watchdog resume`")
    refusal = refused(run, Operation.HOLD)
    if refusal is not None:
        return give_up(run, world, f"hold was refused: {refusal.detail}")
    return Execute(operation=Operation.HOLD, attempt=len(tries(run, Operation.HOLD)) + 1)
